"""The tier of KV blocks in host memory: which block lies where, and the copies under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schedlab.gpu_backend.copy_lane import Lane, Ticket
from schedlab.gpu_backend.host_blocks import HostBlocks, Int64
from schedlab.gpu_backend.places import Places
from schedlab.sim.core.engine import Engine


class HostTier:
    """Host blocks by the names of what they hold, and those of requests that were swapped out.

    A lane for each direction copies beside the steps; the two share nothing.

    Parameters
    ----------
    blocks : HostBlocks
        The memory.
    out, back : Lane
        What copies here, and to the device.

    Attributes
    ----------
    blocks : HostBlocks
        The memory.
    places : Places
        What lies where.
    reading : dict of int to Ticket
        Blocks of the cache that are being copied away, and when that is over.
    """

    def __init__(self, blocks: HostBlocks, out: Lane, back: Lane) -> None:
        self.blocks = blocks
        self.places = Places(blocks.num_blocks)
        self._out, self._back = out, back
        self._swapped: dict[int, list[int]] = {}
        self._swapped_out: dict[int, Ticket] = {}
        self.reading: dict[int, Ticket] = {}

    def store(self, names: Sequence[int], blocks: Int64) -> Ticket:
        """Copy blocks of the cache here, by name."""
        return self._copy_out(blocks, *self.places.add(names))

    def swap_out(self, request_id: int, blocks: Int64) -> Ticket:
        """Copy all blocks of a request here, which has nothing here yet."""
        places, after = self.places.take(len(blocks))
        self._swapped[request_id] = places
        ticket = self._swapped_out[request_id] = self._copy_out(blocks, places, after)
        return ticket

    def load(self, names: Iterable[int], blocks: Int64) -> Ticket:
        """Copy blocks by name to blocks of the cache."""
        return self._copy_in(self.places.of(names), blocks, [])

    def swap_in(self, request_id: int, blocks: Int64) -> Ticket:
        """Copy all blocks of a request back; they stay its own until `forget`."""
        return self._copy_in(self._swapped[request_id], blocks, [self._swapped_out[request_id]])

    def forget(self, request_id: int) -> None:
        """Free what a request has here that was swapped out, if it has anything."""
        places = self._swapped.pop(request_id, None)
        if places is not None:
            self._swapped_out.pop(request_id).wait()
            self.places.give_back(places)

    def settle(self) -> None:
        """Let blocks of the cache be busy no more whose copies are done."""
        for block in [b for b, ticket in self.reading.items() if ticket.is_done()]:
            del self.reading[block]

    def readers(self, blocks: Int64) -> list[Ticket]:
        """Return the copies that still read blocks of the cache which somebody is to write to."""
        return [self.reading[block] for block in blocks.tolist() if block in self.reading]

    def check(self, engine: Engine) -> None:
        """Prove that every host block is free or holds something, or raise AssertionError."""
        swapped = [place for own in self._swapped.values() for place in own]
        self.places.check(swapped)
        counted = engine.requests.tiers
        assert counted is not None
        counted.check_held(0, set(self.places.names), len(swapped))

    def _copy_out(self, blocks: Int64, places: list[int], after: list[Ticket]) -> Ticket:
        ticket = self._out.order(lambda: self.blocks.copy_out(blocks, places), after)
        self.reading.update(dict.fromkeys(blocks.tolist(), ticket))
        return ticket

    def _copy_in(self, places: list[int], blocks: Int64, after: list[Ticket]) -> Ticket:
        after = [*after, *self.readers(blocks)]
        return self._back.order(lambda: self.blocks.copy_in(places, blocks), after)
