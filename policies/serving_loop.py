"""The loop behind `ContinuousBatching`: a function of its own, which the compiled core has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, SupportsIndex

from schedlab.policies.preemption import grant_running_in_order
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


class LoopHooks(Protocol):
    """What the loop asks; see `ContinuousBatching`."""

    def victim(self, running: Sequence[RequestState], now_ns: int) -> RequestState:
        """Choose who loses its memory."""

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterable[RequestState]:
        """Yield the waiting requests to admit."""

    def chunk(self, state: RequestState, view: EngineView) -> SupportsIndex | None:
        """Return the most tokens of a newly admitted request to compute."""

    def seating(self, loaded: list[RequestState], view: EngineView) -> list[RequestState]:
        """Order those who have been loaded, and wait for a seat."""

    def promise(self, view: EngineView, hooks_matter: bool = True) -> Sequence[SupportsIndex]:
        """Return for how many steps, and until when, the plan holds."""


def plan_step(
    hooks: LoopHooks, view: EngineView, builder: PlanBuilder, is_plain: bool
) -> BatchPlan:
    """Plan one step as vLLM V1 does; to the last preemption with `preempt_in_order`.

    Parameters
    ----------
    hooks : LoopHooks
        The policy.
    view, builder : EngineView, PlanBuilder
        As `Policy.plan` gets them.
    is_plain : bool
        Whether everyone who waits is a candidate, in the order of the queue, all of its prompt may
        be computed at once, and a step that cannot admit lasts: then nobody is asked.
    """
    if view.config.preempt_in_order:
        _grant_running_in_order(hooks, view, builder)
    else:
        while not builder.grant_running():
            builder.preempt(hooks.victim(tuple(builder.running()), view.now_ns))
    if builder.preempted:
        return builder.build()
    could_admit = fits = False
    num_waiting = view.waiting.size
    loaded = view.loaded if view.config.kv_tiers else []
    if num_waiting or loaded:
        # `seats_left` is the least of rows and residents.
        could_admit = fits = (
            builder.tokens_left > 0 and builder.rows_left > 0 and builder.residents_left > 0
        )
        for state in hooks.seating(loaded, view) if loaded and fits else ():
            most = None if is_plain else hooks.chunk(state, view)
            fits = builder.grant(state, most) > 0
            could_admit = builder.seats_left > 0 and builder.tokens_left > 0
            if not (fits and could_admit):
                break
        if fits and could_admit and num_waiting:
            candidates = view.waiting if is_plain else hooks.candidates(view, builder)
            for state in builder.undeferred(candidates):
                most = None if is_plain else hooks.chunk(state, view)
                granted = builder.grant(state, most)
                could_admit = (
                    builder.tokens_left > 0 and builder.rows_left > 0 and builder.residents_left > 0
                )
                if not (granted and could_admit):
                    break
    if is_plain and not could_admit:
        return builder.build(FOREVER)
    max_steps, until_ns = hooks.promise(view, could_admit)
    return builder.build(max_steps, until_ns)


def _grant_running_in_order(hooks: LoopHooks, view: EngineView, builder: PlanBuilder) -> None:
    grant_running_in_order(view, builder, lambda running: hooks.victim(running, view.now_ns))
