"""Clients that go on when they have an answer: conversations, and agents that call tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.drive.arrivals import Source, sent_at
from schedlab.sim.request import Arrival, RequestState, Status

Submit = Callable[[Arrival, int], None]
Forget = Callable[[str | None], None]


def peeked(arrivals: Iterable[Arrival]) -> tuple[bool, Iterator[Arrival]]:
    """Return whether requests are those of sessions, and all of them."""
    rest = iter(arrivals)
    first = next(rest, None)
    if first is None:
        return False, rest
    return first.turn is not None, chain([first], rest)


def open_source(
    arrivals: Iterable[Arrival],
    submit: Submit,
    cancel: Submit,
    forget: Forget,
    max_concurrency: int | None,
) -> Source | SessionSource:
    """Return who sends a workload; see `Source` and `SessionSource`."""
    has_sessions, arrivals = peeked(arrivals)
    if has_sessions:
        return SessionSource(arrivals, submit, cancel, forget, max_concurrency)
    return Source(arrivals, submit, max_concurrency)


class _Session:
    """A session that has started.

    Attributes
    ----------
    num_left : int
        Its requests that are neither answered nor rejected.
    """

    __slots__ = ("num_left",)

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left


class _Waiting:
    """A request that is neither answered nor rejected.

    Attributes
    ----------
    arrival : Arrival
        It.
    session : _Session
        Where it belongs.
    num_missing : int
        Answers that it needs and has not yet.
    is_cancelled : bool
        Whether it will never have them.
    """

    __slots__ = ("arrival", "is_cancelled", "num_missing", "session")

    def __init__(self, arrival: Arrival, session: _Session, num_missing: int) -> None:
        self.arrival = arrival
        self.session = session
        self.num_missing = num_missing
        self.is_cancelled = False


class SessionSource:
    """Sends the requests of sessions: the first ones when it starts, the others after answers.

    A request is sent, and its clock started, its delay after the last answer that it needs; one
    that needs none, its delay after the start of the session. Sessions start at their times; in a
    closed loop the next one starts when one of `max_concurrency` is over, but not before its time.
    If a request is rejected, those that need its answer are cancelled: they are never sent.

    Parameters
    ----------
    arrivals : iterable of Arrival
        The requests of a session one behind the other, each behind those that it needs; sessions
        in order of their start. Read one ahead, but a session that starts as a whole.
    submit, cancel : callable
        Take a request, and when it comes, or would never come.
    forget : callable
        Called with the name of a session that is over.
    max_concurrency : int, optional
        Closed loop: most sessions at a time.

    Attributes
    ----------
    next_ns : int
        When the next request comes; FOREVER if none does unless one is answered.
    is_closed : bool
        True: it has to be told of answers.

    Raises
    ------
    ValueError
        When a session starts before the one in front of it, or needs a request that is not there.
    """

    is_closed = True

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        submit: Submit,
        cancel: Submit,
        forget: Forget,
        max_concurrency: int | None,
    ) -> None:
        self._arrivals = iter(arrivals)
        self._submit = submit
        self._cancel = cancel
        self._forget = forget
        self._has_places = max_concurrency is not None
        self._ahead = next(self._arrivals, None)
        self._last_start_ns = 0
        # By time and then by request: who answered first at one instant does not matter.
        self._coming: list[tuple[int, int, _Waiting]] = []
        self._waiting: dict[int, _Waiting] = {}
        self._followers: dict[int, list[_Waiting]] = {}
        self.next_ns = FOREVER
        for _ in range(max_concurrency or 0):
            self._start_next(0)
        self._look_ahead()

    def send_until(self, now_ns: int) -> None:
        """Submit all that come until `now_ns`, in order."""
        while self.next_ns <= now_ns:
            if self._ahead_ns() <= self.next_ns:
                self._start_next(0)
            else:
                at_ns, _, waiting = heappop(self._coming)
                if waiting.is_cancelled:
                    self._cancel(waiting.arrival, at_ns)
                    self._is_over(waiting, at_ns)
                else:
                    self._submit(waiting.arrival, at_ns)
            self._look_ahead()

    def request_is_gone(self, state: RequestState, now_ns: int) -> None:
        """Learn that a request was answered or rejected: who needs the answer may go on."""
        waiting = self._waiting[state.id]
        followers = self._followers.pop(state.id, ())
        if state.status is Status.REJECTED:
            self._give_up(followers, now_ns)
        else:
            for follower in followers:
                follower.num_missing -= 1
                if not (follower.num_missing or follower.is_cancelled):
                    turn = follower.arrival.turn
                    assert turn is not None
                    self._send(follower, now_ns + turn.delay_ns)
        self._is_over(waiting, now_ns)
        self._look_ahead()

    def _give_up(self, followers: Iterable[_Waiting], now_ns: int) -> None:
        for follower in followers:
            if not follower.is_cancelled:
                follower.is_cancelled = True
                request_id = follower.arrival.request.id
                heappush(self._coming, (now_ns, request_id, follower))
                self._give_up(self._followers.pop(request_id, ()), now_ns)

    def _is_over(self, waiting: _Waiting, now_ns: int) -> None:
        del self._waiting[waiting.arrival.request.id]
        waiting.session.num_left -= 1
        if not waiting.session.num_left:
            self._forget(waiting.arrival.request.session)
            if self._has_places:
                self._start_next(now_ns)

    def _send(self, waiting: _Waiting, at_ns: int) -> None:
        waiting.arrival = arrival = sent_at(waiting.arrival, at_ns)
        heappush(self._coming, (arrival.ready_ns, arrival.request.id, waiting))

    def _ahead_ns(self) -> int:
        if self._has_places or self._ahead is None:
            return FOREVER
        return self._ahead.request.arrival_ns

    def _look_ahead(self) -> None:
        self.next_ns = min(self._coming[0][0] if self._coming else FOREVER, self._ahead_ns())

    def _start_next(self, free_ns: int) -> None:
        """Read the next session, if there is one, and let it start, at `free_ns` at the earliest.

        Raises
        ------
        ValueError
            If it starts before the one in front of it, or needs a request that is not there.
        """
        first = self._ahead
        if first is None:
            return
        own_ns = first.request.arrival_ns
        if own_ns < self._last_start_ns:
            raise ValueError(
                f"session {first.request.session} starts at {own_ns} ns, before the one in front "
                f"of it ({self._last_start_ns} ns)"
            )
        self._last_start_ns = own_ns
        start_ns = max(own_ns, free_ns)
        session = _Session(0)
        name = first.request.session
        while (arrival := self._ahead) is not None:
            turn, request = arrival.turn, arrival.request
            if request.session != name or (session.num_left and name is None):
                break
            assert turn is not None
            waiting = _Waiting(arrival, session, len(turn.parents))
            for parent in turn.parents:
                if parent not in self._waiting:
                    raise ValueError(
                        f"request {request.id} needs the answer of {parent}, which is not before "
                        f"it in its session {name}"
                    )
                self._followers.setdefault(parent, []).append(waiting)
            self._waiting[request.id] = waiting
            session.num_left += 1
            if not turn.parents:
                self._send(waiting, start_ns + turn.delay_ns)
            self._ahead = next(self._arrivals, None)
