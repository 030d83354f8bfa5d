"""The freest engine, by the virtual usage of Llumnix."""

from collections.abc import Sequence
from math import inf
from typing import Literal

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import loads
from schedlab.sim.request import Request

Rule = Literal["paper", "code"]


@register("llumnix")
class Llumnix(Router):
    """The engine with the greatest freeness: blocks that are virtually free, a running request.

    Virtual usage is what running requests hold, what the one that has waited the longest asks for,
    and headroom for urgent requests (those of a priority below 0), so that others keep away from
    them. It may exceed the memory.

    The authors' code (its default, without de-fragmentation) counts what all waiting requests ask
    for, divides by those as well, has no headroom, and finds an engine without requests the freest.

    Parameters
    ----------
    headroom : float
        Share of the memory that is kept free where an urgent request runs, in [0, 1]. The paper
        gives no number; this one is ours.
    rule : {"paper", "code"}
        Whose freeness.
    """

    source = (
        "Llumnix, Sun et al., OSDI 2024, sections 4.4.1 and 4.4.3, algorithm 1; rule code: "
        "AlibabaPAI/llumnix, load_computation.py, RemainingStepsLoad"
    )

    def __init__(self, headroom: float = 0.5, rule: Rule = "paper") -> None:
        check(headroom, rule)
        self.headroom = headroom
        self.rule = rule

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Take the freest, in turn among equals."""
        return self.least(loads(engines, self._load))

    def _load(self, engine: EngineState) -> float:
        return -freeness(engine, self.headroom, self.rule)


def check(headroom: float, rule: str) -> None:
    """Refuse knobs that are impossible."""
    if not 0 <= headroom <= 1:
        raise ValueError(f"headroom must be in [0, 1], got {headroom!r}")
    if rule not in ("paper", "code"):
        raise ValueError(f"rule must be paper or code, got {rule!r}")


def freeness(engine: EngineState, headroom: float, rule: str = "paper") -> float:
    """Return the blocks of an engine that are virtually free, for each request that counts."""
    if rule == "code":
        num_requests = engine.num_running + engine.num_waiting
        usage = engine.used_blocks + engine.waiting_blocks
        return (engine.num_blocks - usage) / num_requests if num_requests else inf
    usage = engine.used_blocks + engine.first_waiting_blocks
    if engine.num_urgent:
        usage += round(headroom * engine.num_blocks)
    return (engine.num_blocks - usage) / max(engine.num_running, 1)
