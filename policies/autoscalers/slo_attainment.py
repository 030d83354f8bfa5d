"""One engine more when targets are missed, one less after a while in which they were held."""

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.autoscalers.registry import register
from schedlab.sim.drive.pool_state import PoolState


@register("slo_attainment")
class SloAttainment(Autoscaler):
    """Follow the share of answers that held all their targets.

    Below `target` there is one engine more. If it was at least `target` for `patience` intervals
    in a row there is one less. Intervals without an answer count as held if nothing waits. While
    an engine is starting the number stays: what it is for is on its way.

    Parameters
    ----------
    target : float
        Share of answers, in (0, 1].
    patience : int
        Intervals, >= 1.
    """

    source = (
        "step scaling on an error rate with warm-up, e.g. AWS Auto Scaling; thresholds are ours"
    )
    needs_targets = ("ttft_ms", "tpot_ms", "e2el_ms")

    def __init__(self, target: float = 0.95, patience: int = 6) -> None:
        if not 0 < target <= 1:
            raise ValueError(f"target must be in (0, 1], got {target!r}")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience must be a whole number >= 1, got {patience!r}")
        self.target = target
        self.patience = patience
        self._held = 0

    def num_engines(self, pool: PoolState) -> int:
        """Count what was held since it was asked last."""
        answers = pool.answers
        if answers:
            holds = sum(a.holds_targets for a in answers) >= self.target * len(answers)
        else:
            holds = not any(engine.num_waiting for engine in pool.engines)
        self._held = self._held + 1 if holds else 0
        if len(pool.engines) < pool.num_engines:
            return pool.num_engines
        if not holds:
            return pool.num_engines + 1
        if self._held >= self.patience:
            self._held = 0
            return max(pool.num_engines - 1, 0)
        return pool.num_engines
