"""The time of a fleet, and what is to happen, in the order of phases of an instant."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
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


class Clock:
    """The time, in whole nanoseconds, and what is to happen.

    Everything at one instant happens phase by phase, and in a phase in the order in which it was
    asked for.

    Attributes
    ----------
    now_ns : int
        The time.
    """

    __slots__ = ("_agenda", "_num_asked", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._num_asked = 0
        self._agenda: list[tuple[int, int, int, Callable[[int], object]]] = []

    def at(self, delay_ns: int, phase: int, do: Callable[[int], object]) -> int:
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

        Returns
        -------
        int
            A number of its own, greater than 0.
        """
        self._num_asked += 1
        number = self._num_asked
        heappush(self._agenda, (self.now_ns + delay_ns, phase, number, do))
        return number

    def run(self) -> None:
        """Let everything happen, until nothing is left to."""
        agenda = self._agenda
        while agenda:
            self.now_ns, _, number, do = heappop(agenda)
            do(number)
