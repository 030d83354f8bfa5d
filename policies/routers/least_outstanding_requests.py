"""The engine with the fewest requests."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import column
from schedlab.sim.request import Request


@register("least_outstanding_requests")
class LeastOutstandingRequests(Router):
    """The engine with the fewest requests sent and not answered, in turn among equals.

    A gateway knows that without asking the engines. Long prompts and long answers count as much as
    short ones.
    """

    source = "nginx least_conn; AWS application load balancer, least outstanding requests"

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the one with the fewest."""
        return self.least(column(engines, "num_in_flight"))
