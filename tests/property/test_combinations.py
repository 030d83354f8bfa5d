"""Everything at once: any policy, memory, switches, drafts, closed loops and sessions, drawn."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.policies.speculation.by_batch_size import ByBatchSize
from schedlab.policies.speculation.goodput import Goodput
from schedlab.policies.speculation.slo import SloDrafts
from schedlab.policies.static import Static
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.request import Arrival, Request, Slo
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws, sessions
from tests.policy_cases import CASES, MAY_WAIT, make
from tests.workloads import KV_ALLOCATORS, kv_tiers, workloads

LONGEST = 100
RATES = ((), (), (), (0.0,), (0.6,), (1.0,), (0.9, 0.5, 0.1))
DRAFT_LENGTHS = {
    "fixed": lambda: None,
    "by_batch_size": lambda: ByBatchSize([[2, 1], [4, 0]]),
    "goodput": lambda: Goodput(prior_tokens=4.0),
    "slo": lambda: SloDrafts(budget_tokens=8),
}


@dataclass(frozen=True)
class Combination:
    """A policy and all that it has to live with.

    Attributes
    ----------
    policy : str
        One of `CASES`.
    workload : list of Arrival
        Requests, of sessions or not.
    config : EngineConfig
        Limits and switches of the engine.
    cost : LinearCost
        How long steps take.
    clients : int or None
        Places of a closed loop.
    rates : tuple of float
        Chance that a draft is accepted, by place; empty = no speculation.
    draft_length : str
        One of `DRAFT_LENGTHS`.
    """

    policy: str
    workload: list[Arrival]
    config: EngineConfig
    cost: laws.LinearCost
    clients: int | None
    rates: tuple[float, ...]
    draft_length: str

    @property
    def has_sessions(self):
        return self.workload[0].turn is not None

    def run(self, config=None, **options):
        config = config or self.config
        length = DRAFT_LENGTHS[self.draft_length]()
        make_executor = partial(executor, config, self.rates)
        if self.clients is not None:
            options["max_concurrency"] = self.clients
        return laws.run(
            make(self.policy), self.workload, config, self.cost, make_executor=make_executor,
            draft_length=length if self.rates else None, **options,
        )  # fmt: skip


def executor(config, rates, pricing):
    """Return what runs steps: with drafts that are accepted at these rates, if there are any."""
    if not rates:
        return SimExecutor(pricing)
    acceptance = DrawnAcceptance(list(rates), 0.0, seed=3)
    return SpeculativeExecutor(pricing, config, acceptance, NgramDrafter(1e-8))


@st.composite
def limits(draw, speculates, may_have_tiers=True):
    """Draw limits of an engine, with every switch it has."""
    block_size = draw(st.sampled_from([1, 2, 4, 16, 32]))
    paged = speculates or draw(st.booleans())
    swap_space_blocks = draw(st.sampled_from([0, 0, 1, 3, 30, 500]))
    budget = draw(st.sampled_from([1, 3, 4, 17, 64, 260, 500, 5000]))
    config = EngineConfig(
        num_blocks=-(-LONGEST // block_size) + draw(st.sampled_from([0, 0, 1, 3, 20, 400])),
        max_model_len=LONGEST,
        block_size=block_size,
        max_num_seqs=draw(st.sampled_from([1, 2, 3, 5, 16, 64])),
        max_num_resident=draw(st.sampled_from([None, None, None, 1, 3, 30])),
        max_num_batched_tokens=budget,
        enable_chunked_prefill=budget < LONGEST or draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 8])),
        threshold_spares_lone_request=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.05])),
        null_blocks=draw(st.sampled_from([0, 1])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        kv_allocator="paged" if paged else draw(st.sampled_from(KV_ALLOCATORS[1:])),
        preempt_in_order=draw(st.booleans()),
        serve_behind_preempted=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"][: 1 + bool(swap_space_blocks)])),
        swap_space_blocks=swap_space_blocks,
        kv_block_bytes=draw(st.sampled_from([0, 100])),
        enable_prefix_caching=paged and draw(st.booleans()),
        free_uncached_first=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        arrivals_between_steps=draw(st.booleans()),
        cudagraph_capture_sizes=draw(st.sampled_from([(), (1, 2, 4, 8, 16)])),
        num_speculative_tokens=draw(st.sampled_from([1, 3, 5])) if speculates else 0,
        names_accepted_drafts=draw(st.booleans()),
        num_lookahead_tokens=draw(st.sampled_from([0, 5])) if speculates else 0,
        first_launch_ns=draw(st.sampled_from([0, 0, 2500])),
    )
    if config.async_scheduling and paged:
        config = replace(config, overrun_at_stop=draw(st.booleans()))
    if may_have_tiers and paged and draw(st.integers(0, 2)) == 0:
        config = draw(kv_tiers(config))
    return config


def without_caching(config):
    """Return limits for a policy that sets memory aside."""
    keeps_tiers = config.preemption_mode == "swap"
    return replace(
        config, enable_prefix_caching=False, kv_tiers=config.kv_tiers if keeps_tiers else ()
    )


def named(draw, arrivals, block_size):
    """Give prompts the names of common documents, targets, and lengths that the client cuts."""
    documents = st.integers(0, 2)
    for a in arrivals:
        document, shared = draw(documents), draw(st.integers(0, 60))
        ids = tuple(
            document * 1000 + j
            if (j + 1) * block_size <= shared
            else (a.request.id + 10) * 1000 + j
            for j in range(a.request.prompt_tokens // block_size)
        )
        slo = draw(st.sampled_from([None, Slo(0.02), Slo(None, 0.004), Slo(tpot_ms=0.0016)]))
        yield replace(a, request=replace(
                a.request, prefix_hash_ids=ids, slo=slo or Slo(tpot_ms=0.003),
                max_tokens=draw(st.sampled_from([1 << 20, a.output_tokens, a.output_tokens + 5])),
                application=draw(st.sampled_from(["chat", "code", None])),
            )
        )  # fmt: skip


def in_sessions(arrivals):
    """Return what `sessions.drawn` gives with what policies and targets ask for."""
    return [
        Arrival(
            replace(
                a.request, predicted_tokens=float(a.output_tokens), priority=a.request.id % 3,
                tenant="abc"[a.request.id % 3], slo=Slo(tpot_ms=0.003),
            ),
            a.output_tokens, a.ready_ns, a.turn,
        )
        for a in arrivals
    ]  # fmt: skip


@st.composite
def combinations(draw):
    """Draw a policy with all that it has to live with."""
    rates = draw(st.sampled_from(RATES))
    policy = draw(st.sampled_from(CASES))
    config = draw(limits(bool(rates)))
    if isinstance(make(policy), Static):
        config = without_caching(config)
    if draw(st.integers(0, 3)) == 0:
        seed = draw(st.integers(0, 10_000))
        work = in_sessions(sessions.drawn(seed, draw(st.integers(1, 6)), LONGEST))
    else:
        work = list(named(draw, draw(workloads()), config.block_size))
    slower = draw(st.sampled_from([1, 1, 10_000]))
    return Combination(
        policy=policy,
        workload=work,
        config=config,
        cost=laws.LinearCost(1000 * slower, 10 * slower, slower),
        clients=draw(st.sampled_from([None, None, 1, 3, 8])),
        rates=rates,
        draft_length=draw(st.sampled_from(sorted(DRAFT_LENGTHS))),
    )


def check_combination(one):
    """Require every law of a combination."""
    log = one.run()
    # With tiers the only request may wait for what is copied.
    may_wait = one.policy in MAY_WAIT or bool(one.rates or one.config.kv_tiers)
    laws.check(log, one.workload, one.config, may_wait)
    if one.has_sessions and one.clients is None:
        sessions.check_order(log, one.workload)
    slow = one.run(laws.slow(one.config), prove=False)
    ahead = ("by single steps", "ahead")
    assert (found := laws.difference(slow, log, ahead)) is None, found
    assert laws.signature(log) == laws.signature(slow), "skipping ahead changes token times"
    assert laws.signature(log) == laws.signature(one.run(prove=False)), (
        "the same again is not the same"
    )
    one.run(replace(one.config, check_horizon=True), prove=False)
    if one.clients is None and not one.has_sessions:
        cut = one.run(drive=laws.cut_at_arrivals, prove=False)
        assert laws.signature(log) == laws.signature(cut), "not knowing who comes changes it"


@pytest.mark.slow
@given(combination=combinations())
def test_any_combination_keeps_the_laws_however_it_is_driven(combination):
    check_combination(combination)


def test_two_that_come_back_from_a_tier_into_the_last_memory_do_not_give_way_for_ever():
    work = in_sessions(sessions.drawn(0, 2, LONGEST))
    tiers = (
        KVTier("cpu", 30, 1e8, 1e8, 0, 0, "through"), KVTier("disk", 1, 1e8, 1e8, 0, 0, "through")
    )  # fmt: skip
    config = EngineConfig(
        num_blocks=25, max_model_len=100, block_size=4, max_num_seqs=2, max_num_batched_tokens=3,
        preemption_mode="swap", swap_space_blocks=30, kv_block_bytes=100, kv_tiers=tiers,
    )  # fmt: skip
    check_combination(Combination("aged", work, config, laws.LinearCost(), None, (), "fixed"))


def test_ranks_are_looked_at_where_drafts_take_the_memory_of_who_waits():
    lengths = [(1, 1)] * 8 + [(1, 17), (3, 19), (1, 10), (6, 18), (30, 16), (1, 7)]
    work = [laws.arrival(i, 0, prompt, output) for i, (prompt, output) in enumerate(lengths)]
    config = EngineConfig(
        num_blocks=100, max_model_len=100, block_size=1, max_num_seqs=5, max_num_batched_tokens=64,
        watermark=0.05, num_speculative_tokens=1,
    )  # fmt: skip
    cost = laws.LinearCost()
    check_combination(Combination("gittins", work, config, cost, None, (0.0,), "by_batch_size"))


def test_nested_wait_with_drafts_skips_no_step_in_which_requests_meet_at_one_stage():
    work = [
        Arrival(Request(i, 0, prompt, 1 << 20, predicted_tokens=float(output)), output, 0)
        for i, (prompt, output) in enumerate(((2, 9), (20, 10)))
    ]
    config = EngineConfig(
        num_blocks=200, max_model_len=100, block_size=1, max_num_seqs=3, max_num_batched_tokens=17,
        num_speculative_tokens=2,
    )  # fmt: skip
    cost = laws.LinearCost()
    check_combination(
        Combination("nested_wait", work, config, cost, None, (0.6, 0.6), "by_batch_size")
    )


def test_drafts_are_chosen_anew_after_the_step_of_who_was_loaded_from_a_tier():
    # Three that do not fit together: one is swapped out, and comes back while the others decode.
    # It verifies no drafts at first; how many all draft with it is chosen after that step.
    targets = (0.0005, 0.0005, 0.003)
    work = [
        laws.arrival(i, 0, 6, 20 + 10 * (i == 2), predicted_tokens=5.0, slo=Slo(tpot_ms=targets[i]))
        for i in range(3)
    ]
    config = EngineConfig(
        num_blocks=14, max_model_len=48, block_size=4, max_num_seqs=4, preemption_mode="swap",
        swap_space_blocks=100, kv_block_bytes=100, num_speculative_tokens=3,
        kv_tiers=(KVTier("cpu", 100, 1e8, 1e8),),
    )  # fmt: skip
    cost = laws.LinearCost(1000, 10, 1)
    check_combination(Combination("fcfs", work, config, cost, None, (0.0,), "slo"))
