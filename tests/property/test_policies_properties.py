"""What single policies guarantee whatever comes, beyond the laws that hold for all."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies import registry
from schedlab.policies.fair_batching import FairBatching
from schedlab.policies.nested_wait import NestedWait
from schedlab.sim.config import EngineConfig
from schedlab.sim.request import Slo
from tests import laws
from tests.laws import arrival
from tests.traced import Recorder
from tests.workloads import configs, share, workloads


@st.composite
def floods(draw):
    """Draw two tenants whose requests are all there from the start."""
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.integers(1, 20)),
            min_size=2,
            max_size=30,
        )
    )
    return [arrival(i, 0, p, n, tenant=tenant) for i, (tenant, p, n) in enumerate(rows)]


@given(workload=floods(), seats=st.integers(1, 6), budget=st.sampled_from([8, 64]))
def test_vtc_keeps_the_difference_in_service_within_its_bound(workload, seats, budget):
    config = EngineConfig(
        num_blocks=60, max_model_len=60, block_size=1, max_num_seqs=seats,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    longest = max(a.request.prompt_tokens for a in workload)
    bound = 2 * max(1.0 * longest, 2.0 * config.num_blocks)

    def watch(engine):
        backlogged = {s.request.tenant for s in engine.requests.waiting if s.num_preemptions == 0}
        if backlogged == {"a", "b"}:
            counters = engine.policy.counters
            assert abs(counters["a"] - counters["b"]) <= bound

    laws.run(registry.make("vtc"), workload, config, observer=watch)


@pytest.mark.slow
@given(workload=workloads(), config=configs())
def test_vtc_with_tenants_obeys_the_laws_by_any_route(workload, config):
    log = laws.run(registry.make("vtc"), workload, config)
    laws.check(log, workload, config)
    for other in (laws.slow(config), replace(config, check_horizon=True)):
        again = laws.run(registry.make("vtc"), workload, other)
        assert laws.signature(again) == laws.signature(log)


@pytest.mark.slow
@given(
    workload=workloads(),
    config=configs(),
    targets=st.randoms(use_true_random=False),
    name=st.sampled_from(["slai", "qoserve", "edf"]),
)
def test_slo_policies_with_targets_obey_the_laws_by_any_route(workload, config, targets, name):
    some = [None, Slo(ttft_ms=0.01), Slo(tpot_ms=0.003), Slo(ttft_ms=0.02, tpot_ms=0.002),
            Slo(e2el_ms=0.1)]  # fmt: skip
    workload = [
        replace(a, request=replace(a.request, slo=targets.choice(some), application="x"))
        for a in workload
    ]
    fine = {"chunk_sizes": [2, 9, 40], "scarce_tokens": 0, "batch_tbt_s": 4e-6}
    knobs = {"qoserve": {"alpha_ms_per_token": 1e-4, **fine}}.get(name, {})
    log = laws.run(registry.make(name, **knobs), workload, config)
    laws.check(log, workload, config)
    for other in (laws.slow(config), replace(config, check_horizon=True)):
        again = laws.run(registry.make(name, **knobs), workload, other)
        assert laws.signature(again) == laws.signature(log)


@given(workload=workloads(max_prompt=12), budget=st.sampled_from([6, 20]))
def test_slai_leaves_no_critical_decode_out_while_budget_allows(workload, budget):
    config = EngineConfig(
        num_blocks=2000, max_model_len=100, block_size=1, max_num_seqs=30,
        max_num_batched_tokens=500, fast_forward=False,
    )  # fmt: skip
    policy = registry.make("slai", token_budget=budget, tbt_s=4e-6, dynamic_offset=False, offset=1)

    class Watched(Recorder):
        def plan(self, view, builder):
            dates_ns, others_ns = policy._moments.dates_ns, policy._moments.others_ns
            decodes = [s for s in view.running if s.is_decoding]
            critical = {s.id for s in decodes if dates_ns.get(s, others_ns) <= view.now_ns}
            plan = super().plan(view, builder)
            granted = {s.id for s in plan.decoding()}
            assert critical <= granted or len(granted & critical) == budget
            return plan

    laws.run(Watched(policy), workload, config)


@pytest.mark.slow
@given(workload=workloads(), config=configs())
def test_guaranteed_no_evict_never_evicts(workload, config):
    config = replace(config, kv_allocator="paged")
    for name in ("tensorrt_llm", "tgi", "tgi3"):
        log = laws.run(registry.make(name), workload, config)
        assert log.requests()["num_preemptions"].sum() == 0


@pytest.mark.slow
@given(workload=workloads(), config=configs())
def test_mc_sf_with_exact_lengths_never_evicts(workload, config):
    exact = [
        replace(a, request=replace(a.request, predicted_tokens=float(a.output_tokens)))
        for a in workload
    ]
    config = replace(config, kv_allocator="paged")
    log = laws.run(registry.make("mc_sf", margin=0.0), exact, config)
    assert log.requests()["num_preemptions"].sum() == 0


@given(workload=workloads(), config=configs())
def test_srtf_with_seats_for_all_and_memory_for_all_is_sjf_without_preemption(workload, config):
    roomy = replace(config, num_blocks=5000, max_num_seqs=30, max_num_resident=None)
    log = laws.run(registry.make("srtf"), workload, roomy)
    assert log.requests()["num_preemptions"].sum() == 0


@pytest.mark.slow
@given(workload=workloads(), config=configs())
def test_boosted_and_aged_at_their_extremes_are_the_inner_order_and_first_come(workload, config):
    def run(name, **knobs):
        return laws.signature(laws.run(registry.make(name, **knobs), workload, config))

    assert run("boosted", threshold_s=1e3) == run("sjf")
    assert run("aged", rate_per_s=0.0) == run("sjf")
    assert run("boosted", inner="fcfs", threshold_s=0.0) == run("fcfs")


class SortingAnew(NestedWait):
    """Follows nobody through the segments."""

    def on_tokens(self, plan, num_steps, now_ns):
        self._segments._plan = None
        super().on_tokens(plan, num_steps, now_ns)


@given(
    workload=workloads(),
    config=configs(),
    edges=st.sampled_from([[1, 4], [4, 12], [2, 3, 9], [30]]),
    total_limit=st.integers(1, 24),
    max_wait_s=st.sampled_from([2e-6, 5e-6, 20e-6]),
    drain=st.booleans(),
    swaps=st.booleans(),
)
def test_nested_wait_decides_by_segments_it_kept_as_by_segments_sorted_anew(
    workload, config, edges, total_limit, max_wait_s, drain, swaps
):
    if swaps:
        config = replace(config, preemption_mode="swap", swap_space_blocks=500)
    made = [
        policy(edges, None, total_limit, max_wait_s, drain) for policy in (NestedWait, SortingAnew)
    ]
    kept, anew = [laws.signature(laws.run(policy, workload, config)) for policy in made]
    assert kept == anew


def test_nested_wait_knows_when_they_ran_who_came_back_from_host_memory_and_decode():
    lengths = [(1, 20), (49, 17), (1, 17)]
    workload = [arrival(i, prompt=prompt, output=n) for i, (prompt, n) in enumerate(lengths)]
    config = EngineConfig(
        num_blocks=100, max_model_len=100, block_size=1, max_num_seqs=5, max_num_batched_tokens=3,
        preemption_mode="swap", swap_space_blocks=500,
    )  # fmt: skip
    kept, anew = [
        laws.run(policy([1, 4], None, 5, 5e-6, drain=False), workload, config)
        for policy in (NestedWait, SortingAnew)
    ]
    assert kept.requests()["num_preemptions"].any()
    assert laws.signature(kept) == laws.signature(anew)


@given(workload=workloads(), config=configs())
def test_nested_wait_never_exceeds_the_places_of_its_segments(workload, config):
    policy = registry.make("nested_wait", output_edges=[4, 12], total_limit=6, max_wait_s=5e-6)

    def watch(engine):
        assert sum(s.num_output_tokens < 4 for s in engine.requests.running.values()) <= 6

    laws.run(policy, workload, config, observer=watch)


class NeverFalling(laws.LinearCost):
    """As it is, said aloud: who asks need not look where all fits."""

    never_falls = True


@pytest.mark.slow
@settings(max_examples=60)
@given(
    workloads(max_requests=12),
    configs().map(
        lambda config: replace(
            config,
            num_blocks=900,
            max_num_seqs=16,
            max_num_batched_tokens=200,
            kv_allocator="paged",
        )
    ),
    st.sampled_from([3e-6, 1e-5, 1e-4]),
    st.sampled_from([1.1e-6, 1.3e-6]),
    st.lists(st.sampled_from([None, (0.002, 0.0013), (0.01, 0.0012), (0.03, 0.0014)]), min_size=3),
)
def test_fair_batching_decides_alike_where_it_looks_at_nobody_since_all_fit(
    work, config, ttft_s, tbt_s, paces
):
    for i, one in enumerate(work):
        pace = paces[i % len(paces)]
        if pace is not None:
            slo = Slo(ttft_ms=pace[0], tpot_ms=pace[1])
            work[i] = replace(one, request=replace(one.request, slo=slo))
    made = [
        laws.signature(
            laws.run(registry.make("fair_batching", ttft_s=ttft_s, tbt_s=tbt_s), work, config, cost)
        )
        for cost in (laws.LinearCost(), NeverFalling())
    ]
    assert made[0] == made[1]


class LookingAtAll(FairBatching):
    """Keeps no order of dates from plan to plan."""

    def plan(self, view, builder):
        self._deadlines.together = []
        return super().plan(view, builder)


@st.composite
def crowds(draw):
    """Draw more requests than are served in time, some with targets of their own."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 700, 1500, 1500, 2500]), st.integers(1, 80), st.integers(1, 60)
            ),
            min_size=12,
            max_size=30,
        )
    )
    now_ns, work = 0, []
    apart = [None, Slo(0.005), Slo(0.05)]  # in ms; so that some are late and others far ahead
    paces = draw(st.sampled_from([[None], apart, apart, [*apart, *apart, Slo(0.02, 0.002)]]))
    for i, (gap_ns, prompt, output) in enumerate(rows):
        now_ns += gap_ns
        work.append(arrival(i, now_ns, prompt, output, slo=paces[i % len(paces)]))
    return work


@given(
    crowds(),
    st.sampled_from([60, 120, 900]),
    st.sampled_from([6, 24]),
    st.sampled_from([1e-7, 1e-5, 2e-5]),
    st.sampled_from([1.3e-6, 1.45e-6, 1.73337e-6, 2e-6]),
    st.booleans(),
)
def test_fair_batching_decides_by_an_order_it_kept_as_where_it_looks_at_all(
    work, num_blocks, seats, ttft_s, tbt_s, checks
):
    config = EngineConfig(
        num_blocks=num_blocks, max_model_len=200, block_size=4, max_num_seqs=seats,
        max_num_batched_tokens=100, check_horizon=checks,
    )  # fmt: skip
    kept, anew = [
        laws.signature(laws.run(policy(ttft_s, tbt_s), work, config, NeverFalling()))
        for policy in (FairBatching, LookingAtAll)
    ]
    assert kept == anew


def of_rows(rows):
    """Return requests of rows: when they come, prompt, output, and ms to the first token."""
    return [
        arrival(i, ns, prompt, output, slo=None if ttft_ms is None else Slo(ttft_ms))
        for i, (ns, prompt, output, ttft_ms) in enumerate(rows)
    ]


def test_fair_batching_takes_memory_from_nobody_whom_the_step_serves():
    work = of_rows([
        (0, 33, 8, None), (1500, 58, 31, 0.005), (3000, 27, 7, 0.05), (4500, 4, 58, None),
        (6000, 56, 39, 0.005), (6000, 58, 18, 0.05), (6700, 76, 7, None), (8200, 4, 2, 0.005),
        (8200, 70, 1, 0.05), (8200, 28, 28, None), (8200, 68, 15, 0.005), (9700, 64, 36, 0.05),
        (10400, 45, 15, None), (11100, 59, 19, 0.005), (11100, 54, 54, 0.05), (13600, 13, 12, None),
    ])  # fmt: skip
    config = EngineConfig(
        num_blocks=80, max_model_len=200, block_size=4, max_num_seqs=6, max_num_batched_tokens=100
    )
    kept, anew = [
        laws.run(policy(2e-5, 1.73337e-6), work, config, NeverFalling())
        for policy in (FairBatching, LookingAtAll)
    ]
    assert laws.signature(kept) == laws.signature(anew)
    laws.check(kept, work, config)


def test_fair_batching_lets_prompts_that_block_each_other_come_to_an_end():
    # Who arrived last is due first there: taken out, it came back for the same memory for ever.
    work = of_rows([
        (0, 39, 50, None), (2200, 53, 21, 0.005), (3700, 3, 29, None), (6200, 65, 49, None),
        (6900, 20, 29, 0.05), (8400, 37, 9, None), (8400, 36, 26, 0.005), (8400, 74, 24, 0.05),
        (9900, 43, 44, None), (10600, 45, 39, 0.005), (13100, 1, 3, 0.05), (14600, 76, 34, None),
        (16100, 76, 17, 0.005),
    ])  # fmt: skip
    config = EngineConfig(
        num_blocks=52, max_model_len=200, block_size=4, max_num_seqs=10, max_num_batched_tokens=100
    )
    log = laws.run(FairBatching(1e-5, 2e-6), work, config, NeverFalling())
    laws.check(log, work, config)


@pytest.mark.parametrize("name", ["vtc", "past_future"])
@settings(max_examples=share(0.12))
@given(workload=workloads(), config=configs(), steps=st.sampled_from([1, 3, 10]))
def test_policy_that_waits_for_decodes_keeps_the_laws_and_its_promises(
    name, workload, config, steps
):
    log = laws.run(registry.make(name, max_waiting_tokens=steps), workload, config)
    laws.check(log, workload, config)
    for other in (laws.slow(config), replace(config, check_horizon=True)):
        again = laws.run(registry.make(name, max_waiting_tokens=steps), workload, other)
        assert laws.signature(again) == laws.signature(log)
