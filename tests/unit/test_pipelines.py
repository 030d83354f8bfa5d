import json
from dataclasses import fields, replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab import core
from schedlab.experiments.figures.fleets import of_engines
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.policies import Policy, registry
from schedlab.policies.routers import registry as routers
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.pipeline import Pipeline
from schedlab.sim.core.pipeline_executor import PipelineExecutor
from schedlab.sim.core.pipelined_engine import PipelinedEngine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.clock import PLANS, REPORTS, Clock
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.engine_state import LiveState
from schedlab.sim.drive.failures import Failures, Outage
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.pipelined_server import PipelinedServer
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SchedlabError, SpecError, Stalled
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.link import LINKS
from schedlab.sim.hardware.memory import memory_budget
from schedlab.sim.hardware.models import model, model_names
from schedlab.sim.hardware.stage import stage_weight_bytes, stages
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.metrics.step_lengths import StepLengths
from schedlab.sim.metrics.step_totals import step_totals
from schedlab.sim.record import columns
from schedlab.sim.record import log as logs
from schedlab.sim.record.columns import batches
from schedlab.sim.record.token_times import decodes_before
from schedlab.sim.result import RunResult
from tests import laws
from tests.laws import arrival
from tests.staged_cost import StagedCost

DECODES = BatchShape(32, 32 * 1024, 1024, rows_sampled=32)
MIXED = BatchShape(32, 32 * 1024, 1024, ((2048, 512),), rows_sampled=33)


def spec(**keys):
    engine = {"pipeline_parallel_size": 2, "tensor_parallel_size": 4} | keys.pop("engine", {})
    return make_spec({
        "name": "pipeline",
        "model": "llama-2-70b",
        "policy": "fcfs",
        "engine": engine,
        "workload": {"trace": "azure-conv", "num_requests": 40, "request_rate": 4.0},
        **keys,
    })  # fmt: skip


# -- stages --------------------------------------------------------------------------------------


@pytest.mark.skipif(core.running() != "python", reason="compiled code refuses stand-ins")
@pytest.mark.parametrize(
    ("max_tokens", "sampled", "awaited"),
    [((1, 1), {0, 1}, False), ((1, 2), {0, 1}, True), ((1, 2), {0}, False), ((9, 9), set(), False)],
)
def test_first_stage_waits_for_a_batch_of_which_somebody_who_was_sampled_goes_on(
    max_tokens, sampled, awaited
):
    def state(number, most):
        return SimpleNamespace(id=number, request=SimpleNamespace(max_tokens=most))

    running = {number: state(number, most) for number, most in enumerate(max_tokens)}
    pipeline = SimpleNamespace(settling=SimpleNamespace(sampled=sampled, running=running))
    assert Pipeline.is_awaited.fget(pipeline) == awaited
    pipeline.settling = None
    assert not Pipeline.is_awaited.fget(pipeline)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [80]), (2, [40, 40]), (3, [27, 27, 26]), (6, [13, 13, 13, 14, 14, 13])],
)
def test_layers_are_divided_as_vllm_divides_them(count, expected):
    # vllm.distributed.utils.get_pp_indices(80, rank, count)
    assert [stage.num_layers for stage in stages(model("llama-2-70b"), count)] == expected


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("llama-4-maverick", 2, [12, 12]),  # every second layer
        ("llama-4-maverick", 5, [5, 5, 5, 5, 4]),  # 9, 10, 10, 10 and 9 layers
        ("llama-4-scout", 2, [0, 0]),
        ("glm-4.5-air", 2, [1, 0]),  # the first layer
    ],
)
def test_dense_layers_of_a_mixture_are_where_the_model_has_them(name, count, expected):
    assert [stage.num_dense_layers for stage in stages(model(name), count)] == expected


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int4"])
def test_weights_of_stages_add_up_to_those_of_the_model(name, dtype):
    shape = model(name)
    whole = shape.weight_bytes(dtype)
    assert stage_weight_bytes(shape, stages(shape, 1)[0], dtype) == whole
    divided = [stage_weight_bytes(shape, stage, dtype) for stage in stages(shape, 2)]
    twice = shape.vocab_size * shape.hidden_size * 2 if shape.tied_embeddings else 0
    assert sum(divided) == pytest.approx(whole + twice, abs=2)


@pytest.mark.parametrize("name", ["llama-2-70b", "mixtral-8x7b", "glm-4.5-air"])
def test_stages_take_together_what_the_whole_model_takes(name):
    def cost(count):
        where = Deployment(
            model(name), gpu("h100-80gb"), 8, pipeline_parallel_size=count,
            pipeline_link=LINKS["nvlink"],
        )  # fmt: skip
        return RooflineCostModel(where)

    for shape in (DECODES, MIXED):
        stations = cost(4).stations_ns(shape)
        assert sum(stations[::2]) == pytest.approx(cost(1).step_ns(shape)[0], abs=4)
        assert cost(4).step_ns(shape) == [sum(stations)]


def test_steps_at_once_cost_as_one_by_one_in_a_pipeline():
    cost = RooflineCostModel(
        Deployment(model("llama-2-70b"), gpu("a100-80gb"), 4, pipeline_parallel_size=3)
    )
    at_once = cost.step_ns(DECODES, 5)
    for j in range(5):
        later = BatchShape(32, 32 * (1024 + j), 1024 + j, rows_sampled=32)
        assert cost.step_ns(later) == [at_once[j]]


def test_link_takes_its_latency_and_the_activations_of_each_device():
    where = Deployment(
        model("llama-2-70b"), gpu("a100-80gb"), 4, pipeline_parallel_size=2,
        pipeline_link=LINKS["ethernet-100g"],
    )  # fmt: skip
    # 2,080 tokens of 8,192 numbers of 2 bytes over four devices of 12.5 GB/s each.
    expected_ns = 20_000 + 2_080 * 8_192 * 2 / 4 / 12.5
    assert RooflineCostModel(where).stations_ns(MIXED)[1] == round(expected_ns)


def test_memory_is_that_of_the_tightest_stage():
    def blocks(count, seqs=1024):
        budget = memory_budget(
            model("llama-3.1-8b"), gpu("a100-80gb"), gpu_memory_utilization=0.9, block_size=16,
            max_num_batched_tokens=2048, max_num_seqs=seqs, pipeline_parallel_size=count,
        )  # fmt: skip
        return budget.num_blocks, budget

    one, _ = blocks(1)
    two, budget = blocks(2)
    assert two > 2 * one
    # The last stage has head, logits and as many layers as the first.
    shape = model("llama-3.1-8b")
    assert budget.weight_bytes == stage_weight_bytes(shape, stages(shape, 2)[1], "bf16")
    assert budget.kv_bytes_per_token == shape.kv_bytes_per_token("bf16", 1) // 2


# -- batches in flight ---------------------------------------------------------------------------


def test_preempted_in_the_pipeline_keeps_its_token_and_loses_its_memory():
    # Eight blocks of one token: request 0 grows until request 1, in flight, has to give way.
    limits = EngineConfig(
        num_blocks=8, max_model_len=8, block_size=1, max_num_seqs=1, max_num_resident=2,
        pipeline_parallel_size=2,
    )  # fmt: skip
    work = [arrival(0, 0, 2, 6), arrival(1, 0, 2, 6)]
    cost = StagedCost((10, 10))
    log = laws.run(registry.make("fcfs"), work, limits, cost)
    laws.check(log, work, limits)
    requests, steps = log.requests(), log.steps()
    assert requests["num_preemptions"].tolist() == [0, 1]
    assert steps["padding_tokens"].sum() == 0
    evicted_ns = int(log.preemptions()["evicted_ns"][0])
    came_ns = log.token_times(1)
    in_flight = (steps["start_ns"] < evicted_ns) & (steps["end_ns"] > evicted_ns)
    (late_ns,) = steps["end_ns"][in_flight & (steps["num_decodes"] == 1)]
    assert late_ns in came_ns, "the token that was under way is its own"
    context = int((came_ns <= late_ns).sum()) + 2
    assert requests["recomputed_tokens"].tolist() == [0, context - 1]
    resumed_ns = int(log.preemptions()["resumed_ns"][0])
    assert resumed_ns >= late_ns, "it waits for that"


def test_answer_that_ends_in_the_pipeline_is_whole_though_its_request_was_preempted():
    limits = EngineConfig(
        num_blocks=8, max_model_len=8, block_size=1, max_num_seqs=1, max_num_resident=2,
        pipeline_parallel_size=2,
    )  # fmt: skip
    work = [arrival(0, 0, 2, 6), arrival(1, 0, 2, 3)]
    log = laws.run(registry.make("fcfs"), work, limits, StagedCost((10, 10)))
    laws.check(log, work, limits)
    requests, gone = log.requests(), log.preemptions()
    assert requests["num_preemptions"].tolist() == [0, 1]
    assert requests["recomputed_tokens"].tolist() == [0, 0], "nothing is computed for it any more"
    assert requests["generated_tokens"].tolist() == [6, 3]
    assert gone["evicted_ns"][0] < requests["last_token_ns"][1] == gone["resumed_ns"][0]


@pytest.mark.parametrize("follows", [False, True])
def test_arrival_between_steps_waits_until_a_batch_is_back(follows):
    limits = EngineConfig(
        num_blocks=99, max_model_len=90, block_size=1, max_num_seqs=2, max_num_batched_tokens=10,
        pipeline_parallel_size=3, arrivals_between_steps=True,
        chunked_pipeline_parallelism=follows,
    )  # fmt: skip
    work = [arrival(0, 0, 20, 3), arrival(1, 1_500, 4, 1)]
    cost = StagedCost((10, 10, 10), base_ns=1000, token_ns=0, context_ns=0)
    log = laws.run(registry.make("fcfs"), work, limits, cost)
    laws.check(log, work, limits)
    requests, steps = log.requests(), log.steps()
    assert requests["queued_ns"].tolist() == [0, 3_000]
    assert requests["first_scheduled_ns"].tolist() == [0, 3_000]
    # What is left of the other prompt goes with it, unless it followed at once.
    assert steps["prefill_tokens"].tolist()[: 2 + follows] == ([10, 10, 4] if follows else [10, 10])


def test_batch_of_nobody_has_a_place_until_the_one_before_it_is_back():
    # Two requests as one chunk each: the first two batches fill two of three places, a batch of
    # nobody the third. When the first is back, one of the two who came can begin, not both.
    limits = EngineConfig(
        num_blocks=99, max_model_len=90, block_size=1, max_num_seqs=1, max_num_resident=9,
        max_num_batched_tokens=10, pipeline_parallel_size=3, arrivals_between_steps=True,
    )  # fmt: skip
    work = [arrival(i, at_ns, 10, 1) for i, at_ns in enumerate((0, 0, 500, 600, 700))]
    cost = StagedCost((10, 10, 10), base_ns=1000, token_ns=0, context_ns=0)
    log = laws.run(registry.make("fcfs"), work, limits, cost)
    assert log.requests()["first_scheduled_ns"].tolist() == [0, 0, 3_000, 4_000, 4_000]


def test_plain_engine_refuses_several_batches():
    limits = EngineConfig(num_blocks=8, max_model_len=8, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="takes a PipelinedEngine"):
        Engine(limits, registry.make("fcfs"), SimExecutor(Pricing(laws.LinearCost())))


def test_policy_that_holds_finished_requests_is_named():
    limits = EngineConfig(num_blocks=8, max_model_len=8, pipeline_parallel_size=2)
    with pytest.raises(Exception, match=r"Static at t = 0.0+ s: holds finished requests"):
        laws.run(registry.make("static"), [arrival(0)], limits, StagedCost())


class Waits(Policy):
    """Lets a prompt be computed, and then waits for ever, or up to a time."""

    def __init__(self, until_ns=FOREVER):
        self.until_ns = until_ns

    def plan(self, view, builder):
        if view.waiting:
            builder.grant(view.waiting.head)
        elif view.now_ns >= self.until_ns:
            builder.grant_running()
        return builder.build(until_ns=max(self.until_ns, view.now_ns + 1))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_policy_that_waits_with_requests_in_flight_is_stalled_when_its_last_batch_is_back(
    num_stages,
):
    limits = EngineConfig(num_blocks=8, max_model_len=8, pipeline_parallel_size=num_stages)
    why = r"stalled at t = 0\.00\d+ s: the policy waits and nothing is left to happen"
    with pytest.raises(Stalled, match=why):
        laws.run(Waits(), [arrival(0, 0, 3, 4)], limits, StagedCost(num_stages * (10,)))
    log = laws.run(Waits(50_000), [arrival(0, 0, 3, 1)], limits, StagedCost(num_stages * (10,)))
    assert log.requests()["status"].tolist() == [0]


@pytest.mark.parametrize("slowness", [1.0, 2.0])
def test_overhead_of_a_step_is_spent_where_its_batch_begins(slowness):
    limits = EngineConfig(num_blocks=99, max_model_len=99, pipeline_parallel_size=3)
    cost = StagedCost((10, 20, 5), link_ns=7, base_ns=1000, token_ns=0, context_ns=0)
    overhead = SchedulingOverhead(base_s=300e-9, per_prefill_step_s=40e-9)
    made = []

    def executor(pricing):
        made.append(PipelineExecutor(pricing))
        made[0].slowness = slowness
        return made[0]

    log = laws.run(
        registry.make("fcfs"), [arrival(0, 0, 3, 3)], limits, cost, overhead, make_executor=executor
    )
    steps = log.steps()
    times = [int(slowness * ns) for ns in (1_300, 2_000, 500)]
    more = int(slowness * 40)  # of the step with the prompt
    assert steps["stage_0_ns"].tolist() == [times[0] + more, times[0], times[0]]
    assert steps["stage_1_ns"].tolist() == [times[1]] * 3
    assert steps["stage_2_ns"].tolist() == [times[2]] * 3
    lengths = (steps["end_ns"] - steps["start_ns"]).tolist()
    assert lengths == [sum(times) + 2 * 7 + more, sum(times) + 2 * 7, sum(times) + 2 * 7]


def test_long_log_has_the_stages_as_a_short_one(monkeypatch):
    limits = EngineConfig(num_blocks=99, max_model_len=99, pipeline_parallel_size=3)
    work = [arrival(i, 900 * i, 5, 20) for i in range(30)]
    cost = StagedCost((10, 20, 5))
    short = laws.run(registry.make("fcfs"), work, limits, cost)
    monkeypatch.setattr(logs, "MOST_NUMBERS_IN_MEMORY", 50)
    long = laws.run(registry.make("fcfs"), work, limits, cost)
    assert {*short.steps()} == {*long.steps()} > {"stage_0_ns", "stage_1_ns", "stage_2_ns"}
    for name, column in short.steps().items():
        assert np.array_equal(column, long.steps()[name]), name
    for number in range(30):
        assert short.token_times(number).tolist() == long.token_times(number).tolist()
    for ids in (None, np.array([3, 17])):
        for table in ("token_gaps", "token_counts"):
            one, other = getattr(short, table)(ids), getattr(long, table)(ids)
            for name in one:
                assert sorted(one[name]) == sorted(other[name]), (table, name)
    for name, column in short.token_times_of_all().stints().items():
        assert np.array_equal(column, long.token_times_of_all().stints()[name]), name


def test_decode_steps_of_a_pipeline_are_those_of_one_micro_batch_after_the_other():
    # Three requests at once, and two more that find the first stage busy: two micro-batches, which
    # decode in turn, the second from its own prompts on.
    limits = EngineConfig(
        num_blocks=99, max_model_len=99, pipeline_parallel_size=2, max_num_seqs=3,
        max_num_resident=6,
    )  # fmt: skip
    work = [arrival(i, 0, 5, 4) for i in range(3)] + [arrival(i, 10, 5, 4) for i in (3, 4)]
    cost = StagedCost((10, 10), base_ns=1000, token_ns=0, context_ns=0)
    log = laws.run(registry.make("fcfs"), work, limits, cost)
    steps = log.steps()
    decoding = steps["num_decodes"] > 0
    assert steps["num_decodes"][decoding].tolist() == [3, 2, 3, 2, 3, 2]
    assert steps["micro_batch"][decoding].tolist() == [0, 1, 0, 1, 0, 1]
    assert (steps["micro_batch"][~decoding] == -1).all()
    stints = log.token_times_of_all().stints()
    rows = zip(
        *(stints[name].tolist() for name in ("id", "first_decode", "last_decode")), strict=True
    )
    assert sorted(rows) == [(0, 0, 3), (1, 0, 3), (2, 0, 3), (3, 3, 6), (4, 3, 6)]


def test_straggler_has_slow_stages_and_links_as_fast_as_ever():
    work = [arrival(0, 0, 5, 2)]
    limits = EngineConfig(num_blocks=9, max_model_len=9, pipeline_parallel_size=2)
    cost = StagedCost((10, 5), link_ns=300, base_ns=1000, token_ns=0, context_ns=0)

    def slow(pricing):
        executor = PipelineExecutor(pricing)
        executor.slowness = 1.5
        return executor

    log = laws.run(registry.make("fcfs"), work, limits, cost, make_executor=slow)
    assert log.token_times(0).tolist() == [1500 + 300 + 750, 2 * (1500 + 300 + 750)]
    assert log.steps()["stage_1_ns"].tolist() == [750, 750]


# -- batches planned ahead -----------------------------------------------------------------------

AHEAD = EngineConfig(
    num_blocks=99, max_model_len=99, block_size=1, pipeline_parallel_size=2, async_scheduling=True,
    arrivals_between_steps=True, chunked_pipeline_parallelism=True,
)  # fmt: skip


def constant(*shares):
    """Return stages that take so many tenths of 1,000 ns, whatever the batch."""
    return StagedCost(shares, base_ns=1000, token_ns=0, context_ns=0)


def test_batches_planned_ahead_are_those_worked_out_by_hand():
    # Two stages of 1,000 ns, and places for three batches. At 0: plan 1 has the prompts of 0 and 1,
    # plan 2 nobody, plan 3 their decodes, which begin when batch 1 is back. At 2,000: plan 4 has
    # the prompt of 2, which comes behind batch 3 in each stage; plan 5 the last tokens of 0 and 1,
    # from 4,000 on. At 4,000: plan 6 has the last token of 2, which waits for batch 4, back at
    # 5,000.
    work = [arrival(0, 0, 5, 3), arrival(1, 0, 5, 3), arrival(2, 500, 5, 2)]
    log = laws.run(registry.make("fcfs"), work, AHEAD, constant(10, 10))
    laws.check(log, work, AHEAD)
    steps = log.steps()
    assert steps["num_decodes"].tolist() == [0, 2, 0, 2, 1]
    assert steps["start_ns"].tolist() == [0, 0, 2_000, 2_000, 4_000]
    assert steps["end_ns"].tolist() == [2_000, 4_000, 5_000, 6_000, 7_000]
    assert [log.token_times(i).tolist() for i in range(3)] == [
        [2_000, 4_000, 6_000], [2_000, 4_000, 6_000], [5_000, 7_000],
    ]  # fmt: skip
    assert log.requests()["last_token_ns"].tolist() == [6_000, 6_000, 7_000]


def test_seat_of_who_ends_is_free_for_the_plan_after_the_one_made_ahead():
    # Request 0 ends in batch 1, back at 2,000. Plan 3, at 0, still counts its seat; plan 4, at
    # 2,000, does not.
    work = [arrival(0, 0, 5, 1), arrival(1, 0, 5, 1)]
    limits = replace(AHEAD, max_num_seqs=1, max_num_resident=1)
    log = laws.run(registry.make("fcfs"), work, limits, constant(10, 10))
    laws.check(log, work, limits)
    assert log.requests()["first_scheduled_ns"].tolist() == [0, 2_000]
    # With a seat more it goes along in plan 2.
    limits = replace(limits, max_num_resident=2)
    log = laws.run(registry.make("fcfs"), work, limits, constant(10, 10))
    assert log.requests()["first_scheduled_ns"].tolist() == [0, 0]


@pytest.mark.parametrize("overruns", [False, True])
def test_token_too_many_is_computed_of_an_answer_that_ends_before_its_limit(overruns):
    work = [arrival(0, 0, 5, 2, max_tokens=9)]
    limits = replace(AHEAD, overrun_at_stop=overruns)
    log = laws.run(registry.make("fcfs"), work, limits, constant(10, 10))
    laws.check(log, work, limits)
    steps = log.steps()
    # The prompt, the second token, and one that nobody asked for, in the plan made before.
    assert steps["padding_tokens"].tolist() == [0, 0, 1][: 2 + overruns]
    assert steps["end_ns"].tolist() == [2_000, 4_000, 6_000][: 2 + overruns]
    assert log.token_times(0).tolist() == [2_000, 4_000]


def test_overhead_of_batches_planned_ahead_is_spent_while_the_one_before_computes():
    overhead = SchedulingOverhead(base_s=300e-9)
    work = [arrival(0, 0, 5, 4)]
    log = laws.run(registry.make("fcfs"), work, AHEAD, constant(10, 10), overhead)
    # The first is planned while nothing runs, the others while it, or the one before them, does.
    assert log.token_times(0).tolist() == [2_300, 4_300, 6_300, 8_300]
    assert log.steps()["stage_0_ns"].tolist() == [1_000] * 4
    later = replace(AHEAD, async_scheduling=False)
    log = laws.run(registry.make("fcfs"), work, later, constant(10, 10), overhead)
    assert log.token_times(0).tolist() == [2_300, 4_600, 6_900, 9_200]


def test_overhead_longer_than_a_batch_is_what_batches_planned_ahead_wait_for():
    overhead = SchedulingOverhead(base_s=5_000e-9)
    work = [arrival(0, 0, 5, 4)]
    log = laws.run(registry.make("fcfs"), work, AHEAD, constant(10, 10), overhead)
    # The host schedules one batch after the other: at 0 two of them, then one when one is back.
    assert log.token_times(0).tolist() == [7_000, 12_000, 17_000, 22_000]


def test_request_preempted_in_the_plan_after_its_batch_keeps_the_token_under_way():
    # Nine blocks of one token, two requests that decode together: plan 3 takes the memory of 1,
    # whose second token comes out of batch 2 all the same.
    limits = replace(AHEAD, num_blocks=9, max_model_len=9, preempt_in_order=True)
    work = [arrival(0, 0, 3, 5), arrival(1, 0, 3, 5)]
    log = laws.run(registry.make("fcfs"), work, limits, constant(10, 10))
    laws.check(log, work, limits)
    requests, gone = log.requests(), log.preemptions()
    assert requests["generated_tokens"].tolist() == [5, 5]
    assert requests["num_preemptions"].tolist() == [0, 1]
    evicted_ns = int(gone["evicted_ns"][0])
    came_ns = log.token_times(1)
    before = came_ns[came_ns <= gone["resumed_ns"][0]]
    assert before[-1] > evicted_ns, "its token was under way"
    assert requests["recomputed_tokens"][1] == 3 + len(before) - 1


def test_policy_is_told_of_tokens_planned_on_when_they_come():
    heard = {}

    class Listens(registry.policy_class("fcfs")):
        def on_tokens(self, plan, num_steps, now_ns):
            for state in plan.decodes or ():
                heard.setdefault(state.id, []).append(now_ns)

    work = [arrival(i, 900 * i, 5, 3 + i) for i in range(6)]
    log = laws.run(Listens(), work, AHEAD, constant(10, 10))
    assert heard == {i: log.token_times(i)[1:].tolist() for i in range(6)}


def test_client_whose_answer_was_planned_on_sends_again_when_it_has_come():
    work = [arrival(i, 0, 5, 3 + i % 2) for i in range(6)]
    log = laws.run(registry.make("fcfs"), work, AHEAD, constant(10, 10), max_concurrency=2)
    laws.check(log, work, AHEAD)
    requests = log.requests()
    assert sorted(requests["arrival_ns"])[2:] == sorted(requests["last_token_ns"])[:4]


def test_fleet_of_one_pipeline_that_plans_ahead_takes_the_steps_of_that_pipeline():
    def new_engine(_=0):
        return PipelinedEngine(
            AHEAD, registry.make("fcfs"), PipelineExecutor(Pricing(constant(10, 25)))
        )

    work = [arrival(i, 700 * i, 9, 3 + i % 4) for i in range(20)]
    alone = simulate(new_engine(), work)
    fleet = simulate_cluster(
        [new_engine()],
        routers.make("vllm"),
        work,
        changes=Changes(Supply(new_engine, ["mixed"], [0])),
    )
    assert laws.signature(fleet.of_engines[0]) == laws.signature(alone)


# -- engines of a fleet --------------------------------------------------------------------------


def fleet(*shares, failures=None, num_requests=6):
    """Run requests in turn on engines whose stages take so many tenths of 1,000 ns."""

    def new_engine(pool):
        config = EngineConfig(
            num_blocks=99, max_model_len=99, pipeline_parallel_size=len(shares[pool])
        )
        cost = StagedCost(shares[pool], base_ns=1000, token_ns=0, context_ns=0)
        if len(shares[pool]) == 1:
            return Engine(config, registry.make("fcfs"), SimExecutor(Pricing(cost)))
        return PipelinedEngine(config, registry.make("fcfs"), PipelineExecutor(Pricing(cost)))

    supply = Supply(new_engine, ["mixed"] * len(shares), [0] * len(shares))
    return simulate_cluster(
        [new_engine(pool) for pool in range(len(shares))],
        routers.make("round_robin"),
        [arrival(i, 0, 3, 4) for i in range(num_requests)],
        changes=Changes(supply, failures),
    )


def test_server_moves_while_it_plans_or_has_a_batch_in_flight():
    clock = Clock()
    config = EngineConfig(num_blocks=99, max_model_len=99, pipeline_parallel_size=2)
    cost = StagedCost((10, 10), base_ns=1000, token_ns=0, context_ns=0)
    engine = PipelinedEngine(config, registry.make("fcfs"), PipelineExecutor(Pricing(cost)))
    live = LiveState(0, engine, clock)
    server = PipelinedServer(clock, engine, live)
    assert not server.is_moving
    seen = []

    def look(_):
        seen.append((server.is_moving, live.num_waiting, live.num_running))

    engine.submit(arrival(0, 0, 3, 1), 0)
    server.wake()
    look(None)
    for at_ns in (0, 1999, 2000):
        clock.at(at_ns, REPORTS if at_ns else PLANS, look, place=1)
    clock.run()
    assert seen == [(True, 1, 0), (True, 0, 1), (True, 0, 1), (True, 0, 1)]
    assert not server.is_moving
    assert live.num_running == 0


def test_engine_that_dies_loses_all_batches_in_flight():
    # Steps end at 2000, 3000 (the first stage takes 1,000 ns, the second too), 4000, ...
    log = fleet((10, 10), failures=Failures(outages=[Outage(0, 2_500, 700)]), num_requests=2)
    steps = log.steps()
    assert steps["end_ns"][steps["start_ns"] < 2_500].tolist() == [2_000]
    assert [(loss.id, loss.at_ns, loss.lost_tokens) for loss in log.losses] == [
        (0, 2_500, 3), (1, 2_500, 3),
    ]  # fmt: skip
    assert steps["start_ns"][1] == 3_200
    for number in (0, 1):
        assert log.token_times(number)[:2].tolist() == [2_000, 5_200]
        assert len(log.token_times(number)) == 4


@pytest.mark.parametrize("dies", [False, True])
def test_some_steps_of_a_fleet_are_those_rows_of_all_of_them(dies):
    failures = Failures(outages=[Outage(0, 2_500, 700)]) if dies else None
    log = fleet((10, 10), (20,), (5, 5, 10), failures=failures, num_requests=7)
    steps, size = log.steps(), log.steps().num_rows
    assert len(steps) == len(list(steps))
    assert {*steps} >= {"engine", "micro_batch", "stage_2_ns"}
    assert steps["start_ns"].tolist() == sorted(steps["start_ns"])
    of_dead = steps["micro_batch"][steps["engine"] == 0]
    assert np.unique(of_dead[of_dead >= 0]).tolist() == list(
        range(len(np.unique(of_dead)) - (-1 in of_dead))
    )  # of an engine that was replaced they are counted on
    for start, stop in ((0, size), (0, 1), (3, 9), (7, size - 2), (size - 1, size), (4, 4)):
        some = steps.rows(start, stop)
        assert {*some} == {*steps}
        for name in steps:
            assert some[name].tolist() == steps[name][start:stop].tolist(), (name, start, stop)
    with pytest.raises(KeyError, match="colour"):
        steps["colour"]


def test_totals_of_steps_in_batches_hold_where_an_engine_has_stopped_before(monkeypatch):
    steps = fleet((10, 10), (5,), (5, 5, 10), num_requests=4).steps()
    last_ns = [steps["start_ns"][steps["engine"] == engine].max() for engine in range(3)]
    assert last_ns[1] < last_ns[0], "one engine has nothing left to do"

    def totals():
        found = step_totals(batches(steps))
        return [getattr(found, f.name) for f in fields(found) if f.name != "_lengths"]

    wanted = totals()
    monkeypatch.setattr(columns, "BATCH_ROWS", 2)
    assert len(list(batches(steps))) > 4
    assert totals() == wanted


def test_decode_steps_of_micro_batches_count_alike_where_the_last_batch_of_rows_has_few(
    monkeypatch,
):
    micro_batch, num_decodes = np.array([0, 1, 2, 0, 1, 0]), np.array([1, 2, 3, 0, 4, 5])
    steps = columns.LazyTable(
        6, {"micro_batch": columns.held(micro_batch), "num_decodes": columns.held(num_decodes)}
    )
    assert decodes_before(steps).tolist() == [0, 2, 4, 5]
    monkeypatch.setattr(columns, "BATCH_ROWS", 4)  # in the last rows there are fewer of them
    assert decodes_before(steps).tolist() == [0, 2, 4, 5]


def test_totals_of_any_steps_cut_anywhere_are_those_counted_step_by_step():
    draw = Random(5)
    sums = ("overhead_ns", "num_decodes", "prefill_tokens", "padding_tokens", "swapped_bytes",
            "draft_tokens", "accepted_tokens", "num_drafts")  # fmt: skip
    means = ("num_running", "num_waiting", "kv_tokens", "kv_allocated_tokens",
             "kv_reserved_unused_tokens", "kv_fragmentation_tokens")  # fmt: skip
    for width in 6 * (0, 1, 3):
        num_rows, num_engines = draw.randint(1, 12), draw.randint(1, 3)
        steps = {name: [draw.randint(0, 99) for _ in range(num_rows)] for name in (*sums, *means)}
        steps["start_ns"] = sorted(draw.randint(10, 60) for _ in range(num_rows))
        # A step may end long after those of other engines that begin later.
        steps["engine"] = [draw.randrange(num_engines) for _ in range(num_rows)]
        steps["num_prefills"] = [draw.randint(0, 3) for _ in range(num_rows)]
        last_ns, ends_ns = [0] * num_engines, []
        lengths_ns = []
        for start_ns, engine in zip(steps["start_ns"], steps["engine"], strict=True):
            end_ns = max(start_ns, last_ns[engine]) + draw.randint(1, 50)
            # Of a pipeline, whose steps overlap, what another batch has taken counts once.
            begun_ns = max(start_ns, last_ns[engine]) if width else start_ns
            lengths_ns.append(end_ns - begun_ns)
            last_ns[engine] = end_ns
            ends_ns.append(end_ns)
        steps["end_ns"] = ends_ns
        num_stages = [1 + draw.randrange(width) for _ in range(num_engines)] if width else []
        for place in range(width):
            steps[f"stage_{place}_ns"] = [
                draw.randint(1, 9) if place < num_stages[engine] else 0
                for engine in steps["engine"]
            ]
        cuts = sorted(draw.randint(0, num_rows) for _ in range(draw.randint(0, 3)))
        totals = step_totals(
            {name: np.array(column[a:b], dtype=np.int64) for name, column in steps.items()}
            for a, b in zip([0, *cuts], [*cuts, num_rows], strict=True)
            if b > a or not width
        )
        assert totals.num_steps == num_rows
        assert totals.first_start_ns == steps["start_ns"][0]
        assert totals.last_end_ns == max(ends_ns)
        assert totals.busy_ns == sum(lengths_ns)
        assert totals.sums == {name: sum(steps[name]) for name in sums}
        steps["batch"] = [
            a + b for a, b in zip(steps["num_decodes"], steps["num_prefills"], strict=True)
        ]
        for name in (*means, "batch"):
            held = sum(n * ns for n, ns in zip(steps[name], lengths_ns, strict=True))
            assert totals.mean(name) == pytest.approx(held / sum(lengths_ns)), name
            assert totals.most[name] == max(steps[name]), name
        if width:
            assert totals.stages_ns == [sum(steps[f"stage_{i}_ns"]) for i in range(width)]
            there = set(steps["engine"])
            assert totals.num_stages == {i: num_stages[i] for i in there}
            staged = zip(steps["engine"], lengths_ns, strict=True)
            assert totals.staged_ns == sum(num_stages[i] * ns for i, ns in staged)
        else:
            assert totals.stages_ns == []
            assert totals.num_stages == {}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_fleet_whose_policy_waits_goes_on_when_it_said_or_is_stalled(num_stages):
    def served(until_ns):
        config = EngineConfig(num_blocks=99, max_model_len=99, pipeline_parallel_size=num_stages)
        pricing = Pricing(StagedCost(num_stages * (10,), base_ns=1000, token_ns=0, context_ns=0))
        if num_stages == 1:
            engine = Engine(config, Waits(until_ns), SimExecutor(pricing))
        else:
            engine = PipelinedEngine(config, Waits(until_ns), PipelineExecutor(pricing))
        supply = Supply(lambda pool: engine, ["mixed"], [0])
        return simulate_cluster(
            [engine], routers.make("least_outstanding_requests"), [arrival(0, 0, 3, 2)],
            changes=Changes(supply, None),
        )  # fmt: skip

    log = served(50_000)
    # The prompt at once; the second token when the time has come that the policy named.
    assert log.token_times(0).tolist() == [1_000 * num_stages, 50_000 + 1_000 * num_stages]
    with pytest.raises(Stalled, match="the policy waits and nothing is left to happen"):
        served(FOREVER)


def test_steps_and_stages_of_a_fleet_are_those_of_its_engines():
    log = fleet((10, 30), (20,), (5, 5, 10))
    steps = log.steps()
    names = {"stage_0_ns", "stage_1_ns", "stage_2_ns", "engine"}
    assert names < {*steps}
    for engine, spent_ns in enumerate([(1000, 3000, 0), (0, 0, 0), (500, 500, 1000)]):
        here = steps["engine"] == engine
        assert here.any()
        for stage, ns in enumerate(spent_ns):
            assert (steps[f"stage_{stage}_ns"][here] == ns).all()
    totals = step_totals(batches(steps))
    assert totals.num_stages == {0: 2, 2: 3}
    lengths_ns = {}
    for engine in range(3):
        here = steps["engine"] == engine
        start_ns, end_ns = steps["start_ns"][here], steps["end_ns"][here]
        lengths_ns[engine] = (end_ns - np.maximum(start_ns, np.append(0, end_ns[:-1]))).sum()
    assert totals.busy_ns == sum(lengths_ns.values())
    assert totals.staged_ns == 2 * lengths_ns[0] + 3 * lengths_ns[2]
    counted = [np.count_nonzero(steps["engine"] == engine) for engine in range(3)]
    assert sum(totals.stages_ns) == counted[0] * 4000 + counted[2] * 2000


# -- experiments ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_fleet_of_pipelines_counts_all_gpus_and_has_bubbles_of_pipelines_alone(tmp_path):
    pools = {
        "piped": {"count": 2},
        "whole": {"engine": {"pipeline_parallel_size": 1, "tensor_parallel_size": 8}},
    }
    result = run(spec(cluster={"pools": pools, "router": "jsq"}))
    assert [engine.num_gpus for engine in result.engines] == [8, 8, 8]
    assert result.metric("gpu_seconds") == pytest.approx(24 * result.metric("duration_s"))
    assert 0 < result.metric("pipeline_bubble_share") < 1
    busy = of_engines(result.observation())["busy (% of the run)"]
    assert ((busy > 50) & (busy <= 100)).all()
    assert result.metric("min_engine_busy_share") == pytest.approx(busy.min() / 100)
    assert result.metric("load_imbalance") == pytest.approx(busy.max() / busy.mean())
    assert busy.sum() == pytest.approx(300 * result.metric("busy_s") / (
        3 * result.metric("duration_s")
    ))  # fmt: skip
    steps = result.log.steps()
    piped = steps["engine"] < 2
    span_ns = steps["end_ns"].max() - steps["start_ns"].min()
    for stage in (0, 1):
        spent_ns = steps[f"stage_{stage}_ns"]
        assert (spent_ns > 0).tolist() == piped.tolist()
        assert result.metric(f"stage_utilization(stage={stage})") == pytest.approx(
            spent_ns.sum() / 2 / span_ns
        )
    result.save(tmp_path / "run")
    saved = RunResult.load(tmp_path / "run")
    assert saved.metric("pipeline_bubble_share") == result.metric("pipeline_bubble_share")
    for number in range(40):
        assert saved.log.token_times(number).tolist() == result.log.token_times(number).tolist()
    result.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["name"] == "step"]
    assert ["stage_1_ns" in event["args"] for event in spans] == piped.tolist()
    by_process = {}
    for event in spans:
        by_process.setdefault(event["pid"], set()).add(event["tid"])
    assert [len(by_process[process]) for process in sorted(by_process)] == [2, 2, 1]
    for process, threads in by_process.items():
        for thread in threads:
            times = [
                (e["ts"], e["ts"] + e["dur"])
                for e in spans
                if (e["pid"], e["tid"]) == (process, thread)
            ]
            assert all(b[0] >= a[1] - 1e-6 for a, b in pairwise(times))


def test_run_with_stages_says_so_and_is_measured(tmp_path):
    result = run(spec(engine={"pipeline_link": "ethernet-100g"}))
    described = result.provenance["cost_model"]
    assert described["layers_per_stage"] == [40, 40]
    assert described["pipeline_link"]["bytes_per_s"] == 12.5e9
    assert result.provenance["engine"]["pipeline_parallel_size"] == 2
    result.save(tmp_path / "run")
    saved = RunResult.load(tmp_path / "run")
    for name in (
        "pipeline_bubble_share", "mean_stage_utilization", "stage_utilization(stage=1)",
        "busy_share",
    ):  # fmt: skip
        assert 0 < result.metric(name) == saved.metric(name) <= 1
    each = [result.metric(f"stage_utilization(stage={place})") for place in (0, 1)]
    assert result.metric("mean_stage_utilization") == pytest.approx(sum(each) / 2)
    assert np.isnan(result.metric("stage_utilization(stage=2)"))


def test_run_without_stages_has_no_bubbles():
    result = run(spec(engine={"pipeline_parallel_size": 1}))
    assert np.isnan(result.metric("pipeline_bubble_share"))
    assert "pipeline_parallel_size" not in result.provenance["engine"]
    assert not [name for name in result.log.steps() if name.startswith("stage_")]


def test_metric_of_bubbles_is_found():
    assert metric_named("pipeline_bubble_share").axis == "pipeline bubbles (%)"


@pytest.mark.parametrize(("profile", "most"), [(None, 2), ("vllm-0.32", 3)])
def test_trace_has_a_thread_for_each_batch_in_flight(tmp_path, profile, most):
    result = run(spec(engine={"profile": profile}))
    result.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert len({event["tid"] for event in steps}) == most
    for thread in {event["tid"] for event in steps}:
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in steps if e["tid"] == thread]
        assert all(b[0] >= a[1] - 1e-6 for a, b in pairwise(spans))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": {"pipeline_parallel_size": 0}}, "pipeline_parallel_size: must be >= 1, got 0"),
        ({"engine": {"pipeline_parallel_size": 81}}, "has 80 layers to divide; from 1 to 80"),
        (
            {"engine": {"pipeline_parallel_size": 1, "pipeline_link": "nvlink"}},
            "pipeline_link joins the stages of a pipeline, and there is one stage",
        ),
        ({"engine": {"pipeline_link": "ethernet"}}, "pipeline_link.name: 'ethernet' is not a"),
        ({"engine": {"pipeline_link": {"latency_us": 3}}}, "pipeline_link: give a name"),
        (
            {"engine": {"data_parallel_size": 2}},
            "must be 1 with data_parallel_size > 1; set cluster.count for several engines",
        ),
        ({"backend": "real"}, "pipeline_parallel_size: must be 1 with backend: real"),
        ({"backend": "vllm"}, "pipeline_parallel_size: must be 1 with backend: vllm"),
        (
            {"engine": {"async_scheduling": True}},
            "engine.arrivals_between_steps: must be true with async_scheduling and pipeline_",
        ),
        (
            {"engine": {"profile": "vllm-0.24"}},
            "async_scheduling: must be false with .* profile vllm-0.24, which switches it on",
        ),
        ({"engine": {"check_horizon": True}}, "check_horizon: is not simulated with"),
        (
            {
                "engine": {
                    "speculation": {
                        "method": "ngram",
                        "num_speculative_tokens": 2,
                        "acceptance": 0.5,
                    }
                }
            },
            "engine.speculation: is not simulated with pipeline_parallel_size > 1",
        ),
        ({"policy": "static"}, "static does not plan with several batches in flight .*these do: "),
    ],
)
def test_what_a_pipeline_cannot_be_is_named(keys, message):
    with pytest.raises(SpecError, match=message):
        spec(**keys)


def test_engine_that_plans_batches_ahead_takes_arrivals_between_steps():
    with pytest.raises(ValueError, match="set arrivals_between_steps: true"):
        EngineConfig(num_blocks=9, max_model_len=9, pipeline_parallel_size=2, async_scheduling=True)


@pytest.mark.parametrize("dying", [{"engines": [{"engine": 0, "at_s": 1}]}, {"mtbf_s": 9}])
def test_engines_that_die_with_batches_planned_ahead_are_refused(dying):
    def of_two(failures, **switches):
        if "mtbf_s" in failures:
            failures = {**failures, "mttr_s": 9}
        engine = {"profile": "vllm-0.32", **switches}
        return spec(cluster={"count": 2, "failures": failures}, engine=engine)

    of_two(dying, async_scheduling=False)
    of_two({"stragglers": [{"engine": 0, "from_s": 1, "to_s": 2, "slowdown": 2}]})
    with pytest.raises(SpecError, match=r"engine.async_scheduling: must be false .* that die"):
        of_two(dying)


def test_engine_with_batches_planned_ahead_cannot_die():
    engine = PipelinedEngine(AHEAD, registry.make("fcfs"), PipelineExecutor(Pricing(StagedCost())))
    with pytest.raises(SchedlabError, match="engines that die are not simulated with async_sch"):
        engine.die(0)


def test_profile_of_a_release_with_the_v2_model_runner_plans_batches_ahead():
    assert run(spec(engine={"profile": "vllm-0.32"})).provenance["engine"]["async_scheduling"]


def test_prompts_sent_layer_by_layer_from_stages_are_refused():
    def divided(**roles):
        pools = {
            role: {"role": role, "engine": {"pipeline_parallel_size": stages}}
            for role, stages in roles.items()
        }
        return {"cluster": {"pools": pools, "link": {"name": "nvlink", "by_layer": True}}}

    spec(**divided(prefill=1, decode=2))
    with pytest.raises(
        SpecError, match=r"cluster.pools.prefill.engine.pipeline_\w+: must be 1 with cluster.link"
    ):
        spec(**divided(prefill=2, decode=1))


def test_cost_model_without_stages_is_named():
    where = {"cost_model": "profiles/cpu/schedlab-mini/vllm-fp32-tp1"}
    with pytest.raises(SpecError, match="does not divide its steps among stages"):
        run(spec(model="schedlab-mini", hardware="cpu", engine={
            "tensor_parallel_size": 1, "dtype": "fp32",
            "scheduling_overhead": {"base_s": 0.0},
        }, **where))  # fmt: skip


def test_stages_that_do_not_fit_are_named():
    with pytest.raises(SpecError, match="does not fit on a100-80gb in stage 2 of 2"):
        run(spec(engine={"tensor_parallel_size": 1, "gpu_memory_utilization": 0.8}))


def test_line_of_the_key_is_told(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: x\nmodel: llama-2-7b\nengine:\n  pipeline_parallel_size: 33\n"
        "workload: {trace: azure-conv, num_requests: 3, request_rate: 1}\n"
    )
    with pytest.raises(SpecError, match=r"spec.yaml:4: engine.pipeline_parallel_size"):
        load_spec(path)


def test_batch_in_the_pipeline_that_lacks_one_of_its_decodes_breaks_conservation():
    config = EngineConfig(num_blocks=100, max_model_len=100, pipeline_parallel_size=2)
    engine = PipelinedEngine(config, registry.make("fcfs"), PipelineExecutor(Pricing(StagedCost())))
    for i in range(3):
        engine.submit(arrival(i, 0, 5, 9), 0)
    engine.begin(0)  # all three prompts
    engine.commit()
    engine.begin(engine.now_ns)
    (away,) = engine.requests.in_pipeline.batches
    laws.check_conservation(engine)
    away.decodes.leave(next(iter(away.decodes.members.values())))
    with pytest.raises(AssertionError, match="a request in flight is in no phase"):
        laws.check_conservation(engine)


def test_steps_of_a_pipeline_count_from_the_end_of_the_one_before_also_in_the_next_part():
    # Engines 0 and 1 by turns; a step begins while the one before it on its engine is away.
    table = {
        "start_ns": np.array([10, 12, 15, 20, 40, 42]),
        "end_ns": np.array([30, 25, 45, 44, 60, 70]),
        "engine": np.array([0, 1, 0, 1, 0, 1]),
        "stage_0_ns": np.ones(6, dtype=np.int64),
    }
    starts = [10, 12, 30, 25, 45, 44]
    for size in (1, 2, 3, 4, 6):
        lengths, found = StepLengths(), []
        for first in range(0, 6, size):
            part = {name: column[first : first + size] for name, column in table.items()}
            found += lengths.starts_ns(part).tolist()
        assert found == starts, size
    took = StepLengths().of(table).tolist()
    assert took == (table["end_ns"] - starts).tolist()
    del table["stage_0_ns"]
    assert StepLengths().starts_ns(table).tolist() == table["start_ns"].tolist()
