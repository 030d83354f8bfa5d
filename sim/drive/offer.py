"""The engines that a fleet lets its router choose among.

Whatever answers like an engine may be asked here, also on the compiled core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, Literal

from mypy_extensions import mypyc_attr

from schedlab.sim.drive.engine_state import Board, EngineState, first_least
from schedlab.sim.request import Request

Column = Literal[
    "index", "num_blocks", "block_size", "num_in_flight", "num_waiting", "num_running",
    "used_blocks",
]  # fmt: skip


@mypyc_attr(native_class=False)
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


def column(engines: Sequence[EngineState], name: Column) -> list[int]:
    """Return what all engines say; only to be read.

    Of an `Offer` as it is the columns are kept; any other sequence is asked one by one.
    """
    if isinstance(engines, Offer):
        kept: list[int] = getattr(engines.board, name)
        return kept
    each: Sequence[Any] = engines
    return [getattr(engine, name) for engine in each]


def loads(engines: Sequence[EngineState], load: Callable[[EngineState], Any]) -> list[Any]:
    """Return a load of each engine, only to be read; of an `Offer` as `Board.loads` does it."""
    if isinstance(engines, Offer):
        return engines.board.loads(load)
    each: Sequence[Any] = engines
    return [load(engine) for engine in each]


def place_of_least(
    engines: Sequence[EngineState], waiting: float, running: float, start: int
) -> int:
    """Return where ``waiting * num_waiting + running * num_running`` is least.

    Among equals it is the first from `start` on, in a circle.
    """
    if isinstance(engines, Offer) and waiting < inf:  # what is no number is not least anywhere
        return engines.board.place_of_least(waiting, running, start)
    each: Sequence[Any] = engines
    counted = [waiting * engine.num_waiting + running * engine.num_running for engine in each]
    return first_least(counted, start)


def cached_tokens(engines: Sequence[EngineState], request: Request) -> list[int]:
    """Count the leading tokens of a prompt that each prefix cache holds."""
    if isinstance(engines, Offer):
        return engines.board.cached_tokens(request)
    each: Sequence[Any] = engines
    return [engine.cached_tokens(request) for engine in each]
