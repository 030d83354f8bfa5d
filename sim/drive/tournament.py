"""Loads of which the least is known all the time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from librt.vecs import vec
from mypy_extensions import i64


class Tournament:
    """Loads in a row, and which of them are least.

    Of each pair of neighbours the lesser goes on to the next round: where one changes, only the
    rounds that it goes through are played again, and the last winner is the least of all.

    Parameters
    ----------
    loads : sequence of float
        Finite; at least one.
    """

    __slots__ = ("_rounds", "_width")

    def __init__(self, loads: Sequence[float]) -> None:
        width: i64 = 1
        while width < len(loads):
            width *= 2
        self._width = width
        # Who wins between places 2i and 2i + 1 stands at i; the loads themselves are the last.
        rounds = [inf] * (2 * width)
        rounds[width : width + len(loads)] = loads
        for i in range(width - 1, 0, -1):
            rounds[i] = min(rounds[2 * i], rounds[2 * i + 1])
        self._rounds = vec[float](rounds)

    def change(self, place: int, load: float) -> None:
        """Let a load be another one."""
        rounds = self._rounds
        i: i64 = self._width + place
        if rounds[i] == load:
            return
        rounds[i] = load
        while i > 1:
            other = rounds[i ^ 1]
            i >>= 1
            least = load if load < other else other
            if rounds[i] == least:
                return
            rounds[i] = load = least

    def first_least(self, start: int) -> int:
        """Return the place of the least load, among equals the first from `start` on, in a circle.

        Examples
        --------
        >>> loads = Tournament([2.0, 1.0, 3.0, 1.0])
        >>> loads.first_least(0), loads.first_least(2)
        (1, 3)
        >>> loads.change(3, 4.0)
        >>> loads.first_least(2)
        1
        """
        rounds, width = self._rounds, self._width
        least = rounds[1]
        i: i64 = width + start
        if rounds[i] != least:
            # The nearest part behind `start` that it won in, or all.
            while i > 1 and (i & 1 or rounds[i + 1] != least):
                i >>= 1
            i = i + 1 if i > 1 else 1
            while i < width:
                i *= 2
                if rounds[i] != least:
                    i += 1
        return i - width
