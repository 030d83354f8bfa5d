"""The router of vLLM's data parallelism since it weighs memory."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState, first_least
from schedlab.sim.drive.offer import loads
from schedlab.sim.request import Request

_PRESSED_FROM = 0.5
_WEIGHT = 6.0


@register("vllm_kv")
class VllmKV(Router):
    """The engine with the fewest requests; those that wait weigh more where memory is short.

    An engine counts as what was sent to it and not answered, or as ``waiting + running``, whichever
    is more, and ``6 * waiting * (used - 0.5)`` beyond that if more than half of its KV memory is
    used: a queue there is worked off slowly. The first to be looked at moves on by one with each
    request.

    In vLLM the counts come from a coordinator every 100 ms, and a client counts what it has sent
    since: that is `staleness_ms` 100. There is one client here.
    """

    source = "vLLM 0.28 to 0.33, v1/engine/core_client.py, DPLBAsyncMPClient"

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the least loaded; the first from a place that moves on."""
        start = self.turn % len(engines)
        self.turn = start + 1
        return first_least(loads(engines, _load), start)


def _load(engine: EngineState) -> float:
    num_waiting = engine.num_waiting
    load = float(max(engine.num_in_flight, num_waiting + engine.num_running))
    if num_waiting:
        pressed = max(0.0, engine.used_blocks / engine.num_blocks - _PRESSED_FROM)
        load += num_waiting * _WEIGHT * pressed
    return load
