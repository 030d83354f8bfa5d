"""Run one point of an experiment: the function that everything else calls."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Protocol

import numpy as np

from schedlab.experiments.running.prediction import predictions
from schedlab.experiments.running.trial import try_policy
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.deployment import deployment
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig, vllm_capture_sizes
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor, SimExecutor
from schedlab.sim.core.plan_log import RecordedStep, RecordingExecutor
from schedlab.sim.cost import registry as cost_models
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.memory import MemoryBudget, memory_budget
from schedlab.sim.hardware.models import model
from schedlab.sim.metrics.window import measured_window
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival, Slo
from schedlab.sim.result import RunResult
from schedlab.traces.trace import Trace
from schedlab.traces.workload import workload

Progress = Callable[[int, int], None]
"""Called with the number of requests finished and the number in all."""


def run(
    spec: ExperimentSpec,
    progress: Progress | None = None,
    record: list[RecordedStep] | None = None,
    opened: Callable[[Pricing], Backend] | None = None,
) -> RunResult:
    """Run one experiment, without sweep or replications, on the backend it names.

    On the simulated backend it is a pure function of the specification and of the files it
    names: the same input gives the same bytes.

    Parameters
    ----------
    spec : ExperimentSpec
        One point; see `schedlab.experiments.specification.sweep.points`.
    progress : callable, optional
        Told now and then how many requests are done.
    record : list, optional
        Filled with every step's decision and time; the run is then stepped one by one.
    opened : callable, optional
        Opens another backend than the specification's, e.g. one that goes by a recording.

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
        raise SpecError("run() takes one point: expand the sweep with specification.sweep.points")
    budget = _memory(spec)
    config = engine_config(spec, budget)
    trace = load_workload(spec, config.max_model_len)
    prediction = predictions(spec, trace)
    targets = Slo(spec.slo.ttft_ms, spec.slo.tpot_ms, spec.slo.e2el_ms)
    arrivals = partial(
        workload,
        trace,
        max_model_len=config.max_model_len,
        predicted_tokens=None if prediction is None else prediction.predicted_tokens,
        predictor_latency_s=0.0 if prediction is None else prediction.delay_s,
        slo=targets if targets != (None, None, None) else None,
        hash_block_tokens=config.block_size if config.enable_prefix_caching else None,
    )
    cost_model = make_cost_model(spec)
    pricing = Pricing(cost_model, make_overhead(spec, cost_model))
    backend: Backend = SimBackend(SimExecutor(pricing))
    if opened is not None:
        backend = opened(pricing)
    elif spec.backend == "real":
        _refuse_simulated_switches(spec)
        from schedlab.experiments.running.real_backend import open_backend

        backend = open_backend(spec, config, pricing)
    executor: Executor = backend.executor
    if record is not None:
        executor = recorder = RecordingExecutor(executor)
        recorder.steps = record
    make_policy = partial(registry.make, spec.policy.name, **spec.policy.knobs)
    if _is_to_be_tried(spec):
        try_policy(
            spec.policy.name,
            make_policy,
            lambda: SimExecutor(Pricing(cost_model, pricing.overhead)),
            config,
            arrivals,
            spec.engine.trial_requests,
            spec.workload.max_concurrency,
        )
    engine = Engine(config, make_policy(), executor)
    if progress is not None:
        engine.observer = _reporter(progress, len(trace))
    if spec.engine.data_parallel_size > 1:
        from schedlab.experiments.running.data_parallel import run_engines

        if record is not None:
            raise SpecError("engine.data_parallel_size: steps can be recorded of one engine only")
        log, num_plans = run_engines(spec, config, pricing, arrivals())
    else:
        log = backend.drive(engine, arrivals(), spec.workload.max_concurrency)
        num_plans = engine.num_plans
    if backend.describe() is None and cost_model.is_measured:
        _check_limits(spec, log)
    requests = log.requests()
    _add_origins(requests, trace)
    window = None
    if spec.measure is not None:
        window = measured_window(requests, **spec.measure.model_dump())
    return RunResult(
        name=spec.name,
        policy=spec.policy.name,
        requests=requests,
        log=log,
        window=window,
        kv_capacity_tokens=config.num_blocks * config.block_size * spec.engine.data_parallel_size,
        reject_reasons=log.reject_reasons,
        provenance={
            **_provenance(spec),
            "cost_model": cost_model.describe(),
            "scheduling_overhead": asdict(pricing.overhead),
            "real": backend.describe(),
            "engine": {name: getattr(config, name) for name in config.__dataclass_fields__},
            "memory": {name: getattr(budget, name) for name in budget.__dataclass_fields__},
            "workload": trace.report.lines(),
            "prediction": None if prediction is None else prediction.provenance,
            "num_plans": num_plans,
            "num_steps": log.num_steps,
            "extrapolated_steps": pricing.extrapolated_steps,
            "extrapolated_by_feature": pricing.extrapolated_by_feature,
        },
    )


def _is_to_be_tried(spec: ExperimentSpec) -> bool:
    """Whether the policy is a stranger's, and could skip steps without being asked again."""
    engine = spec.engine
    may_skip = engine.fast_forward and not engine.check_horizon
    return ":" in spec.policy.name and may_skip and engine.trial_requests > 0


def _add_origins(requests: dict[str, np.ndarray], trace: Trace) -> None:
    """Add where each request comes from, as far as the trace says; empty where it does not."""
    rows = requests["id"].astype(np.int64)
    for name in ("tenant", "application", "session"):
        told = getattr(trace, name)
        if told is not None:
            requests[name] = np.where(told[rows] == None, "", told[rows]).astype(str)  # noqa: E711


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
    num_blocks -= engine.reserve_null_block
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
            enable_prefix_caching=engine.enable_prefix_caching,
            async_scheduling=engine.async_scheduling,
            arrivals_between_steps=engine.arrivals_between_steps,
            cudagraph_capture_sizes=(
                vllm_capture_sizes(engine.max_num_seqs) if engine.cuda_graph_padding else ()
            ),
            first_launch_ns=_first_launch_ns(spec),
            fast_forward=engine.fast_forward,
            check_horizon=engine.check_horizon,
        )
    except ValueError as error:
        raise SpecError(f"engine: {error}") from error


def _first_launch_ns(spec: ExperimentSpec) -> int:
    stated = spec.engine.scheduling_overhead
    return 0 if stated is None else int(stated.first_step_s * 1e9 + 0.5)


def make_overhead(spec: ExperimentSpec, cost_model: CostModel) -> SchedulingOverhead:
    """Return the scheduling overhead: the specification's, else the profile's, else none."""
    stated = spec.engine.scheduling_overhead
    if stated is not None:
        return SchedulingOverhead(**stated.model_dump())
    return cost_model.scheduling_overhead or SchedulingOverhead()


def make_cost_model(spec: ExperimentSpec) -> CostModel:
    """Return the cost model that a specification names.

    Raises
    ------
    SpecError
        If a profile is unreadable or of another model or GPU than the run's.
    """
    chosen = spec.cost_model
    name = chosen.name or cost_models.kind_of(str(chosen.profile))
    return cost_models.make(name, deployment(spec), **chosen.given)


def _refuse_simulated_switches(spec: ExperimentSpec) -> None:
    for switch in ("enable_prefix_caching", "async_scheduling", "cuda_graph_padding"):
        if getattr(spec.engine, switch):
            raise SpecError(f"engine.{switch}: the real backend does not do that; set it to false")
    if spec.engine.data_parallel_size > 1:
        raise SpecError("engine.data_parallel_size: the real backend runs one engine")


def _check_limits(spec: ExperimentSpec, log: RunLog) -> None:
    """Refuse a profile that is faster than its device; a nominal CPU has no datasheet."""
    where = deployment(spec)
    if where.gpu.name == "cpu":
        return
    from schedlab.sim.cost.limits import check_limits

    check_limits(log.steps(), where, spec.cost_model.profile or str(spec.cost_model.name))


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


def _reporter(progress: Progress, num_requests: int) -> Callable[[Engine], None]:
    shown = 0

    def report(engine: Engine) -> None:
        nonlocal shown
        done = engine.requests.num_finished + engine.requests.num_rejected
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
        "versions": versions(),
        "git_commit": _git_commit(),
    }


@cache
def versions() -> dict[str, str]:
    """Return the versions of what computes a result, by package."""
    found = {"python": platform.python_version()}
    for package in ("schedlab", "numpy", "scipy", "simpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed: run from a checkout"
    return found


@cache
def _git_commit() -> str | None:
    """Return the commit of the checkout this runs from, marked if it has changes."""
    root = Path(__file__).resolve().parents[2]
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
