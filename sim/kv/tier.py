"""One tier of memory below the GPU's: which KV blocks it holds, and a link to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import ceil

from schedlab.sim.config import KVTier, KVWrite

_WRITING = -1


class Link:
    """One direction of a link: copies run one after the other, in the order of their issue.

    As on a CUDA stream: a copy that waits for its data holds up those behind it. When a copy ends
    is known when it is issued, and does not change by what comes later.

    Parameters
    ----------
    bytes_per_s : float
        Bandwidth.
    latency_ns : int
        From the last byte on the link until it is there; the next copy may begin meanwhile.

    Attributes
    ----------
    free_ns : int
        When the last copy issued so far leaves the link.
    """

    def __init__(self, bytes_per_s: float, latency_ns: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns
        self.free_ns = 0

    def copy_ns(self, num_bytes: int) -> int:
        """Return how long a copy takes on a free link."""
        return ceil(num_bytes * 1e9 / self._bytes_per_s) + self._latency_ns

    def send(self, num_bytes: int, ready_ns: int) -> tuple[int, int]:
        """Issue a copy of data that is ready then; return when it begins and when it is done."""
        start_ns = max(self.free_ns, ready_ns)
        done_ns = start_ns + self.copy_ns(num_bytes)
        self.free_ns = done_ns - self._latency_ns
        return start_ns, done_ns


class Tier:
    """The block table of one tier: contents by name, the least recently used first.

    Beside them it holds blocks of requests that were swapped out, which nobody else can find and
    nothing evicts. Blocks that are being written cannot be found, and like those that are being
    read they cannot be evicted.

    Parameters
    ----------
    limits : KVTier
        Its size.

    Attributes
    ----------
    name : str
        How results call it.
    write : {"through", "back"}
        When blocks come here.
    num_pinned : int
        Blocks of requests that were swapped out.
    """

    def __init__(self, limits: KVTier) -> None:
        self.name = limits.name
        self.write: KVWrite = limits.write
        self.num_pinned = 0
        self._num_blocks = limits.num_blocks
        self._num_locked = 0
        self._locks: OrderedDict[int, int] = OrderedDict()  # readers by name; or _WRITING

    @property
    def used_blocks(self) -> int:
        """Blocks that hold something."""
        return len(self._locks) + self.num_pinned

    @property
    def names(self) -> list[int]:
        """Contents of all blocks but those of swapped requests, written or not."""
        return list(self._locks)

    @property
    def room_for_pins(self) -> int:
        """Blocks that are free, or that can be evicted."""
        return self._num_blocks - self.num_pinned - self._num_locked

    def has(self, name: int) -> bool:
        """Whether a block can be loaded."""
        return self._locks.get(name, _WRITING) != _WRITING

    def awaits(self, name: int) -> bool:
        """Whether a block is being written, and can be loaded when that is done."""
        return self._locks.get(name, 0) == _WRITING

    def add(self, names: Sequence[int]) -> tuple[list[int], list[int]]:
        """Add the contents of a sequence of blocks, from its first on, as far as there is room.

        Returns
        -------
        (list of int, list of int)
            Those to be written (not those that are there, or on their way), and those evicted.
        """
        self.touch(names)
        new = [name for name in names if name not in self._locks]
        evicted = self._evict(self.used_blocks + len(new) - self._num_blocks)
        del new[max(self._num_blocks - self.used_blocks, 0) :]
        for name in reversed(new):
            self._locks[name] = _WRITING
        self._num_locked += len(new)
        return new, evicted

    def add_all(self, names: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Add the contents of blocks, the last one the most recently used, if all find room.

        None of them is evicted for another. Nobody else counts as used by it.

        Returns
        -------
        (list of int, list of int) or None
            As `add`; None if there is no room for all that are not there, and nothing changed.
        """
        new = [name for name in names if name not in self._locks]
        lack = self.used_blocks + len(new) - self._num_blocks
        evicted = self._evict(lack, set(names))
        if len(evicted) < lack:
            return None
        for name in new:
            self._locks[name] = _WRITING
        self._num_locked += len(new)
        return new, evicted

    def written(self, names: Iterable[int]) -> None:
        """Let blocks be found that were added."""
        for name in names:
            self._locks[name] = 0
            self._num_locked -= 1

    def lock(self, names: Sequence[int], is_use: bool = True) -> None:
        """Keep blocks that are being read, which counts as a use of them unless told not to."""
        if is_use:
            self.touch(names)
        for name in names:
            self._num_locked += self._locks[name] == 0
            self._locks[name] += 1

    def unlock(self, names: Iterable[int]) -> None:
        """Take back one `lock`."""
        for name in names:
            self._locks[name] -= 1
            self._num_locked -= self._locks[name] == 0

    def pin(self, count: int) -> list[int]:
        """Take blocks for a request that is swapped out; return whose contents are evicted."""
        evicted = self._evict(self.used_blocks + count - self._num_blocks)
        self.num_pinned += count
        return evicted

    def unpin(self, count: int) -> None:
        """Give such blocks back."""
        self.num_pinned -= count

    def check(self) -> None:
        """Prove that the table fits and locks are counted, or raise AssertionError."""
        assert self.num_pinned >= 0, f"{self.name}: {self.num_pinned} blocks of swapped requests"
        assert self.used_blocks <= self._num_blocks, f"{self.name} holds more than it has"
        locked = sum(locks != 0 for locks in self._locks.values())
        assert locked == self._num_locked, f"{self.name}: {self._num_locked} locks, {locked} are"

    def touch(self, names: Sequence[int]) -> None:
        """Let blocks count as used just now."""
        # From the last to the first: the end of a sequence is of no use without its beginning.
        for name in reversed(names):
            if name in self._locks:
                self._locks.move_to_end(name)

    def _evict(self, count: int, spared: Collection[int] | None = None) -> list[int]:
        """Evict blocks that are not locked; with `spared` none of those, and all or none."""
        evicted: list[int] = []
        if count > 0:
            for name, locks in self._locks.items():
                if not locks and not (spared and name in spared):
                    evicted.append(name)
                    if len(evicted) == count:
                        break
            if spared is not None and len(evicted) < count:
                return []
            for name in evicted:
                del self._locks[name]
        return evicted


class SharedTier(Tier):
    """A tier that several engines write to and read from.

    What is written can be loaded by all from the moment on when it is there, whatever the engine
    that wrote it does then.

    Parameters
    ----------
    limits : KVTier
        Its size.

    Attributes
    ----------
    version : int
        Another number whenever other blocks can be found.
    """

    def __init__(self, limits: KVTier) -> None:
        super().__init__(limits)
        self.version = 0
        self._num_writes = 0
        self._coming: list[tuple[int, int, int, Sequence[int]]] = []  # when, and by whom

    def add(self, names: Sequence[int]) -> tuple[list[int], list[int]]:
        """Add the contents of blocks; see `Tier.add`."""
        added = super().add(names)
        self.version += len(added[1])
        return added

    def comes(self, names: Sequence[int], done_ns: int, writer: int) -> None:
        """Let blocks be found, that were added, from a time on; unless the writer is lost before.

        Parameters
        ----------
        names : sequence of int
            They.
        done_ns : int
            When.
        writer : int
            Number of the engine that writes them.
        """
        self._num_writes += 1
        heappush(self._coming, (done_ns, self._num_writes, writer, names))

    def settle(self, now_ns: int) -> None:
        """Let what is there by now be found."""
        while self._coming and self._coming[0][0] <= now_ns:
            self.written(heappop(self._coming)[3])
            self.version += 1

    def lose(self, writer: int, now_ns: int) -> None:
        """Forget what an engine was still writing when it died."""
        self.settle(now_ns)
        for _, _, by, names in self._coming:
            if by == writer:
                for name in names:
                    del self._locks[name]
                self._num_locked -= len(names)
        self._coming = [write for write in self._coming if write[2] != writer]
        heapify(self._coming)
