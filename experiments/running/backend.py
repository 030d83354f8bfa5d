"""What carries plans out, and what moves the clock: the simulation, or a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from schedlab.experiments.running.fleet import Kind, changes, disaggregation, interconnect
from schedlab.experiments.specification.deployment import runs_in_lockstep
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.vllm import Vllm
from schedlab.policies.routers.vllm_kv import VllmKV
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor
from schedlab.sim.core.pipelined_engine import PipelinedEngine
from schedlab.sim.core.plan_log import RecordedStep, RecordingExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.drive.lockstep import Stepping, joint_steps_ns
from schedlab.sim.drive.router import Router
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.record.cluster_log import ClusterLog
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival
from schedlab.sim.speculation.recording import Drafts

if TYPE_CHECKING:
    from schedlab.gpu_backend.vllm.recording import VllmLog

    Log = RunLog | ClusterLog | VllmLog

_WEIGH_MEMORY = ("vllm-0.32", "vllm-0.33")
"""Engine profiles of releases that choose among data-parallel engines by `VllmKV`."""


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
        Told now and then how many are answered or rejected.
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
    drafts: Mapping[int, Drafts] = MappingProxyType({})
    """What became of drafts, where the backend alone knows."""


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
        self, engines: Sequence[Engine], task: Task, new_engine: Callable[[int], Engine]
    ) -> RunLog | ClusterLog:
        """Run the workload of a task to its end; `new_engine` makes one more of a kind."""


_PLANS_UNTOLD = 50
"""After so many plans progress is told: seconds on a device, nothing in a simulation."""


def serve_on_engines(backend: Engines, task: Task) -> Served:
    """Run a workload on our own engines, with the executors of a backend behind them.

    Raises
    ------
    SpecError
        If the steps of several engines are to be recorded.
    """
    executors = backend.executors(task.kinds)
    if task.record is not None:
        if task.spec.engine.pipeline_parallel_size > 1:
            raise SpecError(
                "engine.pipeline_parallel_size: steps can be recorded of one batch in flight only"
            )
        if len(executors) > 1:
            several = "engine.data_parallel_size" if task.spec.cluster is None else "cluster"
            raise SpecError(f"{several}: steps can be recorded of one engine only")
        executors = [recorder := RecordingExecutor(*executors)]
        recorder.steps = task.record
    made: list[Engine] = []
    plans_left = _PLANS_UNTOLD

    def tell() -> None:
        if task.progress is not None:
            task.progress(sum(e.requests.num_finished + e.requests.num_rejected for e in made))

    def observe(_: Engine) -> None:
        nonlocal plans_left
        plans_left -= 1
        if not plans_left:
            plans_left = _PLANS_UNTOLD
            tell()

    def make(kind: Kind, executor: Executor) -> Engine:
        policy, drafting = kind.point.spec.policy, kind.point.speculation
        config = kind.point.config
        loop = PipelinedEngine if config.pipeline_parallel_size > 1 else Engine
        engine = loop(
            config,
            registry.make(policy.name, **policy.knobs),
            executor,
            None if task.progress is None else observe,
            None if drafting is None else drafting.draft_length(),
        )
        made.append(engine)
        return engine

    of_engine = [kind for kind in task.kinds for _ in range(kind.num_engines)]
    engines = [make(kind, executor) for kind, executor in zip(of_engine, executors, strict=True)]

    def new_engine(pool: int) -> Engine:
        kind = task.kinds[pool]
        return make(kind, *backend.executors([kind._replace(num_engines=1)]))

    log = backend.drive(engines, task, new_engine)
    tell()
    return Served(log, sum(engine.num_plans for engine in made))


class SimBackend:
    """Simulated GPUs on one clock, behind a router if they are several.

    Parameters
    ----------
    pricing : Pricing
        What steps take.
    lockstep : bool
        Whether several engines that are no cluster run every step together.
    router : Router, optional
        Chooses among them; that of vLLM up to 0.26 if none is given.
    """

    def __init__(
        self, pricing: Pricing, lockstep: bool = True, router: Router | None = None
    ) -> None:
        self._pricing = pricing
        self._lockstep = lockstep
        self._num_engines = 0
        self._router = router or Vllm()

    def executors(self, kinds: Sequence[Kind]) -> list[Executor]:
        """Return a simulated GPU for each engine."""
        of_engines = [kind for kind in kinds for _ in range(kind.num_engines)]
        first, self._num_engines = self._num_engines, self._num_engines + len(of_engines)
        return [
            kind.point.simulated_gpu(kind.pricing, engine)
            for engine, kind in enumerate(of_engines, first)
        ]

    def serve(self, task: Task) -> Served:
        """Run a workload to its end."""
        return serve_on_engines(self, task)

    def drive(
        self, engines: Sequence[Engine], task: Task, new_engine: Callable[[int], Engine]
    ) -> RunLog | ClusterLog:
        """Run the workload of a task to its end."""
        spec, cluster = task.spec, task.spec.cluster
        arrivals, max_concurrency = task.arrivals, spec.workload.max_concurrency
        if cluster is None:
            if len(engines) == 1:
                return simulate(engines[0], arrivals, max_concurrency)
            together = self._joint_step_ns if self._lockstep else None
            if together is not None and self._pricing.cost_model.step_spread is not None:
                raise SpecError(
                    "cost_model.scatters: engines in lockstep share the time of a step; leave it "
                    "out, or set engine.data_parallel_lockstep to false"
                )
            return simulate_cluster(engines, self._router, arrivals, max_concurrency, together)
        chosen = cluster.router
        return simulate_cluster(
            engines,
            routers.make(chosen.name, spec.seed, **chosen.knobs),
            arrivals,
            max_concurrency,
            staleness_ns=round(chosen.staleness_ms * 1e6),
            disaggregation=disaggregation(spec, task.kinds),
            interconnect=interconnect(cluster, task.kinds),
            pools=[pool for pool, kind in enumerate(task.kinds) for _ in range(kind.num_engines)],
            changes=changes(spec, task.kinds, new_engine),
        )

    def _joint_step_ns(self, stepping: Sequence[Stepping], idle: Sequence[Engine]) -> int:
        return max(joint_steps_ns(stepping, idle))

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
        router = VllmKV() if spec.engine.profile in _WEIGH_MEMORY else None
        return SimBackend(pricing, runs_in_lockstep(spec), router)
    if spec.backend == "vllm":
        if spec.engine.speculation is not None:
            raise SpecError("engine.speculation: not with backend: vllm; set backend: sim")
        _refuse_tiers(spec)
        from schedlab.experiments.running.vllm_backend import open_vllm  # takes seconds

        return open_vllm(point, pricing)
    _refuse_simulated_switches(spec)
    from schedlab.experiments.running.real_backend import open_device  # torch takes seconds

    return open_device(point, pricing)


def _refuse_simulated_switches(spec: ExperimentSpec) -> None:
    for switch in ("async_scheduling", "cuda_graph_padding"):
        if getattr(spec.engine, switch):
            raise SpecError(f"engine.{switch}: the real backend does not do that; set it to false")
    speculation = spec.engine.speculation
    if speculation is not None and speculation.method != "ngram":
        raise SpecError(
            f"engine.speculation.method: the real backend has no {speculation.method}; set "
            "method: ngram, or backend: sim"
        )
    _refuse_tiers(spec)
    if spec.cluster is not None:
        raise SpecError("cluster: the real backend runs one engine")
    if spec.engine.data_parallel_size > 1:
        raise SpecError("engine.data_parallel_size: the real backend runs one engine")
    if spec.engine.weight_dtype not in ("auto", spec.engine.dtype):
        raise SpecError("engine.weight_dtype: the real backend stores weights as it computes")


def _refuse_tiers(spec: ExperimentSpec) -> None:
    asked = spec.engine.kv_offload
    if asked is None:
        return
    if spec.backend == "vllm":
        raise SpecError(
            "engine.kv_offload: not with backend: vllm; set backend: sim, or preempt by swap "
            "without tiers"
        )
    if spec.engine.offloading_connector:
        raise SpecError(
            "engine.offloading_connector: on the real backend whoever holds memory has a seat; set "
            "it to false, or backend: sim"
        )
    if spec.real.clock == "reference":
        raise SpecError(
            "real.clock: reference is the CPU time of this process, that of copies beside the "
            "steps included; use virtual, wall or modelled with engine.kv_offload"
        )
