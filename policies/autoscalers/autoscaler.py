"""What every autoscaler is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from schedlab.policies.knobs import Knobs
from schedlab.sim.drive.pool_state import PoolState


class Autoscaler(Knobs):
    """Says how many engines a pool should have, every so often.

    A subclass overrides `num_engines`. It may keep state of its own; one object serves one pool.
    Its constructor only stores its parameters.
    """

    source: ClassVar[str] = ""
    """Documentation, code or paper that it follows."""
    counts: Sequence[int] = ()
    """Numbers of engines that it is known ahead to ask for."""

    def num_engines(self, pool: PoolState) -> int:
        """Return how many engines the pool should have; it is kept within `min` and `max`.

        Parameters
        ----------
        pool : PoolState
            What is known of it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override num_engines()")
