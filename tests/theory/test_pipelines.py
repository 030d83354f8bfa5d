"""What several batches in flight must come to where it can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.metrics.step_totals import step_totals
from tests import laws
from tests.laws import arrival
from tests.staged_cost import StagedCost

STAGE_NS = 1_000
TOKENS = 200


def config(stages, rows=1, **limits):
    limits = {"max_num_resident": stages * rows} | limits
    return EngineConfig(
        num_blocks=10_000,
        max_model_len=4_000,
        max_num_seqs=rows,
        pipeline_parallel_size=stages,
        **limits,
    )


def constant(shares, link_ns=0):
    """Return stages that take so many tenths of 1,000 ns, whatever the batch."""
    return StagedCost(shares, link_ns, base_ns=STAGE_NS, token_ns=0, context_ns=0)


def decodes(count):
    """Return requests with a prompt of one token, all at once."""
    return [arrival(i, 0, 1, TOKENS) for i in range(count)]


def serve(work, limits, cost, policy="fcfs"):
    return laws.run(registry.make(policy), work, limits, cost)


def bubbles(log):
    """Return the share of stages' time that they stand still while a batch is in flight."""

    class Run:
        step_totals = step_totals([log.steps()])

    return metric_named("pipeline_bubble_share").of(Run())


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_one_batch_in_a_pipeline_uses_one_stage_at_a_time(stages):
    log = serve(decodes(1), config(stages), constant((10,) * stages))
    assert log.steps()["end_ns"][-1] == TOKENS * stages * STAGE_NS
    assert bubbles(log) == 1 - 1 / stages


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_as_many_equal_batches_as_stages_leave_bubbles_only_at_the_ends(stages):
    log = serve(decodes(stages), config(stages), constant((10,) * stages))
    # The pipeline fills in stages - 1 stage times, and then a batch leaves it every stage time.
    num_steps = stages * TOKENS
    assert log.num_steps == num_steps
    end_ns = (stages - 1 + num_steps) * STAGE_NS
    assert log.steps()["end_ns"].tolist() == list(range(stages * STAGE_NS, end_ns + 1, STAGE_NS))
    assert bubbles(log) == pytest.approx(1 - num_steps / (num_steps + stages - 1), rel=1e-12)


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("policy", ["fcfs", "sarathi"])
def test_chunks_of_one_prompt_follow_each_other_through_the_stages(stages, policy):
    work = [arrival(0, 0, 700, 2)]  # seven chunks
    limits = config(stages, max_num_batched_tokens=100)
    one_by_one = serve(work, limits, constant((10,) * stages), policy)
    assert one_by_one.requests()["first_token_ns"].tolist() == [7 * stages * STAGE_NS]
    limits = replace(limits, chunked_pipeline_parallelism=True)
    following = serve(work, limits, constant((10,) * stages), policy)
    assert following.requests()["first_token_ns"].tolist() == [(7 + stages - 1) * STAGE_NS]
    assert following.steps()["start_ns"][: stages + 1].tolist() == [0] * stages + [
        stages * STAGE_NS
    ]


@pytest.mark.parametrize("stages", [2, 4])
def test_more_batches_in_flight_leave_the_time_between_tokens_as_it_is(stages):
    links = constant((10,) * stages, link_ns=300)
    latency_ns = stages * STAGE_NS + (stages - 1) * 300
    alone = serve(decodes(1), config(stages), links)
    assert np.unique(np.diff(alone.token_times(0))).tolist() == [latency_ns]
    shared = serve(decodes(stages), config(stages), links)
    for i in range(stages):
        assert np.unique(np.diff(shared.token_times(i))).tolist() == [latency_ns]


def test_throughput_of_uneven_stages_is_that_of_the_slowest():
    shares = (10, 25, 5)
    log = serve(decodes(3), config(3), constant(shares))
    ends = log.steps()["end_ns"]
    assert np.unique(np.diff(ends)[5:]).tolist() == [2_500]
    # The three batches take 4,000 ns each way alone; the second stage never stands still.
    assert bubbles(log) == pytest.approx(1 - 40 / (3 * 25), abs=0.01)


def test_unequal_micro_batches_leave_the_bubbles_worked_out_by_hand():
    # Two stages and two batches: one of a decode (1,000 + 10 ns a stage), one of four (1,040 ns).
    # Each is sent in when it is back, so a stage serves both in turn and waits for the longer one
    # to leave the other: a round takes 2 * 1,040 ns, of which a stage computes 1,010 + 1,040.
    cost = StagedCost((10, 10), base_ns=1_000, token_ns=10, context_ns=0)
    work = [arrival(i, 0, 1, TOKENS) for i in range(5)]
    limits = config(2, rows=4, max_num_batched_tokens=4)
    log = serve(work, limits, cost)
    steps = log.steps()
    assert np.unique(steps["num_decodes"][2:-2]).tolist() == [1, 4]
    ends = steps["end_ns"][steps["num_decodes"] == 4]
    assert np.unique(np.diff(ends)).tolist() == [2 * 1_040]
    assert bubbles(log) == pytest.approx(1 - (1_010 + 1_040) / (2 * 1_040), abs=0.003)


def test_whole_prompts_among_decodes_leave_bubbles_that_chunks_do_not():
    # A prompt of 1,600 tokens beside decodes is a batch 17 times as long as the one in flight with
    # it, and each stage waits for it in turn; in pieces of 100 all batches are alike.
    cost = StagedCost((10, 10), base_ns=1_000, token_ns=10, context_ns=0)
    work = [arrival(i, 0, 1_600, 20 + 37 * i % 150) for i in range(60)]
    whole = config(2, rows=8, max_num_batched_tokens=2_000)
    orca = serve(work, whole, cost, "orca")
    sarathi = registry.make("sarathi", chunk_size=100)
    chunked = laws.run(sarathi, work, whole, cost)
    assert bubbles(chunked) < 0.05 < 0.15 < bubbles(orca)
