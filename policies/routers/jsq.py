"""The shortest queue of all."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import loads
from schedlab.sim.request import Request


@register("jsq")
class JoinShortestQueue(Router):
    """The engine with the fewest requests waiting and running; among equals any.

    Optimal for equal servers, exponential service and no knowledge of sizes. What theory calls the
    queue holds those in service as well. Unlike `least_outstanding_requests` it draws among equals.
    """

    source = "Winston 1977, Optimality of the Shortest Line Discipline"

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Draw among those with the fewest."""
        found = loads(engines, _load)
        fewest = min(found)
        place = found.index(fewest)
        for _ in range(int(self.rng.random() * found.count(fewest))):
            place = found.index(fewest, place + 1)
        return place


def _load(engine: EngineState) -> int:
    return engine.num_waiting + engine.num_running
