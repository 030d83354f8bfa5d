"""The time of a fleet, and what is to happen, in the order of phases of an instant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

REPORTS: Final = 0
COMES: Final = 1
"""Requests, and KV from other engines."""
ENDS: Final = 2
"""Steps, and with them answers."""
FAILS: Final = 3
"""Engines: a step that ends at that very instant has ended."""
FOLLOWS: Final = 4
"""What clients and other engines do because of all that."""
PLANS: Final = 5
"""Of the next steps: whoever comes at that very instant has come."""

_PHASE_BITS: Final = 3
_PLACE_BITS: Final = 11
"""An instant, a phase of it and a place in that are one number in the agenda, in that order."""

NUM_PLACES: Final = 1 << _PLACE_BITS
"""Of a phase."""


class Event:
    """One thing that is to happen.

    Attributes
    ----------
    do : callable
        Called with this: who has asked for something else since knows by it what does not count
        any more.
    when : int
        Its instant, phase and place.
    """

    __slots__ = ("do", "when")

    def __init__(self, do: Callable[[Event], object], when: int) -> None:
        self.do = do
        self.when = when


class Clock:
    """The time, in whole nanoseconds, and what is to happen.

    Everything at one instant happens phase by phase, in a phase by places, and there in the order
    in which it was asked for.

    Attributes
    ----------
    now_ns : int
        The time.

    Notes
    -----
    The agenda is a sorted list, as there are not many more entries than engines: a place in it is
    found by comparing a few numbers, which a heap of tuples takes several times as long for. They
    are compared here, as a call of `bisect` takes compiled code longer than that.
    """

    __slots__ = ("_agenda", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._agenda: list[Event] = []  # the next one is the last

    def at(
        self,
        delay_ns: int,
        phase: int,
        do: Callable[[Event], object],
        place: int = 0,
        happened: Event | None = None,
    ) -> Event:
        """Let something happen after some time, in a phase of that instant.

        Parameters
        ----------
        delay_ns : int
            How long it takes, from 0.
        phase : int
            One of those of this module.
        do : callable
            What is done.
        place : int
            Where in the phase, below `NUM_PLACES`.
        happened : Event, optional
            One that happens now, and is of no more use: this one is made of it.

        Returns
        -------
        Event
            It.
        """
        instant = (self.now_ns + delay_ns << _PHASE_BITS) + phase
        when = (instant << _PLACE_BITS) + place
        if happened is None:
            event = Event(do, when)
        else:
            event = happened
            event.do = do
            event.when = when
        agenda = self._agenda
        first: i64 = 0
        end: i64 = len(agenda)
        while first < end:  # before its equals: they were asked for earlier
            middle = (first + end) >> 1
            if agenda[middle].when > when:
                first = middle + 1
            else:
                end = middle
        agenda.insert(first, event)
        return event

    def run(self) -> None:
        """Let everything happen, until nothing is left to."""
        agenda = self._agenda
        while agenda:
            event = agenda.pop()
            self.now_ns = event.when >> _PHASE_BITS + _PLACE_BITS
            event.do(event)
