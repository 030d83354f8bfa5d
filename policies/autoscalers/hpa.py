"""The ratio rule of Kubernetes' horizontal pod autoscaler."""

from collections import deque
from math import ceil
from typing import Literal

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.autoscalers.registry import register
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.pool_state import PoolState

_GROWS_WITHIN_S = 15.0


@register("hpa")
class Hpa(Autoscaler):
    """As many engines as bring the mean of a metric to its target.

    ``ceil(sum / target)``, unless the mean is within `tolerance` of the target. Engines that are
    starting have no metric yet: they count as 0 where those that are up are above the target, and
    as the target where they are below it, so that what is on its way is not asked for again. If the
    mean is on the other side of the target with them nothing changes. It shrinks to no less than
    what it asked for at any time of the last `stabilization_s`, and grows within 15 s by
    `max_added` engines or to twice as many, whichever is more.

    With ``metric: num_waiting, target: 5, external: true`` it is the rule of vLLM's production
    stack (by KEDA).

    Parameters
    ----------
    metric : {"num_waiting", "num_in_flight", "kv_use"}
        What is averaged over the engines that are up: requests without a seat, requests sent and
        not answered, or the share of KV memory in use.
    target : float
        What it should be, > 0.
    tolerance : float
        Deviation from the target that changes nothing, >= 0.
    stabilization_s : float
        For how long a larger number is remembered, >= 0.
    max_added : int or None
        Engines that there may be more than 15 s before, unless twice as many are more; None = any.
    external : bool
        Whether the sum comes from elsewhere (type External, AverageValue): then engines that are
        starting count as 0 on either side.
    """

    source = (
        "Kubernetes, podautoscaler/replica_calculator.go and autoscaling/v2/defaults.go: tolerance "
        "0.1, downscale stabilization 300 s, +4 or x2 within 15 s; vLLM production stack, KEDA on "
        "num_requests_waiting, threshold 5"
    )

    def __init__(
        self,
        metric: Literal["num_waiting", "num_in_flight", "kv_use"] = "num_waiting",
        target: float = 5.0,
        tolerance: float = 0.1,
        stabilization_s: float = 300.0,
        max_added: int | None = 4,
        external: bool = False,
    ) -> None:
        if metric not in ("num_waiting", "num_in_flight", "kv_use"):
            raise ValueError(f"metric must be num_waiting, num_in_flight or kv_use, got {metric!r}")
        if not (target > 0 and tolerance >= 0 and stabilization_s >= 0):
            raise ValueError(
                f"target must be > 0, tolerance and stabilization_s >= 0, got {target!r}, "
                f"{tolerance!r} and {stabilization_s!r}"
            )
        if max_added is not None and max_added < 1:
            raise ValueError(f"max_added must be >= 1, got {max_added!r}")
        self.metric = metric
        self.target = target
        self.tolerance = tolerance
        self.stabilization_s = stabilization_s
        self.max_added = max_added
        self.external = external
        self._asked: deque[tuple[float, int]] = deque()
        self._had: deque[tuple[float, int]] = deque()

    def num_engines(self, pool: PoolState) -> int:
        """Scale by the ratio of the mean to the target."""
        wanted = self._wanted(pool)
        self._asked.append((pool.now_s, wanted))
        while self._asked[0][0] < pool.now_s - self.stabilization_s:
            self._asked.popleft()
        if wanted < pool.num_engines:
            wanted = min(max(asked for _, asked in self._asked), pool.num_engines)
        return self._limited(wanted, pool)

    def _wanted(self, pool: PoolState) -> int:
        num_up = len(pool.engines)
        if not num_up:
            return pool.num_engines
        num_starting = max(pool.num_engines - num_up, 0)
        total = sum(map(self._value, pool.engines))
        ratio = total / (self.target * num_up)
        if ratio < 1 and not self.external:
            total += self.target * num_starting
        with_all = total / (self.target * (num_up + num_starting))
        turns = with_all < 1 <= ratio and not self.external
        if turns or abs(with_all - 1) <= self.tolerance:
            return pool.num_engines
        return ceil(total / self.target)

    def _limited(self, wanted: int, pool: PoolState) -> int:
        self._had.append((pool.now_s, pool.num_engines))
        while self._had[0][0] <= pool.now_s - _GROWS_WITHIN_S:
            self._had.popleft()
        had = self._had[0][1]
        if self.max_added is None or wanted <= pool.num_engines:
            return wanted
        most = max(had + self.max_added, 2 * had)
        return max(min(wanted, most), pool.num_engines)

    def _value(self, engine: EngineState) -> float:
        if self.metric == "kv_use":
            return engine.used_blocks / engine.num_blocks
        return float(getattr(engine, self.metric))
