"""Laws of several batches in flight, over what is drawn."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.pipeline_executor import PipelineExecutor
from schedlab.sim.cost.overhead import SchedulingOverhead
from tests import laws
from tests.policy_cases import CASES, MAY_WAIT, make
from tests.staged_cost import StagedCost
from tests.workloads import configs, share, workloads

ABLE = [name for name in CASES if make(name).can_pipeline]


@st.composite
def pipelines(draw):
    """Draw limits with a pipeline, and a cost model with as many stages."""
    config = draw(configs())
    shares = draw(st.lists(st.sampled_from([1, 5, 10, 25]), min_size=2, max_size=4))
    cost = StagedCost(tuple(shares), draw(st.sampled_from([0, 70, 3_000])), draw(st.integers(0, 9)))
    caches = config.kv_allocator == "paged" and draw(st.booleans())
    between_steps = draw(st.booleans())
    ahead = between_steps and draw(st.booleans())
    return cost, replace(
        config,
        pipeline_parallel_size=len(shares),
        chunked_pipeline_parallelism=draw(st.booleans()),
        arrivals_between_steps=between_steps,
        async_scheduling=ahead,
        overrun_at_stop=ahead and config.kv_allocator == "paged" and draw(st.booleans()),
        enable_prefix_caching=caches,
        preempt_in_order=draw(st.booleans()),
        serve_behind_preempted=draw(st.booleans()),
    )


class Watched(PipelineExecutor):
    """Keeps what every station was busy with."""

    def __init__(self, pricing):
        super().__init__(pricing)
        self.served = [[] for _ in self._free_ns]

    def execute(self, work, max_steps, horizon_ns):
        """Note from when to when each station has the batch."""
        stations_ns = self.pricing.cost_model.stations_ns(work.shape)
        steps = super().execute(work, max_steps, horizon_ns)
        for served, took_ns, end_ns in zip(self.served, stations_ns, self._free_ns, strict=True):
            served.append((end_ns - took_ns, end_ns, work.now_ns))
        return steps


@pytest.mark.parametrize("name", ABLE)
@settings(max_examples=share(0.25))
@given(workload=workloads(), drawn=pipelines())
def test_policy_with_batches_in_flight_keeps_the_laws(name, workload, drawn):
    cost, config = drawn
    log = laws.run(make(name), workload, config, cost)
    laws.check(log, workload, config, may_wait=name in MAY_WAIT)
    again = laws.run(make(name), workload, config, cost, prove=False)
    assert laws.signature(again) == laws.signature(log), "the same work gives the same bytes"


@settings(max_examples=share(0.5))
@given(workload=workloads(), drawn=pipelines())
def test_no_request_is_in_two_batches_at_once(workload, drawn):
    cost, config = drawn

    def in_one_batch(engine):
        known = engine.requests.in_pipeline
        batches = [[*batch.running] for batch in known.batches]
        assert known.settling is None, "the oldest batch is back"
        assert len(batches) == len(engine._in_flight) < config.most_batches
        members = [number for batch in batches for number in batch]
        assert sorted(members) == sorted(state.id for state in known)
        assert (
            len(known)
            == len(members)
            == len({*members, *engine.requests.running}) - len(engine.requests.running)
        )

    laws.run(make("fcfs"), workload, config, cost, observer=in_one_batch)


@settings(max_examples=share(0.5))
@given(workload=workloads(), drawn=pipelines())
def test_stations_serve_one_batch_at_a_time_in_order(workload, drawn):
    cost, config = drawn
    # Planned ahead, a batch may wait for tokens before the first station.
    config = replace(config, async_scheduling=False, overrun_at_stop=False)
    made = []

    def watched(pricing):
        made.append(Watched(pricing))
        return made[0]

    laws.run(make("sarathi"), workload, config, cost, make_executor=watched)
    for station, served in enumerate(made[0].served):
        before_ns = [row[2] for row in served]
        if station:
            before_ns = [end for _, end, _ in made[0].served[station - 1]]
        last_ns = 0
        for (start_ns, end_ns, _), came_ns in zip(served, before_ns, strict=True):
            assert start_ns == max(came_ns, last_ns), "a station waits for nothing else"
            last_ns = end_ns


@settings(max_examples=share(0.5))
@given(
    shares=st.lists(st.sampled_from([1, 5, 10, 25]), min_size=2, max_size=4),
    groups=st.integers(1, 4),
    rows=st.integers(1, 3),
    tokens=st.integers(1, 12),
    link_ns=st.sampled_from([0, 70, 3_000]),
    overhead_ns=st.sampled_from([0, 40, 900, 20_000]),
)
def test_same_batches_planned_ahead_are_never_back_later(
    shares, groups, rows, tokens, link_ns, overhead_ns
):
    # As many batches as stages at most, of equal requests: they go round and round either way.
    size = min(groups, len(shares)) * rows
    later = EngineConfig(
        num_blocks=9_000, max_model_len=99, max_num_seqs=rows, max_num_resident=size,
        max_num_batched_tokens=5 * rows, pipeline_parallel_size=len(shares),
        arrivals_between_steps=True,
    )  # fmt: skip
    work = [laws.arrival(i, 0, 5, tokens) for i in range(size)]
    cost, overhead = StagedCost(tuple(shares), link_ns), SchedulingOverhead(overhead_ns / 1e9)
    log, ahead = (
        laws.run(make("fcfs"), work, config, cost, overhead)
        for config in (later, replace(later, async_scheduling=True))
    )
    for name in ("num_decodes", "num_prefills", "prefill_tokens"):
        assert ahead.steps()[name].tolist() == log.steps()[name].tolist()
    assert (ahead.steps()["end_ns"] <= log.steps()["end_ns"]).all()
