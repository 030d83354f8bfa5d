"""KV blocks in host memory, and the copies between them and the cache on the device."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schedlab.gpu_backend.device import require_memory

Int64 = npt.NDArray[np.int64]

PIECE_BLOCKS = 16
"""Blocks copied at a time: bounds the staging memory on the device."""


class HostBlocks:
    """Host blocks, each with the keys and values of all layers of one KV block.

    Copies go through the device's current stream, in the order in which they are asked for; on a
    GPU they are asynchronous.

    Parameters
    ----------
    kv_pools : list of (Tensor, Tensor)
        The cache on the device; keys and values of each layer.
    num_blocks : int
        How many. Page-locked if the cache is on a GPU.

    Attributes
    ----------
    num_blocks : int
        How many there are.
    what : str
        What an error calls them.
    """

    def __init__(self, kv_pools: list[tuple[Tensor, Tensor]], num_blocks: int) -> None:
        self._pools = [pool for pair in kv_pools for pool in pair]
        self.num_blocks = num_blocks
        self.what = "the swap space"
        self._memory: Tensor | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the cache is on a GPU."""
        return bool(self._pools[0].is_cuda)

    def allocate(self) -> None:
        """Take the memory, if that has not been done.

        Raises
        ------
        SpecError
            If there is not enough of it.
        """
        if self._memory is not None:
            return
        block = self._pools[0][0]
        size = (self.num_blocks, len(self._pools), *block.shape)
        pinned = self.num_blocks > 0 and self.on_gpu
        if pinned:
            # Page-locked memory is there at once; other pages only when somebody writes to them.
            num_bytes = prod(size) * block.itemsize
            require_memory(num_bytes, torch.device("cpu"), f"{self.what} in host memory")
        # Not zeroed: a block is written before it is read.
        self._memory = torch.empty(size, dtype=block.dtype, pin_memory=pinned)

    def copy_out(self, blocks: Int64, host: Sequence[int]) -> None:
        """Copy blocks of the cache to host blocks, one after the other.

        Raises
        ------
        SpecError
            If the memory is only taken now and there is not enough of it.
        """
        self.allocate()
        assert self._memory is not None
        for ids, piece in self._pieces(blocks, host):
            staged = torch.stack([pool.index_select(0, ids) for pool in self._pools], dim=1)
            for i, block in enumerate(piece):
                self._memory[block].copy_(staged[i], non_blocking=True)

    def copy_in(self, host: Sequence[int], blocks: Int64) -> None:
        """Copy host blocks to blocks of the cache."""
        assert self._memory is not None
        for ids, piece in self._pieces(blocks, host):
            size = (len(piece), *self._memory.shape[1:])
            staged = torch.empty(size, dtype=self._memory.dtype, device=ids.device)
            for i, block in enumerate(piece):
                staged[i].copy_(self._memory[block], non_blocking=True)
            for layer, pool in enumerate(self._pools):
                pool.index_copy_(0, ids, staged[:, layer])

    def block(self, place: int) -> memoryview:
        """Return the bytes of a host block; what is written there is in it."""
        assert self._memory is not None
        return memoryview(self._memory[place].view(torch.uint8).numpy()).cast("B")

    def _pieces(self, blocks: Int64, host: Sequence[int]) -> list[tuple[Tensor, Sequence[int]]]:
        ids = torch.from_numpy(blocks)
        if (
            self.on_gpu
        ):  # from pageable memory the host would wait for all that the stream has to do
            ids = ids.pin_memory().to(self._pools[0].device, non_blocking=True)
        starts = range(0, len(host), PIECE_BLOCKS)
        return [(ids[i : i + PIECE_BLOCKS], host[i : i + PIECE_BLOCKS]) for i in starts]
