"""Policies that plan by latency targets, traced by hand.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context.
"""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.policies import Policy, registry
from schedlab.policies.credits import Credits
from schedlab.policies.qoserve import _Lengths
from schedlab.policies.virtual_batch import VirtualBatch
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import PolicyError
from schedlab.sim.request import RequestState, Slo, Status
from tests import laws
from tests.laws import LinearCost, arrival
from tests.staged_cost import StagedCost
from tests.traced import AsksOnce, Recorder, batches, limits
from tests.unit.test_policies_ordering import rival_stream, served

SLAI = {"token_budget": 8, "tbt_s": 6e-6, "dynamic_offset": False, "offset": 1}


@pytest.mark.parametrize(("later_ns", "steps"), [(0, 2), (1, 3)])
def test_slai_serves_a_decode_at_the_very_time_at_which_it_is_due(later_ns, steps):
    # A prompt of another request takes the whole budget of each step, until the decode is due.
    def run_with(tbt_ns):
        work = [arrival(0, prompt=2, output=3), arrival(1, 500, prompt=60, output=1)]
        return batches("slai", work, limits(), **{**SLAI, "offset": 0, "tbt_s": tbt_ns / 1e9})

    _, log = run_with(10**9)
    starts_ns = log.steps()["start_ns"].tolist()
    assert log.steps()["prefill_tokens"].tolist()[:5] == [2, 8, 8, 8, 8]
    got, _ = run_with(starts_ns[3] - log.token_times(0)[0] + later_ns)
    assert got[1 : 1 + steps] == [{1: 8}] * steps
    assert got[1 + steps] == {0: 1, 1: 7}


def test_slai_delays_a_decode_until_its_last_schedulable_time():
    # After the first step (1080 ns) request 0 may wait until 1080 + 6000 - 1 * 1080 = 6000 ns.
    work = [arrival(0, prompt=4, output=4), arrival(1, prompt=60, output=1)]
    got, _ = batches("slai", work, limits(), **SLAI)
    assert got == [
        {0: 4, 1: 4},  # the shorter prompt first
        *5 * [{1: 8}],  # at 1080, 2160, ... 5400: the prompt takes the whole budget
        {0: 1, 1: 7},  # at 6480 the decode is critical and comes first
        {1: 8},  # at 7564; critical again from 7564 + 6000 - 1080 = 12484
        {0: 1, 1: 1},  # but there is room
        {0: 1},
    ]


def test_slai_with_a_large_offset_never_delays_a_decode():
    work = [arrival(0, prompt=4, output=2), arrival(1, prompt=60, output=1)]
    got, _ = batches("slai", work, limits(), **{**SLAI, "offset": 10})
    assert got[:2] == [{0: 4, 1: 4}, {0: 1, 1: 7}]


def test_slai_takes_the_larger_offset_when_memory_is_nearly_full():
    # Offsets of 5 and 10 steps of 1080 ns: from 1680, or at once (negative).
    work = [arrival(0, prompt=4, output=2), arrival(1, prompt=60, output=1)]
    knobs = {**SLAI, "dynamic_offset": True}
    got, _ = batches("slai", work, limits(), **knobs, memory_limit=0.96)
    assert got[1] == {1: 8}
    got, _ = batches("slai", work, limits(), **knobs, memory_limit=0.01)
    assert got[1] == {0: 1, 1: 7}


def test_slai_a_request_with_a_tighter_target_is_critical_first():
    tight = Slo(tpot_ms=0.002)
    work = [
        arrival(0, prompt=2, output=2),
        arrival(1, prompt=2, output=2, slo=tight),
        arrival(2, prompt=60, output=1),
    ]
    got, _ = batches("slai", work, limits(), **SLAI)
    # Last schedulable times: 1080 + 6000 - 1080, and 1080 + 2000 - 1080 = 2000.
    assert got[:4] == [{0: 2, 1: 2, 2: 4}, {2: 8}, {1: 1, 2: 7}, {2: 8}]


def test_slai_orders_new_prompts_by_class_and_length():
    work = [
        arrival(0, prompt=9, priority=1),
        arrival(1, prompt=3, priority=1),
        arrival(2, prompt=7, priority=0),
    ]
    assert served("slai", work, order="fcfs") == [0, 1, 2]
    assert served("slai", work, order="shortest_prompt") == [1, 2, 0]
    assert served("slai", work, order="paying_first") == [2, 1, 0]


@pytest.mark.parametrize("order", ["shortest_prompt", "paying_first"])
def test_slai_takes_the_answer_of_who_was_evicted_for_a_part_of_its_prompt(order):
    # Six blocks. Request 0 is evicted with 7 tokens of an answer: 9 to compute, a prompt of 2.
    work = [
        arrival(0, prompt=2, output=16), arrival(1, prompt=8, output=12),
        arrival(2, 5_000, prompt=5, output=2),
    ]  # fmt: skip
    config = limits(num_blocks=6, max_model_len=24, scheduler_reserve_full_isl=True)
    got, _ = batches("slai", work, config, **{**SLAI, "tbt_s": 1e-9}, order=order)
    assert got[6:9] == [{0: 1, 1: 1}, ({1: 1, 2: 5}, [0]), {1: 1, 2: 1}]


def test_slai_where_rows_run_short_pauses_the_rest_and_preempts_nobody():
    work = [
        arrival(0, prompt=2, output=3),
        arrival(1, prompt=2, output=2),
        arrival(2, prompt=60, output=1),
    ]
    got, _ = batches("slai", work, limits(seats=1, max_num_resident=3), **SLAI)
    assert got == [
        {0: 2},
        {1: 2},
        *4 * [{2: 8}],
        {0: 1},  # both decodes are due, and there is one row
        {1: 1},
        *3 * [{2: 8}],
        {2: 4},
        {0: 1},
    ]


def test_slai_starves_long_prompts_except_in_order_of_arrival():
    work = rival_stream({"prompt": 2}, {"prompt": 12})
    assert served("slai", work)[-1] == 1
    assert served("slai", work, order="fcfs")[1] == 1


def test_slai_without_memory_evicts_a_prompt_under_way_for_a_critical_decode():
    # 5 blocks: the decode's second block is needed when the prompt under way holds all others.
    work = [arrival(0, prompt=4, output=3), arrival(1, prompt=19, output=1)]
    knobs = {**SLAI, "offset": 10, "order": "fcfs"}
    got, _ = batches("slai", work, limits(num_blocks=5), **{**knobs, "token_budget": 20})
    assert got == [
        {0: 4, 1: 12},  # 16 tokens a step at most: one block and three
        {0: 1},  # takes the last block; the prompt's last 7 tokens need two
        {0: 1},
        {1: 7},
    ]
    config = limits(num_blocks=5, budget=20)
    got, log = batches("slai", work, config, **{**knobs, "token_budget": 20})
    assert got[:2] == [{0: 4, 1: 16}, ({0: 1}, [1])]
    assert log.requests()["num_preemptions"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("order", "second"), [("shortest_prompt", ({0: 1, 2: 4}, [1])), ("fcfs", ({0: 1}, [1]))]
)
def test_slai_admits_in_the_place_of_a_prompt_it_evicted_who_comes_before_it(order, second):
    work = [
        arrival(0, prompt=4, output=3),
        arrival(1, prompt=19, output=1),
        arrival(2, 500, prompt=4, output=1),
    ]
    knobs = {**SLAI, "offset": 10, "order": order, "token_budget": 20}
    got, _ = batches("slai", work, limits(num_blocks=5, budget=20), **knobs)
    assert got[:2] == [{0: 4, 1: 16}, second]


def test_slai_with_decodes_that_come_back_from_the_host_goes_on_with_all_others():
    # 3 decodes of up to 3 blocks in a memory of 8: the third is swapped out, and comes back beside
    # others who are not due, with only a token to compute.
    work = [arrival(i, prompt=5 + i, output=6 + i) for i in range(3)]
    config = limits(num_blocks=8, budget=64, preemption_mode="swap", swap_space_blocks=50)
    got, log = batches("slai", work, config, token_budget=64)
    preempted = log.requests()["num_preemptions"].tolist()
    assert sum(preempted) == 1
    gone = preempted.index(1)
    out = next(i for i, one in enumerate(got) if isinstance(one, tuple))
    back = next(one for one in got[out + 1 :] if gone in one)
    assert back[gone] == 1
    assert len(back) > 1
    assert log.requests()["recomputed_tokens"].sum() == 0


FINE = {"chunk_sizes": range(1, 17), "safety": 1.0, "scarce_tokens": 0}
"""Any number of tokens up to the budget, and no margin."""


def test_qoserve_makes_chunks_as_large_as_the_next_deadline_allows():
    # Request 0 is due 1000 ns after arrival and every 1120 ns from the first token on.
    work = [
        arrival(0, 0, prompt=4, output=3, slo=Slo(ttft_ms=0.001, tpot_ms=0.00112)),
        arrival(1, 500, prompt=60, output=1),
    ]
    got, log = batches("qoserve", work, limits(), **FINE)
    assert got == [
        {0: 4},  # late whatever one does; ends at 1040
        {0: 1, 1: 10},  # due at 2160: 1000 + 10 * 11 + 4 <= 1120 < 1000 + 10 * 12 + 4
        {0: 1, 1: 10},  # at 2154, due at 3280: 1000 + 10 * 11 + 5 + 10 <= 1126
        *2 * [{1: 16}],  # nobody decodes: the engine's budget
        {1: 8},
    ]
    assert log.steps()["end_ns"][:3].tolist() == [1040, 2154, 3279]


def test_qoserve_predicts_steps_with_a_margin_and_of_few_sizes():
    # At 1040 there are 1560 ns: 1.4 times 1000 + 10 * 11 + 4 fits, not 1000 + 10 * 12 + 4.
    work = [
        arrival(0, 0, prompt=4, output=2, slo=Slo(ttft_ms=0.001, tpot_ms=0.00156)),
        arrival(1, 500, prompt=60, output=1),
    ]
    got, _ = batches("qoserve", work, limits(), **{**FINE, "safety": 1.4})
    assert got[1] == {0: 1, 1: 10}
    got, _ = batches("qoserve", work, limits(), **{**FINE, "chunk_sizes": [4, 8, 12]})
    assert got[1] == {0: 1, 1: 11}
    knobs = {**FINE, "safety": 1.4, "chunk_sizes": [4, 8, 12]}
    got, _ = batches("qoserve", work, limits(), **knobs)
    assert got[1] == {0: 1, 1: 7}


def test_qoserve_with_late_decodes_takes_the_smallest_step_if_it_has_room_for_prompts():
    late = Slo(ttft_ms=0.001, tpot_ms=0.0001)
    work = [
        arrival(0, 0, prompt=4, output=3, slo=late),
        arrival(1, 500, prompt=6, output=1),
    ]
    got, _ = batches("qoserve", work, limits(), **{**FINE, "chunk_sizes": [4, 16]})
    assert got == [{0: 4}, {0: 1, 1: 3}, {0: 1, 1: 3}]
    got, _ = batches("qoserve", work, limits(), **{**FINE, "chunk_sizes": [1, 16]})
    assert got == [{0: 4}, {0: 1}, {0: 1}, {1: 6}]


def test_qoserve_with_scarce_memory_takes_smaller_steps():
    # 100 blocks of 4 tokens: less than 396 are free as soon as request 0 has two of them.
    work = [
        arrival(0, 0, prompt=5, output=2, slo=Slo(ttft_ms=1, tpot_ms=1)),
        arrival(1, 500, prompt=12, output=1),
    ]
    knobs = {**FINE, "chunk_sizes": [4, 16], "scarce_chunk_sizes": [3, 6]}
    got, _ = batches("qoserve", work, limits(), **{**knobs, "scarce_tokens": 392})
    assert got[1] == {0: 1, 1: 12}
    got, _ = batches("qoserve", work, limits(), **{**knobs, "scarce_tokens": 393})
    assert got[1] == {0: 1, 1: 5}


def test_qoserve_paces_answers_that_are_due_at_their_end():
    # Application a is known for answers of 9 tokens: at 1120 ns each, the first is due at once.
    work = [
        arrival(0, 0, output=9, application="a"),
        arrival(1, 30_000, prompt=4, output=9, application="a", slo=Slo(e2el_ms=0.01008)),
        arrival(2, 30_500, prompt=60, output=1),
    ]
    got, log = batches("qoserve", work, limits(), **FINE, batch_tbt_s=1.12e-6)
    late = got.index({1: 4})
    assert log.steps()["end_ns"][late] == 31_040
    assert got[late + 1] == {1: 1, 2: 10}  # due at 32,160, as above


def test_qoserve_does_not_relegate_whom_it_began_in_time():
    # At 0 a prompt of 60 alone would be done at 1600; in steps of 16 tokens it takes till 5000.
    work = [
        arrival(0, 0, prompt=60, output=1, slo=Slo(ttft_ms=0.002)),
        arrival(1, 100, prompt=4, output=1, slo=Slo(ttft_ms=10.0)),
    ]
    got, _ = batches("qoserve", work, limits(), **FINE, alpha_ms_per_token=0.0)
    assert got == [*3 * [{0: 16}], {0: 12, 1: 4}]


def test_qoserve_keeps_behind_all_others_whom_it_began_late():
    work = [
        arrival(0, 0, prompt=20, output=1, slo=Slo(ttft_ms=0.0001)),
        arrival(1, 100, prompt=20, output=1, slo=Slo(ttft_ms=10.0)),
    ]
    got, _ = batches("qoserve", work, limits(), **FINE)
    assert got == [{0: 16}, {1: 16}, {0: 4, 1: 4}]


@pytest.mark.parametrize(
    ("now_ns", "started_ns", "order"),
    [
        (3_999, -1, [0, 1]),
        (4_000, -1, [0, 1]),  # it can still be in time: 4,000 and a step of 1,000
        (4_001, -1, [1, 0]),
        (9_000, 4_000, [0, 1]),  # it was begun in time, and goes on
        (9_000, 4_001, [1, 0]),
        (4_500, 3_999, [0, 1]),
    ],
)
def test_qoserve_relegates_from_the_last_moment_on_that_a_prompt_could_begin(
    now_ns, started_ns, order
):
    policy = registry.make("qoserve", alpha_ms_per_token=0.0)
    view = SimpleNamespace(now_ns=now_ns, estimate_step_ns=lambda shape: 10 * shape.chunks[0][0])
    first, other = (
        RequestState(arrival(i, 0, 100, 4, slo=Slo(ttft_ms=ms)).request)
        for i, ms in enumerate([0.005, 0.05])
    )
    first.first_scheduled_ns = started_ns
    for state in (first, other):
        policy.on_arrival(state, 0)
    assert [s.id for s in policy._prompts([first], [other], view)] == order
    assert [s.id for s in policy._prompts([], [first, other], view)] == order
    assert [s.id for s in policy._prompts([other, first], [], view)] == order


def test_qoserve_relegates_who_cannot_be_in_time():
    work = [
        arrival(0, slo=Slo(ttft_ms=0.0001)),
        arrival(1, slo=Slo(ttft_ms=10.0)),
        arrival(2, slo=Slo(ttft_ms=5.0)),
    ]
    assert served("qoserve", work) == [2, 1, 0]


def test_qoserve_with_prompts_that_block_each_other_preempts_the_one_that_comes_later_in_order():
    # Request 0 has 64 tokens, 16 of 25 blocks, when request 1 comes, which is due sooner.
    work = [
        arrival(0, 0, prompt=70, output=1, slo=Slo(ttft_ms=10.0)),
        arrival(1, 4_000, prompt=50, output=1, slo=Slo(ttft_ms=5.0)),
    ]
    got, log = batches("qoserve", work, limits(num_blocks=25), **FINE, alpha_ms_per_token=0.0)
    assert got[:8] == [*4 * [{0: 16}], {1: 16}, {1: 16}, ({}, [0]), {1: 16}]
    assert log.requests()["num_preemptions"].tolist() == [1, 0]


def test_qoserve_weighs_deadlines_against_work():
    work = [
        arrival(0, prompt=12, slo=Slo(ttft_ms=5.0)),
        arrival(1, prompt=4, slo=Slo(ttft_ms=6.0)),
    ]
    assert served("qoserve", work, alpha_ms_per_token=0.0) == [0, 1]
    assert served("qoserve", work, alpha_ms_per_token=1.0) == [1, 0]  # 5 + 12 > 6 + 4


def test_qoserve_takes_expected_answers_off_the_deadlines_of_their_ends():
    # Application b is known for answers of 9 tokens when requests 2 and 3 come: due at 41 ms.
    due = {"slo": Slo(e2el_ms=50.0)}
    work = [
        arrival(0, 0, output=1, application="a"),
        arrival(1, 0, output=9, application="b"),
        arrival(2, 30_000, application="a", **due),
        arrival(3, 30_000, application="b", prompt=8, **due),
    ]
    assert served("qoserve", work, alpha_ms_per_token=1.0, batch_tbt_s=1e-3)[2:] == [3, 2]
    assert served("qoserve", work, alpha_ms_per_token=1.0, batch_tbt_s=1e-6)[2:] == [2, 3]


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("slai", {"order": "spf"}, "fcfs, shortest_prompt, paying_first"),
        ("slai", {"token_budget": 0}, "token_budget"),
        ("slai", {"tbt_s": 0.0}, "tbt_s"),
        ("slai", {"offset": -1}, "offset"),
        ("slai", {"memory_limit": 1.5}, "memory_limit"),
        ("qoserve", {"ttft_s": 0.0}, "ttft_s"),
        ("qoserve", {"tbt_s": float("inf")}, "tbt_s"),
        ("qoserve", {"alpha_ms_per_token": -1.0}, "alpha_ms_per_token"),
        ("qoserve", {"batch_tbt_s": 0.0}, "batch_tbt_s"),
        ("qoserve", {"safety": float("nan")}, "safety"),
        ("qoserve", {"chunk_sizes": [256, 128]}, "chunk_sizes"),
        ("qoserve", {"chunk_sizes": []}, "chunk_sizes"),
        ("qoserve", {"scarce_chunk_sizes": [0.5]}, "scarce_chunk_sizes"),
        ("qoserve", {"scarce_tokens": -1}, "scarce_tokens"),
    ],
)
def test_slo_policy_with_an_impossible_knob_is_refused(name, knobs, message):
    with pytest.raises(Exception, match=message):
        batches(name, [arrival(0)], limits(), **knobs)


class CostlyContexts(LinearCost):
    """Charges 50 ns for each token of the longest and of the shortest context."""

    def step_ns(self, shape, k=1):
        both = shape.decode_context_max_tokens + shape.decode_context_min_tokens
        return [ns + 50 * both for ns in super().step_ns(shape, k)]


AT_ONCE = {"ttft_margin_s": 0.0, "safety": 0.99}
"""No margins: steps of the tests take microseconds."""


def test_scorpio_lets_a_lenient_request_run_in_every_other_step():
    # Paces 1 and 1/2: request 1 earns half a credit a step and pays one when it runs.
    work = [
        arrival(0, prompt=4, output=4, slo=Slo(1, 0.002)),
        arrival(1, prompt=4, output=3, slo=Slo(1, 0.004)),
    ]
    got, _ = batches("scorpio", work, limits(), **AT_ONCE)
    assert got == [
        {0: 4, 1: 4},
        {0: 1},
        {0: 1, 1: 1},
        {0: 1},
        {1: 1},  # alone it sets the pace
    ]


def test_scorpio_in_a_pipeline_serves_all_though_tighter_targets_come_while_a_step_is_under_way():
    # Request 0 is let run at full pace; before that step is out, another sets the pace. It owed
    # nearly a token then, for which it waited for ever once it was alone.
    for stages in (2, 3):
        config = limits(pipeline_parallel_size=stages)
        for at_ns in range(1_000, 6_000, 250):
            work = [
                arrival(0, prompt=4, output=6),
                arrival(1, at_ns, prompt=2, output=3, slo=Slo(None, 0.002)),
                arrival(2, at_ns + 1_500, prompt=2, output=2, slo=Slo(None, 0.001)),
            ]
            policy = registry.make("scorpio", **AT_ONCE, tbt_s=0.1, prefill_first=at_ns % 500 == 0)
            log = laws.run(policy, work, config, StagedCost((10,) * stages))
            assert log.requests()["generated_tokens"].tolist() == [6, 3, 2]


def test_scorpio_rejects_what_cannot_have_its_first_token_in_time():
    # A prompt of 16 takes 1160 ns: the second is out at 2320, the third would be at 3480.
    work = [arrival(i, prompt=16, output=1, slo=Slo(0.0025, 1)) for i in range(4)]
    got, log = batches("scorpio", work, limits(), **AT_ONCE)
    assert got == [{0: 16}, {1: 16}]
    assert list(log.reject_reasons) == [2, 3]


@pytest.mark.parametrize("margin_ns", [0, 300])
@pytest.mark.parametrize(("spare_ns", "served"), [(0, True), (-1, False), (1, True)])
@pytest.mark.parametrize("prompts", [(1,), (16,), (4, 7), (3, 3, 9), (10, 30), (40, 1), (30, 55)])
def test_scorpio_rejects_the_last_whose_prompt_ends_a_nanosecond_behind_its_target(
    prompts, spare_ns, served, margin_ns
):
    # A step of n tokens takes 1000 + 10 n ns; 41 take two steps and 85 three.
    due_ns = 1000 * math.ceil(sum(prompts) / 40) + 10 * sum(prompts) + margin_ns + spare_ns
    last = len(prompts) - 1
    work = [
        arrival(i, prompt=n, output=1, slo=Slo((due_ns if i == last else due_ns - 1) / 1e6, 1))
        for i, n in enumerate(prompts)
    ]
    knobs = {**AT_ONCE, "ttft_margin_s": margin_ns / 1e9}
    _, log = batches("scorpio", work, limits(budget=40), **knobs)
    assert list(log.reject_reasons) == ([] if served else [last])
    # A step without decodes has no longest context, whatever that would cost.
    recorder = Recorder(registry.make("scorpio", **knobs))
    log = laws.run(recorder, work, laws.slow(limits(budget=40)), CostlyContexts())
    assert list(log.reject_reasons) == ([] if served else [last])


def test_scorpio_charges_a_step_once_for_all_prompts_that_share_it():
    # Four prompts of 10 take one step of 1400 ns together, and 4400 in steps of their own.
    work = [arrival(i, prompt=10, output=1, slo=Slo(0.0014, 1)) for i in range(4)]
    got, log = batches("scorpio", work, limits(budget=40), **AT_ONCE)
    assert not log.reject_reasons
    assert got == [dict.fromkeys(range(4), 10)]


def test_scorpio_does_not_count_the_tokens_of_who_is_rejected():
    # Request 1 would be out at 3900, behind 90 tokens; without it request 2 is, at 2500, behind 50.
    work = [
        arrival(0, prompt=30, output=1, slo=Slo(0.002, 1)),
        arrival(1, prompt=60, output=1, slo=Slo(0.0024, 1)),
        arrival(2, prompt=20, output=1, slo=Slo(0.0025, 1)),
    ]
    got, log = batches("scorpio", work, limits(budget=40), **AT_ONCE)
    assert list(log.reject_reasons) == [1]
    assert got == [{0: 30, 2: 10}, {2: 10}]


@pytest.mark.parametrize(("target_ms", "served"), [(0.0014, True), (0.001399, False)])
def test_scorpio_counts_the_tokens_left_of_prompts_under_way(target_ms, served):
    # At 1400, 20 tokens of request 0 are left: with 10 more a step takes 1300 ns.
    work = [
        arrival(0, prompt=60, output=1, slo=Slo(1, 1)),
        arrival(1, 1300, prompt=10, output=1, slo=Slo(target_ms, 1)),
    ]
    got, log = batches("scorpio", work, limits(budget=40), **AT_ONCE)
    assert list(log.reject_reasons) == ([] if served else [1])
    assert got == [{0: 40}, {0: 20, 1: 10} if served else {0: 20}]


def test_scorpio_keeps_a_request_waiting_that_would_slow_the_others_too_much():
    # A step of n rows at 10 tokens takes 1000 + 20 n ns; the target is 1045.
    work = [arrival(i, prompt=10, output=2, slo=Slo(1, 0.001045)) for i in range(3)]
    got, _ = batches("scorpio", work, limits(budget=40), **AT_ONCE)
    assert got == [
        {0: 10, 1: 10},
        {0: 1, 1: 1},  # with request 2, three rows would take 1060
        {2: 10},
        {2: 1},
    ]


def test_scorpio_with_nobody_running_admits_whatever_it_takes():
    got, _ = batches("scorpio", [arrival(0, prompt=10, slo=Slo(1, 0.0001))], limits(), **AT_ONCE)
    assert got == [{0: 10}]


@pytest.mark.parametrize(("num_blocks", "prompt"), [(3, 4), (4, 2), (5, 6)])
def test_scorpio_goes_on_when_only_the_tightest_may_run_and_it_finds_no_memory(num_blocks, prompt):
    # The pace was that of request 1 until the next step; but nobody else had a credit to make one.
    work = [
        arrival(0, 0, 2, 8, slo=Slo(tpot_ms=0.004)),
        arrival(1, 100, prompt, 8, slo=Slo(tpot_ms=0.0015)),
    ]
    knobs = {**AT_ONCE, "tbt_s": 1.0, "safety": 0.1}
    _, log = batches("scorpio", work, limits(num_blocks=num_blocks), **knobs)
    assert log.requests()["generated_tokens"].tolist() == [8, 8]
    assert log.requests()["num_preemptions"].sum() > 0
    laws.check_never_idle(log)


def test_scorpio_orders_by_deadline():
    targets = (0.09, 0.07, 0.08)
    work = [arrival(i, prompt=10, slo=Slo(t, 1)) for i, t in enumerate(targets)]
    assert served("scorpio", work, **AT_ONCE) == [1, 2, 0]


def test_scorpio_with_safety_leaves_room_for_prompts_in_the_step():
    # Two rows take 1040, of a target of 1045: not with a fifth more.
    work = [arrival(i, prompt=10, output=2, slo=Slo(1, 0.001045)) for i in range(2)]
    assert batches("scorpio", work, limits(budget=40), **AT_ONCE)[0][0] == {0: 10, 1: 10}
    got, _ = batches("scorpio", work, limits(budget=40), ttft_margin_s=0.0)
    assert got == [{0: 10}, {0: 1}, {1: 10}, {1: 1}]


def test_scorpio_rejects_within_the_margin_of_the_deadline():
    work = [arrival(0, prompt=16, output=1, slo=Slo(0.0020, 1))]
    assert not batches("scorpio", work, limits(), ttft_margin_s=0.8e-6)[1].reject_reasons
    assert batches("scorpio", work, limits(), ttft_margin_s=0.9e-6)[1].reject_reasons


def test_scorpio_rejects_in_the_whole_queue_behind_one_who_waits():
    # Request 1 waits for request 0 to end, at 11,345; those due after it meanwhile become late: the
    # first token of request 2 takes 4000 ns, after 100 tokens; that of request 3 6900, after 190.
    work = [
        arrival(0, prompt=10, output=11, slo=Slo(1, 0.001045)),
        arrival(1, 1, prompt=10, output=1, slo=Slo(0.0125, 0.001)),
        arrival(2, 1, prompt=90, output=1, slo=Slo(0.0140, 0.001)),
        arrival(3, 1, prompt=90, output=1, slo=Slo(0.0141, 0.001)),
    ]
    seen = set()

    def watch(engine):
        if 0 in engine.requests.running:
            seen.add(engine.requests.num_rejected)

    policy = registry.make("scorpio", **AT_ONCE)
    log = laws.run(policy, work, laws.slow(limits(budget=40)), observer=watch)
    assert list(log.reject_reasons) == [3, 2]
    assert seen == {0, 1}


def test_scorpio_with_prefill_first_computes_prompts_in_steps_of_their_own():
    work = [
        arrival(0, prompt=4, output=4, slo=Slo(1, 0.01)),
        arrival(1, 1200, prompt=4, output=2, slo=Slo(1, 0.01)),
    ]
    got, _ = batches("scorpio", work, limits(), **AT_ONCE)
    assert got == [{0: 4}, {0: 1}, {0: 1, 1: 4}, {0: 1, 1: 1}]
    got, _ = batches("scorpio", work, limits(), **AT_ONCE, prefill_first=True)
    assert got == [{0: 4}, {0: 1}, {1: 4}, {0: 1, 1: 1}, {0: 1}]


def test_scorpio_runs_who_has_no_credit_where_all_others_lost_their_memory():
    # Request 1 has the tighter target and came last. Its 13th token finds no block, so it is
    # preempted, and computed again in steps that earn request 0 no credits, up to the same token.
    work = [
        arrival(0, prompt=3, output=6, slo=Slo(1e3, 0.03)),
        arrival(1, prompt=6, output=8, slo=Slo(1e3, 0.02)),
    ]
    config = limits(num_blocks=5, budget=4)
    got, _ = batches("scorpio", work, config, prefill_first=True, safety=0.001)
    assert got[9:] == [({0: 1}, [1]), {1: 4}, {1: 4}, {1: 4}, {1: 1}]


def test_credits_where_all_targets_are_equal_pay_who_waits_for_every_step_of_a_run():
    ran, waited = (RequestState(arrival(i).request) for i in (0, 1))
    credits = Credits(0.1)
    credits._credits = {ran: 1.0, waited: 0.5}
    plan = BatchPlan((ran,), (), (), (), (), (), 0, "leave", False, 5, FOREVER, 0, tuple)
    credits.note_step(plan, 5, took_decodes=True)
    assert credits._credits == {ran: 1.0, waited: 5.5}
    credits.note_step(plan, 5, took_decodes=False)  # prompts had the step to themselves
    assert credits._credits == {ran: 1.0, waited: 5.5}


@pytest.mark.parametrize("decodes_are_named", [False, True])
def test_credits_are_given_to_who_decodes_from_another_engine_once_it_is_expected(
    decodes_are_named,
):
    # A plan for all decodes is asked who they are only after somebody may have come, and once.
    first, second = (RequestState(arrival(i).request) for i in (0, 1))
    for state in (first, second):
        state.status, state._computed, state._generated = Status.RUNNING, 1, 1
    asked = []

    def plan(*decodes):
        def told():
            asked.append(decodes)
            return decodes

        named = decodes if decodes_are_named else None
        return BatchPlan(named, (), (), (), (), (), 0, "leave", False, 1, FOREVER, 0, told)

    credits = Credits(0.1)
    if not decodes_are_named:
        credits.note_step(plan(first), 1, took_decodes=True)
        assert (credits._credits, asked) == ({}, [])
        credits.expect()
    credits.note_step(plan(first), 1, took_decodes=True)
    assert credits._credits == {first: 0.0}
    asked.clear()
    credits.note_step(plan(first, second), 1, took_decodes=True)
    assert (second in credits._credits) is decodes_are_named
    # Behind a plan with names one may have joined that nobody named.
    third = RequestState(arrival(2).request)
    third.status, third._computed, third._generated = Status.RUNNING, 1, 1
    last = BatchPlan(
        None, (), (), (), (), (), 0, "leave", False, 1, FOREVER, 0, lambda: (first, third)
    )
    credits.note_step(last, 1, took_decodes=True)
    assert (third in credits._credits) is decodes_are_named


class PreemptsThenGrants(Policy):
    """Lets prompts be computed, then preempts some, grants who has a credit, and stops."""

    def __init__(self, gone, target_s):
        self.credits = Credits(target_s)
        self.gone = gone

    def on_arrival(self, state, now_ns):
        if state.request.slo is not None:
            self.credits.own_targets_s[state] = state.request.slo.tpot_ms / 1e3

    def on_tokens(self, plan, num_steps, now_ns):
        self.credits.note_step(plan, num_steps, took_decodes=True)

    def plan(self, view, builder):
        if view.waiting:
            for state in view.waiting:
                builder.grant(state)
            return builder.build()
        for state in [s for s in view.running if s.id in self.gone]:
            builder.preempt(state)
        told = self.credits.grant(view, builder, decodes_are_first=True)
        granted = sorted(builder.build().num_scheduled_tokens())
        raise RuntimeError(f"{granted} run, and it says {told}")


@pytest.mark.parametrize(
    ("gone", "granted", "one_rests"),
    [
        ((), [0], True),
        ((0,), [], True),  # who has a credit is gone, and the others rest all the same
        ((1,), [0], True),
        ((1, 2), [0], False),
        ((0, 1), [], True),
        ((0, 1, 2), [], False),
    ],
)
def test_credits_say_that_one_rests_who_was_not_preempted(gone, granted, one_rests):
    # Requests 1 and 2 may take twice the time of request 0: they have half a credit after a step.
    work = [arrival(0, prompt=2, output=9, slo=Slo(tpot_ms=1))]
    work += [arrival(i, prompt=2, output=9) for i in (1, 2)]
    told = rf"{granted} run, and it says \({one_rests}, False\)".replace("[", r"\[")
    with pytest.raises(PolicyError, match=told):
        laws.run(PreemptsThenGrants(gone, 0.002), work, limits())


@pytest.mark.parametrize(("gone", "granted"), [((), [0, 1, 2]), ((1,), [0, 2])])
def test_credits_of_equal_targets_let_all_run_always_unless_one_is_preempted(gone, granted):
    work = [arrival(i, prompt=2, output=9) for i in range(3)]
    told = rf"{granted} run, and it says \(False, True\)".replace("[", r"\[")
    with pytest.raises(PolicyError, match=told):
        laws.run(PreemptsThenGrants(gone, 0.002), work, limits())


@pytest.mark.parametrize("own_targets_s", [(), (2e-6, 9e-6), (9e-6, 2e-6), (1e-6, 9e-6)])
def test_virtual_batch_is_held_to_the_tightest_target_of_its_members_or_the_common_one(
    own_targets_s,
):
    # A step of two of them takes 1.0 us and some ns; the common target is shorter.
    class Asks(AsksOnce):
        def answer(self, view, builder):
            credits = Credits(1e-7)
            credits.own_targets_s = dict(zip(view.running, own_targets_s, strict=False))
            return f"in time: {VirtualBatch(view, credits).is_in_time(1.0)}"

    work = [arrival(i, prompt=2, output=9) for i in range(2)]
    in_time = bool(own_targets_s) and min(own_targets_s) > 1.1e-6
    with pytest.raises(PolicyError, match=f"in time: {in_time}"):
        laws.run(Asks(8), work, limits())


def test_credits_before_anybody_decodes_let_a_newcomer_with_a_loose_target_run():
    state = RequestState(arrival(0).request)
    credits = Credits(0.1)
    credits.own_targets_s[state] = 0.4
    assert credits.pace(state) == 1.0


def test_slai_whose_prompts_under_way_block_each_other_sends_back_the_last():
    # Two blocks each, and each needs a third: all four are taken, and nobody decodes.
    work = [arrival(0, prompt=12, output=1), arrival(1, prompt=12, output=1)]
    config = limits(num_blocks=4, long_prefill_token_threshold=4)
    got, _ = batches("slai", work, config, **SLAI, order="fcfs")
    assert got == [
        {0: 4, 1: 4},
        {0: 4, 1: 4},
        ({}, [1]),
        {0: 4, 1: 4},
        {1: 4},
        {1: 4},
    ]


def test_slai_lets_nobody_behind_the_first_evicted_prompt_take_the_memory_it_left():
    # Two decodes fill their blocks: the first takes that of prompt 3, the second one of the two of
    # prompt 2. Request 4 would fit the other, but comes behind prompt 2, though before prompt 3.
    work = [
        arrival(0, prompt=3, output=3),
        arrival(1, prompt=3, output=3),
        arrival(2, prompt=10, output=1),
        arrival(3, 500, prompt=14, output=1),
        arrival(4, 1_500, prompt=12, output=1),
    ]
    config = limits(num_blocks=5, long_prefill_token_threshold=4)
    knobs = {**SLAI, "token_budget": 16, "offset": 10}
    got, _ = batches("slai", work, config, **knobs)
    assert got[:3] == [
        {0: 3, 1: 3, 2: 4},
        {0: 1, 1: 1, 2: 4, 3: 4},
        ({0: 1, 1: 1}, [3, 2]),
    ]
    ahead = [*work[:4], arrival(4, 1_500, prompt=9, output=1)]
    got, _ = batches("slai", ahead, config, **knobs)
    assert got[2] == ({0: 1, 1: 1, 4: 4}, [3, 2])


def test_slai_plans_once_for_those_due_and_the_others_while_all_of_them_run():
    # From the second step on request 0 is due, request 1 is not, and request 2 has no seat.
    work = [
        arrival(0, prompt=2, output=10, slo=Slo(tpot_ms=0.002)),
        arrival(1, prompt=2, output=10),
        arrival(2, prompt=2, output=10),
    ]
    policy = registry.make("slai", **{**SLAI, "offset": 2})
    engine = Engine(limits(seats=2), policy, SimExecutor(Pricing(LinearCost())))
    simulate(engine, work)
    # Prompts, all their steps, the third prompt, all its steps, and one when all is done.
    assert engine.num_plans == 5


@pytest.mark.parametrize(
    "lengths", [[], [7], [5, 5, 5], [3, 4], [1, 2, 3, 4], [100, 100, 101], [1, 4096], [9, 1, 1, 1]]
)
def test_qoserve_expects_the_mean_of_past_answers_and_two_deviations(lengths):
    past = _Lengths()
    for tokens in lengths:
        past.add(tokens)
    mean, deviation = (np.mean(lengths), np.std(lengths)) if lengths else (0.0, 0.0)
    assert past.high() == pytest.approx(mean + 2 * deviation, rel=1e-9)


@pytest.mark.parametrize("status", [Status.RUNNING, Status.WAITING])
@pytest.mark.parametrize("tpot_ms", [None, 2.5])
def test_slai_takes_up_who_decodes_already_and_targets_of_its_own(status, tpot_ms):
    policy, due = registry.make("slai"), []
    policy._moments = SimpleNamespace(is_due=due.append)
    slo = Slo(ttft_ms=9.0) if tpot_ms is None else Slo(tpot_ms=tpot_ms)
    state = RequestState(arrival(3, 0, 5, 4, slo=slo).request)
    state.status = status
    policy.on_arrival(state, 0)
    assert due == ([state] if status is Status.RUNNING else [])
    assert policy._own_targets_ns == ({} if tpot_ms is None else {state: 2_500_000})


@pytest.mark.parametrize("status", [Status.RUNNING, Status.WAITING])
@pytest.mark.parametrize("tpot_ms", [None, 2.5])
def test_scorpio_expects_decodes_only_of_who_comes_running_and_notes_its_target(status, tpot_ms):
    policy, told = registry.make("scorpio"), []
    policy._credits = SimpleNamespace(own_targets_s={}, expect=lambda: told.append("expected"))
    slo = Slo(ttft_ms=9.0) if tpot_ms is None else Slo(tpot_ms=tpot_ms)
    state = RequestState(arrival(3, 0, 5, 4, slo=slo).request)
    state.status = status
    policy.on_arrival(state, 0)
    assert told == (["expected"] if status is Status.RUNNING else [])
    assert policy._credits.own_targets_s == ({} if tpot_ms is None else {state: 0.0025})


@pytest.mark.parametrize("max_decodes", [1, 2, 3])
def test_slai_gives_its_decodes_to_those_due_first_whoever_came_first(max_decodes):
    # Their own times between tokens fall from request to request: the last is due first.
    work = [
        arrival(i, prompt=2, output=9, slo=Slo(tpot_ms=(1_200 - 100 * i) / 1e6)) for i in range(4)
    ]
    got, _ = batches("slai", work, limits(), **{**SLAI, "max_decodes": max_decodes})
    assert got[0] == {i: 2 for i in range(4)}
    assert got[1] == {3 - i: 1 for i in range(max_decodes)}


def expected_members(view, credits, members, newcomer):
    """Work out the time of a step of a virtual batch, and its target, from the members' fields."""
    more = 0.0 if newcomer is None else (newcomer.request.predicted_tokens or 0.0) / 2
    targets_s = [credits.own_targets_s.get(state, 0.5) for state in members]
    rows = math.ceil(sum(min(targets_s) / one for one in targets_s) - 1e-9)
    mean = sum(s.request.prompt_tokens + s.num_output_tokens for s in members) / len(members) + more
    shape = BatchShape(rows, round(rows * mean), round(mean), rows_sampled=rows)
    return view.estimate_step_ns(shape) / 1e9, min(targets_s)


def test_virtual_batch_counts_members_that_join_as_those_it_began_with():
    """Of drawn lengths, targets and progress: its step is that of a naive count."""
    draw = random.Random(8)

    class Asks(AsksOnce):
        started = 0

        def plan(self, view, builder):
            self.started += 1
            if self.started > 3 and not view.waiting:
                return super().plan(view, builder)
            for state in (*view.running, *view.waiting):
                builder.grant(state)
            return builder.build()

        def answer(self, view, builder):
            members, credits = list(view.running), Credits(0.5)
            credits.own_targets_s = {
                state: draw.choice((0.3, 0.4, 0.9)) for state in members if draw.random() < 0.7
            }
            batch, joins = VirtualBatch(view, credits), None
            for _ in range(5):
                step_s, target_s = expected_members(view, credits, members, joins)
                just = target_s * 0.99 / step_s
                if not batch.is_in_time(just * 0.999) or batch.is_in_time(just * 1.001):
                    return "another step"
                joins = draw.choice(list(view.running))
                batch.add(joins)
                members.append(joins)
            return "all as counted"

    for i in range(12):
        work = [
            arrival(k, prompt=draw.randint(1, 9), output=20,
                    predicted_tokens=draw.choice((None, 3.0, 40.0)))
            for k in range(2 + i % 3)
        ]  # fmt: skip
        with pytest.raises(PolicyError, match="all as counted"):
            laws.run(Asks(4), work, limits(), cost=LinearCost(10, 1, 100))


@pytest.mark.parametrize("name", ["edf", "fair_batching", "hygen", "qoserve", "scorpio", "slai"])
def test_slo_policy_with_memory_for_all_preempts_nobody_for_who_gets_no_seat(name):
    # Prompts take several steps and seats are few; who waits is often due first.
    for seed in range(10):
        draw = random.Random(seed)
        stages = draw.choice((1, 1, 2))
        config = limits(
            400, seats=draw.choice((1, 2)), budget=draw.choice((4, 8)),
            pipeline_parallel_size=stages,
        )  # fmt: skip
        targets = None, Slo(None, 0.002), Slo(0.005, 0.01), Slo(0.05, None)
        work = [
            arrival(
                i, 700 * i, draw.randint(1, 12), draw.randint(1, 6), max_tokens=9,
                slo=draw.choice(targets), predicted_tokens=3.0,
            )
            for i in range(6)
        ]  # fmt: skip
        cost = StagedCost((10,) * stages) if stages > 1 else LinearCost()
        requests = laws.run(registry.make(name), work, config, cost).requests()
        assert requests["num_preemptions"].tolist() == [0] * 6, seed


@pytest.mark.parametrize(("name", "knobs"), [("fair_batching", {}), ("qoserve", {})])
def test_prompt_under_way_goes_on_though_who_is_due_before_it_waits_for_a_seat(name, knobs):
    work = [
        arrival(0, prompt=10, output=2, slo=Slo(900, None)),
        arrival(1, 500, prompt=2, output=1, slo=Slo(800, None)),
        arrival(2, 600, prompt=9, output=1, slo=Slo(850, None)),
    ]
    got, log = batches(name, work, limits(seats=1, budget=4), **knobs)
    assert got == [{0: 4}, {0: 4}, {0: 2}, {0: 1}, {1: 2}, {2: 4}, {2: 4}, {2: 1}]
    # Of two seats one is free: it goes to who is due first, and both prompts share the budget.
    got, log = batches(name, work, limits(seats=2, budget=4), **knobs)
    assert got[:3] == [{0: 4}, {1: 2, 0: 2}, {2: 4}]
    assert not log.requests()["num_preemptions"].any()


def test_slai_computes_no_more_in_a_step_than_its_own_budget_whoever_is_due():
    for seed in range(6):
        draw = random.Random(seed)
        gap_ns = draw.choice((0, 400, 900))
        work = [
            arrival(
                i, gap_ns * (i // 2), draw.randint(1, 6), draw.randint(6, 20),
                slo=draw.choice((None, Slo(None, 0.001), Slo(None, 0.03))),
            )
            for i in range(12)
        ]  # fmt: skip
        budget, most = draw.choice((3, 5, 7)), draw.choice((2, 4, 99))
        knobs = {"token_budget": budget, "max_decodes": most, "tbt_s": draw.choice((3e-6, 2e-5))}
        got, _ = batches(
            "slai", work, limits(seats=12, budget=40), offset=1, dynamic_offset=False, **knobs
        )
        plans = [plan[0] if isinstance(plan, tuple) else plan for plan in got]
        assert max(sum(tokens.values()) for tokens in plans) == budget


def test_qoserve_takes_prompts_that_are_due_alike_by_arrival_then_number():
    policy = registry.make("qoserve", alpha_ms_per_token=0.0, ttft_s=1.0)
    view = SimpleNamespace(now_ns=2_000_000, estimate_step_ns=lambda shape: 1_000)
    states = []
    # All due at 500 ms: number, arrival in ms, target.
    for number, at_ms in ((7, 0), (2, 100), (5, 0), (3, 200)):
        slo = Slo(500 - at_ms, None)
        state = RequestState(arrival(number, at_ms * 1_000_000, prompt=4, slo=slo).request)
        policy.on_arrival(state, at_ms * 1_000_000)
        states.append(state)
    for under_way in (states, []):
        waiting = [] if under_way else sorted(states, key=lambda s: (s.request.arrival_ns, s.id))
        assert [state.id for state in policy._prompts(under_way, waiting, view)] == [5, 7, 2, 3]
    both = policy._prompts(states[:2], [states[2], states[3]], view)
    assert [state.id for state in both] == [5, 7, 2, 3]
