"""Drive an engine by the wall clock: requests arrive while it works."""

from __future__ import annotations

from collections.abc import Iterable

from schedlab.gpu_backend.clock import WallClock
from schedlab.sim.core.audit import stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival


def replay(engine: Engine, arrivals: Iterable[Arrival], clock: WallClock) -> RunLog:
    """Run a workload to its end in real time.

    Parameters
    ----------
    engine : Engine
        A fresh engine whose executor measures with `clock`.
    arrivals : iterable of Arrival
        In order of `ready_ns`; each is released when the clock has reached it, at the next step
        boundary. Open loop: requests are sent whether or not others have finished.
    clock : WallClock
        Set to zero when the run starts.

    Returns
    -------
    RunLog
        The engine's log. Steps of a busy engine follow each other without a gap.

    Raises
    ------
    Stalled
        If requests wait and nothing can ever happen.
    ValueError
        If `arrivals` go back in time.
    """
    source = iter(arrivals)
    coming = next(source, None)
    last_ready_ns = now_ns = 0
    clock.start()
    while True:
        while coming is not None and coming.ready_ns <= now_ns:
            if coming.ready_ns < last_ready_ns:
                raise ValueError(
                    f"request {coming.request.id} is ready at {coming.ready_ns} ns, before the "
                    f"one in front of it ({last_ready_ns} ns)"
                )
            last_ready_ns = coming.ready_ns
            engine.submit(coming, now_ns)
            coming = next(source, None)
        if engine.begin(now_ns) is not None:
            engine.commit()
            now_ns = engine.now_ns
            continue
        wake_ns = min(FOREVER if coming is None else coming.ready_ns, engine.wait_until_ns)
        if wake_ns >= FOREVER:
            if engine.num_in_flight:
                raise stalled(engine, "the policy waits and nothing is left to happen")
            return engine.log
        clock.sleep_until(wake_ns)
        now_ns = max(clock.now_ns(), wake_ns)
