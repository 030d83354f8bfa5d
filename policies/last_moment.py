"""The loop behind `SLAI`: functions of their own, which the compiled core has."""

from __future__ import annotations

from collections.abc import Collection

from schedlab.policies.deadlines import due_by
from schedlab.policies.preemption import (
    Place,
    grant_all_decodes,
    grant_or_preempt,
)
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

Dates = dict[RequestState, int]
"""The last time at which the next token of a request may be scheduled, in ns."""


def note_tokens(
    plan: BatchPlan,
    running: Collection[RequestState],
    dates_ns: Dates,
    now_ns: int,
    target_ns: int,
    own_targets_ns: dict[RequestState, int],
) -> None:
    """Set the dates of all who got a token to a time from now, their own if they have one.

    Parameters
    ----------
    plan : BatchPlan
        What was executed; where it does not list its decodes, all who run took part.
    running : collection of RequestState
        Who runs after it.
    dates_ns : dict of RequestState to int
        The dates; also of those whom the plan names and who finished.
    now_ns, target_ns : int
        A time, and a time from then.
    own_targets_ns : dict of RequestState to int
        The times of those who have their own.
    """
    decoded = running if plan.decodes is None else plan.decodes
    if plan.chunks:
        decoded = [*decoded, *[state for state, _ in plan.chunks if state.is_decoding]]
    dates_ns.update(dict.fromkeys(decoded, now_ns + target_ns))
    if own_targets_ns:
        for state in decoded:
            dates_ns[state] = now_ns + own_targets_ns.get(state, target_ns)


def plan_at_last_moment(
    view: EngineView,
    builder: PlanBuilder,
    dates_ns: Dates,
    place: Place,
    token_budget: int,
    max_decodes: int,
) -> BatchPlan:
    """Plan critical decodes, prompts under way, new prompts, other decodes.

    Parameters
    ----------
    view, builder : EngineView, PlanBuilder
        As `Policy.plan` gets them.
    dates_ns : dict of RequestState to int
        Of the decodes; those not in it are critical.
    place : callable
        Where a request stands in the order of new prompts, which is that of the queue.
    token_budget, max_decodes : int
        Tokens and decodes of a step.
    """
    idle = not (len(view.prefilling) or len(view.waiting) or view.num_paused)
    if idle and len(view.running) <= min(max_decodes, token_budget):
        if view.config.num_speculative_tokens:  # of their drafts not all may fit
            fits = builder.grant_all(view.running)
        else:
            fits = grant_all_decodes(view.running, builder, view)
        if fits:
            return builder.build(max_steps=FOREVER)  # it matters to nobody who is due
    now_ns, decodes = view.now_ns, view.decoding
    critical = due_by(decodes, dates_ns, now_ns)
    floor = max(builder.tokens_left - token_budget, 0)
    paused = list(view.prefilling)

    room = max_decodes
    room -= _decode(critical, room, paused, builder, floor, dates_ns)
    for state in tuple(paused):
        if builder.tokens_left > floor and builder.grant(state, builder.tokens_left - floor):
            paused.remove(state)
    # Who was evicted in this step is back in the queue of the original, and does not fit: only
    # those before it in the order may take the memory it left.
    first_gone = min([place(state) for state in builder.preempted], default=None)
    for state in view.waiting:
        left = builder.tokens_left - floor
        overtakes = first_gone is not None and place(state) > first_gone
        if left < 1 or overtakes or not builder.grant(state, left):
            break
    if builder.tokens_left > floor and builder.rows_left:
        others = decodes
        if critical:
            served = set(critical)
            others = [state for state in decodes if state not in served]
        room -= _decode(others, room, paused, builder, floor, dates_ns)
    if paused and not builder.preempted and len(paused) == len(view.running):
        # Prompts under way block each other for memory; the original reserves them whole.
        builder.preempt(paused[-1])
    # Which decodes are due changes with time: it changes nothing only while all of them run
    # and nobody has a prompt to go before them.
    all_run = max_decodes - room == len(decodes)
    may_prefill = len(view.prefilling) or (len(view.waiting) and builder.residents_left)
    return builder.build(max_steps=FOREVER if all_run and not may_prefill else 1)


def _decode(
    states: list[RequestState],
    room: int,
    paused: list[RequestState],
    builder: PlanBuilder,
    floor: int,
    dates_ns: Dates,
) -> int:
    """Grant up to `room` of some decodes, those due first before others, and count them."""
    if not states:
        return 0
    if len(states) > room:
        states = _by_date(states, dates_ns)[:room]
    if len(states) <= builder.tokens_left - floor and builder.grant_all(states):
        return len(states)
    granted = 0
    for state in _by_date(states, dates_ns):
        if builder.tokens_left <= floor or builder.rows_left < 1:
            break
        victims = [state, *paused]
        granted += grant_or_preempt(builder, state, victims)
        paused[:] = [victim for victim in victims if victim is not state]
    return granted


def _by_date(states: list[RequestState], dates_ns: Dates) -> list[RequestState]:
    dated = [(dates_ns.get(s, 0), s.request.arrival_ns, s.id, s) for s in states]
    dated.sort()
    return [entry[3] for entry in dated]
