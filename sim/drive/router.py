"""Which of several engines a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from schedlab.sim.core.view import EngineView
from schedlab.sim.request import Request


class Router(Protocol):
    """Chooses an engine for each request, once, when it arrives."""

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        """Return the index of the engine that `request` goes to.

        Parameters
        ----------
        request : Request
            What a server knows of it when it arrives; its true length is not known.
        engines : sequence of EngineView
            All engines, as they are at this instant.
        """


class LeastLoaded:
    """The engine with the least ``4 * waiting + running`` requests, in turn among equals.

    As in vLLM's data-parallel load balancer (v1/engine/core_client.py, DPLBAsyncMPClient), but
    with counts that are never stale.

    Attributes
    ----------
    turn : int
        The engine that goes first among equals: the one behind the last that was chosen.
    """

    WAITING_WEIGHT = 4

    def __init__(self) -> None:
        self.turn = 0

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        """Return the index of the least loaded engine; the first from the one behind the last."""
        size, turn = len(engines), self.turn
        chosen = min(
            [(turn + i) % size for i in range(size)],
            key=lambda i: self.WAITING_WEIGHT * engines[i].num_waiting + len(engines[i].running),
        )
        self.turn = (chosen + 1) % size
        return chosen
