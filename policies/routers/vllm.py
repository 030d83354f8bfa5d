"""The router of vLLM's data parallelism before it weighed memory."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import place_of_least
from schedlab.sim.request import Request


@register("vllm")
class Vllm(Router):
    """The engine with the least ``4 * waiting + running`` requests, in turn among equals.

    In vLLM the counts come from a coordinator every 100 ms, and a client counts what it has sent
    since: that is `staleness_ms` 100. There a tie goes to the first engine (0.19, 0.24), or to the
    first from a place that moves on by one (0.26), here to the one behind the last chosen. From
    0.28 on it is `vllm_kv`.

    Parameters
    ----------
    waiting_weight : float
        How many running requests one that waits counts as.
    """

    source = "vLLM up to 0.26, v1/engine/core_client.py, DPLBAsyncMPClient"

    def __init__(self, waiting_weight: float = 4.0) -> None:
        if not waiting_weight >= 0:
            raise ValueError(f"waiting_weight must be >= 0, got {waiting_weight!r}")
        self.waiting_weight = waiting_weight

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the least loaded; the first from the one behind the last."""
        start = self.turn % len(engines)
        place = place_of_least(engines, self.waiting_weight, 1.0, start)
        self.turn = place + 1
        return place
