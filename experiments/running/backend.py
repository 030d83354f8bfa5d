"""What carries plans out, and what moves the clock: the simulation, or a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from schedlab.experiments.running.resolved import Resolved
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.vllm import Vllm
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor, SimExecutor
from schedlab.sim.core.step import Segment
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import joint_steps_ns, simulate_cluster
from schedlab.sim.drive.router import Router
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.record.cluster_log import ClusterLog
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival


class Backend(Protocol):
    """What carries plans out, and what moves the clock."""

    def executors(self, pricings: Sequence[Pricing]) -> list[Executor]:
        """Return what runs steps, one for each engine, given what steps take on it."""

    def drive(
        self, engines: Sequence[Engine], arrivals: Iterable[Arrival], max_concurrency: int | None
    ) -> RunLog | ClusterLog:
        """Run a workload to its end."""

    def describe(self) -> dict[str, object] | None:
        """Return what a result must say about it; None for the simulation."""


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
    """

    def __init__(
        self,
        pricing: Pricing,
        lockstep: bool = True,
        router: Router | None = None,
        staleness_ns: int = 0,
    ) -> None:
        self._pricing = pricing
        self._lockstep = lockstep
        self._router = router
        self._staleness_ns = staleness_ns

    def executors(self, pricings: Sequence[Pricing]) -> list[Executor]:
        """Return a simulated GPU for each engine."""
        return [SimExecutor(pricing) for pricing in pricings]

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
        )

    def _joint_step_ns(self, segments: Sequence[Segment]) -> int:
        return max(joint_steps_ns(self._pricing, segments))

    def describe(self) -> dict[str, object] | None:
        """Return None: the cost model says it all."""
        return None


def open_backend(spec: ExperimentSpec, point: Resolved, pricing: Pricing) -> Backend:
    """Return the backend that a specification names.

    Parameters
    ----------
    spec : ExperimentSpec
        What is run.
    point : Resolved
        The same looked up; of several kinds of engines the first.
    pricing : Pricing
        What steps take, where they are not measured.

    Raises
    ------
    SpecError
        If the real backend does not do what is asked for, or cannot run here.
    """
    if spec.backend == "sim":
        if spec.cluster is None:
            return SimBackend(pricing, spec.engine.data_parallel_lockstep)
        chosen = spec.cluster.router
        router = routers.make(chosen.name, spec.seed, **chosen.knobs)
        return SimBackend(pricing, False, router, round(chosen.staleness_ms * 1e6))
    _refuse_simulated_switches(spec)
    from schedlab.experiments.running.real_backend import open_device  # torch takes seconds

    return open_device(point, pricing)


def _refuse_simulated_switches(spec: ExperimentSpec) -> None:
    for switch in ("enable_prefix_caching", "async_scheduling", "cuda_graph_padding"):
        if getattr(spec.engine, switch):
            raise SpecError(f"engine.{switch}: the real backend does not do that; set it to false")
    if spec.cluster is not None:
        raise SpecError("cluster: the real backend runs one engine")
    if spec.engine.data_parallel_size > 1:
        raise SpecError("engine.data_parallel_size: the real backend runs one engine")
    if spec.engine.weight_dtype not in ("auto", spec.engine.dtype):
        raise SpecError("engine.weight_dtype: the real backend stores weights as it computes")
