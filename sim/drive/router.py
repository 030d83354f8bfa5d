"""Which of several engines a request goes to, as the driver asks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.request import Request


class Router(Protocol):
    """Chooses an engine for each request, once, when it arrives."""

    looks_at_engines: bool
    """Whether it looks at more than the indices of the engines; who does not knows all its choices
    before anything runs."""
    looks_at_caches: bool
    """Whether it asks for `cached_tokens`."""

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Return the place in `engines` of the one that `request` goes to.

        Parameters
        ----------
        request : Request
            What a server knows of it when it arrives; its true length is not known.
        engines : sequence of EngineState
            All engines that can take it.
        """
