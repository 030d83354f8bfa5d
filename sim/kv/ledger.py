"""What an engine asks of KV memory: a ledger of blocks, tentative until a plan is final."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from schedlab.sim.kv.free_queue import Run
from schedlab.sim.request import Request, RequestState


class Hit(NamedTuple):
    """What a prefix cache holds of a waiting request's sequence."""

    tokens: int = 0
    """Tokens that need not be computed."""
    blocks_in_use: int = 0
    """Blocks of it that others hold, so that sharing them takes no memory."""
    num_blocks: int = 0
    """Blocks of the prompt, found by their chained hashes."""
    parts: tuple[tuple[Run, int, int], ...] = ()
    """Where they are: a run, the name of the first of its blocks, and how many of them."""
    num_own: int = 0
    """Free blocks behind them that only this request can use: it was preempted and left them."""


NO_HIT: Final = Hit()


class Mark:
    """A point in an open ledger."""

    __slots__ = ("free_blocks", "journal", "shared_tokens")

    def __init__(self, free_blocks: int, journal: int = 0, shared_tokens: int = 0) -> None:
        self.free_blocks = free_blocks
        self.journal = journal
        self.shared_tokens = shared_tokens


class KVCacheManager:
    """Block accounting for both backends; the allocators derive from it.

    Allocations made while a plan is drawn up are tentative: `begin` opens the ledger and
    `rollback` undoes everything since. A request holds memory from its first granted token (or
    admission) until `release`.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks in the pool, and tokens in a block.
    grows : bool
        Whether decoding requests take new blocks as they go (paged) or hold all from the start.

    Attributes
    ----------
    free_blocks : int
        Blocks that nobody holds.
    shared_tokens : int
        Tokens that several requests hold in one block, each counted once less than it is held.
    num_evictions : int
        The eviction epoch: how often a cached block was lost so far.

    Raises
    ------
    ValueError
        If there is not at least one block of one token.
    """

    def __init__(self, num_blocks: int, block_size: int, grows: bool) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a KV cache needs at least one block of one token, got {num_blocks} x {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.grows = grows
        self.free_blocks = num_blocks
        self.shared_tokens = 0
        self.num_evictions = 0

    def begin(self) -> None:
        """Open a ledger: what follows can be rolled back."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Undo every allocation and release since `begin`."""
        raise NotImplementedError

    def mark(self) -> Mark:
        """Return a point in the open ledger for `restore`."""
        raise NotImplementedError

    def restore(self, mark: Mark) -> None:
        """Undo what was done since `mark`."""
        raise NotImplementedError

    def lookup(self, state: RequestState) -> Hit:
        """Return what a prefix cache holds of a waiting request's sequence."""
        raise NotImplementedError

    def allocate(
        self,
        state: RequestState,
        num_tokens: int,
        keep_free_blocks: int = 0,
        hit: Hit = NO_HIT,
        ahead_tokens: int = 0,
    ) -> bool:
        """Take what `num_tokens` more tokens of the request need; False if it does not fit.

        And slots for `ahead_tokens` behind them, whose content is not known.
        """
        raise NotImplementedError

    def reserve(
        self, state: RequestState, num_tokens: int, keep_free_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Take the same for tokens that are not there before a later plan: nobody finds them."""
        raise NotImplementedError

    def release(
        self,
        state: RequestState,
        comes_back: bool = False,
        granted_tokens: int = 0,
        unnamed_tokens: int = 0,
    ) -> None:
        """Give back all that the request holds.

        Parameters
        ----------
        state : RequestState
            Whose.
        comes_back : bool
            Whether it was preempted: it may find its blocks again, and a rollback undoes it.
        granted_tokens : int
            Tokens allocated in the open ledger, beyond those computed.
        unnamed_tokens : int
            Of all these, the last ones whose content was not known when they were scheduled: a
            block that ends in one is not found again.
        """
        raise NotImplementedError

    def fits_without(
        self, victims: Iterable[RequestState], state: RequestState, keep_free_blocks: int
    ) -> bool:
        """Whether all of a waiting request would fit, were `victims` to give up what they hold."""
        raise NotImplementedError

    def blocks_before_eviction(self) -> int:
        """Count the blocks that can be taken before a cached one has to be."""
        raise NotImplementedError

    def blocks_to_hold(self, request: Request, num_tokens: int) -> int:
        """Count the blocks that a request with `num_tokens` in the cache holds."""
        raise NotImplementedError

    def fragmentation(self, resident_tokens: int) -> tuple[int, int]:
        """Split the held but unused tokens into (reserved for later, never to be used)."""
        raise NotImplementedError

    def check(self, resident: Iterable[RequestState]) -> None:
        """Prove that free and held blocks add up, or raise AssertionError."""
        raise NotImplementedError


def check_total(free_blocks: int, held: int, num_blocks: int) -> None:
    """Raise AssertionError unless free and held blocks add up."""
    assert free_blocks >= 0, f"{-free_blocks} more blocks are held than exist"
    assert free_blocks + held == num_blocks, f"{free_blocks} free + {held} held != {num_blocks}"
