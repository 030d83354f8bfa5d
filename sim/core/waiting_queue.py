"""The queue of requests without a seat, kept in the order the policy wants."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from typing import Any

from schedlab.sim.request import RequestState

Key = Callable[[RequestState, int], Any]
_Entry = tuple[Any, int, int, RequestState]


class WaitingQueue:
    """A list sorted by (policy key, arrival, id), with a moving head; without a key by arrival.

    Taking the head, appending behind the tail (arrivals under FCFS) and putting back before the
    head (preempted requests) cost O(1). An insertion in the middle costs a bisection and one
    memory move, a few microseconds at ten thousand waiting requests.

    Attributes
    ----------
    size : int
        How many wait: what `len` says, which Python takes long to call.
    """

    __slots__ = ("_entries", "_head", "_key", "size")

    def __init__(self, key: Key | None = None) -> None:
        self._key = key
        self._entries: list[_Entry] = []
        self._head = 0
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate in order over the requests waiting now."""
        entries = self._entries
        for i in range(self._head, len(entries)):
            yield entries[i][3]

    def __contains__(self, state: RequestState) -> bool:
        return any(other is state for other in self)

    @property
    def head(self) -> RequestState:
        """The request whose turn it is.

        Raises
        ------
        IndexError
            If nobody waits.
        """
        if self._head == len(self._entries):
            raise IndexError("the waiting queue is empty")
        return self._entries[self._head][3]

    def add(self, state: RequestState, now_ns: int) -> None:
        """Insert a request at its place."""
        request = state.request
        if self._key is None:  # as `_entry`, written out: every request comes once at least
            entry: _Entry = (request.arrival_ns, request.arrival_ns, request.id, state)
        else:
            entry = self._entry(state, now_ns)
        entries, head = self._entries, self._head
        if head == len(entries) or entries[-1] < entry:
            entries.append(entry)
        elif head and entry < entries[head]:
            self._head = head - 1
            entries[head - 1] = entry
        else:
            insort(entries, entry, lo=head)
        self.size += 1

    def remove(self, state: RequestState, now_ns: int) -> None:
        """Take a request out.

        Raises
        ------
        ValueError
            If it is not in the queue.
        """
        entries = self._entries
        head = self._head
        if head < len(entries) and entries[head][3] is state:
            self.size -= 1
            self._head = head + 1
            num_gone = self._head
            if num_gone == len(entries) or (num_gone > 1024 and 2 * num_gone > len(entries)):
                del entries[:num_gone]
                self._head = 0
            return
        i = bisect_left(entries, self._entry(state, now_ns), lo=head)
        if i == len(entries) or entries[i][3] is not state:
            # A key that drifts with time no longer finds its place by bisection.
            i = next((j for j in range(head, len(entries)) if entries[j][3] is state), -1)
            if i < 0:
                raise ValueError(f"{state!r} is not waiting")
        del entries[i]
        self.size -= 1

    def sort(self, now_ns: int) -> None:
        """Put the queue in the order of the keys as they are now (for keys that drift)."""
        self._entries = sorted(self._entry(state, now_ns) for state in self)
        self._head = 0

    def rekey(self, changed: Collection[RequestState], now_ns: int) -> None:
        """Put requests whose keys have changed in their new places; those not waiting are ignored.

        Notes
        -----
        O(n) in the queue, but only a filter and a merge of two sorted runs; keys are computed for
        the changed requests alone.
        """
        stale = set(changed)
        entries = self._entries[self._head :]
        kept = [entry for entry in entries if entry[3] not in stale]
        if len(kept) == len(entries):
            return
        moved = [self._entry(entry[3], now_ns) for entry in entries if entry[3] in stale]
        self._entries = kept + sorted(moved)
        self._entries.sort()  # two sorted runs: Python's sort merges them
        self._head = 0

    def _entry(self, state: RequestState, now_ns: int) -> _Entry:
        request = state.request
        arrival_ns, key = request.arrival_ns, self._key
        place = arrival_ns if key is None else key(state, now_ns)
        return place, arrival_ns, request.id, state
