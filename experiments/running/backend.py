"""What carries plans out, and what moves the clock: the simulation, or a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from schedlab.experiments.running.resolved import Resolved
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor, SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival


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


def open_backend(point: Resolved, pricing: Pricing) -> Backend:
    """Return the backend that a specification names.

    Parameters
    ----------
    point : Resolved
        What is run.
    pricing : Pricing
        What steps take, where they are not measured.

    Raises
    ------
    SpecError
        If the real backend does not do what is asked for, or cannot run here.
    """
    if point.spec.backend == "sim":
        return SimBackend(SimExecutor(pricing))
    _refuse_simulated_switches(point.spec)
    from schedlab.experiments.running.real_backend import open_device  # torch takes seconds

    return open_device(point, pricing)


def _refuse_simulated_switches(spec: ExperimentSpec) -> None:
    for switch in ("enable_prefix_caching", "async_scheduling", "cuda_graph_padding"):
        if getattr(spec.engine, switch):
            raise SpecError(f"engine.{switch}: the real backend does not do that; set it to false")
    if spec.engine.data_parallel_size > 1:
        raise SpecError("engine.data_parallel_size: the real backend runs one engine")
