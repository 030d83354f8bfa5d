"""Any engine."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.request import Request


@register("random")
class Random(Router):
    """Each engine with the same probability.

    Splits a Poisson process into independent ones, so that every engine is a queue by itself: what
    theory says of one engine holds for each, and what another router gains is seen against it.
    """

    source = "random splitting of a Poisson process, e.g. Harchol-Balter 2013, section 11.7"
    looks_at_engines = False

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Draw."""
        return int(self.rng.random() * len(engines))
