"""The engine of the program for long calls, the least used one for short calls."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import column
from schedlab.sim.request import Request


@register("autellix")
class Autellix(Router):
    """Long prompts go to the engine of their session, short ones to the least used engine.

    The idea: short calls share little with the rest of their program beside the system prompt,
    which every engine holds soon, and may even out the load; long calls carry the program's history
    and find it in one cache. A session gets its engine, the least used one, at its first long call,
    wherever its short calls were before, and a new one if that engine is gone. A request without a
    session is a program of its own.

    Must know sessions, and of the engines what the router sent there itself. Does badly where a few
    sessions with long contexts make most of the work: they stay together for good. Used is the
    number of requests sent and not answered, in turn among equals; the paper says "workload" and
    not what it counts.

    Parameters
    ----------
    max_small_tokens : int
        Prompt tokens up to which a request is short, >= 0; with 0 all stay with their session.
    """

    source = "Autellix, Luo et al. 2025 (arXiv:2502.13965), section 5, Algorithm 2"

    def __init__(self, max_small_tokens: int = 2048) -> None:
        if max_small_tokens < 0:
            raise ValueError(f"max_small_tokens must be >= 0, got {max_small_tokens!r}")
        self.max_small_tokens = max_small_tokens
        self._engine: dict[str, int] = {}

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Look the session up if the prompt is long, else take the least used."""
        session = request.session if request.prompt_tokens > self.max_small_tokens else None
        if session is not None:
            names = column(engines, "index")
            chosen = self._engine.get(session)
            if chosen in names:
                return names.index(chosen)
        place = self.least(column(engines, "num_in_flight"))
        if session is not None:  # its first long call, or its engine is down
            self._engine[session] = engines[place].index
        return place
