"""Service that requests have had: charged and looked through at every plan.

Functions of their own, which the compiled core has.
"""

from __future__ import annotations

from collections.abc import Collection

from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.request import RequestState


class Call:
    """What a request has had, with what it brought along, and the queue that this puts it in.

    Queue k holds service below ``first_ns * 2**k``, queue `last` all that is more.

    Attributes
    ----------
    base_ns, waited_ns : int
        Service and waiting time that it brought along.
    came_ns : int
        When it came.
    service_ns : int
        Its service, with what it brought along.
    queue : int
        Where it is.
    end_ns : int
        The service at which it drops to the next queue; FOREVER if there is none.
    """

    __slots__ = ("base_ns", "came_ns", "end_ns", "last", "queue", "service_ns", "waited_ns")

    def __init__(
        self, base_ns: int, waited_ns: int, came_ns: int, first_ns: int, last: int
    ) -> None:
        self.base_ns = base_ns
        self.waited_ns = waited_ns
        self.came_ns = came_ns
        self.service_ns = base_ns
        self.last = last
        self.queue = 0
        self.end_ns = first_ns if last else FOREVER
        self.drop()

    def drop(self) -> None:
        """Go to the queue of the service."""
        while self.end_ns <= self.service_ns:
            self.queue += 1
            self.end_ns = self.end_ns * 2 if self.queue < self.last else FOREVER


def charge(
    plan: BatchPlan, running: Collection[RequestState], used_ns: int, calls: dict[int, Call]
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
    calls : dict of int to Call
        By id.
    """
    took_part = running
    if plan.decodes is not None:
        took_part = plan.decodes
        if plan.chunks:
            took_part = (*took_part, *[state for state, _ in plan.chunks])
    for state in took_part:
        call = calls.get(state.id)
        if call is not None:
            call.service_ns += used_ns
            if call.service_ns >= call.end_ns:
                call.drop()


def least_left_ns(running: Collection[RequestState], calls: dict[int, Call]) -> int:
    """Return what is left of the first quantum to be used up: FOREVER if all are in the last."""
    least_ns = FOREVER
    for state in running:
        call = calls[state.id]
        left_ns = call.end_ns - call.service_ns
        if left_ns < least_ns and call.end_ns < FOREVER:
            least_ns = left_ns
    return least_ns
