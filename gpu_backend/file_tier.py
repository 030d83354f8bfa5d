"""A tier of KV blocks in a file, below host memory: which block lies where, and what copies it."""

from __future__ import annotations

from collections.abc import Sequence

from schedlab.gpu_backend.copy_lane import Lane, Ticket
from schedlab.gpu_backend.file_blocks import FileBlocks
from schedlab.gpu_backend.host_blocks import Int64
from schedlab.gpu_backend.host_tier import HostTier
from schedlab.gpu_backend.places import Places
from schedlab.sim.core.engine import Engine


class FileTier:
    """Blocks of a file by the names of what they hold; they come from the tier above.

    Parameters
    ----------
    blocks : FileBlocks
        The file.
    above : HostTier or FileTier
        Where blocks come from.
    out, back : Lane
        What copies here, and to the device.

    Attributes
    ----------
    blocks : FileBlocks
        The file.
    places : Places
        What lies where.

    Notes
    -----
    Copies wait for each other in one way only: for some that were ordered before them. So nobody
    waits in a circle. A copy here reads places above, which may be given to others as soon as it
    is ordered: `Places` puts those behind it.
    """

    def __init__(
        self, blocks: FileBlocks, above: HostTier | FileTier, out: Lane, back: Lane
    ) -> None:
        self.blocks = blocks
        self.places = Places(blocks.num_blocks)
        self._above = above
        self._out, self._back = out, back

    def store(self, names: Sequence[int]) -> Ticket:
        """Copy blocks here, by name, that lie in the tier above and are written there."""
        source = self._above.places.of(names)
        places, after = self.places.add(names)
        above, blocks = self._above.blocks, self.blocks
        ticket = self._out.order(lambda: blocks.copy_down(above, source, places), after)
        self._above.places.read_until(source, ticket)
        return ticket

    def load(self, names: Sequence[int], blocks: Int64) -> Ticket:
        """Copy blocks by name to blocks of the cache."""
        places = self.places.of(names)
        return self._back.order(lambda: self.blocks.copy_in(places, blocks), self.readers(blocks))

    def readers(self, blocks: Int64) -> list[Ticket]:
        """Return the copies that still read blocks of the cache which somebody is to write to."""
        return self._above.readers(blocks)

    def check(self, engine: Engine, place: int) -> None:
        """Prove that the file holds what the engine counts of this tier, or raise AssertionError.

        `place` is the number of the tier.
        """
        self.places.check()
        counted = engine.requests.tiers
        assert counted is not None
        counted.check_held(place, set(self.places.names), 0)
