"""The driver of one engine: arrivals and the engine as SimPy processes on one clock, in ns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from schedlab.sim.core.audit import stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.drive.arrivals import Clock, Process, Source, Turn
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival


def simulate(
    engine: Engine,
    arrivals: Iterable[Arrival],
    max_concurrency: int | None = None,
    sleep_until: Callable[[int], int] | None = None,
) -> RunLog:
    """Run a workload to its end on an engine.

    Parameters
    ----------
    engine : Engine
        A fresh engine.
    arrivals : iterable of Arrival
        In order of `ready_ns`; read lazily, one ahead, so it may be a stream.
    max_concurrency : int, optional
        Closed loop: at most so many requests in flight, that is sent and neither answered nor
        rejected; the next one is sent, and its clock started, when a place is free (but not
        before its own arrival time).
    sleep_until : callable, optional
        For an executor that works in real time: called with an instant (ns since the start) when
        the engine was idle until then; returns what time it is when it wakes. Steps follow each
        other without it, since they take the time that they were measured to take.

    Returns
    -------
    RunLog
        The engine's log.

    Raises
    ------
    Stalled
        If requests wait and nothing can ever happen.
    ValueError
        If `arrivals` go back in time.
    """
    clock = Clock()
    source = Source(clock, [engine], lambda request: engine, arrivals, max_concurrency)

    def serve() -> Process:
        now_ns = 0
        while True:
            segment = engine.begin(now_ns, source.horizon_ns)
            if segment is not None:
                yield Turn(clock, segment.end_ns - now_ns)
                engine.commit()
                if source.is_resuming:
                    yield Turn(clock, 0)
                now_ns = engine.now_ns
                continue
            if engine.wait_until_ns < FOREVER:
                yield Turn(clock, engine.wait_until_ns - now_ns) | source.sent()
            elif source.will_send:
                yield source.sent()
            elif engine.requests.num_in_flight:
                raise stalled(engine, "the policy waits and nothing is left to happen")
            else:
                return
            awake_ns = now_ns = int(clock.now)
            if sleep_until is not None:
                awake_ns = max(sleep_until(now_ns), now_ns)
            yield Turn(clock, awake_ns - now_ns)
            now_ns = awake_ns

    sending = clock.process(source.run())
    clock.run(clock.process(serve()) & sending)
    return engine.log
