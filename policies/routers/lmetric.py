"""The product of what is to be computed and of how many are there."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import cached_tokens, loads
from schedlab.sim.request import Request


@register("lmetric")
class LMetric(Router):
    """The least product of prompt tokens to compute and of requests, with nothing to tune.

    To compute are the prompts that wait there and what of this one the cache does not hold;
    requests are those waiting and running, and this one. What one factor weighs against the other
    cancels out in a comparison. An idle engine does not always take it: a busy one of few requests
    that holds most of the prompt comes before it.
    """

    source = (
        "LMetric, Zhang et al. 2026 (arXiv:2603.15202), and blitz-serving/blitz-router, "
        "policies/lmetric.rs: new prefill tokens * (batch size + 1)"
    )
    looks_at_caches = True

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the least product, then the most that is cached, in turn among equals."""
        scores = []
        cached = cached_tokens(engines, request)
        for (backlog_tokens, batch), tokens in zip(loads(engines, _load), cached, strict=True):
            new_tokens = request.prompt_tokens - tokens
            scores.append(((backlog_tokens + new_tokens) * batch, new_tokens))
        return self.least(scores)


def _load(engine: EngineState) -> tuple[int, int]:
    return engine.backlog_tokens, engine.num_waiting + engine.num_running + 1
