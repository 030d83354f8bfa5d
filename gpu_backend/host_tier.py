"""The tier of KV blocks in host memory: which block lies where, and the copies under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schedlab.gpu_backend.copy_lane import Lane, Ticket
from schedlab.gpu_backend.host_blocks import HostBlocks, Int64
from schedlab.sim.core.engine import Engine


class HostTier:
    """Host blocks by the names of what they hold, and those of requests that were swapped out.

    A lane for each direction copies beside the steps; the two share nothing. Whoever counts blocks
    (`schedlab.sim.kv.tier.Tier`) evicts or gives back none that is being written or read, so that a
    host block can be handed out as soon as it is free.

    Parameters
    ----------
    blocks : HostBlocks
        The memory.
    out, back : Lane
        What copies here, and to the device.

    Attributes
    ----------
    reading : dict of int to Ticket
        Blocks of the cache that are being copied away, and when that is over.
    """

    def __init__(self, blocks: HostBlocks, out: Lane, back: Lane) -> None:
        self._blocks = blocks
        self._out, self._back = out, back
        self._free = list(range(blocks.num_blocks - 1, -1, -1))
        self._place_of: dict[int, int] = {}
        self._swapped: dict[int, list[int]] = {}
        self._swapped_out: dict[int, Ticket] = {}
        self.reading: dict[int, Ticket] = {}

    def store(self, names: Sequence[int], blocks: Int64) -> Ticket:
        """Copy blocks of the cache here, by name."""
        places = [self._free.pop() for _ in names]
        self._place_of.update(zip(names, places, strict=True))
        return self._copy_out(blocks, places)

    def swap_out(self, request_id: int, blocks: Int64) -> Ticket:
        """Copy all blocks of a request here, which has nothing here yet."""
        places = self._swapped[request_id] = [self._free.pop() for _ in blocks]
        ticket = self._swapped_out[request_id] = self._copy_out(blocks, places)
        return ticket

    def load(self, names: Iterable[int], blocks: Int64) -> Ticket:
        """Copy blocks by name to blocks of the cache."""
        return self._copy_in([self._place_of[name] for name in names], blocks, [])

    def swap_in(self, request_id: int, blocks: Int64) -> Ticket:
        """Copy all blocks of a request back; they stay its own until `forget`."""
        return self._copy_in(self._swapped[request_id], blocks, [self._swapped_out[request_id]])

    def evict(self, names: Iterable[int]) -> None:
        """Forget blocks that nobody reads or writes."""
        self._free.extend([self._place_of.pop(name) for name in names])

    def forget(self, request_id: int) -> None:
        """Free what a request has here that was swapped out, if it has anything."""
        places = self._swapped.pop(request_id, None)
        if places is not None:
            self._swapped_out.pop(request_id).wait()
            self._free.extend(places)

    def settle(self) -> None:
        """Let blocks of the cache be busy no more whose copies are done."""
        for block in [b for b, ticket in self.reading.items() if ticket.is_done()]:
            del self.reading[block]

    def check(self, engine: Engine) -> None:
        """Prove that every host block is free or holds something, or raise AssertionError."""
        held = [*self._place_of.values(), *[p for own in self._swapped.values() for p in own]]
        assert sorted([*held, *self._free]) == list(range(self._blocks.num_blocks)), (
            "a host block is lost or held twice"
        )
        counted = engine.requests.tiers
        assert counted is not None
        counted.check_held(self._place_of, sum(map(len, self._swapped.values())))

    def _copy_out(self, blocks: Int64, places: list[int]) -> Ticket:
        ticket = self._out.order(lambda: self._blocks.copy_out(blocks, places))
        self.reading.update(dict.fromkeys(blocks.tolist(), ticket))
        return ticket

    def _copy_in(self, places: list[int], blocks: Int64, after: list[Ticket]) -> Ticket:
        busy = [self.reading[block] for block in blocks.tolist() if block in self.reading]
        return self._back.order(lambda: self._blocks.copy_in(places, blocks), [*after, *busy])
