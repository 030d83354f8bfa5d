"""The engine with the most free KV memory."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import loads
from schedlab.sim.request import Request


@register("least_kv")
class LeastKV(Router):
    """The engine that uses the least share of its KV memory, then with the fewest waiting.

    Memory tells of long contexts, which counts of requests do not; of requests that still wait it
    tells nothing, so a burst between two looks goes to one engine unless they count as well. The
    source adds the share of the CPU's KV memory, which vLLM no longer tells, and draws among
    equals.
    """

    source = "AIBrix gateway plugins, least-kv-cache"

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the one with the least in use."""
        return self.least(loads(engines, _load))


def _load(engine: EngineState) -> tuple[float, int]:
    return engine.used_blocks / engine.num_blocks, engine.num_waiting
