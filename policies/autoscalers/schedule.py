"""As many engines as a timetable says."""

from collections.abc import Sequence

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.autoscalers.registry import register
from schedlab.sim.drive.pool_state import PoolState


@register("schedule")
class Schedule(Autoscaler):
    """Follow a timetable, for load that is known ahead.

    Parameters
    ----------
    times : sequence of (float, int)
        From so many seconds on, so many engines; in order of time. Before the first nothing
        changes.
    period_s : float or None
        After which it begins anew; None = it does not.
    """

    source = "cron triggers, e.g. keda.sh, Cron scaler"

    def __init__(self, times: Sequence[Sequence[float]], period_s: float | None = None) -> None:
        try:
            rows = [(float(from_s), count) for from_s, count in times]
            in_order = bool(rows) and rows == sorted(rows) and all(r[0] >= 0 for r in rows)
            whole = all(count == int(count) and count >= 1 for _, count in rows)
        except (TypeError, ValueError, OverflowError):
            in_order = whole = False
        if not in_order:
            raise ValueError(f"times must be [seconds, engines] in order of time, got {times!r}")
        if not whole:
            raise ValueError(f"times: engines must be whole numbers >= 1, got {times!r}")
        if period_s is not None and not period_s > 0:
            raise ValueError(f"period_s must be > 0, got {period_s!r}")
        self.times = times
        self.period_s = period_s
        self._rows = [(from_s, int(count)) for from_s, count in rows]
        self.counts = [count for _, count in self._rows]

    def num_engines(self, pool: PoolState) -> int:
        """Look up the time."""
        now_s = pool.now_s if self.period_s is None else pool.now_s % self.period_s
        begun = [count for from_s, count in self._rows if from_s <= now_s]
        return begun[-1] if begun else pool.num_engines
