"""Service that requests have had: charged and looked through at every plan.

Functions of their own, which the compiled core has.
"""

from __future__ import annotations

from collections.abc import Collection

from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.request import RequestState


class Call:
    """What a request brought along, and what it has had since."""

    __slots__ = ("base_ns", "came_ns", "used_ns", "waited_ns")

    def __init__(self, base_ns: int, waited_ns: int, came_ns: int) -> None:
        self.base_ns = base_ns
        self.waited_ns = waited_ns
        self.came_ns = came_ns
        self.used_ns = 0


def charge(plan: BatchPlan, used_ns: int, calls: dict[int, Call]) -> None:
    """Charge who took part in a step; those that have no call any more are left out."""
    for state in plan.decoding():
        call = calls.get(state.id)
        if call is not None:
            call.used_ns += used_ns
    for state, _ in plan.chunks:
        call = calls.get(state.id)
        if call is not None:
            call.used_ns += used_ns


def least_left_ns(
    running: Collection[RequestState], calls: dict[int, Call], first_ns: int, last: int
) -> int:
    """Return what is left of the first quantum to be used up: FOREVER if all are in queue `last`.

    Queue k holds service below ``first_ns * 2**k``.
    """
    least_ns = FOREVER
    for state in running:
        call = calls[state.id]
        service_ns = call.base_ns + call.used_ns
        end_ns, queue = first_ns, 0
        while end_ns <= service_ns and queue < last:
            end_ns += end_ns
            queue += 1
        if queue < last and end_ns - service_ns < least_ns:
            least_ns = end_ns - service_ns
    return least_ns
