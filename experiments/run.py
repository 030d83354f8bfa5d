"""Run one point of an experiment: the function that everything else calls."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from experiments.spec import ExperimentSpec, spec_hash
from experiments.workload import load_workload
from policies import registry
from policies.predictors import registry as predictors
from policies.predictors.predictor import PredictionInputs
from sim.config import EngineConfig
from sim.cost.overhead import SchedulingOverhead
from sim.cost.shape import CostModel
from sim.engine import Engine
from sim.errors import SpecError
from sim.executor import Executor, SimExecutor
from sim.hardware import gpu
from sim.log import RunLog
from sim.memory import MemoryBudget, memory_budget
from sim.models import model
from sim.plan_log import RecordedStep, RecordingExecutor
from sim.request import Arrival, Slo
from sim.result import RunResult
from sim.rng import stream
from sim.simulation import simulate
from traces.trace import Trace
from traces.workload import workload

if TYPE_CHECKING:
    from policies.predictors.predictor import Floats, Predictor

Progress = Callable[[int, int], None]
"""Called with the number of requests finished and the number in all."""


def run(
    spec: ExperimentSpec,
    progress: Progress | None = None,
    record: list[RecordedStep] | None = None,
) -> RunResult:
    """Run one experiment, without sweep or replications, on the backend it names.

    On the simulated backend it is a pure function of the specification and of the files it
    names: the same input gives the same bytes.

    Parameters
    ----------
    spec : ExperimentSpec
        One point; see `experiments.sweep.points`.
    progress : callable, optional
        Told now and then how many requests are done.
    record : list, optional
        Filled with every step's decision and time; the run is then stepped one by one.

    Returns
    -------
    RunResult
        Requests, steps, metrics and provenance.

    Raises
    ------
    SpecError, TraceError
        If the specification or its trace is wrong, or the real backend cannot run here.
    PolicyError, Stalled
        If the policy misbehaves.
    """
    if spec.sweep or spec.replications > 1:
        raise SpecError("run() takes one point: expand the sweep with experiments.sweep.points")
    budget = _memory(spec)
    config = engine_config(spec, budget)
    trace = load_workload(spec, config.max_model_len)
    predictor = _predictor(spec)
    predicted = None if predictor is None else _predict(predictor, trace, spec.seed)
    targets = Slo(spec.slo.ttft_ms, spec.slo.tpot_ms, spec.slo.e2el_ms)
    arrivals = workload(
        trace,
        max_model_len=config.max_model_len,
        predicted_tokens=predicted,
        predictor_latency_s=predictor.latency_s if predictor is not None else 0.0,
        slo=targets if targets != (None, None, None) else None,
    )
    cost_model = make_cost_model(spec)
    overhead = make_overhead(spec, cost_model)
    backend: Backend = SimBackend(SimExecutor(cost_model, overhead))
    if spec.backend == "real":
        from experiments.real_backend import open_backend

        backend = open_backend(spec, config, cost_model, overhead)
    executor: Executor = backend.executor
    if record is not None:
        executor = recorder = RecordingExecutor(executor)
        recorder.steps = record
    policy = registry.make(spec.policy.name, **spec.policy.knobs)
    engine = Engine(config, policy, executor)
    if progress is not None:
        engine.observer = _reporter(progress, len(trace))
    log = backend.drive(engine, arrivals, spec.workload.max_concurrency)
    return RunResult(
        name=spec.name,
        policy=spec.policy.name,
        requests=log.requests(),
        log=log,
        kv_capacity_tokens=config.num_blocks * config.block_size,
        reject_reasons=log.reject_reasons,
        provenance={
            **_provenance(spec),
            "cost_model": cost_model.describe(),
            "scheduling_overhead": asdict(overhead),
            "real": backend.describe(),
            "engine": {name: getattr(config, name) for name in config.__dataclass_fields__},
            "memory": {name: getattr(budget, name) for name in budget.__dataclass_fields__},
            "workload": trace.report.lines(),
            "prediction": _prediction_quality(spec, predicted, trace),
            "num_plans": engine.num_plans,
            "num_steps": log.num_steps,
            "extrapolated_steps": getattr(cost_model, "extrapolated_steps", 0),
        },
    )


class Backend(Protocol):
    """What carries plans out, and what moves the clock."""

    @property
    def executor(self) -> Executor:
        """What runs steps."""

    def drive(
        self, engine: Engine, arrivals: Iterable[Arrival], max_concurrency: int | None
    ) -> RunLog:
        """Run a workload to its end."""

    def describe(self) -> dict[str, object] | None:
        """Return what a result must say about it; None for the simulation."""


class SimBackend:
    """A simulated GPU on SimPy's clock."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def drive(
        self, engine: Engine, arrivals: Iterable[Arrival], max_concurrency: int | None
    ) -> RunLog:
        """Run a workload to its end."""
        return simulate(engine, arrivals, max_concurrency)

    def describe(self) -> dict[str, object] | None:
        """Return None: the cost model says it all."""
        return None


def engine_config(spec: ExperimentSpec, budget: MemoryBudget) -> EngineConfig:
    """Return the limits of the engine that a specification describes.

    Raises
    ------
    SpecError
        If they contradict each other, e.g. `max_model_len` exceeds the KV cache.
    """
    engine = spec.engine
    num_blocks = engine.num_gpu_blocks_override or budget.num_blocks
    capacity_tokens = num_blocks * engine.block_size
    block_bytes = budget.kv_bytes_per_token * engine.block_size
    max_model_len = engine.max_model_len or min(model(spec.model).max_model_len, capacity_tokens)
    try:
        return EngineConfig(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            long_prefill_token_threshold=engine.long_prefill_token_threshold,
            watermark=engine.watermark,
            scheduler_reserve_full_isl=engine.scheduler_reserve_full_isl,
            kv_allocator=engine.kv_allocator,
            preemption_mode=engine.preemption_mode,
            swap_space_blocks=int(engine.swap_space * 2**30 / block_bytes),
            kv_block_bytes=block_bytes,
            fast_forward=engine.fast_forward,
            check_horizon=engine.check_horizon,
        )
    except ValueError as error:
        raise SpecError(f"engine: {error}") from error


def make_overhead(spec: ExperimentSpec, cost_model: CostModel) -> SchedulingOverhead:
    """Return the scheduling overhead: the specification's, else the profile's, else none."""
    stated = spec.engine.scheduling_overhead
    if stated is not None:
        return SchedulingOverhead(stated.base_s, stated.per_running_s, stated.per_waiting_s)
    measured = getattr(cost_model, "meta", {}).get("scheduling_overhead")
    return SchedulingOverhead(**measured) if measured else SchedulingOverhead()


def make_cost_model(spec: ExperimentSpec) -> CostModel:
    """Return the cost model that a specification names.

    Raises
    ------
    SpecError
        If a profile is unreadable or of another model or GPU than the run's.
    """
    engine, chosen = spec.engine, spec.cost_model
    if chosen.profile is not None:
        from sim.cost.fitted import FittedCostModel

        return FittedCostModel.load(
            chosen.profile,
            model=model(spec.model).name,
            hardware=gpu(spec.hardware).name,
            dtype=engine.dtype,
            tensor_parallel_size=engine.tensor_parallel_size,
            allow_mismatch=chosen.allow_mismatch,
        )
    from sim.cost.roofline import RooflineCostModel

    given = {
        key: getattr(chosen, key)
        for key in ("compute_efficiency", "memory_efficiency", "kernel_latency_s")
        if getattr(chosen, key) is not None
    }
    return RooflineCostModel(
        model(spec.model),
        gpu(spec.hardware),
        tensor_parallel_size=engine.tensor_parallel_size,
        dtype=engine.dtype,
        kv_dtype=_kv_dtype(spec),
        **given,
    )


def _kv_dtype(spec: ExperimentSpec) -> str | None:
    return None if spec.engine.kv_cache_dtype == "auto" else spec.engine.kv_cache_dtype


def _memory(spec: ExperimentSpec) -> MemoryBudget:
    engine = spec.engine
    return memory_budget(
        model(spec.model),
        gpu(spec.hardware),
        gpu_memory_utilization=engine.gpu_memory_utilization,
        dtype=engine.dtype,
        kv_dtype=_kv_dtype(spec),
        tensor_parallel_size=engine.tensor_parallel_size,
        block_size=engine.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
    )


def _predictor(spec: ExperimentSpec) -> Predictor | None:
    chosen = spec.policy.predictor
    if chosen is not None:
        return predictors.make(chosen.name, **chosen.knobs)
    if registry.policy_class(spec.policy.name).needs_prediction:
        raise SpecError(
            f"policy.predictor: {spec.policy.name} orders by predicted output; give it one, e.g. "
            f"policy: {{name: {spec.policy.name}, predictor: oracle}}"
        )
    return None


def _predict(predictor: Predictor, trace: Trace, seed: int) -> Floats:
    return predictor.predict(
        PredictionInputs(
            prompt_tokens=trace.prompt_tokens,
            output_tokens=trace.output_tokens,
            rng=stream(seed, "predictor"),
            application=trace.application,
            prompt=trace.prompt,
        )
    )


def _prediction_quality(
    spec: ExperimentSpec, predicted: Floats | None, trace: Trace
) -> dict[str, object] | None:
    """Say how well the predictions really ordered and sized this workload."""
    if predicted is None or spec.policy.predictor is None:
        return None
    from scipy.stats import kendalltau

    # tau is O(n log n); a sample is plenty and keeps a million requests cheap.
    some = slice(None, None, max(1, len(predicted) // 20_000))
    true = trace.output_tokens[some].astype(np.float64)
    tau = float(kendalltau(predicted[some], true).statistic) if len(true) > 1 else math.nan
    error = np.abs(predicted[some] - true)
    return {
        "predictor": spec.policy.predictor.name,
        "kendall_tau": tau,
        "mean_absolute_error_tokens": float(error.mean()),
    }


def _reporter(progress: Progress, num_requests: int) -> Callable[[Engine], None]:
    shown = 0

    def report(engine: Engine) -> None:
        nonlocal shown
        done = engine.num_finished + engine.num_rejected
        if done - shown >= 200 or done == num_requests:
            shown = done
            progress(done, num_requests)

    return report


def _provenance(spec: ExperimentSpec) -> dict[str, object]:
    workload = spec.workload
    rate = workload.request_rate
    return {
        "spec": spec.to_data(),
        "spec_hash": spec_hash(spec),
        "seed": spec.seed,
        "backend": f"schedlab-{spec.backend}",
        "model": model(spec.model).name,
        "hardware": gpu(spec.hardware).name,
        "request_rate": rate,
        "burstiness": workload.burstiness if rate is None else workload.burstiness or 1.0,
        "max_concurrency": workload.max_concurrency,
        "policy_source": registry.policy_class(spec.policy.name).source,
        "versions": _versions(),
        "git_commit": _git_commit(),
    }


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("schedlab", "numpy", "scipy", "simpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed: run from a checkout"
    return versions


@cache
def _git_commit() -> str | None:
    """Return the commit of the checkout this runs from, marked if it has changes."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
