"""One engine more when KV memory is full, one less when it is empty."""

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.autoscalers.registry import register
from schedlab.sim.drive.pool_state import PoolState


@register("kv_thresholds")
class KvThresholds(Autoscaler):
    """Keep the mean share of KV memory in use between two thresholds, an engine at a time.

    While one is starting nothing changes, as in the planner, which waits for what it has asked for.
    That one goes by the mean of an interval, and adds something for requests that wait.

    Parameters
    ----------
    up : float
        Above it there is one engine more, in (0, 1].
    down : float
        Below it there is one less, in [0, `up`).
    """

    source = "NVIDIA Dynamo 0.2, load-based planner: decode KV thresholds 0.9 and 0.5"

    def __init__(self, up: float = 0.9, down: float = 0.5) -> None:
        if not 0 <= down < up <= 1:
            raise ValueError(f"needs 0 <= down < up <= 1, got down {down!r} and up {up!r}")
        self.up = up
        self.down = down

    def num_engines(self, pool: PoolState) -> int:
        """Compare the mean with both."""
        if not pool.engines or len(pool.engines) < pool.num_engines:
            return pool.num_engines
        use = sum([engine.used_blocks / engine.num_blocks for engine in pool.engines])
        mean = use / len(pool.engines)
        return max(pool.num_engines + (mean > self.up) - (mean < self.down), 0)
