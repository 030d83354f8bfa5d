"""Search for the largest value at which something holds, and watch whether that makes sense."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import pairwise
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
        The largest value below the first break at which every bar holds; the smallest value
        tried if none holds there.
    above : float
        The smallest value tried at which a bar breaks; infinity if none breaks.
    bound : {"", "at least", "below"}
        "at least" if nothing breaks up to the largest value tried, so that the answer lies
        beyond; "below" if even the smallest value breaks a bar.
    probes : tuple of Probe
        Everything that was tried, by value.
    """

    value: float
    above: float
    bound: str
    probes: tuple[Probe, ...]

    @property
    def holds_again(self) -> list[float]:
        """Values above one that breaks at which every bar holds: then there is no one answer."""
        return [probe.value for probe in self.probes if probe.holds and probe.value > self.above]

    def falls(self, bar: int) -> list[tuple[Probe, Probe]]:
        """Return neighbours between which the excess over a bar falls: it is not monotone."""
        return [
            (low, high) for low, high in pairwise(self.probes) if high.excess[bar] < low.excess[bar]
        ]


Search = Generator[list[float], Sequence[Probe], Bracket]
"""Yields values to try, is sent what they came to, returns the answer."""


def bracket(
    between: tuple[float, float] | None,
    start: float,
    tolerance: float,
    whole: bool,
    near: float | None = None,
) -> Search:
    """Search the largest value that holds: first a scan, then bisection.

    Parameters
    ----------
    between : (float, float) or None
        Smallest and largest value. Five values across it are tried, so that a break that heals
        further up is seen. `None` doubles or halves from `start` until one holds and one breaks.
    start : float
        Where to begin without a range.
    tolerance : float
        Bisection ends when ``above <= value * (1 + tolerance)``, or at neighbouring integers.
    whole : bool
        Whether values are integers.
    near : float, optional
        A value around which it is looked for first.

    Yields
    ------
    list of float
        Values to try; send a `Probe` for each.

    Returns
    -------
    Bracket
        The answer, below the *first* break: what holds again above it is told, not used.
    """
    if near is not None:
        low, high = near / _NEAR, near * _NEAR
        if between is not None:
            low, high = max(low, between[0]), min(high, between[1])
        found_near = yield from bracket((low, high), near, tolerance, whole)
        if not found_near.bound:
            return found_near
    probes: dict[float, Probe] = {}

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
            further = rounded(value * 2 if probe.holds else value / 2)
            if further == value:
                break
            value = further
    while True:
        tried = tuple(probes[value] for value in sorted(probes))
        breaks = [probe.value for probe in tried if not probe.holds]
        above = breaks[0] if breaks else math.inf
        held = [probe.value for probe in tried if probe.value < above]
        if not held:
            return Bracket(tried[0].value, above, "below", tried)
        if not breaks:
            return Bracket(held[-1], above, "at least", tried)
        middle = rounded(math.sqrt(held[-1] * above))
        close = above <= held[-1] * (1 + tolerance)
        if close or middle in (held[-1], above):
            return Bracket(held[-1], above, "", tried)
        (probe,) = yield [middle]
        probes[middle] = probe
