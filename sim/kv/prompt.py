"""The names of a prompt's blocks as a prefix cache looks them up."""

from __future__ import annotations

from typing import Final

from schedlab.sim.kv.ledger import Hit

STRETCH_BLOCKS: Final = 128
"""Names that are looked up at once: those with the same quotient by it. The reader of a trace makes
successive names of the blocks of one hash (32 of Mooncake's 512 tokens), and hashes are numbered as
they come, so that what is new in a prompt has successive names as well. Fewer make more look-ups,
more make the few runs of each longer to search: 128 and 512 took 1.5 s, 32 took 2.3 s."""


class Prompt:
    """The names of a prompt's full blocks, and what was found of them when last asked.

    Parameters
    ----------
    block_ids : tuple of int
        Name of each block.

    Attributes
    ----------
    stretches : tuple of (int, int)
        First name and count of successive blocks whose names are successive and share their
        quotient by `STRETCH_BLOCKS`.
    num_blocks : int
        Blocks in all.
    hit : Hit or None
        What a cache found, if nothing of that has changed since.
    most_blocks : int
        How many blocks it was asked for.
    """

    __slots__ = ("hit", "most_blocks", "num_blocks", "stretches")

    def __init__(self, block_ids: tuple[int, ...]) -> None:
        self.stretches = tuple(_stretches(block_ids))
        self.num_blocks = len(block_ids)
        self.hit: Hit | None = None
        self.most_blocks = 0

    def part(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of the blocks from `first` up to `end`."""
        parts: list[tuple[int, int]] = []
        at = 0
        for key, count in self.stretches:
            low, high = max(first, at), min(end, at + count)
            if low < high:
                parts.append((key + low - at, high - low))
            at += count
        return parts


def _stretches(ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """Cut names where one does not follow the one before, or where a stretch of them ends."""
    if not ids:
        return []
    found: list[tuple[int, int]] = []
    first = following = ids[0]
    end = first - first % STRETCH_BLOCKS + STRETCH_BLOCKS
    for name in ids:
        if name != following or name == end:
            found.append((first, following - first))
            first = name
            end = name - name % STRETCH_BLOCKS + STRETCH_BLOCKS
        following = name + 1
    found.append((first, following - first))
    return found
