"""Time and arrivals: SimPy's clock in ns, and the process that sends the workload."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import simpy
from simpy.events import EventPriority

from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.request import Arrival, Request

_LATE = EventPriority(2)
_OBJECTS_PER_COLLECTION = 50_000

Process = Generator[simpy.Event, object, None]


class Turn(simpy.Event):
    """A timeout that is processed after everything else at its instant.

    An engine plans when its turn comes: then whoever arrives at that very instant has arrived.
    """

    def __init__(self, clock: Clock, delay_ns: int) -> None:
        super().__init__(clock)
        self._ok = True
        self._value = None
        clock.schedule(self, _LATE, delay_ns)


class Clock(simpy.Environment):
    """SimPy's clock, in whole nanoseconds."""

    def run(self, until: simpy.Event | float | None = None) -> object:
        """Let time pass; see `simpy.Environment.run`."""
        with _collecting_seldom():
            return super().run(until)


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Let Python look for reference cycles seldom.

    A run makes hardly any, but keeps many objects (a prefix cache most of all), through which
    every search goes again: with Python's own threshold that is most of the time of such a run.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], _OBJECTS_PER_COLLECTION), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class Source:
    """Sends the workload to engines: at its times, or as fast as `max_concurrency` allows.

    Parameters
    ----------
    clock : Clock
        What time it is.
    engines : sequence of Engine
        Where requests may go.
    route : callable
        Says which engine a request goes to.
    arrivals : iterable of Arrival
        In order of `ready_ns`; read one ahead.
    max_concurrency : int, optional
        Closed loop: most requests in flight, on all engines together.

    Attributes
    ----------
    is_resuming : bool
        Whether it has been told of a free place and sends at this very instant.
    """

    def __init__(
        self,
        clock: Clock,
        engines: Sequence[Engine],
        route: Callable[[Request], Engine],
        arrivals: Iterable[Arrival],
        max_concurrency: int | None,
    ) -> None:
        self._clock = clock
        self._engines = engines
        self._route = route
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._max_concurrency = max_concurrency
        self._next: Arrival | None = next(self._arrivals, None)
        self._on_the_way = 0
        self._freed: simpy.Event | None = None
        self._sent: simpy.Event | None = None
        self.is_resuming = False
        if max_concurrency is not None:
            for engine in engines:
                engine.requests.on_gone = self._request_is_gone

    @property
    def will_send(self) -> bool:
        """Whether a request comes even if none in flight is answered."""
        return self._on_the_way > 0 or (self._next is not None and self._freed is None)

    @property
    def horizon_ns(self) -> int:
        """When the next request comes; FOREVER if none does unless one is answered."""
        now_ns = int(self._clock.now)
        if self._on_the_way:
            return now_ns
        if self._next is None or (self._max_concurrency is not None and self._is_full):
            return FOREVER
        return max(self._next.ready_ns, now_ns)

    def sent(self) -> simpy.Event:
        """Return an event that happens when the next request is sent."""
        self._sent = self._clock.event()
        return self._sent

    def run(self) -> Process:
        """Send everything, in order."""
        clock, limit, last_ns = self._clock, self._max_concurrency, 0
        while self._next is not None:
            arrival = self._next
            if arrival.ready_ns < last_ns:
                raise ValueError(
                    f"request {arrival.request.id} is ready at {arrival.ready_ns} ns, before the "
                    f"one in front of it ({last_ns} ns)"
                )
            last_ns = arrival.ready_ns
            if arrival.ready_ns > clock.now:
                yield clock.timeout(arrival.ready_ns - clock.now)
            if limit is not None:
                while self._is_full:
                    self._freed = clock.event()
                    yield self._freed
                    self.is_resuming = False
                arrival = _sent_at(arrival, int(clock.now))
            self._next = next(self._arrivals, None)
            if arrival.ready_ns > clock.now:
                self._on_the_way += 1
                clock.process(self._submit_when_ready(arrival))
            else:
                self._submit(arrival)

    @property
    def _is_full(self) -> bool:
        limit = self._max_concurrency
        if limit is None:
            return False
        in_flight = sum([engine.requests.num_in_flight for engine in self._engines])
        return in_flight + self._on_the_way >= limit

    def _request_is_gone(self) -> None:
        if self._freed is not None and not self._is_full:
            freed, self._freed = self._freed, None
            freed.succeed()
            self.is_resuming = True

    def _submit_when_ready(self, arrival: Arrival) -> Process:
        yield self._clock.timeout(arrival.ready_ns - self._clock.now)
        self._on_the_way -= 1
        self._submit(arrival)

    def _submit(self, arrival: Arrival) -> None:
        self._route(arrival.request).submit(arrival, int(self._clock.now))
        if self._sent is not None:
            sent, self._sent = self._sent, None
            sent.succeed()


def _sent_at(arrival: Arrival, now_ns: int) -> Arrival:
    """Start the clock of a request that a closed loop sends later than its own time."""
    request = arrival.request
    if arrival.ready_ns >= now_ns:
        return arrival
    prediction_ns = arrival.ready_ns - request.arrival_ns
    return arrival._replace(
        request=replace(request, arrival_ns=now_ns), ready_ns=now_ns + prediction_ns
    )
