"""Memory in tiers: what is found there, when copies are done, and who waits for them."""

import itertools
import json
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab import core
from schedlab.experiments.running.kv_offload import _fitted, _tier, offload_limits
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.kv_offload import TierSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.routers import registry as routers
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.kv_bytes import CopyTime
from schedlab.sim.core.lifecycle import Lifecycle
from schedlab.sim.core.tiering import Tiering
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.clock import Clock
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.engine_state import LiveState
from schedlab.sim.drive.failures import Failures, Outage
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import InfeasiblePlan, PolicyError, SpecError
from schedlab.sim.hardware.link import LINKS
from schedlab.sim.kv.ledger import NO_HIT
from schedlab.sim.kv.tier import Link, Tier
from schedlab.sim.record.copies import Copies
from schedlab.sim.request import RequestState, Turn
from schedlab.sim.result import RunResult
from tests import laws
from tests.golden import paced
from tests.laws import LinearCost, arrival
from tests.laws import run as run_laws

GB = 1e9  # bytes a second that are bytes a nanosecond
BLOCK = 16
DOCUMENT = tuple(range(8))


def tier(name="cpu", num_blocks=100, **keys):
    keys = {"load_bytes_per_s": GB, "store_bytes_per_s": GB, **keys}
    return KVTier(name, num_blocks, **keys)


def config(*tiers, **keys):
    tiers = tiers or (tier(),)
    keys = {"num_blocks": 40, "max_model_len": 400, "enable_prefix_caching": True, **keys}
    return EngineConfig(
        kv_tiers=tiers, swap_space_blocks=tiers[0].num_blocks, kv_block_bytes=100, **keys
    )


def copies_of(log, **kind):
    rows = log.copies.columns()
    table = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    return [row for row in table if all(row[name] == value for name, value in kind.items())]


def test_copies_over_a_link_follow_each_other_and_latency_is_no_bandwidth():
    link = Link(2 * GB, latency_ns=7)
    assert link.send(100, ready_ns=10) == (10, 67)
    assert link.send(100, ready_ns=10) == (60, 117)
    assert link.send(100, ready_ns=500) == (500, 557)


def test_tier_when_full_evicts_the_end_of_what_was_used_longest_ago():
    table = Tier(tier(num_blocks=4))
    assert table.add([1, 2]) == ([1, 2], [])
    table.written([1, 2])
    assert table.add([3, 4]) == ([3, 4], [])
    assert not table.has(3)  # not written yet
    table.written([3, 4])
    assert table.add([1, 2, 5]) == ([5], [4])
    assert table.add([6, 7, 8, 9])[0] == [6, 7, 8]  # 5 is being written
    assert table.room_for_pins == 0
    table.check()


def test_tier_adds_all_or_none_and_evicts_just_as_many_as_it_lacks():
    table = Tier(tier(num_blocks=3))
    table.add_all([1, 2, 3])
    assert table.add_all([4]) is None  # all are being written
    table.written([1, 2, 3])
    assert table.add_all([4, 5]) == ([4, 5], [1, 2])
    assert table.add_all([3, 6]) is None, "3 is spared, and the others are being written"
    assert table.has(3)
    table.check()


def evicting_work(**keys):
    """Return a document, two that drive it out of the GPU, and the document once more."""
    other = tuple(range(100, 124))
    return [
        arrival(0, 0, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT, **keys),
        arrival(1, 100_000, 24 * BLOCK, 2, prefix_hash_ids=other, **keys),
        arrival(2, 200_000, 24 * BLOCK, 2, prefix_hash_ids=tuple(n + 500 for n in other), **keys),
        arrival(3, 300_000, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT, **keys),
    ]


def evicted_then_asked_again(limits, cost=None):
    return run_laws(ContinuousBatching(), evicting_work(), limits, cost)


def test_prefix_that_left_the_gpu_is_loaded_and_the_rest_computed():
    log = evicted_then_asked_again(config(tier(load_latency_ns=50)))
    (load,) = copies_of(log, is_load=1)
    assert (load["id"], load["num_blocks"], load["start_ns"]) == (3, 8, 300_000)
    assert load["done_ns"] == 300_000 + 800 + 50
    row = {name: column[3] for name, column in log.requests().items()}
    assert row["prefix_hit_tokens"] == row["cached_tokens"] == 8 * BLOCK
    assert row["first_scheduled_ns"] == 300_850
    # A step of one token, that reads all before.
    assert row["first_token_ns"] == 300_850 + 1000 + 10 + 8 * BLOCK


def test_written_through_a_block_is_copied_once_and_its_step_is_not_delayed():
    log = evicted_then_asked_again(config())
    stores = copies_of(log, is_load=0)
    assert [(row["id"], row["num_blocks"]) for row in stores] == [(0, 8), (1, 24), (2, 24)]
    assert not len(log.copies.wait_columns()["start_ns"])


def test_written_back_a_block_delays_whoever_takes_its_place():
    log = evicted_then_asked_again(config(tier(write="back")))
    stores, (load,) = copies_of(log, is_load=0), copies_of(log, is_load=1)
    before = [row["num_blocks"] for row in stores if row["issued_ns"] < 300_000]
    assert before
    waits = log.copies.wait_columns()
    assert waits["wait_ns"][waits["start_ns"] < 300_000].sum() == 100 * sum(before)
    here = [row["num_blocks"] for row in stores if row["issued_ns"] == 300_000]
    assert load["start_ns"] == 300_000 + 100 * sum(here)


@pytest.mark.parametrize(("token_ns", "loads"), [(6, 0), (7, 1)])
def test_loading_breaks_even_where_its_time_is_that_of_computing(token_ns, loads):
    # n blocks load in L + n b / B = 50 + 100 n, and compute in 16 n t: at n = 8 both take 850 ns
    # where t = 6.64.
    limits = config(tier(load_latency_ns=50))
    log = evicted_then_asked_again(limits, LinearCost(0, token_ns, 0))
    assert len(copies_of(log, is_load=1)) == loads


def test_loading_always_does_not_ask_what_computing_takes():
    log = evicted_then_asked_again(config(kv_load="always"), LinearCost(0, 1, 0))
    assert len(copies_of(log, is_load=1)) == 1


def test_what_the_first_tier_evicts_is_written_back_to_the_second_and_loaded_from_there():
    limits = config(tier(num_blocks=30), tier("disk", write="back", load_bytes_per_s=GB / 2))
    log = evicted_then_asked_again(limits)
    assert sum(row["num_blocks"] for row in copies_of(log, tier=1, is_load=0)) >= 8
    loads = copies_of(log, is_load=1)
    assert sum(row["num_blocks"] for row in loads) == 8
    assert any(row["tier"] == 1 for row in loads)


def test_others_run_while_a_prefix_is_loaded():
    slow = config(tier(load_bytes_per_s=GB / 1000), kv_load="always", max_model_len=640)
    work = [
        arrival(0, 0, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT),
        arrival(1, 100_000, 39 * BLOCK, 2, prefix_hash_ids=tuple(range(100, 139))),
        arrival(2, 200_000, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT),
        arrival(3, 200_000, BLOCK, 1),
    ]
    requests = run_laws(ContinuousBatching(), work, slow).requests()
    assert requests["finish_ns"][3] == 200_000 + 1000 + 160
    assert requests["first_scheduled_ns"][2] == 200_000 + 800_000


@pytest.mark.parametrize("later_ns", [0, 500])
def test_blocks_on_their_way_for_one_are_waited_for_and_not_loaded_twice(later_ns):
    both = [
        *evicting_work(),
        arrival(4, 300_000 + later_ns, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT),
        arrival(5, 300_000 + later_ns, BLOCK, 1),
    ]
    log = run_laws(ContinuousBatching(), both, config(kv_load="always"))
    assert [row["id"] for row in copies_of(log, is_load=1)] == [3]
    requests = log.requests()
    assert requests["prefix_hit_tokens"][[3, 4, 5]].tolist() == [8 * BLOCK, 8 * BLOCK, 0]
    # Who needs none of them runs meanwhile.
    assert requests["first_scheduled_ns"][5] == 300_000 + later_ns
    assert requests["first_scheduled_ns"][4] > 300_800


IN_ORDER = {
    "slai": {"order": "fcfs"},
    "qoserve": {"alpha_ms_per_token": 0.0},
    "wait": {"output_edges": [9], "total_limit": 12, "only_cap": True},
    "nested_wait": {"output_edges": [9], "total_limit": 12, "max_wait_s": 0.0},
}


@pytest.mark.parametrize(
    "name",
    [
        *("fair_batching", "fastserve", "hygen", "mc_sf", "orca", "past_future", "prefill_first"),
        *("sarathi", "scorpio", "srtf", "tensorrt_llm", "tgi", "tgi3", *IN_ORDER),
    ],
)
def test_who_waits_for_blocks_on_their_way_for_another_holds_up_nobody(name):
    told = {"predicted_tokens": 5.0, "max_tokens": 5}
    work = [
        *evicting_work(**told),
        arrival(4, 300_001, 32 * BLOCK, 1, prefix_hash_ids=DOCUMENT, **told),
        arrival(5, 300_002, BLOCK, 1, **told),
    ]
    limits = config(tier(load_bytes_per_s=GB / 100), max_model_len=640, kv_load="always")
    log = run_laws(registry.make(name, **IN_ORDER.get(name, {})), work, limits)
    assert [row["id"] for row in copies_of(log, is_load=1)] == [3]
    first_ns = log.requests()["first_scheduled_ns"]
    assert first_ns[5] == 300_002
    assert first_ns[4] >= 380_000


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        *[(name, {}) for name in ("gittins", "hygen", "ltr", "program_srpt", "srtf", "trail")],
        *[(name, {"first_quantum_s": 1e-6}) for name in ("atlas", "fastserve", "plas")],
    ],
)
def test_nobody_gives_up_memory_for_who_waits_for_blocks_on_their_way_for_another(name, knobs):
    work = [
        *evicting_work(predicted_tokens=2.0)[:3],
        arrival(3, 290_000, 2 * BLOCK, 60, priority=1, predicted_tokens=60.0),
        arrival(4, 290_000, 2 * BLOCK, 60, priority=1, predicted_tokens=60.0),
        *[
            arrival(i, 300_000, 8 * BLOCK + 1, 2, prefix_hash_ids=DOCUMENT, predicted_tokens=2.0)
            for i in (5, 6)
        ],
    ]
    # The budget does not hold both prompts, so that not everybody can be served at once.
    limits = config(
        tier(load_bytes_per_s=GB / 100), kv_load="always", max_num_batched_tokens=9 * BLOCK
    )
    log = run_laws(registry.make(name, **knobs), work, limits)
    assert [row["id"] for row in copies_of(log, is_load=1)] == [5]
    assert log.requests()["num_preemptions"].sum() == 0


def swapping(tiers, policy="srtf", **knobs):
    limits = EngineConfig(
        num_blocks=10,
        max_model_len=160,
        preemption_mode="swap",
        swap_space_blocks=100,
        kv_tiers=tiers,
        kv_block_bytes=100,
    )
    work = [
        arrival(0, 0, 100, 40, predicted_tokens=40.0),
        arrival(1, 10_000, 100, 3, predicted_tokens=3.0),
    ]
    return run_laws(registry.make(policy, **knobs), work, limits)


def test_request_swapped_out_comes_back_whole_and_only_who_needs_its_blocks_waits():
    log = swapping((tier(),))
    (out,), (back,) = copies_of(log, is_load=0, is_swap=1), copies_of(log, is_load=1, is_swap=1)
    assert out["num_blocks"] == back["num_blocks"]
    assert back["start_ns"] >= out["done_ns"]
    requests = log.requests()
    assert requests["recomputed_tokens"].sum() == 0
    (gone,) = zip(*log.preemptions().values(), strict=True)
    assert gone[2] >= back["done_ns"]  # it runs when its KV is there
    assert log.copies.wait_columns()["wait_ns"].tolist() == [out["done_ns"] - out["issued_ns"]]
    assert log.steps()["swapped_bytes"].sum() == 0  # no step is charged


def test_fastserve_waits_for_a_long_copy_without_being_asked_each_nanosecond():
    log = swapping((tier(load_bytes_per_s=GB / 1000),), "fastserve", first_quantum_s=2e-6)
    (back,) = copies_of(log, is_load=1, is_swap=1)
    assert back["done_ns"] - back["start_ns"] == 700_000
    assert log.requests()["generated_tokens"].tolist() == [40, 3]


def test_without_tiers_swapping_is_charged_to_the_step_as_before():
    log = swapping(())
    assert log.steps()["swapped_bytes"].sum() > 0
    assert not copies_of(log)


class AheadOfNeed(ContinuousBatching):
    """Loads what waits before its turn; swaps out whom it is told to."""

    def __init__(self, victim=None):
        self.victim_id = victim
        self.answers = []

    def plan(self, view, builder):
        if self.victim_id is not None:
            for state in list(view.running):
                if state.id == self.victim_id and state.num_output_tokens == 5:
                    self.answers.append(builder.offload(state))
                    self.victim_id = None
        builder.grant_running()
        for state in view.waiting:
            if not builder.prefetch(state) and not builder.grant(state):
                break
        return builder.build()


def test_policy_swaps_out_and_loads_ahead_of_need():
    policy = AheadOfNeed(victim=0)
    limits = config(preemption_mode="swap")
    log = run_laws(policy, [arrival(0, 0, 100, 40), arrival(1, 0, 100, 40)], limits)
    assert policy.answers == [True]
    assert [row["is_load"] for row in copies_of(log, is_swap=1)] == [0, 1]


def test_policy_loads_ahead_of_need_what_would_be_computed_sooner():
    cost = LinearCost(0, 1, 0)  # 128 tokens take 128 ns, their 8 blocks 800
    assert not copies_of(evicted_then_asked_again(config(), cost), is_load=1)
    log = run_laws(AheadOfNeed(), evicting_work(), config(), cost)
    assert [row["num_blocks"] for row in copies_of(log, is_load=1)] == [8]


def test_policy_that_gives_up_whom_it_swapped_out_frees_its_place_below():
    class GivesUp(AheadOfNeed):
        def plan(self, view, builder):
            given_up = [state for state in view.waiting if state.swapped]
            for state in given_up:
                builder.reject(state, "enough")
            if not given_up:
                return super().plan(view, builder)
            builder.grant_running()
            return builder.build()

    limits = config(preemption_mode="swap")
    free = []
    work = [arrival(0, 0, 100, 40), arrival(1, 0, 100, 40)]
    log = run_laws(
        GivesUp(victim=0), work, limits,
        observer=lambda engine: free.append(engine.requests.tiers._tiers[0].num_pinned),
    )  # fmt: skip
    assert log.requests()["generated_tokens"].tolist() == [5, 40]
    assert max(free) == 7, "of 105 tokens"
    assert free[-1] == 0


def test_policy_that_loads_ahead_of_need_loads_no_block_twice():
    later = arrival(4, 300_100, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT)
    log = run_laws(AheadOfNeed(), [*evicting_work(), later], config())
    assert [row["id"] for row in copies_of(log, is_load=1)] == [3]
    assert log.requests()["prefix_hit_tokens"][4] == 8 * BLOCK


def test_connector_puts_who_is_preempted_last_before_all_who_wait():
    # Four prompts fill four blocks; with the fifth token each needs one more, and 3 and 2 give way.
    limits = config(
        num_blocks=4, max_model_len=64, max_num_seqs=4, offloading_connector=True, kv_load="always"
    )
    work = [arrival(i, 0, BLOCK - 4, 9) for i in range(5)]
    log = run_laws(ContinuousBatching(), work, limits)
    rows = log.preemptions()
    assert rows["id"].tolist() == [2, 3]
    assert rows["resumed_ns"].max() < log.requests()["first_scheduled_ns"][4]


@pytest.mark.parametrize(("connects", "queue"), [(True, [1, 0, 4]), (False, [0, 1, 4])])
def test_queue_has_who_was_put_back_last_first_under_a_connector_and_by_arrival_else(
    connects, queue
):
    class TakesFromTheFirst(ContinuousBatching):
        """Takes memory from the earliest admission."""

        queues = ()

        def victim(self, running, now_ns):
            return running[-1]

        def plan(self, view, builder):
            self.queues = (*self.queues, [state.id for state in view.waiting])
            return super().plan(view, builder)

    limits = config(
        num_blocks=4, max_model_len=64, max_num_seqs=4, offloading_connector=connects,
        kv_load="always",
    )  # fmt: skip
    policy = TakesFromTheFirst()
    log = run_laws(policy, [arrival(i, i, BLOCK - 4, 9) for i in range(5)], limits)
    assert log.preemptions()["id"].tolist() == [0, 1]
    longest = max(policy.queues, key=len)
    assert longest == [1, 2, 3, 4], "the first was served alone"
    assert queue in policy.queues
    assert [*reversed(queue[:2]), 4] not in policy.queues


def test_blocks_being_stored_are_awaited_however_often_they_are_asked_for():
    limits = config(tier(store_bytes_per_s=GB / 1000), offloading_connector=True)
    tiering = Tiering(limits, lambda shape, k: 1000, Copies())
    first, second = (
        RequestState(arrival(i, 0, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT).request)
        for i in range(2)
    )
    first._computed = 8 * BLOCK
    tiering.store_step([first])
    for _ in range(2):
        assert tiering.find(second, NO_HIT) == ()
        assert tiering.found_awaited


def test_connector_stores_no_block_that_a_prompt_has_filled_in_part():
    copies = Copies()
    tiering = Tiering(config(offloading_connector=True), lambda shape, k: 1000, copies)
    state = RequestState(arrival(0, 0, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT).request)
    state._computed = 3 * BLOCK + 5
    tiering.store_step([state])
    assert copies.columns()["num_blocks"].tolist() == [3]


def test_wait_for_a_link_counts_from_when_anything_last_changed():
    tiering = Tiering(config(), lambda shape, k: 1000, Copies())
    tiering._loads[0].free_ns = 900
    tiering._changed_ns, tiering.now_ns = 300, 700
    assert tiering.load_ns(0, 2) == (900 - 300) + 200


def fastserve(work, num_blocks=8, below=None, max_num_seqs=1, **knobs):
    """Run few requests a step; on the GPU few blocks of 4 tokens."""
    below = below or tier(num_blocks=20)
    limits = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=4 * num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        preemption_mode="swap",
        swap_space_blocks=below.num_blocks,
        kv_tiers=(below,),
        kv_block_bytes=100,
    )
    return run_laws(registry.make("fastserve", first_quantum_s=2e-6, **knobs), work, limits)


def ahead_of_a_prompt(**knobs):
    """Let request 0 drop a level for 1; then comes 2, which needs 3 blocks."""
    work = [arrival(0, 0, 8, 6), arrival(1, 3000, 8, 6), arrival(2, 5000, 12, 1)]
    log = fastserve(work, **knobs)
    swaps = [(row["id"], row["is_load"], row["issued_ns"]) for row in copies_of(log, is_swap=1)]
    return swaps, log


def test_fastserve_at_need_lets_a_new_prompt_wait_for_the_copy_of_whose_blocks_it_takes():
    # Prompts of 8 take 1,080 ns and of 12 1,120; tokens 1,010 + their context. 0 runs to 3,117 and
    # 1 to 5,215; both have 3 of 8 blocks then. 3 blocks are copied in 300 ns.
    swaps, log = ahead_of_a_prompt()
    assert swaps == [(0, 0, 5215), (0, 1, 10_717)]
    assert log.copies.wait_columns()["wait_ns"].tolist() == [300]
    assert log.requests()["first_token_ns"][2] == 5215 + 300 + 1120


def test_fastserve_with_a_reserve_has_blocks_for_a_new_prompt_and_loads_who_is_next():
    # At 4,197 the first token of 1 takes its third block and leaves 2 of 8: 0 goes, done at 4,497.
    # At 5,215 the prompt takes 3 of the 5 free ones, and now 1 goes, to come back when 2 is done.
    swaps, log = ahead_of_a_prompt(reserve_blocks=3)
    assert swaps == [(0, 0, 4197), (1, 0, 5215), (1, 1, 6335), (0, 1, 10_717)]
    assert not len(log.copies.wait_columns()["wait_ns"])
    assert log.requests()["first_token_ns"][2] == 5215 + 1120
    assert log.requests()["recomputed_tokens"].sum() == 0


def test_fastserve_loads_ahead_only_what_leaves_the_reserve_free():
    work = [arrival(0, 0, 8, 6), arrival(1, 3000, 8, 3), arrival(2, 6000, 8, 1)]
    for num_blocks, issued_ns in ((8, 6234), (7, 7314)):
        # 1 has left at 6,234 and the prompt of 2 takes 2 blocks until 7,314; 0 needs 3, and 3 stay.
        (load,) = copies_of(fastserve(work, num_blocks, reserve_blocks=3), is_load=1)
        assert (load["id"], load["issued_ns"]) == (0, issued_ns)


@pytest.mark.parametrize(("host_reserve", "admitted_ns"), [(0.85, 5215), (0.86, 9597)])
def test_fastserve_admits_no_prompt_while_host_memory_is_short(host_reserve, admitted_ns):
    # 0 takes 3 of 20 blocks below from 4,197 on, 0.85 are left; it comes back when 1 has ended.
    _, log = ahead_of_a_prompt(reserve_blocks=3, host_reserve=host_reserve)
    assert log.requests()["first_scheduled_ns"][2] == admitted_ns


@pytest.mark.parametrize(("starvation_s", "gone"), [(1.0, 0), (4e-6, 1)])
def test_fastserve_swaps_out_who_would_run_latest_promotions_counted(starvation_s, gone):
    # 0 is at level 2 since 6,180 ns and 1 at level 1 since 8,278, when 2 comes, of level 0. Before
    # 0 runs again 1 has 4,000 ns to use up and 2 6,000, before 1 only 2 has 2,000. Promoted after
    # 4,000 ns, 0 would run within 1,902 ns.
    work = [arrival(0, 0, 8, 16), arrival(1, 6000, 8, 16), arrival(2, 8000, 8, 1)]
    log = fastserve(work, 12, reserve_blocks=4, starvation_s=starvation_s)
    first = copies_of(log, is_swap=1)[0]
    assert (first["id"], first["is_load"], first["issued_ns"]) == (gone, 0, 8278)


def test_fastserve_that_lacks_blocks_of_a_load_waits_for_it_rather_than_make_more_room():
    # Of 10 blocks each takes up to 9 in the end; loads are slow, so that often nobody computes.
    work = [arrival(i, 0, 20, 16) for i in range(3)]
    slow = tier(load_bytes_per_s=GB / 10)
    log = fastserve(work, 10, slow, max_num_seqs=2, reserve_blocks=1)
    assert log.requests()["generated_tokens"].tolist() == [16, 16, 16]


def test_fastserve_with_a_reserve_and_no_memory_to_swap_to_is_refused():
    with pytest.raises(PolicyError, match=r"reserve_blocks.*engine\.kv_offload"):
        swapping((), "fastserve", reserve_blocks=3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tiers": []}, r"engine\.kv_offload\.tiers"),
        ({"tiers": [{"name": "cpu", "gib": 0, "link": "pcie-5"}]}, r"gib.*> 0|greater than 0"),
        ({"tiers": [{"name": "cpu", "gib": 1e-6, "link": "pcie-5"}]}, "cpu must hold at least one"),
        ({"tiers": [{"name": "cpu", "gib": 4}]}, "give a link"),
        ({"tiers": [{"name": "cpu", "gib": 4, "load_gb_per_s": 3}]}, "give a link"),
        ({"tiers": [{"name": "cpu", "gib": 4, "store_gb_per_s": 3}]}, "give a link"),
        ({"tiers": [{"name": "cpu", "gib": 4, "num_blocks": 9}]}, "give gib or num_blocks"),
        ({"tiers": [{"name": "cpu", "link": "pcie-5"}]}, "give gib or num_blocks"),
        ({"tiers": [{"name": "cpu", "gib": 4, "link": "pcie-6"}]}, r"link.*pcie-5"),
        (
            {"tiers": [{"name": "cpu", "gib": 4, "link": "pcie-5", "load_gb_per_s": 0}]},
            "load_gb_per_s",
        ),
        ({"tiers": [{"name": "cpu", "gib": 4, "link": "pcie-5", "wirte": "back"}]}, "write"),
        (
            {"tiers": [{"name": "cpu", "gib": 4, "link": "pcie-5"}] * 2},
            "kv_tiers need different names",
        ),
    ],
)  # fmt: skip
def test_wrong_tiers_are_refused_by_name(keys, message):
    with pytest.raises(SpecError, match=message):
        run(spec_of(keys))


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        ({"enable_prefix_caching": False}, {}, "kv_tiers would hold nothing"),
        (
            {"enable_prefix_caching": False, "kv_allocator": "contiguous_max"},
            {},
            "kv_tiers need paged memory",
        ),
        ({}, {"backend": "real", "real": {"clock": "reference"}}, r"real\.clock: reference"),
        (
            {
                "offloading_connector": True,
                "speculation": {
                    "method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5
                },
            },
            {},
            "offloading_connector was not held against vLLM with speculation",
        ),
        ({"offloading_connector": True}, {"backend": "real"}, r"engine\.offloading_connector:"),
        ({"offloading_connector": False}, {"backend": "vllm", "workload": {
            "prompt_tokens": {"distribution": "uniform", "low": 4, "high": 40},
            "output_tokens": {"distribution": "uniform", "low": 2, "high": 20},
            "num_requests": 2, "request_rate": 1.0}}, r"engine\.kv_offload: not with"),
        ({"enable_prefix_caching": False}, {"cluster": {"count": 2, "migration": "llumnix"}},
         "kv_offload: engines whose requests move look nothing up"),
        ({"enable_prefix_caching": False, "preemption_mode": "swap", "offloading_connector": True},
         {"cluster": {"count": 2, "migration": "llumnix"}}, "offloading_connector: not simulated"),
    ],
)  # fmt: skip
def test_tiers_are_refused_where_they_cannot_be(engine, more, message):
    engine = {**engine, **more.pop("engine", {})}
    with pytest.raises(SpecError, match=message):
        run(spec_of({"tiers": [{"name": "cpu", "gib": 4, "link": "pcie-5"}]}, engine, **more))


def test_first_tier_that_is_to_lie_on_a_disk_is_refused():
    tiers = [{"name": "cpu", "gib": 4, "link": "pcie-5", "path": "/mnt"}]
    with pytest.raises(SpecError, match=r"tiers\[0\]\.path: the first tier is the host's memory"):
        spec_of({"tiers": tiers})


def profile_with(folder, swap_times):
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps({"swap_times": swap_times}))
    return str(folder)


def test_measured_link_has_latency_and_bandwidth_of_each_direction(tmp_path):
    times = [
        {"direction": way, "num_bytes": n, "seconds": latency_s + n / bytes_per_s}
        for way, latency_s, bytes_per_s in (("in", 2e-5, 5e9), ("out", 1e-5, 4e9))
        for n in (10**5, 10**6, 10**8)
    ]
    profile = profile_with(tmp_path / "profile", times)
    spec = spec_of({"tiers": [{"name": "cpu", "num_blocks": 7, "link": "measured"}]})
    spec = spec.model_copy(
        update={"cost_model": spec.cost_model.model_copy(update={"profile": profile})}
    )
    (found,) = offload_limits(spec, 100)["kv_tiers"]
    assert found.num_blocks == 7
    assert (found.load_latency_ns, found.store_latency_ns) == (20_000, 10_000)
    assert found.load_bytes_per_s == pytest.approx(5e9)
    assert found.store_bytes_per_s == pytest.approx(4e9)


def test_measured_link_whose_small_copies_are_fast_has_no_latency_below_nothing():
    times = [
        {"direction": "in", "num_bytes": n, "seconds": s}
        for n, s in ((10**6, 0.5e-3), (2 * 10**6, 1.1e-3), (10**7, 5.5e-3))
    ]
    found = _fitted(times, "in")
    assert found.latency_s == 0.0
    assert 1.8e9 < found.bytes_per_s < 2.0e9


def test_link_of_a_tier_is_what_is_given_and_for_the_rest_that_of_its_name(tmp_path):
    times = [
        {"direction": way, "num_bytes": n, "seconds": latency_s + n / rate}
        for way, latency_s, rate in (("in", 5e-6, 5e9), ("out", 8e-6, 4e9))
        for n in (10**6, 10**7, 10**8)
    ]
    profile = profile_with(tmp_path / "profile", times)
    pcie = LINKS["pcie-5"]
    known = {
        None: (0.0, 0.0, 0.0, 0.0),
        "pcie-5": (pcie.bytes_per_s, pcie.bytes_per_s, pcie.latency_s, pcie.latency_s),
        "nvme-4": (6.5e9, 3.5e9, 1e-4, 1e-4),
        "measured": (5e9, 4e9, 5e-6, 8e-6),
    }
    for link, of_link in known.items():
        for given in itertools.product([None, 7.0], [None, 3.0], [None, 40.0]):
            names = ("load_gb_per_s", "store_gb_per_s", "latency_us")
            keys = {name: value for name, value in zip(names, given, strict=True) if value}
            if link is None and len(keys) < 3 - (given[2] is None):
                continue  # refused: half of it is unknown
            found = _tier(TierSpec(name="cpu", num_blocks=9, link=link, **keys), 1, profile)
            load, store, latency_us = given
            assert (found.load_bytes_per_s, found.store_bytes_per_s) == pytest.approx(
                (load * 1e9 if load else of_link[0], store * 1e9 if store else of_link[1])
            )
            latencies_s = (latency_us * 1e-6,) * 2 if latency_us else of_link[2:]
            assert (found.load_latency_ns, found.store_latency_ns) == pytest.approx(
                [1e9 * seconds for seconds in latencies_s], abs=1
            )


@pytest.mark.parametrize(
    ("profile", "message"),
    [(None, "measured is that of a profile"), ([], "has no swap_times; measure it")],
)
def test_measured_link_without_measured_copies_is_refused_by_the_tier(profile, message, tmp_path):
    spec = spec_of({"tiers": [{"name": "cpu", "num_blocks": 7, "link": "measured"}]})
    if profile is not None:
        folder = profile_with(tmp_path / "profile", profile)
        cost_model = spec.cost_model.model_copy(update={"profile": folder})
        spec = spec.model_copy(update={"cost_model": cost_model})
    with pytest.raises(SpecError, match=f"tier cpu: link: .*{message}"):
        offload_limits(spec, 100)


def spec_of(offload, engine=None, **keys):
    engine = {"enable_prefix_caching": True, "kv_offload": offload, **(engine or {})}
    workload = {
        "session_rate": 2.0,
        "sessions": {
            "count": 12,
            "turns": 4,
            "new_tokens": 300,
            "output_tokens": 60,
            "think_s": {"distribution": "fixed", "seconds": 2},
        },
    }
    return make_spec({"workload": workload, "engine": engine, **keys})


@pytest.mark.slow
def test_result_of_tiers_tells_hits_and_bytes_and_survives_saving(tmp_path):
    tiers = [
        {"name": "cpu", "num_blocks": 300, "link": "pcie-4"},
        {"name": "disk", "gib": 100, "link": "nvme-4"},
    ]
    engine = {"num_gpu_blocks_override": 300, "max_model_len": 4096}
    result = run(spec_of({"tiers": tiers, "load": "always"}, engine))
    metrics = result.metrics()
    hits = metrics["tier_hit_tokens"]
    assert hits > 0
    assert metrics["tier_hit_tokens(tier=cpu)"] + metrics["tier_hit_tokens(tier=disk)"] == hits
    assert metrics["loaded_bytes"] == hits * result.tiers[0].block_bytes // 16
    assert 0 < metrics["tier_peak_share"] <= 1
    result.save(tmp_path)
    again = RunResult.load(tmp_path)
    assert again.metrics() == pytest.approx(metrics, nan_ok=True)
    assert (
        json.loads((tmp_path / "result.json").read_text())["schedlab"]["tiers"][1]["name"] == "disk"
    )


@pytest.mark.slow
def test_engines_of_a_cluster_have_tiers_of_their_own_and_lose_them_when_they_die():
    tiers = {"tiers": [{"name": "cpu", "num_blocks": 300, "link": "pcie-4"}], "load": "always"}
    engine = {"num_gpu_blocks_override": 150, "max_model_len": 2400}
    dies = {"engines": [{"engine": 1, "at_s": 3, "down_s": 2}]}
    hits = []
    for failures in ({}, {"failures": dies}):
        result = run(spec_of(tiers, engine, cluster={"count": 2, **failures}))
        assert set(result.copies["engine"].tolist()) == {0, 1}
        assert result.metric("completed") == 48
        hits.append(result.metric("tier_hit_tokens"))
    assert hits[0] > hits[1] > 0


def test_result_without_tiers_says_nothing_of_them():
    spec = make_spec({"workload": {"trace": "azure-conv", "num_requests": 3, "request_rate": 2}})
    result = run(spec)
    assert not [name for name in result.metrics() if "tier" in name or "loaded" in name]
    assert "tiers" not in result.to_vllm_json()["schedlab"]


def test_engine_that_dies_gives_back_whom_it_was_loading():
    limits = config(tier(load_bytes_per_s=GB / 1e6), kv_load="always")
    engine = Engine(limits, ContinuousBatching(), SimExecutor(Pricing(LinearCost(), None)))
    simulate(engine, evicting_work()[:3])
    engine.submit(evicting_work()[3], 300_000)
    assert engine.begin(300_000) is None
    assert list(engine.requests.loading) == [3]
    assert [state.id for state in engine.die(300_001)] == [3]


@pytest.mark.parametrize(("follows", "first_blocks"), [(False, 0), (True, 1)])
def test_router_is_told_of_what_is_left_to_compute_of_who_is_loaded(follows, first_blocks):
    # With a seat or without: of nine blocks eight are held, and a token is not computed.
    keys = {"offloading_connector": follows, "load_takes_seat": not follows}
    limits = config(tier(load_bytes_per_s=GB / 1e6), kv_load="always", **keys)
    engine = Engine(limits, ContinuousBatching(), SimExecutor(Pricing(LinearCost(), None)))
    simulate(engine, evicting_work()[:3])
    engine.submit(evicting_work()[3], 300_000)
    assert engine.begin(300_000) is None
    live = LiveState(0, engine, Clock())
    assert live.backlog_tokens == 1
    assert live.first_waiting_blocks == live.waiting_blocks == first_blocks


@pytest.mark.parametrize("priority", [-1, 0])
@pytest.mark.parametrize("takes_seat", [True, False])
def test_router_is_told_of_an_urgent_request_that_is_loaded_if_it_has_a_seat(takes_seat, priority):
    keys = {"offloading_connector": not takes_seat, "load_takes_seat": takes_seat}
    limits = config(tier(load_bytes_per_s=GB / 1e6), kv_load="always", **keys)
    engine = Engine(limits, ContinuousBatching(), SimExecutor(Pricing(LinearCost(), None)))
    simulate(engine, evicting_work()[:3])
    last = evicting_work()[3]
    engine.submit(replace(last, request=replace(last.request, priority=priority)), 300_000)
    live = LiveState(0, engine, Clock())
    assert live.num_urgent == 0, "it waits"
    assert engine.begin(300_000) is None
    assert bool(engine.requests.loading) == takes_seat
    assert LiveState(0, engine, Clock()).num_urgent == (takes_seat and priority < 0)


@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        ("vtc", {}),
        ("hrrn", {}),
        ("boosted", {"threshold_s": 0.0}),
        ("past_future", {"reserved": 0.0}),
    ],
)
def test_policy_with_an_order_of_its_own_passes_over_who_is_loaded_without_a_seat(policy, knobs):
    limits = connected(tier(load_bytes_per_s=GB / 10))
    work = [*evicting_work(), arrival(4, 302_000, 1, 1), arrival(5, 400_000, 1, 1)]
    log = run_laws(registry.make(policy, **knobs), told(work), limits)
    (load,) = copies_of(log, is_load=True)
    assert load["id"] == 3
    requests = log.requests()
    assert requests["first_scheduled_ns"][3:5].tolist() == [load["done_ns"], 302_000]


@pytest.mark.parametrize("slower", [1, 10])
@pytest.mark.parametrize("follows", [None, False, True])
def test_vtc_charges_each_prompt_once_however_it_comes_by_its_kv(follows, slower):
    # The plan that lets him load may compute something, or nothing: then no step tells of it.
    limits = EngineConfig(num_blocks=40, max_model_len=400, enable_prefix_caching=True)
    if follows is not None:
        keys = {"offloading_connector": follows, "load_takes_seat": not follows}
        limits = config(tier(load_bytes_per_s=GB / slower), kv_load="always", **keys)
    for more in ([], [arrival(4, 300_000, BLOCK, 20), arrival(5, 300_100, 1, 1)]):
        work = [*evicting_work(), *more]
        policy = registry.make("vtc")
        log = run_laws(policy, work, limits)
        assert len(copies_of(log, is_load=True)) == (follows is not None)
        prompts = sum(a.request.prompt_tokens for a in work)
        outputs = sum(a.output_tokens for a in work)
        assert policy.counters == {None: prompts + 2 * outputs}


def test_promise_ends_where_a_step_evicts_what_somebody_who_waits_would_then_load():
    work = [
        arrival(0, prompt=BLOCK, output=1, prefix_hash_ids=(0,)),
        arrival(1, at_ns=100_000, prompt=8 * BLOCK, output=1, prefix_hash_ids=tuple(range(10, 18))),
        arrival(2, at_ns=200_000, prompt=4 * BLOCK - 4, output=40),
        arrival(3, at_ns=200_500, prompt=10 * BLOCK, output=1, prefix_hash_ids=(0, *range(20, 29))),
    ]
    log = run_laws(
        ContinuousBatching(), work, config(num_blocks=13, max_model_len=200, check_horizon=True)
    )
    assert [row["num_blocks"] for row in copies_of(log, is_load=True)] == [1]


def test_loads_that_end_together_are_there_in_the_order_they_were_issued():
    limits = replace(config(), kv_block_bytes=0)  # so copies take no time but their latency
    tiering = Tiering(limits, lambda shape, k: 1000, Copies())
    states = [RequestState(arrival(i, 0, 8, 1).request) for i in (2, 0, 1)]
    for state in reversed(states):
        tiering.swap_out(state, 1)
    assert tiering.settle(1_000) == (True, [])
    for state in states:
        tiering.swap_in(state, 1, num_free=9)
    assert len(set(tiering._log.columns()["done_ns"][3:].tolist())) == 1
    assert tiering.settle(2_000) == (True, states)


@pytest.mark.skipif(core.running() != "python", reason="compiled code refuses stand-ins")
def test_request_that_loads_reuses_no_more_than_the_gpu_holds():
    told = []
    state = RequestState(arrival(0, 0, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT).request)
    requests = SimpleNamespace(
        tiers=SimpleNamespace(
            reuse=lambda state, num_tokens: told.append(num_tokens), load=lambda *loaded: None
        ),
        waiting=SimpleNamespace(remove=lambda state, now_ns: None),
        config=config(),
        kv_bytes=None,
        loading={},
        holding={},
        kv=SimpleNamespace(free_blocks=9),
        _take_over=lambda state, cached_tokens: None,
        _drop_kept_for=lambda state: None,
    )
    Lifecycle._load(requests, state, ((0, (3, 4)), (1, (5,))), 6 * BLOCK, 0)
    assert told == [3 * BLOCK], "six blocks, of which three are loaded"


def connected(*tiers, **keys):
    """Return limits that follow vLLM's connector, and load whatever they find."""
    keys = {"max_model_len": 640, "max_num_batched_tokens": 64, **keys}
    return config(
        *tiers, offloading_connector=True, kv_load="always", load_takes_seat=False, **keys
    )


def test_blocks_of_a_prompt_for_which_there_was_no_room_are_tried_again_after_each_step():
    # Eight blocks are being stored, and there is room for nine: the next prompt's two have to wait.
    # They are stored once it is done, though only answers are computed by then.
    slow = tier(num_blocks=9, store_bytes_per_s=GB / 10)
    work = [
        arrival(0, 0, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT),
        arrival(1, 10, 2 * BLOCK + 1, 30, prefix_hash_ids=(70, 71)),
    ]
    log = run_laws(ContinuousBatching(), work, connected(slow, max_num_batched_tokens=400))
    first, second = copies_of(log, id=0), copies_of(log, id=1)
    assert [row["num_blocks"] for row in second] == [2]
    (last_ns,) = (row["done_ns"] for row in first)
    steps = log.steps()
    later = (steps["start_ns"] >= last_ns) & (steps["num_decodes"] > 0)
    assert second[0]["issued_ns"] == min(steps["end_ns"][later])
    assert second[0]["issued_ns"] < log.requests()["finish_ns"][1]


def test_request_loaded_to_its_end_has_all_but_its_last_token_cached():
    work = [*evicting_work()[:3], arrival(3, 300_000, 8 * BLOCK, 1, prefix_hash_ids=DOCUMENT)]
    log = run_laws(ContinuousBatching(), work, connected())
    assert [row["num_blocks"] for row in copies_of(log, is_load=1)] == [8]
    assert log.requests()["cached_tokens"][3] == 8 * BLOCK - 1


@pytest.mark.parametrize("turn", [0, 2, 3])
@pytest.mark.parametrize("follows", [False, True])
def test_runs_with_tiers_that_begin_later_are_those_that_begin_at_zero(follows, turn):
    # Few blocks: those who began at zero are preempted, and loaded when they come back.
    keys = {"num_blocks": 20, "block_size": 4, "max_model_len": 60, "kv_load": "always"}
    more = {"load_takes_seat": False, "offloading_connector": True} if follows else {}
    draw = Random(turn)
    work = []
    for i in range(14):
        document, length = draw.randrange(3), draw.choice((4, 8, 16, 24))
        names = tuple(100 * document + j for j in range(length // 4))
        work.append(arrival(i, 1_500 * (i // 5), length, 12, prefix_hash_ids=names))
    limits = config(tier(load_latency_ns=40 * turn), max_num_seqs=6, **keys, **more)
    at_once, later = (
        run_laws(ContinuousBatching(), paced.shifted(work, by_ns), limits) for by_ns in (0, 90_000)
    )
    assert at_once.requests()["num_preemptions"].sum() > 0
    assert copies_of(at_once, is_load=1)
    assert paced.since(later, 90_000) == paced.since(at_once, 0)
    assert len(copies_of(later)) == len(copies_of(at_once))


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("follows", [False, True])
def test_prompt_in_a_tier_is_loaded_up_to_the_token_that_is_computed_again(size, more, follows):
    # With vLLM's connector the last block, too, of which its last token is computed again; but a
    # block of a single token is computed, not loaded.
    others = [tuple(range(n, n + 24)) for n in (100, 600)]
    document = tuple(range(8))
    work = [
        arrival(0, 0, 8 * size + 1, 1, prefix_hash_ids=document),
        *(arrival(i, i * 100_000, 24 * size, 2, prefix_hash_ids=other)
          for i, other in enumerate(others, 1)),
        arrival(3, 300_000, 8 * size + more, 1, prefix_hash_ids=document),
    ]  # fmt: skip
    keys = {"block_size": size, "max_model_len": 40 * size, "max_num_batched_tokens": 400}
    limits = connected(**keys) if follows else config(kv_load="always", **keys)
    log = run_laws(ContinuousBatching(), work, limits)
    most = 8 if more or (follows and size > 1) else 7
    assert [row["num_blocks"] for row in copies_of(log, is_load=1)] == [most]
    assert log.requests()["cached_tokens"][3] == min(most * size, 8 * size + more - 1)


def test_loaded_request_that_got_its_seat_is_no_longer_among_those_who_came():
    def observe(engine):
        assert engine.requests.come <= engine.requests.holding.keys()

    log = run_laws(ContinuousBatching(), evicting_work(), connected(), observer=observe)
    assert [row["id"] for row in copies_of(log, is_load=1)] == [3]


def test_load_takes_no_blocks_that_a_prompt_under_way_still_needs():
    # Of 40 blocks the prompt needs 36, two a step: 38 are free when the document comes again.
    whole = tuple(range(2000, 2036))
    work = [
        *evicting_work()[:3],
        arrival(3, 300_000, 36 * BLOCK, 1, prefix_hash_ids=whole),
        arrival(4, 300_001, 8 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT),
    ]
    log = run_laws(ContinuousBatching(), work, connected(long_prefill_token_threshold=32))
    (load,) = copies_of(log, is_load=1)
    assert load["id"] == 4
    assert load["issued_ns"] >= log.requests()["first_token_ns"][3]


@pytest.mark.parametrize(("num_decodes", "waits"), [(17, False), (18, True)])
def test_loaded_prompt_is_let_in_where_prompts_are_not_cut_if_it_just_fills_the_budget(
    num_decodes, waits
):
    # A block of it is loaded beside decodes; of the 641 tokens of a step it then needs 624.
    work = evicting_work()[:3]
    work += [arrival(3 + i, 299_990, 1, 9) for i in range(num_decodes)]
    work.append(arrival(99, 300_000, BLOCK + 624, 1, prefix_hash_ids=DOCUMENT[:1]))
    limits = connected(
        num_blocks=62, max_model_len=641, max_num_batched_tokens=641, enable_chunked_prefill=False
    )
    rows = run_laws(ContinuousBatching(), work, limits).requests()
    assert rows["cached_tokens"][-1] == BLOCK
    assert (rows["first_token_ns"][-1] > rows["finish_ns"][3]) is np.bool(waits)


@pytest.mark.parametrize("way", ["load", "store"])
def test_tier_with_a_negative_latency_is_refused(way):
    with pytest.raises(ValueError, match="tier cpu: latencies must be >= 0"):
        tier(**{f"{way}_latency_ns": -1})


def test_step_in_lockstep_waits_for_the_slowest_copy_of_all():
    # Engine 0 takes blocks that have to leave first; engine 1 only decodes, one token a step.
    limits = config(tier(write="back"))
    work = [*evicting_work(), arrival(9, 199_500, 5, 4)]
    engines = [
        Engine(limits, ContinuousBatching(), SimExecutor(Pricing(LinearCost(1000, 10, 0))))
        for _ in range(2)
    ]
    place = iter([0, 0, 1, 0, 0])
    router = SimpleNamespace(
        looks_at_engines=True, looks_at_caches=False, route=lambda request, engines: next(place)
    )
    log = simulate_cluster(
        engines, router, sorted(work, key=lambda a: a.ready_ns),
        lockstep=lambda stepping, idle: max(one.steps.durations_ns[0] for _, one in stepping),
    )  # fmt: skip
    waits = log.of_engines[0].copies.wait_columns()
    late = waits["wait_ns"][waits["start_ns"] < 300_000]
    assert len(late) == 2
    # The prompt of 384 tokens takes 1000 + 3840 ns, a step of one token 1010, and each its wait.
    assert np.diff(log.token_times(9)).tolist() == [4840 + late[0], 1010 + late[1], 1010]


def test_link_is_fitted_to_copies_of_its_own_direction_and_has_no_negative_latency():
    def copies(direction, latency_s, bytes_per_s, more=()):
        sizes = (1_000, 4_000, 16_000)
        times = [latency_s + n / bytes_per_s for n in sizes]
        return [
            {"direction": direction, "seconds": s, "num_bytes": n}
            for s, n in (*zip(times, sizes, strict=True), *more)
        ]

    both = [*copies("in", 0.002, 1e6), *copies("out", 0.001, 2e6)]
    assert _fitted(both, "in") == pytest.approx((1e6, 0.002))
    assert _fitted(both, "out") == pytest.approx((2e6, 0.001))
    # Small ones that take less than their share: no latency, and the rate alone is fitted.
    rate, latency_s = _fitted(copies("in", -0.0005, 1e6), "in")
    assert latency_s == 0.0
    ratios = [n / (n / 1e6 - 0.0005) for n in (1_000, 4_000, 16_000)]
    assert rate == pytest.approx(sum(x * x for x in ratios) / sum(ratios))


@pytest.mark.parametrize("fast_forward", [False, True])
def test_steps_are_skipped_only_into_blocks_that_nobody_copies_away(fast_forward):
    # Three of six blocks are copied away until 301.6 us. The prompt takes one of the others, and
    # its answer two more: at its 33rd token it waits for a fourth.
    work = [
        arrival(0, 0, 3 * BLOCK, 1, prefix_hash_ids=(0, 1, 2)),
        arrival(1, 2_000, BLOCK, 60),
    ]
    limits = config(
        tier(store_bytes_per_s=GB / 1000), num_blocks=6, max_model_len=90, fast_forward=fast_forward
    )
    log = run_laws(ContinuousBatching(), work, limits, LinearCost(1000, 10, 0))
    waits = {name: column.tolist() for name, column in log.copies.wait_columns().items()}
    first_ns = 2_000 + 1_000 + 10 * BLOCK
    start_ns = first_ns + 2 * BLOCK * 1_010
    assert waits == {"start_ns": [start_ns], "wait_ns": [1_480 + 300_000 - start_ns]}


def test_what_is_stored_after_skipped_steps_finds_the_tier_as_the_last_of_them_did():
    # A tier of few blocks: what is being written there cannot be evicted for what ends next.
    num_stores = num_late = 0
    for seed in range(8):
        draw = Random(seed)
        every_ns = draw.randrange(1_000, 9_000)
        work = []
        for i in range(8):
            names, blocks = tuple(range(10 * i, 10 * i + 9)), draw.randrange(1, 4)
            sent = arrival(
                i, i * every_ns, blocks * BLOCK, draw.randrange(5, 90), session=str(i),
                prefix_hash_ids=names[:blocks],
            )  # fmt: skip
            work.append(replace(sent, turn=Turn(answer_hash_ids=names[blocks:])))
        slow = tier(num_blocks=draw.choice([3, 4, 6]), store_bytes_per_s=GB / 50)
        limits = config(slow, num_blocks=60)
        tables = []
        for fast_forward in (False, True):
            log = run_laws(
                ContinuousBatching(), work, replace(limits, fast_forward=fast_forward),
                LinearCost(1000, 10, 0),
            )  # fmt: skip
            tables.append((laws.signature(log), copies_of(log)))
        assert tables[0] == tables[1], seed
        stores = copies_of(log, is_load=0)
        num_stores += len(stores)
        num_late += sum(row["done_ns"] > row["issued_ns"] + 2_000 for row in stores)
    assert num_stores > 40
    assert num_late > 30


def test_blocks_of_two_stores_are_busy_until_the_later_is_done():
    def released_after(*stores):
        tiering = Tiering(config(), lambda shape, k: 1000, Copies())
        state = RequestState(arrival(0, 0, 8, 1).request)
        for now_ns, names in stores:
            tiering.settle(now_ns)
            tiering.store(state, names)
        tiering.released(state)
        busy = [tiering.num_busy]
        for now_ns in (299, 300, 399, 400, 499, 500):
            tiering.settle(now_ns)
            busy.append(tiering.num_busy)
        return busy

    assert released_after((0, [0, 1, 2])) == [3, 3, 0, 0, 0, 0, 0]
    # A block takes 100 ns: the second copy begins behind the first.
    assert released_after((0, [0, 1, 2]), (0, [3, 4])) == [5, 5, 5, 5, 5, 5, 0]
    assert released_after((0, [0, 1, 2]), (299, [3])) == [4, 4, 4, 4, 0, 0, 0]
    # What is there when more is stored is busy no more; what was there before is not stored.
    assert released_after((0, [0, 1]), (200, [0, 1, 2])) == [1, 1, 0, 0, 0, 0, 0]
    assert released_after((0, [0, 1]), (150, [0, 1])) == [2, 0, 0, 0, 0, 0, 0]


def test_step_waits_for_stores_of_who_finished_just_where_it_takes_or_finds_their_blocks():
    # The prompt's first block is stored until 10,016 ns, its second behind it until 20,016: the
    # link takes 10,000 ns a block. It is answered at 33 ns, and the next prompt comes at 50.
    slow = tier(store_bytes_per_s=GB / 100)
    cost = LinearCost(0, 1, 0)
    first, second = 16 + 10_000, 16 + 20_000

    def answered_ns(num_blocks, at_ns=50, **asked):
        limits = config(
            slow, num_blocks=num_blocks, max_model_len=48, max_num_batched_tokens=16,
            offloading_connector=True,
        )  # fmt: skip
        work = [
            arrival(0, 0, 2 * BLOCK + 1, 1, prefix_hash_ids=(0, 1)),
            arrival(1, at_ns, output=1, **asked),
        ]
        log = run_laws(ContinuousBatching(), work, limits, cost)
        assert log.requests()["first_token_ns"][0] == 33
        waits = log.copies.wait_columns()
        first_token_ns = int(log.requests()["first_token_ns"][1])
        return first_token_ns, waits["start_ns"].tolist(), waits["wait_ns"].tolist()

    # Who finds nothing of it, and gets other blocks, waits for nobody.
    assert answered_ns(40, prompt=7) == (57, [], [])
    assert answered_ns(40, prompt=BLOCK + 1, prefix_hash_ids=(7,)) == (67, [], [])
    # Who finds a block waits for that, and for no other.
    for names, until_ns in (((0,), first), ((0, 1), second)):
        found = answered_ns(40, prompt=len(names) * BLOCK + 1, prefix_hash_ids=names)
        assert found == (until_ns + 1, [50], [until_ns - 50]), names
    # A step later there is nothing to wait for but what is not there yet.
    both = {"prompt": 2 * BLOCK + 1, "prefix_hash_ids": (0, 1)}
    assert answered_ns(40, first, **both) == (second + 1, [first], [second - first])
    assert answered_ns(40, second - 1, **both) == (second + 1, [second - 1], [1])
    assert answered_ns(40, second, **both) == (second + 1, [], [])
    # Of three blocks the free ones are handed out from the last: one has no name, and is not
    # stored. A prompt of three chunks takes them one a step.
    for tokens, wait in ((15, []), (31, [second - 66]), (47, [second - 66])):
        _, _, found = answered_ns(3, prompt=tokens)
        assert found == wait, tokens


@pytest.mark.parametrize(
    ("spare", "loads", "runs"), [(3, True, True), (2, True, False), (1, False, False)]
)
def test_loaded_prompt_that_is_to_fit_whole_leaves_the_watermark_free_twice(spare, loads, runs):
    # Of 40 blocks four are kept free. The prompt needs 14, of which 8 are loaded, and a step fills
    # four of the others: it can be loaded beside 22 blocks, and begin only if there are as few
    # still. Two plans and then the load lie between the other prompt and that.
    work = [
        *evicting_work()[:3],
        arrival(3, 290_000, 22 * BLOCK - spare, 24),
        arrival(4, 300_000, 13 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT),
    ]
    limits = connected(watermark=0.1, scheduler_reserve_full_isl=True)
    log = run_laws(ContinuousBatching(), work, limits, LinearCost(1000, 10, 0))
    (load,) = copies_of(log, is_load=1)
    assert load["id"] == 4
    rows = {name: column.tolist() for name, column in log.requests().items()}
    gone_ns = rows["finish_ns"][3]
    assert gone_ns > 320_000
    assert (load["issued_ns"] < gone_ns) is np.bool(loads)
    assert (rows["first_scheduled_ns"][4] < gone_ns) is runs


@pytest.mark.parametrize("seat", [True, False])
def test_request_that_is_being_loaded_cannot_be_preempted_until_it_is_there(seat):
    told = []

    class Preempts(ContinuousBatching):
        seats_loaded = not seat

        def plan(self, view, builder):
            requests = view._requests
            for state in (requests.loading if seat else requests.holding).values():
                with pytest.raises(InfeasiblePlan, match="cannot be preempted: it does not run"):
                    builder.preempt(state)
                told.append(view.now_ns)
            return super().plan(view, builder)

    # Another prompt keeps the engine busy while the document is loaded.
    *before, document = evicting_work()
    work = [*before, arrival(4, 299_000, 24, 30), document]
    limits = config(tier(load_bytes_per_s=GB / 10), kv_load="always", load_takes_seat=seat)
    run_laws(Preempts(), work, limits, prove=False)
    assert told


@pytest.mark.parametrize(("spare", "at_once"), [(4, False), (5, True)])
@pytest.mark.parametrize("follows", [False, True])
def test_load_that_takes_a_seat_asks_for_room_for_its_next_chunk_as_well(follows, spare, at_once):
    # Eight blocks are loaded and five computed; vLLM's connector asks for the eight alone.
    work = [
        *evicting_work()[:3],
        arrival(3, 299_000, (32 - spare) * BLOCK - 15, 15),
        arrival(4, 310_000, 12 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT),
    ]
    keys = {"offloading_connector": follows, "load_takes_seat": not follows}
    limits = config(kv_load="always", max_model_len=640, **keys)
    log = run_laws(ContinuousBatching(), work, limits)
    (load,) = copies_of(log, is_load=1)
    finish_ns = log.requests()["finish_ns"][3]
    assert bool(load["issued_ns"] < finish_ns) is (follows or at_once)


def test_prompts_that_are_loaded_by_turns_do_not_evict_each_other_for_ever():
    # Prompts hold memory until the link to the other engine has taken them.
    engine = {"block_size": 4, "num_gpu_blocks_override": 132}
    tiers = [
        {"name": "t0", "num_blocks": 5, "load_gb_per_s": 5, "store_gb_per_s": 0.5,
         "latency_us": 3000},
        {"name": "t1", "num_blocks": 60, "link": "pcie-4", "write": "back"},
    ]  # fmt: skip
    uniform = {"distribution": "uniform", "low": 1}
    sessions = {
        "count": 20, "turns": {**uniform, "high": 4}, "output_tokens": {**uniform, "high": 40},
        "new_tokens": {**uniform, "low": 5, "high": 80}, "think_s": 0,
    }  # fmt: skip
    spec = spec_of(
        {"tiers": tiers}, engine, policy="gittins",
        workload={"session_rate": 10, "sessions": sessions},
        cluster={
            "link": {"gb_per_s": 0.5}, "pools": {"p": {"role": "prefill"}, "d": {"role": "decode"}}
        },
    )  # fmt: skip
    assert run(spec).metric("rejected") == 0


def test_computing_blocks_is_estimated_by_steps_that_have_nothing_else_in_them():
    told = []

    def estimate_ns(shape, num_steps):
        told.append((shape, num_steps))
        return 7 * len(told)

    tiering = Tiering(config(max_num_batched_tokens=40), estimate_ns, Copies())
    assert tiering.compute_ns(1, 8) == 7 + 14 + 21
    chunks = [(40, 16), (40, 56), (32, 96)]  # from token 16 to 128
    assert told == [(BatchShape(0, 0, 0, (chunk,)), 1) for chunk in chunks]
    assert tiering.compute_ns(8, 8) == 0


def test_everybody_is_answered_whenever_an_engine_dies_that_loads():
    # As above: the last prompt waits, is loaded, has memory and no seat until the other is gone,
    # and runs.
    limits = connected(watermark=0.1, scheduler_reserve_full_isl=True)
    work = [
        *evicting_work()[:3],
        arrival(3, 290_000, 22 * BLOCK - 2, 24),
        arrival(4, 300_000, 13 * BLOCK + 1, 1, prefix_hash_ids=DOCUMENT),
    ]

    def new_engine(_=0):
        return Engine(
            limits, ContinuousBatching(), SimExecutor(Pricing(LinearCost(1000, 10, 0))),
            check_conservation,
        )  # fmt: skip

    for at_ns in (300_100, 300_900, 310_000, 323_000):
        failures = Failures(outages=[Outage(0, at_ns, 1_000)])
        log = simulate_cluster(
            [new_engine()], routers.make("round_robin"), work,
            changes=Changes(Supply(new_engine, ["mixed"], [0]), failures),
        )  # fmt: skip
        rows = log.requests()
        assert rows["id"].tolist() == [0, 1, 2, 3, 4], at_ns
        assert rows["generated_tokens"].tolist() == [1, 2, 2, 24, 1], at_ns
        lost = {3, 4} if at_ns < 322_730 else {4}
        assert {loss.id for loss in log.losses} == lost, at_ns


def test_request_without_a_seat_is_granted_one_only_when_what_is_loaded_is_there():
    told = []

    class Insists(ContinuousBatching):
        seats_loaded = True

        def plan(self, view, builder):
            for state in view._requests.holding.values():
                if state.id not in view._requests.come:
                    assert state not in list(view.waiting)
                    assert builder.grant(state) == 0
                    assert builder.denied == (state, "its KV is on its way from a lower tier")
                    told.append(view.now_ns)
            return super().plan(view, builder)

    *before, document = evicting_work()
    work = [*before, arrival(4, 299_000, 24, 30), document]
    limits = connected(max_model_len=400)
    limits = replace(limits, kv_tiers=(tier(load_bytes_per_s=GB / 10),))
    log = run_laws(Insists(), work, limits, prove=False)
    (load,) = copies_of(log, is_load=1)
    assert load["id"] == 3
    assert len(told) > 3
    assert log.requests()["first_scheduled_ns"][3] >= load["done_ns"] > max(told)


class Holder:
    """Who holds the bytes and times their copies: every second step waited, each for longer."""

    times_copies = True

    def __init__(self):
        self.num_asked = 0
        self.under_way = []

    def open(self, kv):
        pass

    def reuse(self, state, num_tokens):
        pass

    def answered(self, state, names):
        pass

    def copy(self, number, copy, now_ns):
        self.under_way.append(CopyTime(number, now_ns + 2, now_ns + 30))

    def done(self, now_ns):
        found = [one for one in self.under_way if one.done_ns <= now_ns]
        self.under_way = [one for one in self.under_way if one.done_ns > now_ns]
        return found

    def take_wait_ns(self):
        self.num_asked += 1
        return self.num_asked * 7 * (self.num_asked % 2)


def test_waits_that_only_who_holds_the_bytes_knows_are_those_of_their_steps():
    gpu = SimExecutor(Pricing(LinearCost(1000, 10, 1)))
    gpu.kv_bytes = Holder()
    engine = Engine(config(fast_forward=False), ContinuousBatching(), gpu)
    log = simulate(engine, [arrival(i, 500 * i, 20, 3 + i) for i in range(3)])
    starts = log.steps()["start_ns"].tolist()
    assert len(starts) > 4
    waits = log.copies.wait_columns()
    assert waits["start_ns"].tolist() == starts[::2]
    assert waits["wait_ns"].tolist() == [7 * (i + 1) for i in range(0, len(starts), 2)]


def told(work):
    """Return requests that say how long their answers are."""
    return [
        replace(
            a,
            request=replace(
                a.request, max_tokens=a.output_tokens, predicted_tokens=float(a.output_tokens)
            ),
        )
        for a in work
    ]


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        ("tensorrt_llm", {}),
        ("tensorrt_llm", {"capacity_policy": "static_batch"}),
        ("tgi", {}),
        ("tgi3", {}),
        ("mc_sf", {"margin": 0.0}),
        ("past_future", {"reserved": 0.0}),
        ("wait", {"output_edges": [400], "total_limit": 1, "only_cap": True}),
        ("scorpio", {"ttft_s": 1e3, "tbt_s": 1e-7}),
    ],
)
def test_admission_that_reckons_with_others_counts_who_is_being_loaded(policy, knobs, follows):
    # Of 40 blocks the one that is loaded will hold 24 and the other 23; and a place, or the time
    # between tokens, is for one alone.
    limits = config(
        tier(load_bytes_per_s=GB / 1000), kv_load="always",
        offloading_connector=follows, load_takes_seat=not follows,
    )  # fmt: skip
    work = [
        *evicting_work()[:3],
        arrival(3, 300_000, 8 * BLOCK + 1, 16 * BLOCK - 1, prefix_hash_ids=DOCUMENT),
        arrival(4, 300_100, BLOCK, 22 * BLOCK),
    ]
    log = run_laws(registry.make(policy, **knobs), told(work), limits)
    assert [row["id"] for row in copies_of(log, is_load=1)] == [3]
    requests = log.requests()
    assert requests["first_scheduled_ns"][4] > requests["first_token_ns"][3]
    assert not requests["num_preemptions"].any()


@pytest.mark.parametrize("takes_seat", [True, False])
def test_request_on_its_way_from_a_tier_is_counted_where_it_has_a_seat_or_waits(takes_seat):
    slow = tier(load_bytes_per_s=1e7)  # a block takes ten steps
    limits = config(slow, kv_load="always", load_takes_seat=takes_seat)
    work = [*evicting_work(), arrival(4, 300_000, 16, 60)]
    log = run_laws(ContinuousBatching(), work, limits)
    assert copies_of(log, is_load=1)
    requests, steps = log.requests(), log.steps()
    for start_ns, running, waiting in zip(
        steps["start_ns"], steps["num_running"], steps["num_waiting"], strict=True
    ):
        here = (requests["arrival_ns"] <= start_ns) & (requests["finish_ns"] > start_ns)
        assert running + waiting == here.sum(), start_ns
