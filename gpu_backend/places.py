"""The places of a tier's memory: which content lies where, and what is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schedlab.gpu_backend.copy_lane import Ticket
from schedlab.sim.errors import SchedlabError


class Places:
    """Places for KV blocks, by the names of what they hold.

    Whoever counts blocks (`schedlab.sim.kv.tier.Tier`) evicts none that is loaded or written, so
    that its place is free at once; but for a copy to the tier below, which goes on reading it.
    Such places are handed out last, and whoever writes there comes behind that copy.

    Parameters
    ----------
    num_places : int
        How many there are.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._place_of: dict[int, int] = {}
        self._read_until: dict[int, Ticket] = {}

    @property
    def names(self) -> Iterable[int]:
        """What lies here."""
        return self._place_of.keys()

    def of(self, names: Iterable[int]) -> list[int]:
        """Return where contents lie; KeyError if one is not here."""
        return [self._place_of[name] for name in names]

    def add(self, names: Sequence[int]) -> tuple[list[int], list[Ticket]]:
        """Take places for contents; see `take`."""
        places, after = self.take(len(names))
        self._place_of.update(zip(names, places, strict=True))
        return places, after

    def take(self, count: int) -> tuple[list[int], list[Ticket]]:
        """Take free places.

        Returns
        -------
        (list of int, list of Ticket)
            They, and the copies behind which they may be written to.

        Raises
        ------
        SchedlabError
            If there are fewer, which the engine's accounting rules out.
        """
        free, reading = self._free, self._read_until
        if count > len(free):
            raise SchedlabError(
                f"{count} blocks go to a tier of {self._num_places} that has room for {len(free)}; "
                "the engine and the tier do not count alike"
            )
        for place in [place for place, ticket in reading.items() if ticket.is_done()]:
            del reading[place]
        taken: list[int] = []
        at = len(free) - 1
        while at >= 0 and len(taken) < count:
            if free[at] not in reading:
                taken.append(free.pop(at))
            at -= 1
        while len(taken) < count:
            taken.append(free.pop())
        after = [reading.pop(place) for place in taken if place in reading]
        return taken, list(dict.fromkeys(after))

    def read_until(self, places: Iterable[int], ticket: Ticket) -> None:
        """Note a copy that reads places; those of a tier are read in the order of these notes."""
        self._read_until.update(dict.fromkeys(places, ticket))

    def evict(self, names: Iterable[int]) -> None:
        """Forget contents."""
        self.give_back([self._place_of.pop(name) for name in names])

    def give_back(self, places: Iterable[int]) -> None:
        """Let places be free that were taken."""
        self._free.extend(places)

    def check(self, others: Iterable[int] = ()) -> None:
        """Prove that every place is free, holds something or is one of `others`, or raise."""
        held = [*self._place_of.values(), *others, *self._free]
        assert sorted(held) == list(range(self._num_places)), "a place is lost or held twice"
