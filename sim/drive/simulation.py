"""SimPy wiring: arrivals and the engine as processes on one integer-nanosecond clock."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import cast

import simpy
from simpy.events import EventPriority

from schedlab.sim.core.audit import stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival

# Behind SimPy's NORMAL: at one instant, arrivals come before the engine plans.
_LATE = cast(EventPriority, 2)

_Process = Generator[simpy.Event, object, None]


class _StepEnd(simpy.Event):
    """A timeout that is processed after everything else at its instant."""

    def __init__(self, env: simpy.Environment, delay_ns: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority=_LATE, delay=delay_ns)


class _Source:
    """Submits the workload: at its times, or as fast as `max_concurrency` allows."""

    def __init__(
        self,
        env: simpy.Environment,
        engine: Engine,
        arrivals: Iterable[Arrival],
        max_concurrency: int | None,
    ) -> None:
        self._env = env
        self._engine = engine
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._max_concurrency = max_concurrency
        self._next: Arrival | None = next(self._arrivals, None)
        self._on_the_way = 0
        self._freed: simpy.Event | None = None
        self.sleeping: simpy.Event | None = None

    @property
    def will_send(self) -> bool:
        """Whether a request comes even if none finishes."""
        return self._on_the_way > 0 or (self._next is not None and self._freed is None)

    @property
    def horizon_ns(self) -> int:
        """When the next request comes; FOREVER if none does unless one finishes."""
        if self._on_the_way:
            return int(self._env.now)
        if self._next is None or self._is_full:
            return FOREVER
        return max(self._next.ready_ns, int(self._env.now))

    def run(self) -> _Process:
        env, limit, last_ns = self._env, self._max_concurrency, 0
        while self._next is not None:
            arrival = self._next
            if arrival.ready_ns < last_ns:
                raise ValueError(
                    f"request {arrival.request.id} is ready at {arrival.ready_ns} ns, before the "
                    f"one in front of it ({last_ns} ns)"
                )
            last_ns = arrival.ready_ns
            if arrival.ready_ns > env.now:
                yield env.timeout(arrival.ready_ns - env.now)
            if limit is not None:
                while self._is_full:
                    self._freed = env.event()
                    yield self._freed
                arrival = _sent_at(arrival, int(env.now))
            self._next = next(self._arrivals, None)
            if arrival.ready_ns > env.now:
                self._on_the_way += 1
                env.process(self._submit_when_ready(arrival))
            else:
                self._submit(arrival)

    def a_place_is_free(self) -> bool:
        """Let the closed loop go on if it waits for a finish and one came."""
        if self._freed is None or self._is_full:
            return False
        freed, self._freed = self._freed, None
        freed.succeed()
        return True

    @property
    def _is_full(self) -> bool:
        limit = self._max_concurrency
        return limit is not None and self._engine.num_in_flight + self._on_the_way >= limit

    def _submit_when_ready(self, arrival: Arrival) -> _Process:
        yield self._env.timeout(arrival.ready_ns - self._env.now)
        self._on_the_way -= 1
        self._submit(arrival)

    def _submit(self, arrival: Arrival) -> None:
        self._engine.submit(arrival, int(self._env.now))
        if self.sleeping is not None and not self.sleeping.triggered:
            self.sleeping._ok = True
            self.sleeping._value = None
            self._env.schedule(self.sleeping, priority=_LATE)


def _sent_at(arrival: Arrival, now_ns: int) -> Arrival:
    """Start the clock of a request that a closed loop sends later than its own time."""
    request = arrival.request
    if arrival.ready_ns >= now_ns:
        return arrival
    prediction_ns = arrival.ready_ns - request.arrival_ns
    return arrival._replace(
        request=replace(request, arrival_ns=now_ns), ready_ns=now_ns + prediction_ns
    )


def simulate(
    engine: Engine,
    arrivals: Iterable[Arrival],
    max_concurrency: int | None = None,
    lookahead: bool = True,
) -> RunLog:
    """Run a workload to its end on an engine.

    Parameters
    ----------
    engine : Engine
        A fresh engine.
    arrivals : iterable of Arrival
        In order of `ready_ns`; read lazily, one ahead, so it may be a stream.
    max_concurrency : int, optional
        Closed loop: at most so many requests in flight; the next one is sent, and its clock
        started, when a place is free (but not before its own arrival time).
    lookahead : bool
        Whether the engine is told when the next request comes. Without it, segments start
        optimistically and are cut when a request arrives, as in a cluster, where nobody knows;
        the results are the same.

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
    env = simpy.Environment(initial_time=0)
    source = _Source(env, engine, arrivals, max_concurrency)

    def asleep() -> simpy.Event:
        source.sleeping = env.event()
        return source.sleeping

    def serve() -> _Process:
        while True:
            now_ns = int(env.now)
            segment = engine.begin(now_ns, source.horizon_ns if lookahead else FOREVER)
            if segment is None:
                if engine.wait_until_ns < FOREVER:
                    yield _StepEnd(env, engine.wait_until_ns - now_ns) | asleep()
                elif source.will_send:
                    yield asleep()
                elif engine.num_in_flight:
                    raise stalled(engine, "the policy waits and nothing is left to happen")
                else:
                    return
                source.sleeping = None
                continue
            end_ns = segment.end_ns
            if lookahead or len(segment.steps.durations_ns) == 1:
                yield _StepEnd(env, end_ns - now_ns)
            else:
                yield _StepEnd(env, end_ns - now_ns) | asleep()
                source.sleeping = None
                if env.now < end_ns:
                    yield _StepEnd(env, engine.cut(int(env.now)) - int(env.now))
            engine.commit()
            if source.a_place_is_free():
                yield _StepEnd(env, 0)

    arriving = env.process(source.run())
    env.run(env.process(serve()) & arriving)
    return engine.log
