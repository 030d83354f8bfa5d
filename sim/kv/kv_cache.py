"""KV memory: paged blocks, and the contiguous reservations of the time before paging."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, Protocol

from schedlab.sim.config import EngineConfig
from schedlab.sim.kv.free_queue import Block
from schedlab.sim.request import Request, RequestState

Reservation = Literal["max", "pow2", "exact"]

_RESERVATIONS: dict[str, Reservation] = {
    "contiguous_max": "max",
    "contiguous_pow2": "pow2",
    "contiguous_exact": "exact",
}


class Hit(NamedTuple):
    """What a prefix cache holds of a waiting request's sequence."""

    tokens: int = 0
    """Tokens that need not be computed."""
    blocks_in_use: int = 0
    """Blocks of it that others hold, so that sharing them takes no memory."""
    blocks: tuple[Block, ...] = ()
    """Blocks of the prompt, found by their chained hashes."""
    num_own: int = 0
    """Free blocks behind them that only this request can use: it was preempted and left them."""


NO_HIT = Hit()


class Mark(NamedTuple):
    """A point in an open ledger."""

    free_blocks: int
    journal: int = 0
    shared_tokens: int = 0


class KVCacheManager(Protocol):
    """Block accounting for both backends.

    Allocations made while a plan is drawn up are tentative: `begin` opens the ledger and
    `rollback` undoes everything since. A request holds memory from its first granted token (or
    admission) until `release`.
    """

    block_size: int
    num_blocks: int
    grows: bool
    """Whether decoding requests take new blocks as they go (paged) or hold all from the start."""
    free_blocks: int
    shared_tokens: int
    """Tokens that several requests hold in one block, each counted once less than it is held."""
    num_evictions: int
    """The eviction epoch: how often a cached block was lost so far."""

    def begin(self) -> None:
        """Open a ledger: what follows can be rolled back."""

    def rollback(self) -> None:
        """Undo every allocation and release since `begin`."""

    def mark(self) -> Mark:
        """Return a point in the open ledger for `restore`."""

    def restore(self, mark: Mark) -> None:
        """Undo what was done since `mark`."""

    def lookup(self, state: RequestState) -> Hit:
        """Return what a prefix cache holds of a waiting request's sequence."""

    def allocate(
        self, state: RequestState, num_tokens: int, keep_free_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Take what `num_tokens` more tokens of the request need; False if it does not fit."""

    def release(self, state: RequestState, comes_back: bool = False) -> None:
        """Give back all that the request holds; it `comes_back` if it was preempted."""

    def blocks_before_eviction(self) -> int:
        """Count the blocks that can be taken before a cached one has to be."""

    def blocks_to_hold(self, request: Request, num_tokens: int) -> int:
        """Count the blocks that a request with `num_tokens` in the cache holds."""

    def fragmentation(self, resident_tokens: int) -> tuple[int, int]:
        """Split the held but unused tokens into (reserved for later, never to be used)."""

    def check(self, resident: Iterable[RequestState]) -> None:
        """Prove that free and held blocks add up, or raise AssertionError."""


class PagedKVCache:
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

    grows = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        _require_positive(num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_blocks = num_blocks
        self.shared_tokens = 0
        self.num_evictions = 0
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
        self, state: RequestState, num_tokens: int, keep_free_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Take what `num_tokens` more tokens of the request need; False if it does not fit."""
        computed = state.num_computed_tokens
        need = -(-(computed + num_tokens) // self.block_size)
        if not state.swapped:
            need += -computed // self.block_size
        if need > self.free_blocks - keep_free_blocks:
            return False
        self.free_blocks -= need
        return True

    def release(self, state: RequestState, comes_back: bool = False) -> None:
        """Give back the blocks of the request's computed tokens."""
        self.free_blocks -= -state.num_computed_tokens // self.block_size

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
        held = sum(-(-s.num_computed_tokens // self.block_size) for s in resident)
        _check_total(self.free_blocks, held, self.num_blocks)


class ContiguousKVCache:
    """One contiguous range a request, reserved at admission: serving before paging.

    Ranges are placed first-fit, so external fragmentation is real: a reservation can fail
    although enough blocks are free in all.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks in the pool, and tokens in a block (the granularity of a range).
    reserve : {"max", "pow2", "exact"}
        What is reserved behind the prompt: room up to `max_model_len`; the next power of two of
        the true output; exactly the true output. These are the baselines Orca (Max), (Pow2) and
        (Oracle) of the PagedAttention paper (section 6.1); the last two know what no server can.
    max_model_len : int
        Longest sequence, in tokens.
    output_tokens : callable
        True output length of a request. An accounting oracle of the allocator: policies have no
        access to it.
    """

    grows = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        reserve: Reservation,
        max_model_len: int,
        output_tokens: Callable[[Request], int],
    ) -> None:
        _require_positive(num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_blocks = num_blocks
        self.shared_tokens = 0
        self.num_evictions = 0
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
        self, state: RequestState, num_tokens: int, keep_free_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Reserve the request's range at its first tokens; later tokens are already paid for."""
        if state.id in self._held:
            return True
        need = self.blocks_to_hold(state.request, num_tokens)
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

    def blocks_before_eviction(self) -> int:
        """Return the free blocks: no content is lost with them."""
        return self.free_blocks

    def release(self, state: RequestState, comes_back: bool = False) -> None:
        """Give the request's range back, if it has one."""
        held = self._held.get(state.id)
        if held is not None:
            self._give(state.id, held)
            self._journal.append((state.id, held, False))

    def blocks_to_hold(self, request: Request, num_tokens: int) -> int:
        """Count the blocks of the request's reservation, whatever it has computed."""
        if self._reserve == "max":
            tokens = self._max_model_len
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
        _check_total(self.free_blocks, held, self.num_blocks)

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


def make_kv_cache(
    config: EngineConfig, output_tokens: Callable[[Request], int]
) -> PagedKVCache | ContiguousKVCache:
    """Return the allocator that a configuration names.

    Parameters
    ----------
    config : EngineConfig
        Limits and `kv_allocator`.
    output_tokens : callable
        True output length of a request, for reservations and for accounting.
    """
    blocks, size = config.num_blocks, config.block_size
    if config.enable_prefix_caching:
        from schedlab.sim.kv.prefix_cache import PrefixCachingKVCache  # it builds on this module

        return PrefixCachingKVCache(blocks, size)
    if config.kv_allocator == "paged":
        return PagedKVCache(blocks, size)
    reserve = _RESERVATIONS[config.kv_allocator]
    return ContiguousKVCache(blocks, size, reserve, config.max_model_len, output_tokens)


def _require_positive(num_blocks: int, block_size: int) -> None:
    if num_blocks < 1 or block_size < 1:
        raise ValueError(
            f"a KV cache needs at least one block of one token, got {num_blocks} x {block_size}"
        )


def _check_total(free_blocks: int, held: int, num_blocks: int) -> None:
    assert free_blocks >= 0, f"{-free_blocks} more blocks are held than exist"
    assert free_blocks + held == num_blocks, f"{free_blocks} free + {held} held != {num_blocks}"
