"""Search for the largest, or least, value at which something holds, and watch what is odd."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

_SCAN = 5
_MOST_STRIDES = 16
_FAR = 2.0
_NEAR_STEPS = 2.5
"""How many tolerances the first stride away from where an answer is expected takes."""


class Probe(NamedTuple):
    """A value that was tried.

    Attributes
    ----------
    value : float
        What was set.
    excess : tuple of float
        By how much each constraint is broken there; a constraint holds at <= 0.
    """

    value: float
    excess: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """Whether every constraint holds."""
        return all(excess <= 0.0 for excess in self.excess)


class Bracket(NamedTuple):
    """Where the constraints begin to break.

    Attributes
    ----------
    value : float
        The largest (or least) value before the first break at which every constraint holds; the
        first value tried if none holds there.
    breaks_at : float
        The value tried next to it at which a constraint breaks; infinity (or 0) if none breaks.
    bound : {"", "at least", "below", "at most", "above"}
        "at least" (of the least value: "at most") if nothing breaks up to the last value tried, so
        that the answer lies beyond; "below" ("above") if even the first value breaks a constraint.
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
        """Values beyond one that breaks at which all constraints hold: there is no one answer."""
        return [
            probe.value
            for probe in self.probes
            if probe.holds and probe.value != self.breaks_at
            and (probe.value < self.breaks_at) is self.least
        ]  # fmt: skip

    @property
    def has_answer(self) -> bool:
        """Whether a value was found at which every constraint holds."""
        return self.bound not in ("below", "above")

    def falls(self, i: int) -> list[tuple[Probe, Probe]]:
        """Return neighbours between which the excess over one constraint goes the wrong way.

        It is to rise with the value; with the least value searched, to fall.
        """
        return [
            (low, high)
            for low, high in pairwise(self.probes)
            if low.excess[i] != high.excess[i]
            and (high.excess[i] < low.excess[i]) is not self.least
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
        Where the answer is expected: from there strides are taken instead of a scan, small at
        first and twice as long each time, until one holds and one breaks.
    least : bool
        Whether constraints hold at large values, and the least such value is searched.

    Yields
    ------
    list of float
        Values to try; send a `Probe` for each.

    Returns
    -------
    Bracket
        The answer, before the *first* break: what holds again beyond it is told, not used.
    """
    probes: dict[float, Probe] = {}
    low, high = between or (0.0, math.inf)
    beyond = 0.0 if least else math.inf

    def rounded(value: float) -> float:
        value = min(max(value, low), high)
        return float(max(1, round(value))) if whole else value

    if between is not None and near is None:
        steps = [rounded(low * (high / low) ** (i / (_SCAN - 1))) for i in range(_SCAN)]
        found = yield list(dict.fromkeys(steps))
        probes |= {probe.value: probe for probe in found}
    else:
        value = rounded(start if near is None else near)
        ratio = _FAR if near is None else (1 + tolerance) ** _NEAR_STEPS
        for _ in range(_MOST_STRIDES):
            (probe,) = yield [value]
            probes[value] = probe
            if len({p.holds for p in probes.values()}) == 2:
                break
            upwards = probe.holds is not least
            further = rounded(value * ratio if upwards else value / ratio)
            if further == value and whole:
                further = rounded(value + (1 if upwards else -1))
            if further == value:
                break
            value, ratio = further, min(ratio**2, _FAR)
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
