"""Paged KV memory: blocks handed out on demand."""

from collections.abc import Iterable

from schedlab.sim.kv.ledger import NO_HIT, Hit, KVCacheManager, Mark, check_total
from schedlab.sim.request import Request, RequestState


class PagedKVCache(KVCacheManager):
    """Blocks handed out on demand, as in PagedAttention (Kwon et al., SOSP 2023).

    A request with c tokens in the cache holds ``ceil(c / block_size)`` blocks, so counting is
    enough; which physical blocks they are matters only to kernels and to prefix caching.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks in the pool, and tokens in a block.

    Raises
    ------
    ValueError
        If either is not positive.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, grows=True)
        self._free_at_begin = num_blocks

    def begin(self) -> None:
        """Open a ledger: what follows can be rolled back."""
        self._free_at_begin = self.free_blocks

    def rollback(self) -> None:
        """Undo every allocation and release since `begin`."""
        self.free_blocks = self._free_at_begin

    def mark(self) -> Mark:
        """Return a point in the open ledger for `restore`."""
        return Mark(self.free_blocks)

    def restore(self, mark: Mark) -> None:
        """Undo what was done since `mark`."""
        self.free_blocks = mark.free_blocks

    def lookup(self, state: RequestState) -> Hit:
        """Return `NO_HIT`: contents are not remembered."""
        return NO_HIT

    def allocate(
        self,
        state: RequestState,
        num_tokens: int,
        keep_free_blocks: int = 0,
        hit: Hit = NO_HIT,
        ahead_tokens: int = 0,
    ) -> bool:
        """Take what `num_tokens` more tokens, and those ahead, need; False if it does not fit."""
        computed = state._computed if state._batch is None else state.num_computed_tokens
        need = -(-(computed + num_tokens + ahead_tokens) // self.block_size)
        if computed and not state.swapped:  # who has nothing computed holds no block
            need += -(computed + state.spare_tokens) // self.block_size
        if need > self.free_blocks - keep_free_blocks:
            return False
        if need > 0:
            self.free_blocks -= need
        return True

    def reserve(
        self, state: RequestState, num_tokens: int, keep_free_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Take the same as `allocate`."""
        return self.allocate(state, num_tokens, keep_free_blocks, hit)

    def release(
        self,
        state: RequestState,
        comes_back: bool = False,
        granted_tokens: int = 0,
        unnamed_tokens: int = 0,
    ) -> None:
        """Give back the blocks of the request's computed and granted tokens."""
        computed = state._computed if state._batch is None else state.num_computed_tokens
        self.free_blocks -= -(computed + granted_tokens) // self.block_size

    def fits_without(
        self, victims: Iterable[RequestState], state: RequestState, keep_free_blocks: int
    ) -> bool:
        """Whether all of a waiting request would fit, were `victims` to give up what they hold."""
        size, room = self.block_size, self.free_blocks - keep_free_blocks
        for victim in victims:
            room += -(-(victim.num_computed_tokens + victim.spare_tokens) // size)
        return -(-state.num_tokens // size) <= room

    def blocks_before_eviction(self) -> int:
        """Return the free blocks: no content is lost with them."""
        return self.free_blocks

    def blocks_to_hold(self, request: Request, num_tokens: int) -> int:
        """Count the blocks that a request with `num_tokens` in the cache holds."""
        return -(-num_tokens // self.block_size)

    def fragmentation(self, resident_tokens: int) -> tuple[int, int]:
        """Return (0, unused tail tokens of last blocks)."""
        return 0, (self.num_blocks - self.free_blocks) * self.block_size - resident_tokens

    def check(self, resident: Iterable[RequestState]) -> None:
        """Prove that free and held blocks add up, or raise AssertionError."""
        tokens = [s.num_computed_tokens + s.spare_tokens for s in resident]
        held = sum(-(-held_tokens // self.block_size) for held_tokens in tokens)
        check_total(self.free_blocks, held, self.num_blocks)
