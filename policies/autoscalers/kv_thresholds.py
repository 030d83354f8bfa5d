"""One engine more when KV memory is full, one less when it is empty."""

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.autoscalers.registry import register
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.pool_state import PoolState
from schedlab.sim.sums import in_order

_GRACE = 3
"""Intervals in which none is taken away, that in which one is added among them."""
_SHARE_OF_WAITING = 0.02


@register("kv_thresholds")
class KvThresholds(Autoscaler):
    """Keep the mean share of KV memory in use between two thresholds, an engine at a time.

    A request that waits counts as 2 % of the memory, where others run. While an engine is starting
    nothing changes, as in the planner, which waits for what it has asked for. The next two times
    after one was added none is taken away, so that it can fill its cache. The planner goes by the
    mean of an interval, here it is the moment that counts.

    Parameters
    ----------
    up : float
        Above it there is one engine more, in (0, 1].
    down : float
        Below it there is one less, in [0, `up`).
    """

    source = (
        "NVIDIA Dynamo 0.2, load-based planner (planner.py, collect_metrics() and "
        "make_adjustments()): decode KV thresholds 0.9 and 0.5, NEW_DECODE_WORKER_GRACE_PERIOD 3"
    )

    def __init__(self, up: float = 0.9, down: float = 0.5) -> None:
        if not 0 <= down < up <= 1:
            raise ValueError(f"needs 0 <= down < up <= 1, got down {down!r} and up {up!r}")
        self.up = up
        self.down = down
        self._grace = 0

    def num_engines(self, pool: PoolState) -> int:
        """Compare the mean with both."""
        if not pool.engines or len(pool.engines) < pool.num_engines:
            return pool.num_engines
        mean = in_order([_load(engine) for engine in pool.engines]) / len(pool.engines)
        wanted = pool.num_engines
        if mean < self.down and not self._grace:
            wanted -= 1
        if mean > self.up:
            wanted += 1
            self._grace = _GRACE
        self._grace = max(self._grace - 1, 0)
        return max(wanted, 0)


def _load(engine: EngineState) -> float:
    waiting = engine.num_waiting if engine.num_running else 0
    return engine.used_blocks / engine.num_blocks + _SHARE_OF_WAITING * waiting
