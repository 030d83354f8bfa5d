"""vLLM's KV cache manager as the memory that a plan is drawn up on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlab.sim.kv.ledger import Mark
from schedlab.sim.request import Request, RequestState, Status

if TYPE_CHECKING:
    from schedlab.gpu_backend.vllm.requests import Requests


class VllmHit(NamedTuple):
    """What vLLM's prefix cache holds of a waiting request's sequence."""

    tokens: int
    blocks_in_use: int
    blocks: Any
    """vLLM's KVCacheBlocks."""


_NO_HIT = VllmHit(0, 0, None)


class Blocks:
    """Grants become blocks at once, in the order in which the policy asks for them.

    That is vLLM's own order, so that it evicts the same contents; it also means that a plan cannot
    be rolled back. An error in a plan ends the server, which loses its requests anyway.

    Parameters
    ----------
    requests : Requests
        Whose memory it is.
    manager : vllm KVCacheManager
        Who keeps it.
    block_size : int
        Tokens in a block.
    """

    grows = True
    shared_tokens = 0
    num_evictions = 0

    def __init__(self, requests: Requests, manager: Any, block_size: int) -> None:  # noqa: ANN401
        self._requests = requests
        self._manager = manager
        self.block_size = block_size
        self.new_blocks: dict[str, Any] = {}
        """vLLM's id of a request to the blocks that this step gave it."""

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def begin(self) -> None:
        """Begin a step."""
        self.new_blocks = {}

    def rollback(self) -> None:
        """Keep what was granted: see the class."""

    def mark(self) -> Mark:
        """Return nothing of use: nothing is taken back."""
        return Mark(0)

    def lookup(self, state: RequestState) -> VllmHit:
        """Ask vLLM's prefix cache."""
        found, tokens = self._manager.get_computed_blocks(self._requests.vllm_request(state))[:2]
        in_use = sum(block.ref_cnt > 0 for block in _listed(found))
        return VllmHit(tokens, in_use, found)

    def new_blocks_of(self, state: RequestState, num_tokens: int) -> int:
        """Count the blocks that `num_tokens` more tokens of a running request take."""
        computed = state.num_computed_tokens
        return -(-(computed + num_tokens) // self.block_size) + -computed // self.block_size

    def allocate(
        self,
        state: RequestState,
        num_tokens: int,
        keep_free_blocks: int = 0,
        hit: VllmHit = _NO_HIT,
        ahead_tokens: int = 0,
    ) -> bool:
        """Take what `num_tokens` more tokens, and those ahead, need; False if it does not fit."""
        request = self._requests.vllm_request(state)
        if state.status is Status.RUNNING:
            blocks = self._manager.allocate_slots(
                request, num_tokens, num_lookahead_tokens=ahead_tokens
            )
        else:
            filled = hit.tokens + num_tokens + ahead_tokens
            need = -(-filled // self.block_size) - hit.blocks_in_use
            if need > self.free_blocks - keep_free_blocks:
                return False
            # The watermark was looked at just now.
            blocks = self._manager.allocate_slots(
                request,
                num_tokens,
                num_new_computed_tokens=hit.tokens,
                new_computed_blocks=hit.blocks if hit.tokens else None,
                num_lookahead_tokens=ahead_tokens,
                has_scheduled_reqs=False,
            )
        if blocks is None:
            return False
        self.new_blocks[request.request_id] = blocks
        return True

    def release(
        self,
        state: RequestState,
        comes_back: bool = False,
        granted_tokens: int = 0,
        unnamed_tokens: int = 0,
    ) -> None:
        """Let vLLM preempt the request, then and there."""
        self.new_blocks.pop(self._requests.vllm_request(state).request_id, None)
        self._requests.evict(state)

    def fits_without(
        self, victims: Iterable[RequestState], state: RequestState, keep_free_blocks: int
    ) -> bool:
        """Whether all of a waiting request would fit, were `victims` to give up what they hold.

        A block becomes free if all who hold it are among them; those that others hold of what the
        request begins with need not be.
        """
        requests, room = self._requests, self.free_blocks - keep_free_blocks
        need = self.blocks_to_hold(state.request, state.num_tokens)
        if not requests.config.enable_prefix_caching:
            held = [victim.num_computed_tokens + victim.spare_tokens for victim in victims]
            return need <= room + sum([-(-tokens // self.block_size) for tokens in held])
        holders: Counter[int] = Counter()
        for victim in victims:
            name = requests.vllm_request(victim).request_id
            for block in _listed(self._manager.get_blocks(name)):
                holders[block.block_id] += 1
                room += holders[block.block_id] == block.ref_cnt
        for block in _listed(self.lookup(state).blocks):
            need -= block.ref_cnt > holders[block.block_id]
        return need <= room

    def blocks_to_hold(self, request: Request, num_tokens: int) -> int:
        """Count the blocks that a request with `num_tokens` in the cache holds."""
        return -(-num_tokens // self.block_size)


def _listed(blocks: Any) -> Iterator[Any]:  # noqa: ANN401
    """Iterate over vLLM's KVCacheBlocks."""
    return chain.from_iterable(blocks.blocks)
