"""The engine with the fewest tokens to serve."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import loads
from schedlab.sim.request import Request


@register("least_outstanding_tokens")
class LeastOutstandingTokens(Router):
    """The engine whose unanswered requests have the fewest tokens, in turn among equals.

    Tokens are those of the prompts, and of the answers as far as they are predicted; without a
    predictor prompts alone. A gateway knows that without asking the engines.
    """

    source = "AIBrix gateway plugins, least-load by tokens"

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the one with the fewest."""
        return self.least(loads(engines, _load))


def _load(engine: EngineState) -> float:
    return engine.prompt_tokens_in_flight + engine.predicted_tokens_in_flight
