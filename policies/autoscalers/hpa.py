"""The ratio rule of Kubernetes' horizontal pod autoscaler."""

from collections import deque
from math import ceil
from typing import Literal

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.autoscalers.registry import register
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.pool_state import PoolState


@register("hpa")
class Hpa(Autoscaler):
    """As many engines as bring the mean of a metric to its target.

    ``ceil(engines * mean / target)``, unless the ratio is within `tolerance` of 1. It shrinks to
    no less than what it asked for at any time of the last `stabilization_s`. With
    ``metric: num_waiting, target: 5`` it is the rule of vLLM's production stack (by KEDA).

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
    """

    source = (
        "kubernetes.io, Horizontal Pod Autoscaling: algorithm details, tolerance 0.1, downscale "
        "stabilization 300 s; vLLM production stack, KEDA on num_requests_waiting, threshold 5"
    )

    def __init__(
        self,
        metric: Literal["num_waiting", "num_in_flight", "kv_use"] = "num_waiting",
        target: float = 5.0,
        tolerance: float = 0.1,
        stabilization_s: float = 300.0,
    ) -> None:
        if metric not in ("num_waiting", "num_in_flight", "kv_use"):
            raise ValueError(f"metric must be num_waiting, num_in_flight or kv_use, got {metric!r}")
        if not (target > 0 and tolerance >= 0 and stabilization_s >= 0):
            raise ValueError(
                f"target must be > 0, tolerance and stabilization_s >= 0, got {target!r}, "
                f"{tolerance!r} and {stabilization_s!r}"
            )
        self.metric = metric
        self.target = target
        self.tolerance = tolerance
        self.stabilization_s = stabilization_s
        self._asked: deque[tuple[float, int]] = deque()

    def num_engines(self, pool: PoolState) -> int:
        """Scale by the ratio of the mean to the target."""
        wanted = pool.num_engines
        if pool.engines:
            mean = sum(map(self._value, pool.engines)) / len(pool.engines)
            ratio = mean / self.target
            if abs(ratio - 1) > self.tolerance:
                wanted = ceil(pool.num_engines * ratio)
        self._asked.append((pool.now_s, wanted))
        while self._asked[0][0] < pool.now_s - self.stabilization_s:
            self._asked.popleft()
        if wanted < pool.num_engines:
            return min(max(asked for _, asked in self._asked), pool.num_engines)
        return wanted

    def _value(self, engine: EngineState) -> float:
        if self.metric == "kv_use":
            return engine.used_blocks / engine.num_blocks
        return float(getattr(engine, self.metric))
