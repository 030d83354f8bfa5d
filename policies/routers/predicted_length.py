"""The engine with the least predicted work."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import loads
from schedlab.sim.request import Request


@register("predicted_length")
class PredictedLength(Router):
    """The engine whose unanswered requests have the fewest predicted output tokens.

    How long an engine is busy is decided by its answers rather than by its prompts. Counted is the
    whole answer until it is there.
    """

    source = "least work left, with predicted sizes: Harchol-Balter 2013, section 24.2"
    needs_prediction = True

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the one with the least; in turn among equals."""
        if request.predicted_tokens is None:
            raise ValueError(
                f"request {request.id} carries no prediction; the router needs a predictor, for "
                "example policy.predictor: oracle"
            )
        return self.least(loads(engines, _load))


def _load(engine: EngineState) -> float:
    return engine.predicted_tokens_in_flight
