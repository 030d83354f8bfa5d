"""Service that requests have had: charged and looked through at every plan.

Functions of their own, which the compiled core has.
"""

from __future__ import annotations

from collections.abc import Collection

from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.request import RequestState

_NEVER = 2 * FOREVER
"""More service than anybody gets."""


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
    """What a request has had, with what it brought along, and the queue that this puts it in.

    Queue k holds service below ``first_ns * 2**k``, queue `last` all that is more.

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
    queue : int
        Where it is.
    left_ns : int
        Service until it drops to the next queue; FOREVER or more if there is none.
    """

    __slots__ = (
        "_end_ns", "_last", "base_ns", "came_ns", "gone_ns", "kept_ns", "left_ns", "past", "queue",
        "waited_ns",
    )  # fmt: skip

    def __init__(self, past: Past, came_ns: int, first_ns: int, last: int) -> None:
        self.past = past
        self.base_ns = self.kept_ns = past.service_ns
        self.waited_ns = past.waited_ns
        self.came_ns = came_ns
        self.gone_ns = -1
        self.queue = 0
        self._last = last
        self._end_ns = first_ns if last else _NEVER
        self.left_ns = self._end_ns - self.base_ns
        self.drop()

    @property
    def service_ns(self) -> int:
        """Its service, with what it brought along."""
        return self._end_ns - self.left_ns

    def drop(self) -> None:
        """Go to the queue of the service."""
        while self.left_ns <= 0:
            service_ns = self.service_ns
            self.queue += 1
            self._end_ns = self._end_ns * 2 if self.queue < self._last else _NEVER
            self.left_ns = self._end_ns - service_ns


def charge_gone(plan: BatchPlan, used_ns: int, gone: dict[RequestState, Call]) -> None:
    """Charge who took part in a step and is gone by its end; see `charge`."""
    in_step = [state for state, call in gone.items() if call.gone_ns > plan.start_ns]
    charge(plan, in_step, used_ns, gone)


def charge(
    plan: BatchPlan,
    running: Collection[RequestState],
    used_ns: int,
    calls: dict[RequestState, Call],
) -> None:
    """Charge who took part in a step; those that have no call any more are left out.

    Parameters
    ----------
    plan : BatchPlan
        Of the step; where it does not list its decodes, all who run took part.
    running : collection of RequestState
        Who runs after it.
    used_ns : int
        What it took.
    calls : dict of RequestState to Call
        Of all requests.
    """
    took_part = running
    if plan.decodes is not None:
        took_part = plan.decodes
        if plan.chunks:
            took_part = (*took_part, *[state for state, _ in plan.chunks])
    for state in took_part:
        call = calls.get(state)
        if call is not None:
            call.left_ns = left_ns = call.left_ns - used_ns
            if left_ns <= 0:
                call.drop()


def least_left_ns(running: Collection[RequestState], calls: dict[RequestState, Call]) -> int:
    """Return what is left of the first quantum to be used up: FOREVER if all are in the last."""
    least_ns = FOREVER
    for state in running:
        left_ns = calls[state].left_ns
        if left_ns < least_ns:
            least_ns = left_ns
    return least_ns
