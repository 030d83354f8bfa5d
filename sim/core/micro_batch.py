"""Requests of a pipeline that decode in the same batches."""

from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.plan import FOREVER

_FEW_NUMBERS = 1024


class MicroBatch(DecodeBatch):
    """Decodes of an engine with several batches in flight that stay together from one to the next.

    Its clock counts the steps that it takes itself; steps of others take place between them, and
    the log numbers all of them.

    Attributes
    ----------
    soonest_end : int
        No member finishes at a smaller count of steps. Kept by the executor, who knows.
    """

    __slots__ = ("_first", "_many", "_numbers", "soonest_end")

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.soonest_end = FOREVER
        self._numbers: list[int] = []
        self._first = 0  # the step that the first of them is of
        self._many = _FEW_NUMBERS

    def advance_as(self, number: int) -> None:
        """Take a step of all members, which is the decode step of the engine with this number."""
        self.steps += 1
        self._numbers.append(number)
        if len(self._numbers) >= self._many:
            self._forget()

    def _forget(self) -> None:
        """Drop the numbers of steps that no member took part in."""
        oldest = min([state._stint_start for state in self.members.values()], default=self.steps)
        del self._numbers[: oldest - self._first]
        self._first = oldest
        self._many = _FEW_NUMBERS + 2 * len(self._numbers)

    def numbers_since(self, step: int) -> list[int]:
        """Return which decode steps of the engine its own are, from one of them on."""
        return self._numbers[step - self._first :]
