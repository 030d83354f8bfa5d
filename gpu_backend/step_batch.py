"""One step's batch as the device reads it: a single buffer, filled by the host, copied once."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schedlab.gpu_backend.model import StepTensors

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_ALIGNMENT = 128


class StepLayout:
    """Where the parts of a batch lie in its buffer; the same for every step.

    Parameters
    ----------
    max_tokens, max_num_seqs, max_blocks : int
        Most tokens and sequences of a step, and blocks of a sequence.
    max_samples : int, optional
        Most tokens of a step that are sampled; by default one of each sequence.
    """

    def __init__(
        self, max_tokens: int, max_num_seqs: int, max_blocks: int, max_samples: int | None = None
    ) -> None:
        self.max_tokens = max_tokens
        self.max_num_seqs = max_num_seqs
        self.max_blocks = max_blocks
        self.max_samples = max_num_seqs if max_samples is None else max_samples
        # The block tables come last, so that a copy can end with those in use.
        parts = {
            "tokens": ((max_tokens,), torch.int64),
            "positions": ((max_tokens,), torch.int64),
            "slots": ((max_tokens,), torch.int64),
            "sample_rows": ((self.max_samples,), torch.int64),
            "sample_keys": ((self.max_samples,), torch.int64),
            "query_start": ((max_num_seqs + 1,), torch.int32),
            "context_lens": ((max_num_seqs,), torch.int32),
            "block_tables": ((max_num_seqs, max_blocks), torch.int32),
        }
        self._parts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        offset = 0
        for name, (size, dtype) in parts.items():
            self._parts[name] = (offset, size, dtype)
            offset += prod(size) * dtype.itemsize
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the parts of a buffer of `num_bytes` bytes by name."""
        return {
            name: buffer[start : start + prod(size) * dtype.itemsize].view(dtype).view(size)
            for name, (start, size, dtype) in self._parts.items()
        }

    def used_bytes(self, num_seqs: int) -> int:
        """Return how much of a buffer a step of `num_seqs` sequences uses."""
        return self._parts["block_tables"][0] + num_seqs * self.max_blocks * 4


class StepBatch:
    """A batch under construction in host memory.

    Parameters
    ----------
    layout : StepLayout
        Sizes.
    pinned : bool
        Whether to allocate page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(self, layout: StepLayout, pinned: bool) -> None:
        self.layout = layout
        self.buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.views = views = layout.views(self.buffer)
        self.tokens: Int64 = views["tokens"].numpy()
        self.positions: Int64 = views["positions"].numpy()
        self.slots: Int64 = views["slots"].numpy()
        self.sample_rows: Int64 = views["sample_rows"].numpy()
        self.sample_keys: Int64 = views["sample_keys"].numpy()
        self.query_start: Int32 = views["query_start"].numpy()
        self.context_lens: Int32 = views["context_lens"].numpy()
        self.block_tables: Int32 = views["block_tables"].numpy()
        self.num_tokens = self.num_sequence_tokens = 0
        self.num_seqs = self.num_samples = 0
        self.max_query_tokens = 1
        self.decode_only = True

    def fill(
        self,
        history: Int32,
        tables: Int32,
        block_size: int,
        seats: Int64,
        contexts: Int64,
        num_new: Int64 | None = None,
        padding_tokens: int = 0,
    ) -> None:
        """Lay out everything but the samples.

        Parameters
        ----------
        history : ndarray of int32, shape (num_seats, max_model_len)
            Token ids by seat.
        tables : ndarray of int32, shape (num_seats, max_blocks)
            Blocks by seat.
        block_size : int
            Tokens in a block.
        seats, contexts : ndarray of int64, shape (S,)
            Of each sequence: its row in `tables`, and its tokens in the cache before the step.
        num_new : ndarray of int64, shape (S,), or None
            New tokens of each sequence; `None` stands for one of each and nothing else (decode).
        padding_tokens : int
            Tokens computed for nobody, behind all sequences.
        """
        n = len(seats)
        self.num_seqs = n
        self.decode_only = num_new is None and not padding_tokens
        if num_new is None:
            num_tokens, positions, rows = n, contexts, seats
            self.query_start[: n + 1] = np.arange(n + 1)
            self.context_lens[:n] = contexts + 1
            self.max_query_tokens = 1
        else:
            ends = np.cumsum(num_new)
            num_tokens = int(ends[-1]) if n else 0
            positions = np.repeat(contexts - (ends - num_new), num_new) + np.arange(num_tokens)
            rows = np.repeat(seats, num_new)
            self.query_start[0] = 0
            self.query_start[1 : n + 1] = ends
            self.context_lens[:n] = contexts + num_new
            self.max_query_tokens = int(num_new.max()) if n else 1
        self.tokens[:num_tokens] = history[rows, positions]
        self.positions[:num_tokens] = positions
        # int64 before the product: slots of a large pool exceed 32 bits.
        blocks = tables[rows, positions // block_size].astype(np.int64)
        self.slots[:num_tokens] = blocks * block_size + positions % block_size
        np.take(tables, seats, axis=0, out=self.block_tables[:n], mode="clip")
        self.num_sequence_tokens = num_tokens
        self.num_tokens = num_tokens + padding_tokens
        for part, value in ((self.tokens, 0), (self.positions, 0), (self.slots, -1)):
            part[num_tokens : self.num_tokens] = value

    def sample(self, rows: Int64, keys: Int64) -> None:
        """Ask for the successors of some tokens: their indices, and keys of their randomness."""
        self.num_samples = len(rows)
        self.sample_rows[: len(rows)] = rows
        self.sample_keys[: len(rows)] = keys

    def pad_sequences(self, num_seqs: int) -> None:
        """Append decode rows of nobody, one token in the dummy block each, up to `num_seqs`."""
        n = self.num_seqs
        for part, value in (
            (self.tokens, 0), (self.positions, 0), (self.slots, -1), (self.context_lens, 1),
            (self.block_tables, 0), (self.sample_keys, 0),
        ):  # fmt: skip
            part[n:num_seqs] = value
        self.query_start[n : num_seqs + 1] = np.arange(n, num_seqs + 1)
        self.sample_rows[n:num_seqs] = np.arange(n, num_seqs)
        self.num_seqs = self.num_tokens = self.num_sequence_tokens = self.num_samples = num_seqs

    def tensors(self, views: dict[str, Tensor]) -> StepTensors:
        """Cut this batch out of a buffer's parts, the host's own or a copy on the device."""
        return StepTensors(
            tokens=views["tokens"][: self.num_tokens],
            positions=views["positions"][: self.num_tokens],
            slots=views["slots"][: self.num_tokens],
            query_start=views["query_start"][: self.num_seqs + 1],
            context_lens=views["context_lens"][: self.num_seqs],
            block_tables=views["block_tables"][: self.num_seqs],
            sample_rows=views["sample_rows"][: self.num_samples],
            num_sequence_tokens=self.num_sequence_tokens,
            max_query_tokens=self.max_query_tokens,
        )


def launch_order(contexts: Int64, num_new: Int64) -> Int64:
    """Return the order in which the sequences of a mixed batch are best laid out.

    Chunks come first, as they are given, then sequences of a single new token, the longest context
    last. The prefill kernel begins at the end of the batch, and one such sequence is a single
    program's work however long its context: started late, it would run on alone.

    Parameters
    ----------
    contexts, num_new : ndarray of int64, shape (S,)
        Tokens in the cache before the step, and new ones, of each sequence.

    Returns
    -------
    ndarray of int64, shape (S,)
        Indices of sequences.
    """
    is_single = num_new == 1
    return np.lexsort((np.where(is_single, contexts, 0), is_single))
