"""What a router remembers of the prompts that it sent to engines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixTree:
    """Prefixes that engines were sent, of each engine the least recently used forgotten first.

    The names of blocks are chained: equal names mean equal prefixes. So what an engine was sent is
    a set of names, in which the beginnings of a prompt are always younger than its end; and a name
    says which engines were sent it, so that one search of a prompt answers for all of them.
    """

    def __init__(self) -> None:
        self._sent: dict[int, OrderedDict[int, None]] = {}  # by engine, oldest first
        self._holders: dict[int, int] = {}  # by name: a bit for each engine

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
        sent = self._sent
        return [len(sent[engine]) if engine in sent else 0 for engine in engines]

    def match(self, ids: Sequence[int]) -> dict[int, int]:
        """Count the leading blocks of a prompt that are remembered, by engine that has any."""
        holders = self._holders
        found: dict[int, int] = {}
        left = holders.get(ids[0], 0) if ids else 0
        high = len(ids)
        while left:  # whoever has the most of what is left
            low, deepest = 1, left
            while low < high:
                middle = (low + high + 1) // 2
                have = holders.get(ids[middle - 1], 0) & left
                if have:
                    low, deepest = middle, have
                else:
                    high = middle - 1
            left &= ~deepest
            high = low - 1
            while deepest:
                bit = deepest & -deepest
                found[bit.bit_length() - 1] = low
                deepest ^= bit
        return found

    def add(self, engine: int, ids: Sequence[int], max_blocks: int) -> None:
        """Remember that an engine is sent a prompt, and so many blocks of it in all at most."""
        names = self._sent.setdefault(engine, OrderedDict())
        holders, bit = self._holders, 1 << engine
        for name in reversed(ids):
            if name in names:
                names.move_to_end(name)
            else:
                names[name] = None
                holders[name] = holders.get(name, 0) | bit
        while len(names) > max_blocks:
            self._drop(names.popitem(last=False)[0], bit)

    def forget(self, engine: int) -> None:
        """Remember nothing of an engine."""
        for name in self._sent.pop(engine, ()):
            self._drop(name, 1 << engine)

    def _drop(self, name: int, bit: int) -> None:
        others = self._holders[name] & ~bit
        if others:
            self._holders[name] = others
        else:
            del self._holders[name]
