"""The engines that a fleet lets its router choose among."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from schedlab.sim.drive.engine_state import Board, EngineState

Column = Literal[
    "index", "num_blocks", "block_size", "num_in_flight", "num_waiting", "num_running",
    "used_blocks",
]  # fmt: skip


class Offer(list[EngineState]):
    """Engines one by one, and what they say column by column.

    Attributes
    ----------
    board : Board
        The columns.
    """

    def __init__(self, engines: Iterable[EngineState] = ()) -> None:
        super().__init__(engines)
        self.board = Board(self)
        self._load: Callable[[EngineState], float] | None = None
        self._loads: list[float] = []

    def loads(self, load: Callable[[EngineState], float]) -> list[float]:
        """Return the load of each engine; see the function `loads`."""
        changed = self.board.changed
        if load == self._load:
            for place in changed:
                self._loads[place] = load(self[place])
        else:
            self._load, self._loads = load, [load(engine) for engine in self]
        changed.clear()
        return self._loads


def column(engines: Sequence[EngineState], name: Column) -> list[int]:
    """Return what all engines say; only to be read.

    Of an `Offer` as it is the columns are kept; any other sequence is asked one by one.
    """
    if isinstance(engines, Offer):
        kept: list[int] = getattr(engines.board, name)
        return kept
    return [getattr(engine, name) for engine in engines]


def loads(engines: Sequence[EngineState], load: Callable[[EngineState], float]) -> list[float]:
    """Return a load of each engine; only to be read.

    Parameters
    ----------
    engines : sequence of EngineState
        Of an `Offer` only those are asked that changed since the last time.
    load : callable
        Computes it of an engine's counts of requests and of their tokens in flight, and of nothing
        else: memory in use also changes with the time.
    """
    if isinstance(engines, Offer):
        return engines.loads(load)
    return [load(engine) for engine in engines]
