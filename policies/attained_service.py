"""Service that requests have had: charged and looked through at every plan.

Functions of their own, which the compiled core has.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate

from schedlab.policies.shared_steps import SharedSteps
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.request import RequestState

_NEVER = 2 * FOREVER
"""More service than anybody gets."""

_MOST_QUEUES = 64
"""Nobody gets as much service as there would be in more."""


class Past:
    """What requests of a session have had that are gone: a policy's `Session.noted`.

    Attributes
    ----------
    service_ns, waited_ns : int
        The service that counts for the next ones, and the time that they were here without any.
    """

    __slots__ = ("service_ns", "waited_ns")

    def __init__(self) -> None:
        self.service_ns = 0
        self.waited_ns = 0


def past_of(state: RequestState) -> Past:
    """Return the past of a request's session; without one, one of its own."""
    session = state.session
    if session is None:
        return Past()
    past = session.noted
    if not isinstance(past, Past):
        past = session.noted = Past()
    return past


class Call:
    """What a request has had, with what it brought along, and where it stands.

    Attributes
    ----------
    past : Past
        Of its session.
    base_ns, waited_ns : int
        Service and waiting time that it brought along, as that was.
    kept_ns : int
        The service up to which its session keeps it already.
    came_ns, gone_ns : int
        When it came, and went; -1 if it is here.
    place : tuple of (int, int, bool, int)
        Its queue; when it came to it; whether from another queue; a number that orders those that
        came at one time.
    left_ns : int
        What is left of its quantum; FOREVER or more in the last queue.
    end_ns : int
        Its service when the quantum is used up.
    promoted_ns, promoted_had_ns : int
        When it was promoted last, or came, and the service that it had by then.
    """

    __slots__ = (
        "base_ns", "came_ns", "end_ns", "gone_ns", "kept_ns", "left_ns", "past", "place",
        "promoted_had_ns", "promoted_ns", "waited_ns",
    )  # fmt: skip

    def __init__(
        self, past: Past, came_ns: int, place: tuple[int, int, bool, int], quantum_ns: int
    ) -> None:
        self.past = past
        self.base_ns = self.kept_ns = self.promoted_had_ns = past.service_ns
        self.waited_ns = past.waited_ns
        self.came_ns = self.promoted_ns = came_ns
        self.gone_ns = -1
        self.place = place
        self.left_ns = quantum_ns
        self.end_ns = self.base_ns + quantum_ns

    @property
    def service_ns(self) -> int:
        """Its service, with what it brought along."""
        return self.end_ns - self.left_ns


class Queues:
    """Multi-level queues of calls: by service when they come, by quanta from then on.

    Queue k is for calls that bring service below ``first_ns * 2**k``, the last one for all that
    bring more. The quantum of a queue is the service that it spans: `first_ns` of the first two,
    twice that of the one before of the others. Whoever changes queues goes to the back, with the
    whole quantum. Whoever has waited `ratio` times its service, that of its session before it
    included, is moved to the first queue, and its own waiting and service count anew.

    Parameters
    ----------
    first_ns : int
        Service that the first queue holds.
    num_queues : int
        How many there are.
    ratio : float or None
        Waiting time over service at which a call starves; None = never.

    Attributes
    ----------
    calls : dict of RequestState to Call
        All that are here.
    look_ns : int
        Before this no call outside the first queue starves.
    """

    __slots__ = ("_first_ns", "_number", "_put_off", "_quanta_ns", "_ratio", "calls", "look_ns")

    def __init__(self, first_ns: int, num_queues: int, ratio: float | None) -> None:
        self.calls: dict[RequestState, Call] = {}
        self.look_ns = FOREVER
        self._first_ns = first_ns
        self._ratio = ratio
        self._number = 0
        self._put_off = SharedSteps()
        last = min(num_queues, _MOST_QUEUES) - 1
        self._quanta_ns = [first_ns << max(k - 1, 0) for k in range(last)] + [_NEVER]

    def join(self, state: RequestState, past: Past, now_ns: int) -> None:
        """Take in a request of a session with a past."""
        queue, last = 0, len(self._quanta_ns) - 1
        while queue < last and past.service_ns >= self._first_ns << queue:
            queue += 1
        self._number += 1
        place = queue, now_ns, False, self._number
        self.calls[state] = call = Call(past, now_ns, place, self._quanta_ns[queue])
        if self._ratio is not None and self._starves(call, now_ns, 0):
            self._promote(call, now_ns, 0)

    def charge(
        self,
        plan: BatchPlan,
        running: Collection[RequestState],
        durations_ns: Sequence[int],
        now_ns: int,
    ) -> None:
        """Charge who took part in steps, and let drop who used up a quantum in one of them.

        Those that are not here any more are left out. Steps that all who run took part in are put
        off until `settle`, unless it is looked for who starves.

        Parameters
        ----------
        plan : BatchPlan
            Of the steps; where it does not list its decodes, all who run took part.
        running : collection of RequestState
            Who runs after them.
        durations_ns : sequence of int
            How long each step took.
        now_ns : int
            When the last one ended.
        """
        if self._ratio is None and self._put_off.add(plan, running, durations_ns, now_ns):
            return
        self.settle()
        calls, used_ns = self.calls, now_ns - plan.start_ns
        used_up: list[Call] = []
        for state in _took_part(plan, running):
            call = calls.get(state)
            if call is not None:
                call.left_ns = left_ns = call.left_ns - used_ns
                if left_ns <= 0:
                    used_up.append(call)
        if not used_up:
            return
        if len(durations_ns) > 1:
            self._drop_step_by_step(used_up, list(accumulate(durations_ns)), now_ns)
            return
        used_up.sort(key=_place)
        for call in used_up:
            self._drop(call, now_ns, 0)

    def settle(self) -> None:
        """Charge those who took part in steps that were put off, and let them drop."""
        put_off = self._put_off
        calls, ends_ns = self.calls, put_off.ends_ns
        used_up: list[Call] = []
        for state, _, taken_ns in put_off.taken():
            call = calls.get(state)
            if call is not None:
                call.left_ns = left_ns = call.left_ns - taken_ns
                if left_ns <= 0:
                    used_up.append(call)
        if used_up:
            self._drop_step_by_step(used_up, ends_ns, put_off.end_ns)
        put_off.clear()

    def leave(self, state: RequestState) -> Call:
        """Let a request out that has ended; its last step may not be charged yet."""
        call = self.calls.pop(state)
        call.left_ns -= self._put_off.leave(state)
        return call

    def _drop_step_by_step(self, used_up: list[Call], ends_ns: list[int], now_ns: int) -> None:
        used_ns = ends_ns[-1]
        due = [(bisect_left(ends_ns, used_ns + call.left_ns), call.place, call) for call in used_up]
        heapify(due)
        while due:
            step, _, call = due[0]
            since_ns = used_ns - ends_ns[step]
            self._drop(call, now_ns - since_ns, since_ns)
            if call.left_ns > 0:
                heappop(due)
            else:
                again = bisect_left(ends_ns, used_ns + call.left_ns)
                heapreplace(due, (again, call.place, call))

    def _drop(self, call: Call, at_ns: int, since_ns: int) -> None:
        self._move(call, call.place[0] + 1, at_ns, since_ns)
        if self._ratio is not None and self._starves(call, at_ns, since_ns):
            self._promote(call, at_ns, since_ns)

    def _move(self, call: Call, queue: int, at_ns: int, since_ns: int) -> None:
        """Move a call, which is charged already for a service of `since_ns` that it had later."""
        service_ns = call.end_ns - call.left_ns
        self._number += 1
        call.place = queue, at_ns, True, self._number
        call.left_ns = left_ns = self._quanta_ns[queue] - since_ns
        call.end_ns = service_ns + left_ns

    def _promote(self, call: Call, at_ns: int, since_ns: int) -> None:
        call.promoted_ns = at_ns
        call.promoted_had_ns = call.service_ns - since_ns
        self._move(call, 0, at_ns, since_ns)

    def _starves(self, call: Call, at_ns: int, since_ns: int) -> bool:
        """Whether a call outside the first queue has waited too long; if not, note from when on."""
        if not call.place[0] or self._ratio is None:
            return False
        own_ns = call.service_ns - since_ns - call.promoted_had_ns
        service_ns = call.base_ns + own_ns
        if service_ns <= 0:
            return False
        most_ns = math.ceil(self._ratio * service_ns)
        # It has waited since then, but for the time that it was served.
        starves_ns = call.promoted_ns + own_ns + most_ns - call.waited_ns
        if starves_ns <= at_ns:
            return True
        self.look_ns = min(self.look_ns, starves_ns)
        return False

    def promote_starving(self, now_ns: int) -> list[RequestState]:
        """Move those that starve to the first queue, in the order in which they stood."""
        self.look_ns = FOREVER
        starving = [
            (call.place, state, call)
            for state, call in self.calls.items()
            if self._starves(call, now_ns, 0)
        ]
        starving.sort()
        for _, _, call in starving:
            self._promote(call, now_ns, 0)
        return [state for _, state, _ in starving]

    def until_ns(self, running: Collection[RequestState], now_ns: int) -> int:
        """Return when a quantum of those who run may be used up, or somebody starves."""
        calls = self.calls
        least_ns = min([calls[state].left_ns for state in running], default=FOREVER)
        return min(now_ns + least_ns, self.look_ns, FOREVER)


def charge_gone(plan: BatchPlan, now_ns: int, gone: dict[RequestState, Call]) -> None:
    """Charge who took part in the steps of a plan and is gone by their end, `now_ns`."""
    used_ns = now_ns - plan.start_ns
    for state in _took_part(plan, gone):
        call = gone.get(state)
        if call is not None and call.gone_ns > plan.start_ns:
            call.left_ns -= used_ns


def _took_part(plan: BatchPlan, running: Collection[RequestState]) -> Collection[RequestState]:
    if plan.decodes is None:
        return running
    if not plan.chunks:
        return plan.decodes
    return (*plan.decodes, *[state for state, _ in plan.chunks])


def _place(call: Call) -> tuple[int, int, bool, int]:
    return call.place
