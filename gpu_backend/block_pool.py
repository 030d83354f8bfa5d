"""Physical KV blocks: which ones a request holds, and where its sequence is written."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from schedlab.sim.core.engine import Engine
from schedlab.sim.errors import SchedlabError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

DUMMY_BLOCK = 0
"""The block that padding rows read; it belongs to nobody."""


class BlockPool:
    """Blocks and seats of the requests that have any.

    Blocks are taken when a sequence first needs them and given back all at once. The engine's
    `KVCacheManager` counts the very same blocks without naming them; `check` compares the two.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks that can be held, and tokens in a block. Their ids are 1..num_blocks.
    max_num_seqs : int
        Seats: most requests that hold blocks at a time.
    max_model_len : int
        Longest sequence in tokens; wide enough for its blocks is a row of `tables`.
    shuffle_seed : int, optional
        Hand blocks out in a random order instead of one after the other, as in a pool that has
        been in use for long (neighbouring blocks flatter memory bandwidth).

    busy : collection of int
        Blocks that are being copied away: handed out last.

    Attributes
    ----------
    tables : ndarray of int32, shape (max_num_seqs, max_blocks)
        Blocks of the request in each seat, in order, then `DUMMY_BLOCK`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        shuffle_seed: int | None = None,
        busy: Collection[int] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: Int32 = np.full(
            (max_num_seqs, -(-max_model_len // block_size)), DUMMY_BLOCK, dtype=np.int32
        )
        ids = np.arange(num_blocks, 0, -1)
        if shuffle_seed is not None:
            np.random.default_rng(shuffle_seed).shuffle(ids)
        self._free: list[int] = ids.tolist()
        self._busy = busy
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._seats: dict[int, int] = {}
        self._held = [0] * max_num_seqs

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - len(self._free)

    def holds(self, request_id: int) -> bool:
        """Whether a request has a seat and blocks."""
        return request_id in self._seats

    def seat(self, request_id: int) -> int:
        """Return the row of `tables` of a request that holds blocks; `KeyError` if it has none."""
        return self._seats[request_id]

    def blocks(self, request_id: int) -> Int64:
        """Return a copy of a request's block ids, in order."""
        seat = self._seats[request_id]
        return self.tables[seat, : self._held[seat]].astype(np.int64)

    def grow(self, request_id: int, num_tokens: int) -> int:
        """Make sure that a request's first `num_tokens` tokens have blocks.

        Returns
        -------
        int
            Its seat: the row of `tables`.

        Raises
        ------
        SchedlabError
            If there is no free block or seat, which the engine's accounting rules out.
        """
        seat = self._seated(request_id)
        held, needed = self._held[seat], -(-num_tokens // self.block_size)
        if needed > held:
            self.tables[seat, held:needed] = self._take(needed - held, request_id)
            self._held[seat] = needed
        return seat

    def _seated(self, request_id: int) -> int:
        """Return the seat of a request, which takes one if it has none."""
        seat = self._seats.get(request_id)
        if seat is None:
            if not self._free_seats:
                raise SchedlabError(f"request {request_id}: all {len(self._held)} seats are taken")
            seat = self._seats[request_id] = self._free_seats.pop()
        return seat

    def _take(self, count: int, request_id: int) -> list[int]:
        """Take free blocks for a request, the one given back last first."""
        if count > len(self._free):
            raise SchedlabError(
                f"request {request_id} needs {count} more KV blocks and "
                f"{len(self._free)} of {self.num_blocks} are free; the engine and the block "
                "pool do not count alike"
            )
        free = self._free
        taken: list[int] = []
        if self._busy:
            at = len(free) - 1
            while at >= 0 and len(taken) < count:
                if free[at] not in self._busy:
                    taken.append(free.pop(at))
                at -= 1
        left = count - len(taken)
        taken += free[: -left - 1 : -1]
        del free[len(free) - left :]
        return taken

    def release(self, request_id: int, num_computed: int = 0) -> None:
        """Give back a request's blocks and seat, if it has any.

        `num_computed` of its tokens are there, for pools that keep what can be found again.
        """
        if request_id in self._seats:
            self._free.extend(self._stand(request_id))

    def _stand(self, request_id: int) -> list[int]:
        """Take a request out of its seat and return the blocks that it holds, in order."""
        seat = self._seats.pop(request_id)
        held = self._held[seat]
        blocks: list[int] = self.tables[seat, :held].tolist()
        self.tables[seat, :held] = DUMMY_BLOCK
        self._held[seat] = 0
        self._free_seats.append(seat)
        return blocks

    def check(self, engine: Engine) -> None:
        """Prove that engine and pool agree, between two steps, or raise AssertionError.

        Notes
        -----
        The contiguous allocators of the engine reserve more than is written; then the pool may
        hold fewer blocks than the engine counts, and no more.
        """
        held = [block for request_id in self._seats for block in self.blocks(request_id)]
        assert sorted(held + self._free) == list(range(1, self.num_blocks + 1)), (
            "a KV block is lost or held twice"
        )
        counted = engine.kv.num_blocks - engine.kv.free_blocks
        assert self.num_used <= counted, f"{self.num_used} blocks held, the engine counts {counted}"
        if engine.kv.grows:
            assert self.num_used == counted, f"{self.num_used} blocks held, {counted} counted"
