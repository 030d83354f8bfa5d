"""The weighted scores of llm-d's inference scheduler."""

from collections.abc import Sequence

from schedlab.policies.routers.prefix_aware import PrefixTree
from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.request import Request


@register("llm_d")
class LlmD(Router):
    """The engine with the greatest weighted sum of three scores, each in [0, 1].

    Prefix: the share of the prompt that was sent there before. Queue: 1 for the shortest queue and
    0 for the longest, in between in proportion. KV: the share of its memory that is free.

    Parameters
    ----------
    prefix, queue, kv : float
        The weights.
    precise : bool
        Whether the prefix score goes by the true content of the caches.
    """

    source = "llm-d inference scheduler: prefix-cache 3, queue 2 and kv-cache-utilization 2"

    def __init__(
        self, prefix: float = 3.0, queue: float = 2.0, kv: float = 2.0, precise: bool = False
    ) -> None:
        if not (prefix >= 0 and queue >= 0 and kv >= 0 and prefix + queue + kv > 0):
            raise ValueError(f"weights must be >= 0 and not all 0, got {prefix}, {queue}, {kv}")
        self.prefix = prefix
        self.queue = queue
        self.kv = kv
        self.precise = precise
        self.looks_at_caches = precise
        self._trees: dict[int, PrefixTree] = {}

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the one with the greatest score, in turn among equals."""
        queues = [engine.num_waiting for engine in engines]
        shortest, span = min(queues), max(queues) - min(queues)

        def loss(engine: EngineState) -> float:
            queue = (engine.num_waiting - shortest) / span if span else 0.0
            kv = engine.used_blocks / engine.num_blocks
            prefix = 1 - self._known_tokens(request, engine) / request.prompt_tokens
            return self.prefix * prefix + self.queue * queue + self.kv * kv

        place = self.least([loss(engine) for engine in engines])
        if not self.precise:
            self._trees[engines[place].index].add(request.prefix_hash_ids)
        return place

    def engine_is_gone(self, index: int) -> None:
        """Forget what it was sent."""
        self._trees.pop(index, None)

    def _known_tokens(self, request: Request, engine: EngineState) -> int:
        if self.precise:
            return engine.cached_tokens(request)
        tree = self._trees.get(engine.index)
        if tree is None:
            tree = self._trees[engine.index] = PrefixTree(engine.num_blocks)
        return tree.match(request.prefix_hash_ids) * engine.block_size
