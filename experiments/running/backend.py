"""What carries plans out, and what moves the clock: the simulation, or a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from schedlab.experiments.running.fleet import Kind, disaggregation
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.vllm import Vllm
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor
from schedlab.sim.core.plan_log import RecordedStep, RecordingExecutor
from schedlab.sim.core.step import Segment
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.drive.handover import Disaggregation
from schedlab.sim.drive.lockstep import joint_steps_ns
from schedlab.sim.drive.router import Router
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.record.cluster_log import ClusterLog
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival

if TYPE_CHECKING:
    from schedlab.gpu_backend.vllm.recording import VllmLog

    Log = RunLog | ClusterLog | VllmLog


@dataclass(frozen=True)
class Task:
    """What a backend is to serve.

    Attributes
    ----------
    spec : ExperimentSpec
        One point.
    kinds : sequence of Kind
        Its engines.
    arrivals : iterable of Arrival
        The requests, in order of `ready_ns`.
    progress : callable, optional
        Told after steps how many are answered or rejected.
    record : list, optional
        Filled with every step's decision and time.
    """

    spec: ExperimentSpec
    kinds: Sequence[Kind]
    arrivals: Iterable[Arrival]
    progress: Callable[[int], None] | None = None
    record: list[RecordedStep] | None = None


class Served(NamedTuple):
    """What became of it."""

    log: Log
    num_plans: int
    """How often policies were asked."""


class Backend(Protocol):
    """What carries plans out, and what moves the clock."""

    def serve(self, task: Task) -> Served:
        """Run a workload to its end."""

    def describe(self) -> dict[str, object] | None:
        """Return what a result must say about it; None for the simulation."""


class Engines(Protocol):
    """What a backend made of our own engines says of itself."""

    def executors(self, kinds: Sequence[Kind]) -> list[Executor]:
        """Return what runs steps, one for each engine of each kind."""

    def drive(
        self, engines: Sequence[Engine], arrivals: Iterable[Arrival], max_concurrency: int | None
    ) -> RunLog | ClusterLog:
        """Run a workload to its end."""


def serve_on_engines(backend: Engines, task: Task) -> Served:
    """Run a workload on our own engines, with the executors of a backend behind them.

    Raises
    ------
    SpecError
        If the steps of several engines are to be recorded.
    """
    executors = backend.executors(task.kinds)
    if task.record is not None:
        if len(executors) > 1:
            several = "engine.data_parallel_size" if task.spec.cluster is None else "cluster"
            raise SpecError(f"{several}: steps can be recorded of one engine only")
        executors = [recorder := RecordingExecutor(*executors)]
        recorder.steps = task.record
    engines: list[Engine] = []
    for kind in task.kinds:
        for executor in executors[len(engines) : len(engines) + kind.num_engines]:
            policy = kind.point.spec.policy
            made = registry.make(policy.name, **policy.knobs)
            drafting = kind.point.speculation
            length = None if drafting is None else drafting.draft_length()
            engines.append(Engine(kind.point.config, made, executor, draft_length=length))
    if (tell := task.progress) is not None:

        def observe(_: Engine) -> None:
            tell(sum(e.requests.num_finished + e.requests.num_rejected for e in engines))

        for engine in engines:
            engine.observer = observe
    log = backend.drive(engines, task.arrivals, task.spec.workload.max_concurrency)
    return Served(log, sum(engine.num_plans for engine in engines))


class SimBackend:
    """Simulated GPUs on one clock, behind a router if they are several.

    Parameters
    ----------
    pricing : Pricing
        What steps take.
    lockstep : bool
        Whether several engines run every step together.
    router : Router, optional
        Chooses among several engines; vLLM's if none is given.
    staleness_ns : int
        How often engines report to the router; 0 = it sees them as they are.
    disaggregation : Disaggregation, optional
        Which engines compute prompts, and which go on from there.
    """

    def __init__(
        self,
        pricing: Pricing,
        lockstep: bool = True,
        router: Router | None = None,
        staleness_ns: int = 0,
        disaggregation: Disaggregation | None = None,
    ) -> None:
        self._pricing = pricing
        self._lockstep = lockstep
        self._router = router
        self._staleness_ns = staleness_ns
        self._disaggregation = disaggregation

    def executors(self, kinds: Sequence[Kind]) -> list[Executor]:
        """Return a simulated GPU for each engine."""
        return [
            kind.point.simulated_gpu(kind.pricing)
            for kind in kinds
            for _ in range(kind.num_engines)
        ]

    def serve(self, task: Task) -> Served:
        """Run a workload to its end."""
        return serve_on_engines(self, task)

    def drive(
        self, engines: Sequence[Engine], arrivals: Iterable[Arrival], max_concurrency: int | None
    ) -> RunLog | ClusterLog:
        """Run a workload to its end."""
        if len(engines) == 1 and self._router is None:
            return simulate(engines[0], arrivals, max_concurrency)
        return simulate_cluster(
            engines,
            self._router or Vllm(),
            arrivals,
            max_concurrency,
            self._joint_step_ns if self._lockstep else None,
            self._staleness_ns,
            self._disaggregation,
        )

    def _joint_step_ns(self, segments: Sequence[Segment]) -> int:
        return max(joint_steps_ns(self._pricing, segments))

    def describe(self) -> dict[str, object] | None:
        """Return None: the cost model says it all."""
        return None


def open_backend(spec: ExperimentSpec, kinds: Sequence[Kind]) -> Backend:
    """Return the backend that a specification names.

    Parameters
    ----------
    spec : ExperimentSpec
        What is run.
    kinds : sequence of Kind
        Its engines.

    Raises
    ------
    SpecError
        If the backend does not do what is asked for, or cannot run here.
    """
    point, pricing = kinds[0].point, kinds[0].pricing
    if spec.backend == "sim":
        if spec.cluster is None:
            return SimBackend(pricing, spec.engine.data_parallel_lockstep)
        chosen = spec.cluster.router
        router = routers.make(chosen.name, spec.seed, **chosen.knobs)
        staleness_ns = round(chosen.staleness_ms * 1e6)
        return SimBackend(pricing, False, router, staleness_ns, disaggregation(spec, kinds))
    if spec.backend == "vllm":
        if spec.engine.speculation is not None:
            raise SpecError("engine.speculation: not with backend: vllm; set backend: sim")
        from schedlab.experiments.running.vllm_backend import open_vllm  # takes seconds

        return open_vllm(point, pricing)
    _refuse_simulated_switches(spec)
    from schedlab.experiments.running.real_backend import open_device  # torch takes seconds

    return open_device(point, pricing)


def _refuse_simulated_switches(spec: ExperimentSpec) -> None:
    for switch in ("enable_prefix_caching", "async_scheduling", "cuda_graph_padding"):
        if getattr(spec.engine, switch):
            raise SpecError(f"engine.{switch}: the real backend does not do that; set it to false")
    if spec.engine.speculation is not None:
        raise SpecError("engine.speculation: only the simulation has it; set backend: sim")
    if spec.cluster is not None:
        raise SpecError("cluster: the real backend runs one engine")
    if spec.engine.data_parallel_size > 1:
        raise SpecError("engine.data_parallel_size: the real backend runs one engine")
    if spec.engine.weight_dtype not in ("auto", spec.engine.dtype):
        raise SpecError("engine.weight_dtype: the real backend stores weights as it computes")
