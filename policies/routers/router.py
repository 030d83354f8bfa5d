"""What every router is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from schedlab.policies.knobs import Knobs
from schedlab.sim.drive.engine_state import EngineState, first_least
from schedlab.sim.request import Request


class Router(Knobs):
    """Chooses an engine for each request, once, when it arrives.

    A subclass overrides `route`. It may keep state of its own, and knows of the engines what they
    tell it (`EngineState`). Its constructor only stores its parameters.

    Attributes
    ----------
    rng : numpy.random.Generator
        The only source of chance a router may use; it is there once it is made by name.
    turn : int
        Where `least` begins to look.
    """

    source: ClassVar[str] = ""
    """Paper section or code that the router follows."""
    needs_prediction: ClassVar[bool] = False
    """Whether requests must carry `predicted_tokens`."""
    needs_prefixes: ClassVar[bool] = False
    """Whether it goes by what prompts have in common, whose blocks have names only where an engine
    has a prefix cache; a run without one says so."""
    looks_at_engines: bool = True
    """Whether it looks at more than number and `index` of the engines. Who does not is asked about
    all requests before anything runs, and its engines are run one after the other."""
    looks_at_caches: bool = False
    """Whether it asks for `cached_tokens`."""

    rng: np.random.Generator
    turn: int = 0

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Return the place in `engines` of the one that a request goes to.

        Parameters
        ----------
        request : Request
            What a server knows of it when it arrives.
        engines : sequence of EngineState
            All engines that are up and can take it, at least one.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override route()")

    def engine_is_gone(self, index: int) -> None:
        """Learn that an engine died, with its cache; one that starts there later is fresh."""

    def least(self, loads: Sequence[Any]) -> int:
        """Return the place of the least load; among equals engines take turns.

        The first to be looked at is the one behind the last that was chosen.
        """
        start = self.turn % len(loads)
        if isinstance(loads, list) and isinstance(loads[0], float):
            place = first_least(loads, start)
        else:
            least = min(loads)
            try:
                place = loads.index(least, start)
            except ValueError:  # none from there on
                place = loads.index(least)
        self.turn = place + 1
        return place
