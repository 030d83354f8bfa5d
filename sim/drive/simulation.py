"""The driver of one engine: arrivals and segments in turn, on a clock in whole nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from schedlab.sim.core.audit import WAITS, stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.pipelined_engine import PipelinedEngine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.drive.arrivals import Source
from schedlab.sim.drive.collector import collector_off
from schedlab.sim.drive.sessions import SessionSource, open_source
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
        In order of `ready_ns`; read lazily, one ahead, so it may be a stream. Those of sessions
        that need answers are sent when they have them (`schedlab.sim.drive.sessions`).
    max_concurrency : int, optional
        Closed loop: at most so many requests in flight, that is sent and neither answered nor
        rejected; the next one is sent, and its clock started, when a place is free (but not
        before its own arrival time). Where requests are those of sessions, most sessions.
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

    Notes
    -----
    One engine needs no event queue: what happens next is the end of its segment, or the next
    arrival. Several engines have one (`cluster.py`).
    """
    requests = engine.requests
    source = open_source(
        arrivals, requests.submit, requests.cancel, requests.sessions.forget, max_concurrency
    )
    if source.is_closed:
        engine.requests.on_gone = source.request_is_gone
    with collector_off():
        if isinstance(engine, PipelinedEngine):
            _serve_pipelined(engine, source)
        else:
            _serve(engine, source, sleep_until)
    requests.expire(FOREVER)  # nobody comes for what is kept
    return engine.log


def _serve(
    engine: Engine, source: Source | SessionSource, sleep_until: Callable[[int], int] | None
) -> None:
    now_ns = 0
    while True:
        # Whoever comes at this very instant, or is sent because of an answer given now, has
        # come when the next step is planned.
        if source.next_ns <= now_ns:
            source.send_until(now_ns)
        segment = engine.begin(now_ns, source.next_ns)
        if segment is not None:
            now_ns = segment.end_ns
            if source.next_ns <= now_ns:
                source.send_until(now_ns)
            engine.commit()
            continue
        now_ns = min(engine.wait_until_ns, source.next_ns)
        if now_ns < FOREVER:
            if sleep_until is not None:
                source.send_until(now_ns)
                now_ns = max(sleep_until(now_ns), now_ns)
        elif engine.requests.num_in_flight:
            raise stalled(engine, WAITS)
        else:
            return


def _serve_pipelined(engine: PipelinedEngine, source: Source | SessionSource) -> None:
    now_ns = 0
    while True:
        if source.next_ns <= now_ns:
            source.send_until(now_ns)
        next_ns = source.next_ns
        while engine.can_begin(now_ns):
            if engine.begin(now_ns) is None:
                next_ns = min(next_ns, engine.wait_until_ns)
                break
        now_ns = min(next_ns, engine.next_end_ns)
        if now_ns >= FOREVER:
            if engine.requests.num_in_flight:
                raise stalled(engine, WAITS)
            return
        if source.next_ns <= now_ns:
            source.send_until(now_ns)
        if engine.next_end_ns <= now_ns:
            engine.commit()
