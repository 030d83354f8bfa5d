"""Drive an engine by the wall clock: requests arrive while it works."""

from __future__ import annotations

from collections.abc import Iterable

from schedlab.gpu_backend.clock import WallClock
from schedlab.sim.core.engine import Engine
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival


def replay(
    engine: Engine,
    arrivals: Iterable[Arrival],
    clock: WallClock,
    max_concurrency: int | None = None,
) -> RunLog:
    """Run a workload to its end in real time.

    Parameters
    ----------
    engine : Engine
        A fresh engine whose executor measures with `clock`.
    arrivals : iterable of Arrival
        In order of `ready_ns`; a request counts as queued from then, and is known to the engine at
        the end of the step under way.
    clock : WallClock
        Set to zero when the run starts.
    max_concurrency : int, optional
        Closed loop; see `schedlab.sim.drive.simulation.simulate`, also for the errors.

    Returns
    -------
    RunLog
        The engine's log. Steps of a busy engine follow each other without a gap.
    """

    def sleep_until(instant_ns: int) -> int:
        clock.sleep_until(instant_ns)
        return clock.now_ns()

    clock.start()
    return simulate(engine, arrivals, max_concurrency, sleep_until)
