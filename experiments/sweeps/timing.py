"""How long the rest will take, from what the points before it took."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable


class TimeEstimate:
    """An estimate of the time that points still need.

    Parameters
    ----------
    labels : iterable of str
        Setting of each point still to run; replications of a setting share it.
    num_workers : int
        Points that run at the same time.
    clock : callable
        Seconds that only grow.

    Notes
    -----
    A point is expected to take as long as the finished replications of its setting, or, if there
    are none yet, as long as all finished points took on average. Until as many points are finished
    as run at a time there is no estimate: the first to finish are the short ones.
    """

    def __init__(
        self,
        labels: Iterable[str],
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = Counter(labels)
        self._num_workers = max(1, num_workers)
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._clock = clock
        self._num_run = 0
        self._last = clock()

    def know(self, label: str, seconds: float) -> None:
        """Note how long a point took that is not among those to run."""
        self._seconds[label].append(seconds)

    def finish(self, label: str, seconds: float | None) -> None:
        """Note that a point to run is done; without a time if it failed."""
        if seconds is not None:
            self.know(label, seconds)
        self._left[label] -= 1
        self._num_run += 1
        self._last = self._clock()

    def remaining_s(self) -> float | None:
        """Return the wall time still needed, in seconds; None while nobody can say."""
        left = self._left.total()
        if not left:
            return 0.0
        timed = [seconds for times in self._seconds.values() for seconds in times]
        if not timed or (self._num_run and self._num_run < min(self._num_workers, left)):
            return None
        overall = math.fsum(timed) / len(timed)
        work = 0.0
        longest = 0.0
        for label, count in self._left.items():
            times = self._seconds.get(label)
            each = math.fsum(times) / len(times) if times else overall
            work += each * count
            longest = max(longest, each if count else 0.0)
        since = self._clock() - self._last
        return max(max(work / self._num_workers, longest) - since, 0.0)

    def text(self) -> str:
        """Return the estimate in words, no more precise than it is."""
        remaining = self.remaining_s()
        if remaining is None:
            return "time left: not known yet"
        return f"about {duration(remaining)} left"


def duration(seconds: float) -> str:
    """Return a time span with two significant parts.

    Examples
    --------
    >>> duration(7.4), duration(200), duration(7300)
    ('7 s', '3 min 20 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 1 else "1 s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds / 10) * 10, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"
