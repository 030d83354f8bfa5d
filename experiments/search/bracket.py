"""Search for the largest, or least, value at which something holds, and watch what is odd."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

_SCAN = 5
_MOST_DOUBLINGS = 16
_NEAR = 1.25


class Probe(NamedTuple):
    """A value that was tried.

    Attributes
    ----------
    value : float
        What was set.
    excess : tuple of float
        By how much each bar is broken there; a bar holds at <= 0.
    """

    value: float
    excess: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """Whether every bar holds."""
        return all(excess <= 0.0 for excess in self.excess)


class Bracket(NamedTuple):
    """Where the bars begin to break.

    Attributes
    ----------
    value : float
        The largest (or least) value before the first break at which every bar holds; the first
        value tried if none holds there.
    breaks_at : float
        The value tried next to it at which a bar breaks; infinity (or 0) if none breaks.
    bound : {"", "at least", "below", "at most", "above"}
        "at least" (of the least value: "at most") if nothing breaks up to the last value tried, so
        that the answer lies beyond; "below" ("above") if even the first value breaks a bar.
    probes : tuple of Probe
        Everything that was tried, by value.
    least : bool
        Whether the least value was searched: then "before" is above.
    """

    value: float
    breaks_at: float
    bound: str
    probes: tuple[Probe, ...]
    least: bool = False

    @property
    def holds_again(self) -> list[float]:
        """Values beyond one that breaks at which every bar holds: then there is no one answer."""
        return [
            probe.value
            for probe in self.probes
            if probe.holds and probe.value != self.breaks_at
            and (probe.value < self.breaks_at) is self.least
        ]  # fmt: skip

    @property
    def has_answer(self) -> bool:
        """Whether a value was found at which every bar holds."""
        return self.bound not in ("below", "above")

    def falls(self, bar: int) -> list[tuple[Probe, Probe]]:
        """Return neighbours between which the excess over a bar goes the wrong way.

        It is to rise with the value; with the least value searched, to fall.
        """
        return [
            (low, high)
            for low, high in pairwise(self.probes)
            if low.excess[bar] != high.excess[bar]
            and (high.excess[bar] < low.excess[bar]) is not self.least
        ]


Search = Generator[list[float], Sequence[Probe], Bracket]
"""Yields values to try, is sent what they came to, returns the answer."""


def bracket(
    between: tuple[float, float] | None,
    start: float,
    tolerance: float,
    whole: bool,
    near: float | None = None,
    *,
    least: bool = False,
) -> Search:
    """Search the largest (or least) value that holds: first a scan, then bisection.

    Parameters
    ----------
    between : (float, float) or None
        Smallest and largest value. Five values across it are tried, so that a break that heals
        further on is seen. `None` doubles or halves from `start` until one holds and one breaks.
    start : float
        Where to begin without a range.
    tolerance : float
        Bisection ends when the value that breaks is within this share of the one that holds, or
        at neighbouring integers.
    whole : bool
        Whether values are integers.
    near : float, optional
        A value around which it is looked for first.
    least : bool
        Whether bars hold at large values, and the least such value is searched.

    Yields
    ------
    list of float
        Values to try; send a `Probe` for each.

    Returns
    -------
    Bracket
        The answer, before the *first* break: what holds again beyond it is told, not used.
    """
    if near is not None:
        low, high = near / _NEAR, near * _NEAR
        if whole:  # that the neighbour of a small integer is looked at, too
            low, high = min(low, near - 1), max(high, near + 1)
        if between is not None:
            low, high = max(low, between[0]), min(high, between[1])
        low = max(low, 1.0) if whole else low
        found_near = yield from bracket((low, high), near, tolerance, whole, least=least)
        if not found_near.bound:
            return found_near
    probes: dict[float, Probe] = {}
    beyond = 0.0 if least else math.inf

    def rounded(value: float) -> float:
        return float(max(1, round(value))) if whole else value

    if between is not None:
        ratio = between[1] / between[0]
        steps = [rounded(between[0] * ratio ** (i / (_SCAN - 1))) for i in range(_SCAN)]
        found = yield list(dict.fromkeys(steps))
        probes |= {probe.value: probe for probe in found}
    else:
        value = rounded(start)
        for _ in range(_MOST_DOUBLINGS):
            (probe,) = yield [value]
            probes[value] = probe
            if len({p.holds for p in probes.values()}) == 2:
                break
            further = rounded(value * 2 if probe.holds is not least else value / 2)
            if further == value:
                break
            value = further
    while True:
        by_value = tuple(probes[value] for value in sorted(probes))
        from_easy = by_value[::-1] if least else by_value
        held = [probe.value for probe in takewhile(lambda probe: probe.holds, from_easy)]
        if not held:
            first = from_easy[0].value
            return Bracket(first, first, "above" if least else "below", by_value, least)
        best = held[-1]
        if len(held) == len(by_value):
            bound = "at most" if least else "at least"
            if least and whole and best == 1:
                bound = ""  # nothing is less
            return Bracket(best, beyond, bound, by_value, least)
        breaks_at = from_easy[len(held)].value
        middle = rounded(math.sqrt(best * breaks_at))
        close = max(best, breaks_at) <= min(best, breaks_at) * (1 + tolerance)
        if close or middle in (best, breaks_at):
            return Bracket(best, breaks_at, "", by_value, least)
        (probe,) = yield [middle]
        probes[middle] = probe
