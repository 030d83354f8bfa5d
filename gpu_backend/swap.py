"""Host memory for the KV of preempted requests, and the copies to and from it."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schedlab.gpu_backend.device import require_memory
from schedlab.sim.core.engine import Engine
from schedlab.sim.errors import SchedlabError

Int64 = npt.NDArray[np.int64]

_PIECE_BLOCKS = 16
"""Blocks copied at a time: bounds the staging memory on the device."""


class SwapSpace:
    """A pool of host blocks, each with the keys and values of all layers of one KV block.

    Copies are only noted when a plan asks for them, and carried out in that order by `run` at the
    start of the step, so that they are timed with it. All of them go through the device's current
    stream: a block is read before the kernels behind overwrite it, and written before they read it.

    Parameters
    ----------
    kv_pools : list of (Tensor, Tensor)
        The cache on the device; keys and values of each layer.
    num_blocks : int
        Host blocks. Page-locked if the cache is on a GPU.
    allocate : bool
        Whether to take the memory now. Otherwise the first block that is swapped out takes it,
        and its step bears the time.
    """

    def __init__(
        self, kv_pools: list[tuple[Tensor, Tensor]], num_blocks: int, allocate: bool = True
    ) -> None:
        self._pools = [pool for pair in kv_pools for pool in pair]
        self.num_blocks = num_blocks
        self._host = self._allocated() if allocate else None
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[int, list[int]] = {}
        self._pending: list[tuple[bool, Int64, list[int]]] = []

    @property
    def num_used(self) -> int:
        """Host blocks that requests hold."""
        return self.num_blocks - len(self._free)

    def swap_out(self, request_id: int, blocks: Int64) -> None:
        """Note that a request's blocks are to be copied to the host.

        Raises
        ------
        SchedlabError
            If there is no room, which the engine's accounting rules out.
        """
        if len(blocks) > len(self._free):
            raise SchedlabError(
                f"request {request_id} needs {len(blocks)} blocks of swap space and "
                f"{len(self._free)} of {self.num_blocks} are free"
            )
        host = [self._free.pop() for _ in blocks]
        self._held[request_id] = host
        self._pending.append((True, blocks, host))

    def swap_in(self, request_id: int, blocks: Int64) -> None:
        """Note that a request's KV is to be copied back, into as many blocks of the cache."""
        host = self._held.pop(request_id)
        self._pending.append((False, blocks[: len(host)], host))
        # Free at once: whatever is copied there later is copied later.
        self._free.extend(host)

    def forget(self, request_id: int) -> None:
        """Free the host blocks of a request that does not come back, if it has any."""
        self._free.extend(self._held.pop(request_id, ()))

    def run(self) -> None:
        """Carry out what was noted, asynchronously on a GPU.

        Raises
        ------
        SpecError
            If the memory is only taken now and there is not enough of it.
        """
        if self._pending and self._host is None:
            self._host = self._allocated()
        for is_out, blocks, host in self._pending:
            copy = self._copy_out if is_out else self._copy_in
            for start in range(0, len(host), _PIECE_BLOCKS):
                piece = slice(start, start + _PIECE_BLOCKS)
                ids = torch.from_numpy(blocks[piece]).to(self._pools[0].device)
                copy(ids, host[piece])
        self._pending.clear()

    def check(self, engine: Engine) -> None:
        """Prove that engine and swap space agree, or raise AssertionError."""
        counted = engine.config.swap_space_blocks - engine.requests.free_swap_blocks
        assert self.num_used == counted, f"{self.num_used} host blocks held, {counted} counted"

    def _allocated(self) -> Tensor:
        block = self._pools[0][0]
        size = (self.num_blocks, len(self._pools), *block.shape)
        pinned = self.num_blocks > 0 and block.device.type == "cuda"
        if pinned:
            # Page-locked memory is there at once; other pages only when somebody writes to them.
            num_bytes = prod(size) * block.itemsize
            require_memory(num_bytes, torch.device("cpu"), "the swap space in host memory")
        # Not zeroed: a block is written before it is read.
        return torch.empty(size, dtype=block.dtype, pin_memory=pinned)

    def _copy_out(self, ids: Tensor, host: list[int]) -> None:
        assert self._host is not None
        staged = torch.stack([pool.index_select(0, ids) for pool in self._pools], dim=1)
        for i, block in enumerate(host):
            self._host[block].copy_(staged[i], non_blocking=True)

    def _copy_in(self, ids: Tensor, host: list[int]) -> None:
        assert self._host is not None
        size = (len(host), *self._host.shape[1:])
        staged = torch.empty(size, dtype=self._host.dtype, device=ids.device)
        for i, block in enumerate(host):
            staged[i].copy_(self._host[block], non_blocking=True)
        for layer, pool in enumerate(self._pools):
            pool.index_copy_(0, ids, staged[:, layer])
