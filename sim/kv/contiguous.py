"""Contiguous KV memory: reservations of the time before paging."""

from collections.abc import Callable, Iterable
from typing import Literal

from schedlab.sim.kv.ledger import NO_HIT, Hit, KVCacheManager, Mark, check_total
from schedlab.sim.request import Request, RequestState

Reservation = Literal["max", "declared", "pow2", "exact"]


class ContiguousKVCache(KVCacheManager):
    """One contiguous range a request, reserved at admission: serving before paging.

    Ranges are placed first-fit, so external fragmentation is real: a reservation can fail
    although enough blocks are free in all.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks in the pool, and tokens in a block (the granularity of a range).
    reserve : {"max", "declared", "pow2", "exact"}
        What is reserved behind the prompt: room up to `max_model_len`; the `max_tokens` that the
        request declares, as Orca does (OSDI 2022, algorithm 1); the next power of two of the true
        output; exactly the true output. All but the second are the baselines Orca (Max), (Pow2) and
        (Oracle) of the PagedAttention paper (section 6.1); the last two know what no server can.
    max_model_len : int
        Longest sequence, in tokens.
    output_tokens : callable
        True output length of a request. An accounting oracle of the allocator: policies have no
        access to it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        reserve: Reservation,
        max_model_len: int,
        output_tokens: Callable[[Request], int],
    ) -> None:
        super().__init__(num_blocks, block_size, grows=False)
        self._reserve = reserve
        self._max_model_len = max_model_len
        self._output_tokens = output_tokens
        self._holes: list[tuple[int, int]] = [(0, num_blocks)]
        self._held: dict[int, tuple[int, int, int]] = {}
        self._used_at_end_tokens = 0
        self._journal: list[tuple[int, tuple[int, int, int], bool]] = []

    def begin(self) -> None:
        """Open a ledger: what follows can be rolled back."""
        self._journal.clear()

    def rollback(self) -> None:
        """Undo every allocation and release since `begin`."""
        for request_id, held, was_taken in reversed(self._journal):
            if was_taken:
                self._give(request_id, held)
            else:
                self._take(request_id, held)
        self._journal.clear()

    def mark(self) -> Mark:
        """Return a point in the open ledger for `restore`."""
        return Mark(self.free_blocks)

    def restore(self, mark: Mark) -> None:
        """Do nothing: running requests, which are all that is ever taken back, hold their range."""

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
        """Reserve the request's range at its first tokens; later tokens are already paid for."""
        if state.id in self._held:
            return True
        need = self.blocks_to_hold(state.request, num_tokens + ahead_tokens)
        if need > self.free_blocks - keep_free_blocks:
            return False
        for start, length in self._holes:
            if length >= need:
                request = state.request
                final = request.prompt_tokens + self._output_tokens(request) - 1
                held = (start, need, min(final, need * self.block_size))
                self._take(state.id, held)
                self._journal.append((state.id, held, True))
                return True
        return False

    def reserve(
        self, state: RequestState, num_tokens: int, keep_free_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Take the same as `allocate`."""
        return self.allocate(state, num_tokens, keep_free_blocks, hit)

    def fits_without(
        self, victims: Iterable[RequestState], state: RequestState, keep_free_blocks: int
    ) -> bool:
        """Return False: what they hold need not be next to each other."""
        return False

    def blocks_before_eviction(self) -> int:
        """Return the free blocks: no content is lost with them."""
        return self.free_blocks

    def release(
        self,
        state: RequestState,
        comes_back: bool = False,
        granted_tokens: int = 0,
        unnamed_tokens: int = 0,
    ) -> None:
        """Give the request's range back, if it has one."""
        held = self._held.get(state.id)
        if held is not None:
            self._give(state.id, held)
            self._journal.append((state.id, held, False))

    def blocks_to_hold(self, request: Request, num_tokens: int) -> int:
        """Count the blocks of the request's reservation, whatever it has computed."""
        if self._reserve == "max":
            tokens = self._max_model_len
        elif self._reserve == "declared":
            tokens = min(request.prompt_tokens + request.max_tokens, self._max_model_len)
        else:
            output = self._output_tokens(request)
            room = 1 << (output - 1).bit_length() if self._reserve == "pow2" else output
            tokens = min(request.prompt_tokens + room, self._max_model_len)
        return -(-tokens // self.block_size)

    def fragmentation(self, resident_tokens: int) -> tuple[int, int]:
        """Split the held but unused tokens into (reserved for later, never to be used)."""
        held = (self.num_blocks - self.free_blocks) * self.block_size
        return self._used_at_end_tokens - resident_tokens, held - self._used_at_end_tokens

    def check(self, resident: Iterable[RequestState]) -> None:
        """Prove that holes and ranges tile the pool, or raise AssertionError."""
        ids = {s.id for s in resident}
        assert ids >= self._held.keys(), f"blocks held by {self._held.keys() - ids}, not resident"
        ranges = sorted(self._holes + [(start, size) for start, size, _ in self._held.values()])
        end = 0
        for start, size in ranges:
            assert start == end, f"blocks {end}..{start} are lost or held twice"
            end = start + size
        assert end == self.num_blocks
        held = sum(size for _, size, _ in self._held.values())
        check_total(self.free_blocks, held, self.num_blocks)

    def _take(self, request_id: int, held: tuple[int, int, int]) -> None:
        start, size, used_at_end = held
        for i, (hole, length) in enumerate(self._holes):
            if hole <= start and start + size <= hole + length:
                rest = [(hole, start - hole), (start + size, hole + length - start - size)]
                self._holes[i : i + 1] = [piece for piece in rest if piece[1]]
                break
        self._held[request_id] = held
        self.free_blocks -= size
        self._used_at_end_tokens += used_at_end

    def _give(self, request_id: int, held: tuple[int, int, int]) -> None:
        start, size, used_at_end = held
        del self._held[request_id]
        merged: list[tuple[int, int]] = []
        for hole, length in sorted([*self._holes, (start, size)]):
            if merged and sum(merged[-1]) == hole:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((hole, length))
        self._holes = merged
        self.free_blocks += size
        self._used_at_end_tokens -= used_at_end
