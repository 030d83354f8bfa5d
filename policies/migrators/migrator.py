"""What every migrator is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from schedlab.policies.knobs import Knobs
from schedlab.sim.drive.engine_state import Candidate
from schedlab.sim.request import RequestState


class Migrator(Knobs):
    """Chooses which requests move from engine to engine while they decode.

    A subclass overrides `pairs`, and `victim` if it does not want the shortest of the least urgent.
    Its constructor only stores its parameters.
    """

    source: ClassVar[str] = ""
    """Paper section or code that it follows."""

    def pairs(self, candidates: Sequence[Candidate]) -> Sequence[tuple[int, int]]:
        """Return from which engines a request should move to which, by their places.

        Parameters
        ----------
        candidates : sequence of Candidate
            All engines of one role that are up. Nobody can go to one that drains.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override pairs()")

    def victim(self, decoding: Sequence[RequestState]) -> int | None:
        """Return the place of the request that moves, None if none is to.

        Parameters
        ----------
        decoding : sequence of RequestState
            Those that decode there, at least one.
        """
        keys = [(-s.request.priority, s.num_computed_tokens, s.id) for s in decoding]
        return keys.index(min(keys))
