"""The queue of free KV blocks, oldest first, with contents that may still be reused."""

from __future__ import annotations

from collections.abc import Callable

Undo = tuple[Callable[..., object], tuple[object, ...]]


class Run:
    """KV blocks that are alike: with contents one behind the other, or without any.

    Attributes
    ----------
    key : int or None
        Name of the first block's content (its chained hash); each block behind it has the next
        number. `None` where contents have no public name.
    count : int
        Blocks it stands for.
    owner : int or None
        The request that alone can find this run of free blocks again.
    holders : set of int
        Requests that hold it; it is in the queue exactly when there are none.
    """

    __slots__ = ("before", "behind", "count", "holders", "key", "owner")

    before: Run
    behind: Run

    def __init__(
        self,
        count: int,
        key: int | None = None,
        holders: set[int] | None = None,
        owner: int | None = None,
    ) -> None:
        self.count = count
        self.key = key
        self.holders: set[int] = set() if holders is None else holders
        self.owner = owner

    @property
    def is_cached(self) -> bool:
        """Whether somebody may find its content again."""
        return self.key is not None or self.owner is not None


class FreeQueue:
    """Free blocks in the order in which they are handed out.

    A doubly linked list of runs, each handed out from its end: a run that is hit leaves the list
    from the middle. While a ledger is open every change is written down, and undoing them in
    reverse order restores every link.

    Parameters
    ----------
    num_blocks : int
        Blocks at the start, all without content.
    on_evict : callable
        Called with a cached run of which blocks are handed out, and how many; the run is empty
        if those were the last.

    Attributes
    ----------
    num_blocks : int
        Blocks in the queue.
    journal : list
        What undoes the changes since the ledger was opened, newest last.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Run, int], None]) -> None:
        self.num_blocks = 0
        self.journal: list[Undo] = []
        self._is_open = False
        self._on_evict = on_evict
        self._end = end = Run(0)
        end.before = end.behind = end
        self.append(Run(num_blocks))

    def open(self) -> None:
        """Begin a ledger: from now on changes can be undone."""
        self._is_open = True
        self.journal.clear()

    def close(self) -> None:
        """End the ledger: what was changed stays, and changes are not written down."""
        self._is_open = False
        self.journal.clear()

    def note(self, undo: Callable[..., object], *arguments: object) -> None:
        """Write down what undoes a change, if a ledger is open."""
        if self._is_open:
            self.journal.append((undo, arguments))

    def undo_to(self, mark: int) -> None:
        """Undo all changes since the journal was `mark` entries long."""
        journal = self.journal
        while len(journal) > mark:
            undo, arguments = journal.pop()
            undo(*arguments)

    def append(self, run: Run) -> None:
        """Put a run behind all others."""
        self._link(run, self._end.before)
        self.note(self._unlink, run)

    def prepend(self, run: Run) -> None:
        """Put a run before all others."""
        self._link(run, self._end)
        self.note(self._unlink, run)

    def remove(self, run: Run) -> None:
        """Take a run out from wherever it is."""
        before = run.before
        self._unlink(run)
        self.note(self._link, run, before)

    def shrink(self, run: Run, count: int) -> None:
        """Take the last `count` blocks of a run out; a run of none leaves the queue."""
        self._add(run, -count)
        self.note(self._add, run, count)
        if not run.count:
            self.remove(run)

    def split(self, run: Run, upper: Run) -> None:
        """Let the last blocks of a run be one of their own, at the place where they are."""
        run.count -= upper.count
        self.num_blocks -= upper.count
        self._link(upper, run.before)

    def merge(self, run: Run, upper: Run) -> None:
        """Undo a split."""
        self._unlink(upper)
        run.count += upper.count
        self.num_blocks += upper.count

    def pop(self, count: int) -> None:
        """Hand out the `count` oldest blocks; their contents are gone."""
        while count:
            run = self._end.behind
            taken = min(count, run.count)
            count -= taken
            self.shrink(run, taken)
            if run.is_cached:
                self._on_evict(run, taken)

    def blocks_before_cached(self, at_most: int) -> int:
        """Count the blocks in front of the first cached one, up to `at_most`."""
        count, run = 0, self._end.behind
        while run is not self._end and not run.is_cached and count < at_most:
            count += run.count
            run = run.behind
        return min(count, at_most)

    def _link(self, run: Run, before: Run) -> None:
        behind = before.behind
        before.behind = behind.before = run
        run.before, run.behind = before, behind
        self.num_blocks += run.count

    def _unlink(self, run: Run) -> None:
        run.before.behind = run.behind
        run.behind.before = run.before
        # A run that is held for long must not keep alive who was beside it here.
        run.before = run.behind = self._end
        self.num_blocks -= run.count

    def _add(self, run: Run, count: int) -> None:
        run.count += count
        self.num_blocks += count
