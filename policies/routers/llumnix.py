"""The freest engine, by the virtual usage of Llumnix."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import loads
from schedlab.sim.request import Request


@register("llumnix")
class Llumnix(Router):
    """The engine with the greatest freeness: blocks that are virtually free, a running request.

    Virtual usage is what running requests hold, what the one that has waited the longest asks for,
    and headroom for urgent requests (those of a priority below 0), so that others keep away from
    them. It may exceed the memory.

    Parameters
    ----------
    headroom : float
        Share of the memory that is kept free where an urgent request runs, in [0, 1].
    """

    source = "Llumnix, Sun et al., OSDI 2024, sections 4.4.1 and 4.4.3"

    def __init__(self, headroom: float = 0.5) -> None:
        if not 0 <= headroom <= 1:
            raise ValueError(f"headroom must be in [0, 1], got {headroom!r}")
        self.headroom = headroom

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the freest, in turn among equals."""
        return self.least(loads(engines, self._load))

    def _load(self, engine: EngineState) -> float:
        return -freeness(engine, self.headroom)


def freeness(engine: EngineState, headroom: float) -> float:
    """Return the blocks of an engine that are virtually free, for each running request."""
    usage = engine.used_blocks + engine.first_waiting_blocks
    if engine.num_urgent:
        usage += round(headroom * engine.num_blocks)
    return (engine.num_blocks - usage) / max(engine.num_running, 1)
