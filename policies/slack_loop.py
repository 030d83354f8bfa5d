"""The loop behind `FairBatching`: a function of its own, which the compiled core has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from schedlab.policies.deadlines import Target, all_due_ns, due_ns
from schedlab.policies.preemption import grant_all_decodes, grant_or_preempt, latest_arrival
from schedlab.policies.step_load import StepLoad
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

Targets = dict[RequestState, Target]


def plan_by_slack(
    view: EngineView, builder: PlanBuilder, targets: Targets, tbt_ns: int
) -> BatchPlan:
    """Plan urgent decodes, prompts, other decodes, as many as end within the time.

    Parameters
    ----------
    view, builder : EngineView, PlanBuilder
        As `Policy.plan` gets them.
    targets : dict of RequestState to Target
        Of all requests; the queue is in the order of when their next tokens are due.
    tbt_ns : int
        The least time between tokens of all decodes.
    """
    now_ns, decodes = view.now_ns, view.decoding
    if not decodes:
        tbt_ns = 0
    load = StepLoad(view)
    could_prefill = len(view.prefilling) > 0 or (len(view.waiting) > 0 and builder.seats_left > 0)
    if not could_prefill:
        # The budget is the least time between tokens at least, whatever the slack.
        steps = load.with_decodes(decodes).steps_within(tbt_ns)
        if steps and grant_all_decodes(decodes, builder, view):
            return builder.build(max_steps=steps)
    urgent, budget_ns = decodes, FOREVER
    others: list[RequestState] = []
    if decodes:
        dates_ns = all_due_ns(decodes, view.output_tokens(decodes), targets)
        budget_ns = max(min(dates_ns) - now_ns, tbt_ns)
        urgent_ns = now_ns + budget_ns + tbt_ns
        if could_prefill and max(dates_ns) >= urgent_ns:
            urgent, others = [], []
            for state, at_ns in zip(decodes, dates_ns, strict=True):
                (urgent if at_ns < urgent_ns else others).append(state)
    served, load = _decode(urgent, load, budget_ns, builder, view, (), targets)
    served = (*served, *_compute_prompts(load, budget_ns, builder, view, targets))
    more, load = _decode(others, load, budget_ns, builder, view, served, targets)
    if load.is_empty and view.running and not builder.preempted:
        # Prompts under way block each other for memory.
        builder.preempt(latest_arrival(builder))
    if could_prefill or len(served) + len(more) < len(decodes):
        return builder.build()
    return builder.build(max_steps=max(load.steps_within(tbt_ns), 1))


def _compute_prompts(
    load: StepLoad, budget_ns: int, builder: PlanBuilder, view: EngineView, targets: Targets
) -> list[RequestState]:
    """Grant prompts what ends within the time, by slack; count them, and return whose they are."""
    prompts: Iterable[RequestState] = view.waiting if not builder.preempted else ()
    under_way = [state for state in view.prefilling if state not in builder.preempted]
    if under_way:
        prompts = _by_slack(under_way, prompts, targets)
    served: list[RequestState] = []
    for state in prompts:
        if not (builder.tokens_left and builder.rows_left):
            break
        most = min(state.num_uncomputed_tokens, builder.tokens_left)
        chunk = load.chunk_within(state, most, budget_ns) or int(load.is_empty)
        granted = builder.grant(state, chunk) if chunk else 0
        if not granted:
            break
        load.add(state, granted)
        served.append(state)
    return served


def _by_slack(
    under_way: Sequence[RequestState], waiting: Iterable[RequestState], targets: Targets
) -> Iterator[RequestState]:
    """Merge prompts under way into those that wait, which are in order; few are ever asked for."""
    entries = sorted([(_place(state, targets), state) for state in under_way], reverse=True)
    for state in waiting:
        place = _place(state, targets)
        while entries and entries[-1][0] < place:
            yield entries.pop()[1]
        yield state
    while entries:
        yield entries.pop()[1]


def _place(state: RequestState, targets: Targets) -> tuple[int, int, int]:
    return due_ns(state, targets), state.request.arrival_ns, state.id


def _decode(
    states: Sequence[RequestState],
    load: StepLoad,
    budget_ns: int,
    builder: PlanBuilder,
    view: EngineView,
    served: Collection[RequestState],
    targets: Targets,
) -> tuple[Collection[RequestState], StepLoad]:
    """Grant the first due that fit the time, taking memory from who is not served."""
    if builder.preempted:
        states = [state for state in states if state not in builder.preempted]
    if not states:
        return (), load
    both = load.with_decodes(states)
    if both.is_within(budget_ns) and grant_all_decodes(states, builder, view):
        return states, both
    states = [entry[1] for entry in sorted([(_place(state, targets), state) for state in states])]
    within = load.decodes_within(states, budget_ns) or int(load.is_empty)
    granted: set[RequestState] = set()
    for state in states[:within]:
        if not (builder.tokens_left and builder.rows_left):
            break
        if state in builder.preempted:
            continue
        if not builder.grant(state):
            rest = {*builder.running()} - granted - {*served}
            by_arrival = sorted(rest, key=lambda s: (s.request.arrival_ns, s.id))
            if not grant_or_preempt(builder, state, by_arrival):
                continue
        load.add(state, 1)
        granted.add(state)
    return granted, load
