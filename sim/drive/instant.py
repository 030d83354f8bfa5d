"""What happens at one instant, in an order that does not depend on what was known first."""

from __future__ import annotations

from collections.abc import Callable

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

REPORTS = URGENT
COMES = NORMAL
"""Requests, and KV from other engines."""
ENDS = EventPriority(2)
"""Steps, and with them answers."""
FAILS = EventPriority(3)
"""Engines: a step that ends at that very instant has ended."""
FOLLOWS = EventPriority(4)
"""What clients and other engines do because of all that."""
PLANS = EventPriority(5)
"""Of the next steps: whoever comes at that very instant has come."""


def at(
    clock: simpy.Environment,
    delay_ns: int,
    phase: EventPriority,
    do: Callable[[simpy.Event], None] | None = None,
) -> simpy.Event:
    """Let something happen after some time, in a phase of that instant; return its event."""
    event = _Instant(clock, do)
    clock.schedule(event, phase, delay_ns)
    return event


class _Instant(simpy.Event):
    """An event that happens whatever becomes of others: it has no value to wait for."""

    def __init__(self, clock: simpy.Environment, do: Callable[[simpy.Event], None] | None) -> None:
        # All that `Event` has, at once: there are four of these a request.
        self.env = clock
        self.callbacks = [] if do is None else [do]
        self._ok = True
        self._value = None
