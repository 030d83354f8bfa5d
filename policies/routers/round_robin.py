"""One engine after the other."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.request import Request


@register("round_robin")
class RoundRobin(Router):
    """Engines in turn.

    Evens out how many requests each gets and when they come, not how much work they are.
    """

    source = "nginx, upstream module: the default method"
    looks_at_engines = False

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the one behind the last."""
        place = self.turn % len(engines)
        self.turn = place + 1
        return place
