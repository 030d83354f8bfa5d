"""vLLM's KV cache manager as the memory that a plan is drawn up on."""

from __future__ import annotations

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
        in_use = sum(block.ref_cnt > 0 for group in found.blocks for block in group)
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

    def blocks_to_hold(self, request: Request, num_tokens: int) -> int:
        """Count the blocks that a request with `num_tokens` in the cache holds."""
        return -(-num_tokens // self.block_size)
