"""The time of a fleet, and what is to happen, in the order of phases of an instant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

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

    __slots__ = ("_agenda", "_num_asked", "_when", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._num_asked = 0
        # When, in one number, negative, so that the next one is the last of the list.
        self._when: list[int] = []
        self._agenda: list[tuple[int, Callable[[int], object]]] = []

    def at(self, delay_ns: int, phase: int, do: Callable[[int], object], place: int = 0) -> int:
        """Let something happen after some time, in a phase of that instant.

        Parameters
        ----------
        delay_ns : int
            How long it takes, from 0.
        phase : int
            One of those of this module.
        do : callable
            Called with the number that this returned: who has asked for something else since
            knows by it what does not count any more.
        place : int
            Where in the phase, below `NUM_PLACES`.

        Returns
        -------
        int
            A number of its own, greater than 0.
        """
        self._num_asked += 1
        number = self._num_asked
        instant = (self.now_ns + delay_ns << _PHASE_BITS) + phase
        when = -((instant << _PLACE_BITS) + place)
        agenda_when = self._when
        first, end = 0, len(agenda_when)
        while first < end:  # before its equals: they were asked for earlier
            middle = (first + end) >> 1
            if agenda_when[middle] < when:
                first = middle + 1
            else:
                end = middle
        agenda_when.insert(first, when)
        self._agenda.insert(first, (number, do))
        return number

    def run(self) -> None:
        """Let everything happen, until nothing is left to."""
        when, agenda = self._when, self._agenda
        while agenda:
            self.now_ns = -when.pop() >> _PHASE_BITS + _PLACE_BITS
            number, do = agenda.pop()
            do(number)
