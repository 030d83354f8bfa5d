"""Who sends requests, and when: at the times of the workload, or when an answer is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.request import Arrival, RequestState


class Source:
    """Sends the workload: at its times, or as fast as `max_concurrency` allows.

    Whoever drives it moves the time, and tells it of every request that is answered or rejected
    if the loop is closed. In a closed loop the next request takes the place of the one that is
    gone: it is sent, and its clock started, at that instant, but not before its own time.

    Parameters
    ----------
    arrivals : iterable of Arrival
        In order of `ready_ns`; read one ahead, or one ahead for each place of a closed loop.
    submit : callable
        Takes a request, and when it comes.
    max_concurrency : int, optional
        Closed loop: most requests in flight.

    Attributes
    ----------
    next_ns : int
        When the next request comes; FOREVER if none does unless one is answered.
    is_closed : bool
        Whether it has to be told of answers.

    Raises
    ------
    ValueError
        When the workload goes back in time.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        submit: Callable[[Arrival, int], None],
        max_concurrency: int | None,
    ) -> None:
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._submit = submit
        self.is_closed = max_concurrency is not None
        self._last_ready_ns = 0
        self._num_read = 0
        self._next: Arrival | None = None
        # In a closed loop there are several, by the time they come: predictions may let one
        # overtake another.
        self._coming: list[tuple[int, int, Arrival]] = []
        self.next_ns = FOREVER
        for _ in range(1 if max_concurrency is None else max_concurrency):
            if not self._read(0):
                break

    def send_until(self, now_ns: int) -> None:
        """Submit all that come until `now_ns`, in order."""
        while self.next_ns <= now_ns:
            at_ns = self.next_ns
            if self.is_closed:
                arrival = heappop(self._coming)[2]
                self.next_ns = self._coming[0][0] if self._coming else FOREVER
            else:
                assert self._next is not None
                arrival = self._next
                self.next_ns = FOREVER
                self._read(0)
            self._submit(arrival, at_ns)

    def request_is_gone(self, _: RequestState, now_ns: int) -> None:
        """Learn that a request was answered or rejected: its place in a closed loop is free."""
        self._read(now_ns)

    def _read(self, free_ns: int) -> bool:
        """Let the next request take a place that is free from `free_ns` on; False if none is left.

        Raises
        ------
        ValueError
            If it is ready before the one in front of it.
        """
        arrival = next(self._arrivals, None)
        if arrival is None:
            return False
        if arrival.ready_ns < self._last_ready_ns:
            raise ValueError(
                f"request {arrival.request.id} is ready at {arrival.ready_ns} ns, before the "
                f"one in front of it ({self._last_ready_ns} ns)"
            )
        self._last_ready_ns = arrival.ready_ns
        if not self.is_closed:
            self._next, self.next_ns = arrival, arrival.ready_ns
            return True
        if arrival.request.arrival_ns < free_ns:
            arrival = sent_at(arrival, free_ns)
        self._num_read += 1
        heappush(self._coming, (arrival.ready_ns, self._num_read, arrival))
        self.next_ns = self._coming[0][0]
        return True


def sent_at(arrival: Arrival, now_ns: int) -> Arrival:
    """Start the clock of a request that is sent later than at its own time."""
    request = arrival.request
    prediction_ns = arrival.ready_ns - request.arrival_ns
    return replace(
        arrival, request=replace(request, arrival_ns=now_ns), ready_ns=now_ns + prediction_ns
    )
