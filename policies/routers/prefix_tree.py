"""What a router remembers of the prompts that it sent to engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Sent:
    """A prompt that an engine was sent, as far as no later one has the same beginning.

    Attributes
    ----------
    engine : int
        Which one.
    node : _Stretch
        Where it ends, or what is remembered of it does.
    end : int
        So many of its leading blocks are remembered.
    is_over : bool
        Whether nothing of it is left that is not a later one's as well.
    """

    __slots__ = ("end", "engine", "is_over", "node")

    def __init__(self, engine: int, node: _Stretch, end: int) -> None:
        self.engine = engine
        self.node = node
        self.end = end
        self.is_over = False


class _Stretch:
    """Blocks of prompts that nothing branches off within.

    Attributes
    ----------
    ids : sequence of int
        A prompt that has them.
    start, end : int
        From where to where in it.
    parent : _Stretch or None
        The blocks in front of them; None at the root, which has none.
    next : dict of int to _Stretch
        What follows, by the name of its first block.
    last : dict of int to _Sent
        By engine that remembers a block of them, the last prompt sent there that has them. What
        was sent before may be forgotten up to a block in the middle of them. In the order in which
        they were first sent them.
    """

    __slots__ = ("end", "ids", "last", "next", "parent", "start")

    def __init__(self, ids: Sequence[int], start: int, end: int, parent: _Stretch | None) -> None:
        self.ids = ids
        self.start = start
        self.end = end
        self.parent = parent
        self.next: dict[int, _Stretch] = {}
        self.last: dict[int, _Sent] = {}

    def common(self, ids: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt that has the first of them lie up to here."""
        low, high = self.start + 1, min(self.end, len(ids))
        own = self.ids
        if ids[high - 1] == own[high - 1]:
            return high
        while low < high:
            middle = (low + high) // 2
            if ids[middle] == own[middle]:
                low = middle + 1
            else:
                high = middle
        return low


class PrefixTree:
    """Prefixes that engines were sent, of each engine the least recently used forgotten first.

    The names of blocks are chained: equal names mean equal prefixes. Of one prompt the end is
    forgotten before the beginning, which others may share. Prompts are kept by stretches of blocks,
    so that one of a hundred blocks costs no more than a short one.
    """

    def __init__(self) -> None:
        self._root = _Stretch((), 0, 0, None)
        self._sent: dict[int, deque[_Sent]] = {}  # by engine, oldest first
        self._sizes: dict[int, int] = {}

    def tokens(
        self, ids: Sequence[int], engines: Sequence[int], block_sizes: Sequence[int]
    ) -> list[int]:
        """Count the leading prompt tokens that each engine was sent and is thought to hold."""
        tokens = [0] * len(engines)
        found = self.match(ids)
        if found:
            for place, engine in enumerate(engines):
                if engine in found:
                    tokens[place] = found[engine] * block_sizes[place]
        return tokens

    def sizes(self, engines: Sequence[int]) -> list[int]:
        """Count the blocks remembered of each engine."""
        sizes = self._sizes
        return [sizes.get(engine, 0) for engine in engines]

    def match(self, ids: Sequence[int]) -> dict[int, int]:
        """Count the leading blocks of a prompt that are remembered, by engine that has any."""
        found: dict[int, int] = {}
        for node, end in self._path(ids):
            for engine, sent in node.last.items():
                found[engine] = min(sent.end, end)
        return found

    def first_sent(self, ids: Sequence[int], engines: Sequence[int]) -> int:
        """Return the engine that was sent first what of a prompt is remembered of them.

        Parameters
        ----------
        ids : sequence of int
            The prompt.
        engines : sequence of int
            Engines of which equally many of its blocks are remembered.
        """
        for node, _ in reversed(self._path(ids)):
            for engine in node.last:
                if engine in engines:
                    return engine
        return engines[0]

    def _path(self, ids: Sequence[int]) -> list[tuple[_Stretch, int]]:
        """Return the stretches that a prompt goes along, and up to which block."""
        path: list[tuple[_Stretch, int]] = []
        node: _Stretch | None = self._root
        end = 0
        while node is not None and node.end == end < len(ids):
            node = node.next.get(ids[end])
            if node is not None:
                end = node.common(ids)
                path.append((node, end))
        return path

    def add(self, engine: int, ids: Sequence[int], max_blocks: int) -> None:
        """Remember that an engine is sent a prompt, and so many blocks of it in all at most."""
        node = self._root
        sent = _Sent(engine, node, len(ids))
        size = self._sizes.get(engine, 0)
        while node.end < len(ids):
            node = self._next(node, ids)
            before = node.last.get(engine)
            node.last[engine] = sent
            if before is None:
                size += node.end - node.start
            else:
                size += node.end - min(node.end, before.end)
                if before.node is node:
                    before.is_over = True
        all_sent = self._sent.setdefault(engine, deque())
        if node is not self._root:
            sent.node = node
            all_sent.append(sent)
        while all_sent and (size > max_blocks or all_sent[0].is_over):
            if all_sent[0].is_over:
                all_sent.popleft()
            else:
                size -= self._forget_end(all_sent[0], size - max_blocks)
        self._sizes[engine] = size

    def oldest(
        self, engine: int, num_blocks: int, spared: Sequence[int]
    ) -> list[tuple[Sequence[int], int, int]]:
        """Say what would be forgotten of an engine if so many of its blocks had to be.

        Parameters
        ----------
        engine : int
            Which one.
        num_blocks : int
            How many; all that are remembered, if these are fewer.
        spared : sequence of int
            A prompt whose blocks are not forgotten: it is the one to be sent there.

        Returns
        -------
        list of tuple
            A prompt, and from where to where in it blocks would be forgotten, the first ones first.
        """
        found: list[tuple[Sequence[int], int, int]] = []
        left = num_blocks
        for sent in self._sent.get(engine, ()):
            if left <= 0:
                break
            if sent.is_over:
                continue
            node: _Stretch | None = sent.node
            end = sent.end
            while left > 0 and node is not None and node.last.get(engine) is sent:
                start = node.start
                if start < len(spared) and spared[start] == node.ids[start]:
                    start = node.common(spared)
                if start < end:
                    start = max(start, end - left)
                    found.append((node.ids, start, end))
                    left -= end - start
                end, node = node.start, node.parent
        return found

    def forget(self, engine: int) -> None:
        """Remember nothing of an engine."""
        for sent in self._sent.pop(engine, ()):
            while not sent.is_over:
                self._forget_end(sent, sent.end)
        self._sizes.pop(engine, None)

    def _next(self, node: _Stretch, ids: Sequence[int]) -> _Stretch:
        """Return the stretch behind one that a prompt goes on with; all of it is the prompt's."""
        name = ids[node.end]
        after = node.next.get(name)
        if after is None:
            after = node.next[name] = _Stretch(ids, node.end, len(ids), node)
            return after
        end = after.common(ids)
        if end == after.end:
            return after
        # What is behind stays the same object: prompts end there.
        upper = node.next[name] = _Stretch(after.ids, after.start, end, node)
        for engine, sent in list(after.last.items()):
            upper.last[engine] = sent
            if sent.end <= end:
                del after.last[engine]
                if sent.node is after:
                    sent.node = upper
        after.start, after.parent = end, upper
        if after.last:
            upper.next[after.ids[end]] = after
        return upper

    def _forget_end(self, sent: _Sent, num_blocks: int) -> int:
        """Forget so many blocks at the end of a prompt, or a stretch if that is less; say how many.

        Blocks of later prompts stay.
        """
        node, engine = sent.node, sent.engine
        have = sent.end - node.start
        if have > num_blocks:
            sent.end -= num_blocks
            return num_blocks
        sent.end = node.start
        parent = node.parent
        assert parent is not None
        del node.last[engine]
        if not node.last:  # nor has anybody what is behind it
            del parent.next[node.ids[node.start]]
        if parent.last.get(engine) is sent:
            sent.node = parent
        else:
            sent.is_over = True
        return have
