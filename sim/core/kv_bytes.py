"""What an executor that holds the bytes of KV blocks is told of them: names, hits and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from schedlab.sim.kv.ledger import KVCacheManager
from schedlab.sim.request import RequestState


class Copy(NamedTuple):
    """KV blocks that go down to a tier, or come back from there to the GPU.

    To the first tier they come from the GPU, to one below from the tier above, which has their
    bytes as long as the copy takes.
    """

    is_load: bool
    num_blocks: int
    names: Sequence[int] = ()
    """Of blocks of prompts and answers; none if a request is swapped."""
    state: RequestState | None = None
    """Whose blocks of the GPU they are; None of blocks that just lost their place."""
    first_block: int = 0
    """Where in its sequence the first of them lies."""
    place: int = 0
    """Which tier, 0 = the nearest."""
    evicted: Sequence[int] = ()
    """What the tier forgets for them, by name: nobody loads or writes it, and whatever of it goes
    to the tier below is on its way there already."""

    @property
    def is_swap(self) -> bool:
        """Whether it is of a request that is preempted, or comes back."""
        return not self.names


class CopyTime(NamedTuple):
    """When a copy took place."""

    number: int
    start_ns: int
    done_ns: int


class KVBytes(Protocol):
    """The bytes behind a ledger of KV blocks, and behind the tiers below it.

    Who counts decides, and tells: which request begins with blocks that are there, what blocks are
    called, what is copied and what is lost. Whoever holds the bytes keeps everything that can
    still be found; `PrefixCachingKVCache` says what that is.

    Attributes
    ----------
    times_copies : bool
        Whether copies take as long as they do, which nobody knows before they are done; otherwise
        they take what links say.
    """

    times_copies: bool

    def open(self, kv: KVCacheManager) -> None:
        """Learn of the ledger, before anything happens."""

    def reuse(self, state: RequestState, num_tokens: int) -> None:
        """Let a request begin with blocks of the cache, those that were its own included.

        Told of those of whom something is found in the cache or is loaded: of the latter no tokens
        perhaps, and what is loaded lies behind.
        It is told before anybody is given other blocks. Some of these may only be filled by the
        step that the request is admitted in.
        """

    def loaded(self, state: RequestState) -> None:
        """Learn that what was loaded for a request is there, and that others may find it."""

    def answered(self, state: RequestState, names: Sequence[int]) -> None:
        """Learn what the full blocks behind a request's prompt are called, while it holds them."""

    def copy(self, number: int, copy: Copy, now_ns: int) -> None:
        """Begin a copy; whoever overwrites what it reads, or reads what it writes, waits for it."""

    def finish(self, number: int) -> None:
        """Learn that the links say of a copy that it is done: be done with it."""

    def done(self, now_ns: int) -> list[CopyTime]:
        """Return the copies that are done by now and were not told of before."""

    def wait_for_copy(self, now_ns: int) -> int:
        """Return until when an engine waits at the latest that can only wait for copies."""

    def take_wait_ns(self) -> int:
        """Return how long steps have waited for copies since this was asked last."""
