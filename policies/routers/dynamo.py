"""The least cost in blocks of prompts and of decodes, as Dynamo's KV router has it."""

from collections.abc import Sequence
from math import exp

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import cached_tokens, column, loads
from schedlab.sim.request import Request
from schedlab.sim.sums import in_order


@register("dynamo")
class Dynamo(Router):
    """The least ``overlap_weight * prefill blocks + decode blocks``.

    Prefill blocks are the prompts to be computed there, in blocks, with what of this one the cache
    does not hold; decode blocks are what requests hold or wait for. So it weighs a hit against a
    fuller memory, without thresholds: the weight is of first tokens against those that follow. It
    must know what caches hold, and both loads. It does badly where a cached prefix is worth less
    than a block of KV for the time of an answer: the whole context of a decode costs as much as a
    prompt of that length, and engines of different speed or memory are held for equal.

    Dynamo counts what it sent itself: a prompt as a whole until its first token, and no block
    twice. Here engines tell what is left of prompts; blocks that this prompt shares with others
    that run there count again, everywhere alike. It draws among equals.

    Parameters
    ----------
    overlap_weight : float
        Of prefill blocks, >= 0; with 0 caches do not matter.
    temperature : float
        Of draws by a softmax of the costs over their span, >= 0; with 0 the least takes it.
    """

    source = (
        "ai-dynamo/dynamo, lib/llm/src/kv_router/scheduler.rs, DefaultWorkerSelector: "
        "kv-overlap-score-weight 1, router-temperature 0, KV events"
    )
    looks_at_caches = True

    def __init__(self, overlap_weight: float = 1.0, temperature: float = 0.0) -> None:
        if not (overlap_weight >= 0 and temperature >= 0):
            raise ValueError(
                f"overlap_weight and temperature must be >= 0, got {overlap_weight!r} and "
                f"{temperature!r}"
            )
        self.overlap_weight = overlap_weight
        self.temperature = temperature

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Draw among those with the least cost, or by temperature."""
        weight, prompt_tokens = self.overlap_weight, request.prompt_tokens
        known = zip(
            loads(engines, self._load),
            cached_tokens(engines, request),
            column(engines, "block_size"),
            strict=True,
        )
        costs = [load + weight * (prompt_tokens - tokens) / size for load, tokens, size in known]
        least = min(costs)
        span = (max(costs) - least) * self.temperature
        if span:
            return self._by_shares([exp((least - cost) / span) for cost in costs])
        place = costs.index(least)
        for _ in range(int(self.rng.random() * costs.count(least))):
            place = costs.index(least, place + 1)
        return place

    def _load(self, engine: EngineState) -> float:
        prefill_blocks = engine.backlog_tokens / engine.block_size
        return self.overlap_weight * prefill_blocks + engine.used_blocks + engine.waiting_blocks

    def _by_shares(self, shares: Sequence[float]) -> int:
        """Draw a place in proportion to its share."""
        left = float(self.rng.random()) * in_order(shares)
        for place, share in enumerate(shares):
            left -= share
            if left < 0:
                return place
        return shares.index(max(shares))  # rounding ate the last of it
