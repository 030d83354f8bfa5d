"""The queue of free KV blocks, oldest first, with contents that may still be reused."""

from __future__ import annotations

from collections.abc import Callable

Undo = tuple[Callable[..., None], tuple[object, ...]]


class Block:
    """A KV block whose content has a name, or a run of free blocks that are alike.

    Attributes
    ----------
    key : int or None
        Chained hash of the content; `None` where it has no public name.
    owner : int or None
        The request that alone can find this run of blocks again.
    count : int
        Blocks it stands for: 1 with a key, any number without.
    num_users : int
        Requests that hold it; it is in the queue exactly when there are none.
    """

    __slots__ = ("before", "behind", "count", "key", "num_users", "owner")

    def __init__(
        self,
        key: int | None = None,
        count: int = 1,
        num_users: int = 0,
        owner: int | None = None,
    ) -> None:
        self.key = key
        self.owner = owner
        self.count = count
        self.num_users = num_users
        self.before: Block = self
        self.behind: Block = self

    @property
    def is_cached(self) -> bool:
        """Whether somebody may find its content again."""
        return self.key is not None or self.owner is not None


class FreeQueue:
    """Free blocks in the order in which they are handed out; every change can be undone.

    A doubly linked list: a block that is hit leaves it from the middle, and undoing in reverse
    order restores every link.

    Parameters
    ----------
    num_blocks : int
        Blocks at the start, all without content.
    on_evict : callable
        Called with a cached block that is handed out, or a run of which some are.

    Attributes
    ----------
    num_blocks : int
        Blocks in the queue.
    journal : list
        What undoes the changes so far, newest last.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Block], None]) -> None:
        self.num_blocks = 0
        self.journal: list[Undo] = []
        self._on_evict = on_evict
        self._end = Block(count=0)
        self.append(Block(count=num_blocks))

    def append(self, block: Block) -> None:
        """Put a block behind all others."""
        self._link(block, self._end.before)
        self.journal.append((self._unlink, (block,)))

    def remove(self, block: Block) -> None:
        """Take a block out from wherever it is."""
        before = block.before
        self._unlink(block)
        self.journal.append((self._link, (block, before)))

    def shrink(self, block: Block, count: int) -> None:
        """Take `count` blocks out of a run; a run of none leaves the queue."""
        self._add(block, -count)
        self.journal.append((self._add, (block, count)))
        if not block.count:
            self.remove(block)

    def pop(self, count: int) -> None:
        """Hand out the `count` oldest blocks; their contents are gone."""
        while count:
            block = self._end.behind
            taken = min(count, block.count)
            count -= taken
            self.shrink(block, taken)
            if block.is_cached:
                self._on_evict(block)

    def blocks_before_cached(self, at_most: int) -> int:
        """Count the blocks in front of the first cached one, up to `at_most`."""
        count, block = 0, self._end.behind
        while block is not self._end and not block.is_cached and count < at_most:
            count += block.count
            block = block.behind
        return min(count, at_most)

    def undo_to(self, mark: int) -> None:
        """Undo all changes since the journal was `mark` entries long."""
        journal = self.journal
        while len(journal) > mark:
            undo, arguments = journal.pop()
            undo(*arguments)

    def _link(self, block: Block, before: Block) -> None:
        behind = before.behind
        before.behind = behind.before = block
        block.before, block.behind = before, behind
        self.num_blocks += block.count

    def _unlink(self, block: Block) -> None:
        block.before.behind = block.behind
        block.behind.before = block.before
        self.num_blocks -= block.count

    def _add(self, block: Block, count: int) -> None:
        block.count += count
        self.num_blocks += count
