"""The part of a run that is measured: after warm-up, before the arrivals end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.latencies import seen_column
from schedlab.sim.record.columns import Bools, Columns, Ints

_NS_PER_S = 1_000_000_000


class Window(NamedTuple):
    """A span of a run, half-open.

    Attributes
    ----------
    begin_ns, end_ns : int
        On the run's clock.
    """

    begin_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.begin_ns) / _NS_PER_S

    def holds(self, times_ns: Ints) -> Bools:
        """Say of each time whether it lies inside."""
        return np.asarray((times_ns >= self.begin_ns) & (times_ns < self.end_ns))


def measured_window(
    requests: Columns,
    *,
    warm_up_s: float | None = None,
    warm_up_requests: int | None = None,
    cool_down_s: float | None = None,
) -> Window:
    """Return the part of a run that is left when its ends are cut off.

    Parameters
    ----------
    requests : mapping of str to ndarray
        One row a request: arrival_ns, finish_ns (-1 = never), finish_seen_ns of a front end.
    warm_up_s : float, optional
        The window begins so long after the first arrival.
    warm_up_requests : int, optional
        Instead, it begins with the first arrival after that of so many: who comes at the same
        instant as the last of them is left out with it.
    cool_down_s : float, optional
        The window ends so long before the last arrival; if absent with the run.

    Returns
    -------
    Window
        From the first to the last of what is measured.

    Raises
    ------
    SpecError
        If no request arrives inside.
    """
    arrival = np.sort(requests["arrival_ns"].astype(np.int64))
    if not len(arrival):
        raise SpecError("measure: there are no requests")
    first, last = int(arrival[0]), int(arrival[-1])
    begin = first + round((warm_up_s or 0.0) * _NS_PER_S)
    if warm_up_requests:
        if warm_up_requests >= len(arrival):
            raise SpecError(
                f"measure.warm_up_requests: {warm_up_requests} of {len(arrival)} requests leaves "
                "nothing to measure"
            )
        num_left_out = int(np.searchsorted(arrival, arrival[warm_up_requests - 1], side="right"))
        if num_left_out == len(arrival):
            raise SpecError(
                f"measure.warm_up_requests: {warm_up_requests} of {len(arrival)} requests leaves "
                "nothing to measure: all others arrive with the last of them"
            )
        begin = int(arrival[num_left_out])
    end = max(int(requests[seen_column(requests, "finish")].max()), last) + 1
    if cool_down_s is not None:
        end = last - round(cool_down_s * _NS_PER_S)
    window = Window(begin, end)
    if not window.holds(arrival).any():
        raise SpecError(
            f"measure: nothing is left: requests arrive for {(last - first) / _NS_PER_S:g} s only, "
            f"and what is measured would begin at {(begin - first) / _NS_PER_S:g} s and end at "
            f"{(end - first) / _NS_PER_S:g} s"
        )
    return window
