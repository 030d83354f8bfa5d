"""Which prompt blocks two requests share: chained block ids, a ragged column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError
from schedlab.traces.row_error import RowError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PrefixHashes:
    """Block ids of every prompt of a trace.

    Equal ids mean that the two prompts are equal from their start to the end of that block.

    Attributes
    ----------
    ids : ndarray of int64, shape (num_blocks,)
        The ids of all rows, one row after another.
    offsets : ndarray of int64, shape (num_rows + 1,)
        Row i owns ``ids[offsets[i]:offsets[i + 1]]``.
    block_tokens : int
        Tokens a block covers; the last block of a row may be partial.
    """

    ids: Int64
    offsets: Int64
    block_tokens: int

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise TraceError(f"prefix hash blocks must cover >= 1 token, got {self.block_tokens}")
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids):
            raise TraceError("prefix hash offsets must run from 0 to the number of ids")
        if np.any(np.diff(self.offsets) < 0):
            raise TraceError("prefix hash offsets must not decrease")

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]], block_tokens: int) -> PrefixHashes:
        """Return the column whose row i is ``rows[i]``.

        Raises
        ------
        RowError
            If an id is no 64-bit integer.
        """
        rows = list(rows)
        for i, row in enumerate(rows):
            if not isinstance(row, list | tuple) or not all(type(block) is int for block in row):
                raise RowError("prefix hashes", i, "block ids must be a list of integers")
            if row and not -(2**63) <= min(row) <= max(row) < 2**63:
                raise RowError("prefix hashes", i, "block ids must fit in 64 bits, signed")
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        ids = np.array([block for row in rows for block in row], dtype=np.int64)
        return cls(ids, offsets, block_tokens)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self) -> list[tuple[int, ...]]:
        """Return the ids as one tuple a row."""
        flat = self.ids.tolist()
        bounds = self.offsets.tolist()
        return [tuple(flat[a:b]) for a, b in pairwise(bounds)]

    def take(self, indices: Int64) -> PrefixHashes:
        """Return the rows `indices`, in that order."""
        counts = np.diff(self.offsets)[indices]
        offsets = np.zeros(len(indices) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        starts = np.repeat(self.offsets[:-1][indices], counts)
        return PrefixHashes(self.ids[starts + within], offsets, self.block_tokens)

    @classmethod
    def concat(cls, parts: Sequence[PrefixHashes]) -> PrefixHashes:
        """Return the rows of all `parts`, one part after another.

        Raises
        ------
        TraceError
            If the parts count blocks of different sizes.
        """
        sizes = {part.block_tokens for part in parts}
        if len(sizes) != 1:
            raise TraceError(f"cannot join prefix hashes of block sizes {sorted(sizes)}")
        shifts = np.cumsum([0] + [len(part.ids) for part in parts[:-1]])
        offsets = [part.offsets[1:] + shift for part, shift in zip(parts, shifts, strict=True)]
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([np.zeros(1, dtype=np.int64), *offsets]),
            parts[0].block_tokens,
        )

    def with_block_tokens(self, block_tokens: int, prompt_tokens: Int64) -> PrefixHashes:
        """Return the same sharing in blocks of another size, full blocks only.

        Finer blocks: sub-block j of block `id` becomes ``id * factor + j``. Coarser blocks: a
        block takes the id of the last of its parts. Either way a row keeps
        ``prompt_tokens // block_tokens`` blocks, the ones a prefix cache can hold.

        Parameters
        ----------
        block_tokens : int
            The new size; it must divide the old one or be a multiple of it.
        prompt_tokens : ndarray of int64, shape (num_rows,)
            Prompt lengths.

        Raises
        ------
        TraceError
            If the sizes do not divide each other, or an id would not fit in 64 bits.

        Notes
        -----
        A partial last block is shared only with partial last blocks of the same id, so going to
        finer blocks can lose up to one old block of sharing a request; it never invents any.
        """
        old, new = self.block_tokens, block_tokens
        if new < 1 or max(old, new) % min(old, new):
            raise TraceError(
                f"prefix hashes of {old}-token blocks cannot be expressed in blocks of {new} "
                "tokens: one size must divide the other"
            )
        per_row = np.minimum(prompt_tokens, np.diff(self.offsets) * old) // new
        offsets = np.zeros(len(per_row) + 1, dtype=np.int64)
        np.cumsum(per_row, out=offsets[1:])
        position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], per_row)
        starts = np.repeat(self.offsets[:-1], per_row)
        if new >= old:
            last_part = (position + 1) * (new // old) - 1
            return PrefixHashes(self.ids[starts + last_part], offsets, new)
        factor = old // new
        parents = self.ids[starts + position // factor]
        limit = 2**62 // factor
        if (parents >= limit).any() or (parents <= -limit).any():
            raise TraceError(f"prefix hash ids are too large to split into {factor} parts each")
        return PrefixHashes(parents * factor + position % factor, offsets, new)
