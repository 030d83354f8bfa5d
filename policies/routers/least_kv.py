"""The engine with the most free KV memory."""

from collections.abc import Sequence
from operator import truediv

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import column
from schedlab.sim.request import Request


@register("least_kv")
class LeastKV(Router):
    """The engine that uses the least share of its KV memory, then with the fewest waiting.

    Memory tells of long contexts, which counts of requests do not; of requests that still wait it
    tells nothing, so a burst between two looks goes to one engine unless they count as well.
    """

    source = "AIBrix gateway plugins, least-kv-cache"

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the one with the least in use."""
        used, blocks = column(engines, "used_blocks"), column(engines, "num_blocks")
        shares = map(truediv, used, blocks)
        return self.least(list(zip(shares, column(engines, "num_waiting"), strict=True)))
