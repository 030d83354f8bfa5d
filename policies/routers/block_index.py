"""Which blocks engines were sent, as the index of llm-d keeps them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MOST_SETS = 4096


class BlockIndex:
    """The blocks that engines were sent, of each engine the least recently sent forgotten first."""

    def __init__(self) -> None:
        self._sent: dict[int, OrderedDict[int, None]] = {}  # by engine, the oldest first
        self._engines: dict[int, int] = {}  # by block, a bit for each engine
        self._numbers: dict[int, list[int]] = {}  # by such bits, their places

    def tokens(
        self, ids: Sequence[int], engines: Sequence[int], block_sizes: Sequence[int]
    ) -> list[int]:
        """Count the tokens of the blocks of a prompt that each engine was sent.

        They are counted up to the first block that nobody was sent.
        """
        blocks: dict[int, int] = {}
        holders = self._engines
        who, count = 0, 0  # long stretches were sent to the same engines
        for name in ids:
            others = holders.get(name, 0)
            if not others:
                break
            if others != who:
                self._count(who, count, blocks)
                who, count = others, 0
            count += 1
        self._count(who, count, blocks)
        tokens = [0] * len(engines)
        if blocks:
            for place, engine in enumerate(engines):
                if engine in blocks:
                    tokens[place] = blocks[engine] * block_sizes[place]
        return tokens

    def _count(self, who: int, count: int, blocks: dict[int, int]) -> None:
        """Add so many blocks to each of some engines."""
        if not count:
            return
        numbers = self._numbers.get(who)
        if numbers is None:
            if len(self._numbers) >= _MOST_SETS:
                self._numbers.clear()
            numbers = [number for number in range(who.bit_length()) if who >> number & 1]
            self._numbers[who] = numbers
        for number in numbers:
            blocks[number] = blocks.get(number, 0) + count

    def add(self, engine: int, ids: Sequence[int], max_blocks: int) -> None:
        """Remember that an engine is sent a prompt, and so many blocks in all at most."""
        sent = self._sent.setdefault(engine, OrderedDict())
        holders, bit = self._engines, 1 << engine
        for name in ids:
            if name in sent:
                sent.move_to_end(name)
            else:
                sent[name] = None
                holders[name] = holders.get(name, 0) | bit
                if len(sent) > max_blocks:
                    self._lose(sent.popitem(last=False)[0], engine)

    def forget(self, engine: int) -> None:
        """Remember nothing of an engine."""
        for name in self._sent.pop(engine, ()):
            self._lose(name, engine)

    def _lose(self, name: int, engine: int) -> None:
        others = self._engines[name] & ~(1 << engine)
        if others:
            self._engines[name] = others
        else:
            del self._engines[name]
