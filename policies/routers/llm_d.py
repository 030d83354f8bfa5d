"""The weighted scores of llm-d's inference scheduler."""

from collections.abc import Sequence

from schedlab.policies.routers.block_index import BlockIndex
from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import cached_tokens, column, loads
from schedlab.sim.request import Request


@register("llm_d")
class LlmD(Router):
    """The engine with the greatest weighted sum of three scores, each in [0, 1].

    Prefix: the share of the blocks of the prompt, the last one counted whole, that was sent there
    before; what is behind `max_prefix_blocks` is not looked at. A prompt of less than a block
    scores 0. Queue: 1 for the shortest queue and 0 for the longest, in between in proportion. KV:
    the share of its memory that is free. The source draws among equals, here they take turns.

    Of each engine as many blocks are remembered as it has, one by one, and the least recently sent
    is forgotten first: of a prompt its beginning, where the engine's cache loses the end. What is
    behind a block that is forgotten everywhere does not count, and what is behind one that another
    engine was sent counts, though the engine itself may have lost it. So the source does it.

    Parameters
    ----------
    prefix, queue, kv : float
        The weights.
    precise : bool
        Whether the prefix score is the share of the prompt that the caches do hold.
    max_prefix_blocks : int or None
        Most blocks of a prompt that are remembered and compared, >= 1; None = all.
    """

    source = (
        "llm-d inference scheduler (520af47): prefix-cache 3, queue 2 and kv-cache-utilization 2; "
        "approximateprefix, types.go (defaultMaxPrefixBlocks 256), indexer.go and plugin.go"
    )
    needs_prefixes = True

    def __init__(
        self,
        prefix: float = 3.0,
        queue: float = 2.0,
        kv: float = 2.0,
        precise: bool = False,
        max_prefix_blocks: int | None = 256,
    ) -> None:
        if not (prefix >= 0 and queue >= 0 and kv >= 0 and prefix + queue + kv > 0):
            raise ValueError(f"weights must be >= 0 and not all 0, got {prefix}, {queue}, {kv}")
        if max_prefix_blocks is not None and max_prefix_blocks < 1:
            raise ValueError(f"max_prefix_blocks must be >= 1, got {max_prefix_blocks!r}")
        self.prefix = prefix
        self.queue = queue
        self.kv = kv
        self.precise = precise
        self.max_prefix_blocks = max_prefix_blocks
        self.looks_at_caches = precise
        self._index = BlockIndex()

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the one with the greatest score, in turn among equals."""
        queues = column(engines, "num_waiting")
        shortest = min(queues)
        span = max(queues) - shortest or 1  # all as short: all lose nothing
        ids = request.prefix_hash_ids[: self.max_prefix_blocks]
        if self.precise:
            known, all_tokens = cached_tokens(engines, request), request.prompt_tokens
        else:
            sizes = column(engines, "block_size")
            known = self._index.tokens(ids, column(engines, "index"), sizes)
            num_blocks = -(-request.prompt_tokens // sizes[0])
            all_tokens = min(num_blocks, self.max_prefix_blocks or num_blocks) * sizes[0]
        by_prefix, by_queue, by_kv = self.prefix, self.queue, self.kv
        shares = loads(engines, _kv_share)
        of_nothing = by_prefix * 1.0  # as most know nothing of the prompt
        losses = [of_nothing + by_kv * share for share in shares]
        for i, tokens in enumerate(known):
            waiting = queues[i]
            if tokens or waiting > shortest:
                loss = by_prefix * (1 - tokens / all_tokens) + by_queue * (
                    (waiting - shortest) / span
                )
                losses[i] = loss + by_kv * shares[i]
        place = self.least(losses)
        if not self.precise:
            chosen = engines[place]
            self._index.add(chosen.index, ids, chosen.num_blocks)
        return place

    def engine_is_gone(self, index: int) -> None:
        """Forget what it was sent."""
        self._index.forget(index)


def _kv_share(engine: EngineState) -> float:
    return engine.used_blocks / engine.num_blocks
