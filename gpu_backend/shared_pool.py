"""Physical KV blocks that several requests may hold, found again by their content."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from schedlab.gpu_backend.block_pool import BlockPool, Int64
from schedlab.sim.core.engine import Engine
from schedlab.sim.errors import SchedlabError
from schedlab.sim.kv.prefix import PrefixCachingKVCache

_UNCOMPUTED = (
    "request {} begins with a block that was never computed, though the ledger counts it as "
    "cached; run this policy with engine.enable_prefix_caching: false, or with backend: sim"
)


class SharedBlockPool(BlockPool):
    """Blocks of a prefix cache: of each content there is one, whoever computes it again.

    The engine's `PrefixCachingKVCache` counts blocks and decides which content is kept; blocks that
    nobody holds stay as they are here until somebody needs one, who then asks the ledger which
    content can be found no more. So nothing here decides what is evicted, and the ledger need not
    tell.

    Where the ledger has two blocks with the same content, computed side by side, one of them is
    given back here as soon as it is filled. So there is never more in use here than is counted.

    Parameters
    ----------
    num_blocks, block_size, max_num_seqs, max_model_len, shuffle_seed
        See `BlockPool`.
    busy : collection of int
        Blocks that are being copied away: handed out last.

    Attributes
    ----------
    ledger : PrefixCachingKVCache
        Set before anybody takes a block.
    """

    ledger: PrefixCachingKVCache

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        shuffle_seed: int | None = None,
        busy: Collection[int] = (),
    ) -> None:
        super().__init__(num_blocks, block_size, max_num_seqs, max_model_len, shuffle_seed, busy)
        self._num_named = [0] * max_num_seqs
        self._block_of: dict[int, int] = {}
        self._name_of: dict[int, int] = {}
        self._holders: dict[int, int] = {}  # of blocks with a name
        self._idle: dict[int, None] = {}  # those of them without any, the longest so first
        self._left_behind: dict[int, list[int]] = {}
        self._own: dict[int, list[int]] = {}
        self._set_aside: dict[int, list[int]] = {}
        self._kept: dict[int, tuple[list[int], int]] = {}  # without a seat: and how many named
        self._doubles: list[tuple[int, int, int]] = []  # seat, place in its table, and name

    @property
    def num_used(self) -> int:
        """Blocks that requests hold, each counted once."""
        left = sum([len(blocks) for blocks in self._left_behind.values()])
        return self.num_blocks - len(self._free) - len(self._idle) - left

    def blocks_of(self, names: Sequence[int]) -> Int64:
        """Return the blocks with some contents, held or not; KeyError if there is none."""
        return np.array([self._block_of[name] for name in names], dtype=np.int64)

    def begin_with(self, request_id: int, names: Sequence[int]) -> int:
        """Seat a request with blocks that are there, then those kept or set aside for it.

        Returns
        -------
        int
            Its seat.

        Raises
        ------
        SchedlabError
            If there is no such block, which the ledger rules out.
        """
        seat = self._seated(request_id)
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                raise SchedlabError(_UNCOMPUTED.format(request_id))
            self._hold(block)
            blocks.append(block)
        blocks += self._own.pop(request_id, [])
        blocks += self._set_aside.pop(request_id, [])
        self.tables[seat, : len(blocks)] = blocks
        self._held[seat], self._num_named[seat] = len(blocks), len(names)
        return seat

    def set_aside(self, request_id: int, count: int) -> Int64:
        """Take blocks for a request, behind those that it begins with or has set aside already."""
        taken = self._take(count, request_id)
        self._set_aside.setdefault(request_id, []).extend(taken)
        return np.array(taken, dtype=np.int64)

    def hold_own(self, request_id: int, num_own: int) -> None:
        """Keep the first blocks that a request left behind, with which it is about to begin.

        The ledger counts them as its own from then on, and not as left behind.

        Raises
        ------
        SchedlabError
            If there are fewer, which the ledger rules out.
        """
        own = self._left_behind.pop(request_id, [])
        if len(own) < num_own:
            raise SchedlabError(_UNCOMPUTED.format(request_id))
        self._own[request_id] = own[:num_own]
        self._free.extend(own[num_own:])

    def name(self, request_id: int, names: Sequence[int]) -> None:
        """Let the first blocks of a request be found that it has filled, or will in this step.

        It takes those that it has not yet; of contents that nobody holds it takes the block.
        """
        seat = self._seated(request_id)
        for place in range(self._num_named[seat], len(names)):
            name = names[place]
            there = self._block_of.get(name)
            is_idle = there in self._idle
            if place == self._held[seat]:
                if there is not None and is_idle:
                    self._hold(there)
                    self.tables[seat, place] = there
                    self._held[seat] += 1
                    continue
                self.tables[seat, place] = self._take(1, request_id)[0]
                self._held[seat] += 1
                there = self._block_of.get(name)
                is_idle = there in self._idle
            if there is not None and not is_idle:
                self._doubles.append((seat, place, name))
                continue
            if there is not None:
                self._forget(there)
            block = int(self.tables[seat, place])
            self._block_of[name], self._name_of[block], self._holders[block] = block, name, 1
        self._num_named[seat] = max(self._num_named[seat], len(names))

    def merge_doubles(self) -> None:
        """Give back blocks whose content is in another one, when both are filled."""
        for seat, place, name in self._doubles:
            own, other = int(self.tables[seat, place]), self._block_of[name]
            self._hold(other)
            self.tables[seat, place] = other
            self._free.append(own)
        self._doubles.clear()

    def keep(self, request_id: int) -> None:
        """Let a request hold its blocks without a seat, until it is released."""
        self.merge_doubles()
        self._kept[request_id] = self._stand_named(request_id)

    def _stand_named(self, request_id: int) -> tuple[list[int], int]:
        seat = self._seats[request_id]
        named, self._num_named[seat] = self._num_named[seat], 0
        return self._stand(request_id), named

    def release(self, request_id: int, num_computed: int = 0) -> None:
        """Give back a request's blocks and seat; what can be found again stays as it is."""
        if request_id in self._kept:
            blocks, named = self._kept.pop(request_id)
        elif request_id in self._seats:
            self.merge_doubles()
            blocks, named = self._stand_named(request_id)
        else:
            return
        for block in blocks[named - 1 :: -1] if named else ():
            self._holders[block] -= 1
            if not self._holders[block]:
                self._idle[block] = None
        # What it left behind before may still be known, and is the same.
        count = self.ledger.num_left_behind(request_id)
        before = self._left_behind.pop(request_id, [])
        num_left = max(min(count, num_computed // self.block_size - named), 0)
        kept = blocks[named : named + num_left]
        if num_left < min(count, len(before)):
            num_left, kept, before = 0, before[:count], before[count:]
        self._free.extend(before)
        if kept:
            self._left_behind[request_id] = kept
        self._free.extend(blocks[named + num_left :])

    def check(self, engine: Engine) -> None:
        """Prove that engine and pool agree, between two steps, or raise AssertionError."""
        held = {block for request_id in self._seats for block in self.blocks(request_id).tolist()}
        kept = self._kept
        held.update(*self._own.values(), *self._set_aside.values(), *[b for b, _ in kept.values()])
        others = [
            *self._free,
            *self._idle,
            *[b for left in self._left_behind.values() for b in left],
        ]
        assert sorted([*held, *others]) == list(range(1, self.num_blocks + 1)), (
            "a KV block is lost or held twice"
        )
        counted = engine.kv.num_blocks - engine.kv.free_blocks
        assert len(held) <= counted, f"{len(held)} blocks held, the engine counts {counted}"
        holders = dict.fromkeys(self._name_of, 0)
        named = {i: self.blocks(i)[: self._num_named[seat]] for i, seat in self._seats.items()}
        named |= {
            i: np.array(blocks[:count], dtype=np.int64) for i, (blocks, count) in kept.items()
        }
        for request_id, blocks in named.items():
            assert len(blocks) == self.ledger.num_named(request_id), "a name is missing"
            for block in blocks.tolist():
                holders[block] += 1
        assert holders == self._holders, "holders are off"
        assert {b for b, n in holders.items() if not n} == set(self._idle), "idle blocks are off"

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] += 1

    def _forget(self, block: int) -> None:
        """Let an idle block be free."""
        del self._idle[block], self._holders[block]
        del self._block_of[self._name_of.pop(block)]
        self._free.append(block)

    def _take(self, count: int, request_id: int) -> list[int]:
        if count > len(self._free):
            self._collect(count - len(self._free))
        return super()._take(count, request_id)

    def _collect(self, count: int) -> None:
        """Free at least `count` blocks whose content cannot be found any more, if there are any."""
        ledger = self.ledger
        ledger.blocks_before_eviction()  # which lets go of what was only counted
        lost = []
        for block in self._idle:
            if not ledger.knows(self._name_of[block]):
                lost.append(block)
                if len(lost) == count:
                    break
        for block in lost:
            self._forget(block)
        if len(lost) < count:
            for request_id, blocks in list(self._left_behind.items()):
                kept = ledger.num_left_behind(request_id)
                self._free.extend(blocks[kept:])
                del blocks[kept:]
                if not blocks:
                    del self._left_behind[request_id]
