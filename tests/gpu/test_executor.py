"""The real executor behind the engine: the simulator's decisions, and the model's own tokens."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from schedlab.experiments.running.run import run  # noqa: E402
from schedlab.experiments.specification.loading import make_spec  # noqa: E402
from schedlab.gpu_backend.clock import ModelledClock, VirtualClock  # noqa: E402
from schedlab.gpu_backend.executor import TorchExecutor  # noqa: E402
from schedlab.policies import registry  # noqa: E402
from schedlab.sim.core.engine import Engine  # noqa: E402
from schedlab.sim.cost.overhead import SchedulingOverhead  # noqa: E402
from schedlab.sim.cost.pricing import Pricing  # noqa: E402
from schedlab.sim.drive.simulation import simulate  # noqa: E402
from schedlab.sim.errors import SpecError  # noqa: E402
from schedlab.sim.record.columns import FINISHED, TRUNCATED  # noqa: E402
from tests import laws  # noqa: E402
from tests.gpu.backend import (  # noqa: E402
    CONFIG,
    TIGHT,
    TINY,
    generated,
    random_tensors,
    run_real,
    tiny_runner,
)
from tests.gpu.reference import full_logits  # noqa: E402
from tests.policy_cases import CASES, make  # noqa: E402

OVERHEAD = SchedulingOverhead(1e-6, 1e-7, 1e-8)
MEMORY = {
    "paged": TIGHT,
    "contiguous": replace(TIGHT, kv_allocator="contiguous_exact"),
    "swap": replace(TIGHT, preemption_mode="swap", swap_space_blocks=20, kv_block_bytes=2048),
}
NEVER_PREEMPT = {"tensorrt_llm", "tgi", "tgi3", "scorpio", "past_future"}
"""They reserve memory to the end of a request before they admit it, reject what comes late, or
take answers for long ones until they have seen many."""


# Preemption moves blocks only where memory is paged, so every policy is run there; what the other
# two memories do depends on when requests come, go and come back, not on whose rule that is.
ELSEWHERE = {
    "contiguous": ("fcfs", "static", "orca", "sarathi", "vtc", "tensorrt_llm/static_batch"),
    "swap": ("srtf", "fastserve", "trail/unlimited", "ltr", "dynamic", "aged/priority"),
}


def workload(gap_ns=900):
    rng = np.random.default_rng(5)
    return [
        laws.arrival(
            i,
            gap_ns * i,
            int(rng.integers(1, 60)),
            int(rng.integers(1, 30)),
            priority=int(rng.integers(0, 3)),
            predicted_tokens=float(rng.integers(1, 30)),
        )
        for i in range(10)
    ]


@pytest.fixture(scope="module")
def alone():
    """What every request generates when it is served alone."""
    tokens = {}
    for request in workload():
        _, executor = run_real("fcfs", [request])
        tokens.update(generated(executor, [request]))
    assert len({tuple(t) for t in tokens.values()}) == len(tokens)
    assert np.median([len(set(t)) / len(t) for t in tokens.values()]) > 0.4, "too repetitive"
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "memory"),
    [
        pytest.param(case, memory, marks=() if case in ("fcfs", "static") else pytest.mark.slow)
        for memory, cases in {"paged": CASES, **ELSEWHERE}.items()
        for case in cases
    ],
)
def test_policy_on_real_kernels_decides_as_simulated_and_changes_no_token(case, memory, alone):
    config = MEMORY[memory]
    simulated = laws.run(make(case), workload(), config, overhead=OVERHEAD)
    clock = ModelledClock(Pricing(laws.LinearCost(), OVERHEAD))
    estimate = Pricing(laws.LinearCost(), OVERHEAD).estimate_ns
    real, executor = run_real(make(case), workload(), config, clock, estimate_step_ns=estimate)
    assert laws.signature(real) == laws.signature(simulated)
    served = [a for a in workload() if a.request.id not in real.reject_reasons]
    assert served
    assert generated(executor, served) == {a.request.id: alone[a.request.id] for a in served}
    if memory == "paged" and case.split("/")[0] not in NEVER_PREEMPT:
        assert real.requests()["num_preemptions"].sum() > 0, "memory was not short"


@pytest.mark.slow
@pytest.mark.parametrize("host_blocks", [6, 200], ids=["some-recomputed", "all-swapped"])
@pytest.mark.parametrize("case", ["fcfs", "sjf", "prefill_first", "priority", "sarathi"])
def test_swapped_requests_go_on_where_they_were(case, host_blocks, alone):
    config = replace(
        TIGHT, preemption_mode="swap", swap_space_blocks=host_blocks, kv_block_bytes=2048
    )
    simulated = laws.run(make(case), workload(gap_ns=0), config)
    real, executor = run_real(make(case), workload(gap_ns=0), config)
    assert laws.signature(real) == laws.signature(simulated)
    assert generated(executor, workload()) == alone
    assert real.steps()["swapped_bytes"].sum() > 0
    assert (real.requests()["recomputed_tokens"].sum() > 0) == (host_blocks == 6)


def test_held_requests_of_a_static_batch_are_computed_along():
    policy = registry.make("static", pad_prompts=True, pad_decodes=True)
    log, executor = run_real(policy, workload(gap_ns=0))
    assert log.steps()["padding_tokens"].sum() > 0
    assert any(s.shape.padding_context_tokens for s in executor.steps)


@pytest.mark.parametrize("policy", ["static", "prompt_buckets"])
def test_sealed_batch_of_more_residents_than_rows_runs_on_the_device_as_simulated(policy):
    data = {
        "name": "sealed", "model": "schedlab-tiny", "hardware": "cpu", "policy": policy,
        "real": {"clock": "modelled"},
        "engine": {
            "dtype": "fp32", "num_gpu_blocks_override": 64, "block_size": 4, "max_num_seqs": 2,
            "max_num_resident": 6, "max_num_batched_tokens": 64, "max_model_len": 64,
        },
        "workload": {
            "prompt_tokens": 8, "output_tokens": {"distribution": "uniform", "low": 1, "high": 12},
            "num_requests": 12, "request_rate": float("inf"),
        },
    }  # fmt: skip
    simulated = run(make_spec(data | {"backend": "sim"}))
    measured = run(make_spec(data | {"backend": "real"}))
    steps = measured.log.steps()
    assert (steps["num_decodes"] + steps["padding_tokens"]).max() > 3
    for name, column in simulated.log.steps().items():
        assert steps[name].tolist() == column.tolist(), name
    assert measured.requests["finish_ns"].tolist() == simulated.requests["finish_ns"].tolist()


def test_greedy_tokens_are_the_most_likely_ones_of_full_attention(alone):
    prompt = np.arange(7)
    request = laws.arrival(0, 0, 7, 20)
    _, executor = run_real("fcfs", [request], prompt_ids=lambda _: prompt)
    tokens = [*prompt.tolist(), *executor.generated(0).tolist()]
    logits = full_logits(TINY, random_tensors(TINY), tokens[:-1])
    assert logits[6:].argmax(-1).tolist() == tokens[7:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"shuffle_blocks": True}, {"prepare_ahead": True}],
    ids=["shuffled-blocks", "prepared-ahead"],
)
@pytest.mark.parametrize("config", [CONFIG, TIGHT], ids=["roomy", "tight"])
def test_way_of_execution_changes_neither_decisions_nor_tokens(options, config, alone):
    plain, _ = run_real("fcfs", workload(), config)
    log, executor = run_real("fcfs", workload(), config, **options)
    assert laws.signature(log) == laws.signature(plain)
    assert generated(executor, workload()) == alone
    prepared = sum(step.was_prepared for step in executor.steps)
    assert bool(prepared) == ("prepare_ahead" in options)


@pytest.mark.slow
def test_chunk_size_changes_no_token(alone):
    for budget in (9, 20):
        config = replace(CONFIG, max_num_batched_tokens=budget)
        _, executor = run_real("fcfs", workload(), config)
        assert generated(executor, workload()) == alone


@pytest.mark.slow
def test_random_sampling_depends_on_seed_and_request_but_not_on_the_batch():
    roomy = tiny_runner(temperature=1.0)
    _, together = run_real("fcfs", workload(), runner=roomy)
    _, pressed = run_real("sjf", workload(), TIGHT, runner=tiny_runner(TIGHT, temperature=1.0))
    _, reseeded = run_real(
        "fcfs", workload(), runner=roomy, seed=1,
        prompt_ids=together.sequences._prompt_ids,
    )  # fmt: skip
    assert generated(pressed, workload()) == generated(together, workload())
    assert generated(reseeded, workload()) != generated(together, workload())


def test_request_cut_by_max_tokens_is_truncated():
    cut = laws.arrival(0, 0, 5, 30, max_tokens=4)
    log, executor = run_real("fcfs", [cut, laws.arrival(1, 0, 5, 3, max_tokens=4)])
    assert log.requests()["status"].tolist() == [TRUNCATED, FINISHED]
    assert len(executor.generated(0)) == 4
    assert len(executor.generated(1)) == 3


def test_virtual_clock_takes_the_measured_time_of_every_step():
    log, executor = run_real("fcfs", workload(), clock=VirtualClock())
    steps = log.steps()
    assert (steps["end_ns"] - steps["start_ns"]).tolist() == [
        step.duration_ns for step in executor.steps
    ]
    for step in executor.steps:
        assert step.duration_ns >= step.overhead_ns + step.prepare_ns + step.device_ns
    laws.check(log, workload(), CONFIG)


def test_policy_that_asks_for_a_step_time_gets_the_cost_models_or_an_error():
    pricing = Pricing(laws.LinearCost())
    executor = TorchExecutor(
        tiny_runner(), CONFIG, VirtualClock(), estimate_step_ns=pricing.estimate_ns
    )
    asked = laws.BatchShape(3, 30, 20)
    assert executor.estimate_step_ns(asked) == pricing.estimate_ns(asked)
    without = TorchExecutor(tiny_runner(), CONFIG, VirtualClock())
    with pytest.raises(SpecError, match="cost model"):
        without.estimate_step_ns(asked)


def test_prompt_ids_of_the_wrong_length_are_refused():
    executor = TorchExecutor(
        tiny_runner(), CONFIG, VirtualClock(), prompt_ids=lambda _: np.zeros(3, dtype=np.int64)
    )
    engine = Engine(CONFIG, registry.make("fcfs"), executor)
    with pytest.raises(ValueError, match="request 0: 3 prompt ids for 5 prompt tokens"):
        simulate(engine, [laws.arrival(0, 0, 5, 2)])


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(104, 26), (105, 27), (107, 27)])
def test_table_of_blocks_has_a_place_for_a_last_one_that_is_not_full(max_model_len, num_blocks):
    runner = tiny_runner(replace(CONFIG, max_model_len=max_model_len))
    assert runner.layout.max_blocks == num_blocks
