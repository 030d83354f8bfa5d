"""The loop behind `FairBatching`: functions of their own, which the compiled core has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from schedlab.policies.deadlines import Target, all_due_ns, due_ns
from schedlab.policies.preemption import (
    everyone_fits,
    grant_all_decodes,
    grant_or_preempt,
    latest_arrival,
)
from schedlab.policies.step_load import STEPS_AHEAD, Ceiling, PromptCeilings, StepLoad
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

Targets = dict[RequestState, Target]


class Deadlines:
    """When the next tokens of requests are due.

    Attributes
    ----------
    targets : dict of RequestState to Target
        Of all requests.
    none_before_ns : int
        No token is due before. It may be too early: what is due later and later is looked at only
        where that matters.
    full_tokens : int
        Tokens of the last step that its time cut off in a prompt: often those of the next one, too,
        since times rise by stairs.
    ceiling : Ceiling
        Of all decodes alone.
    prompt_ceilings : PromptCeilings
        Of decodes with a prompt.
    """

    __slots__ = ("ceiling", "full_tokens", "none_before_ns", "prompt_ceilings", "targets")

    def __init__(self) -> None:
        self.targets: Targets = {}
        self.full_tokens = 0
        self.none_before_ns = FOREVER
        self.ceiling = Ceiling()
        self.prompt_ceilings = PromptCeilings()

    def add(self, state: RequestState, target: Target) -> None:
        """Let a request have a target."""
        self.targets[state] = target
        self.none_before_ns = min(self.none_before_ns, due_ns(state, self.targets))

    def of_decodes(
        self, view: EngineView, decodes: Sequence[RequestState]
    ) -> tuple[list[int], int]:
        """Return when the next token of each decode is due, and the first of any.

        The queue is in the order of that.
        """
        targets = self.targets
        dates_ns = all_due_ns(decodes, view.output_tokens(decodes), targets)
        self.none_before_ns = 0
        first_ns = min(dates_ns)
        if first_ns > view.now_ns:  # else it does not matter how late it is
            others = [*view.prefilling, *view.loading, *view.loaded, *view.in_pipeline]
            if len(view.waiting):
                others.append(view.waiting.head)
            self.none_before_ns = min([first_ns, *[due_ns(state, targets) for state in others]])
        return dates_ns, first_ns


def plan_by_slack(
    view: EngineView, builder: PlanBuilder, deadlines: Deadlines, tbt_ns: int
) -> BatchPlan:
    """Plan urgent decodes, prompts, other decodes, as many as end within the time.

    Parameters
    ----------
    view, builder : EngineView, PlanBuilder
        As `Policy.plan` gets them.
    deadlines : Deadlines
        Of all requests; the queue is in their order.
    tbt_ns : int
        The least time between tokens of all decodes.
    """
    could_prefill = len(view.prefilling) > 0 or (len(view.waiting) > 0 and builder.seats_left > 0)
    if could_prefill and _grant_everyone(view, builder, deadlines, tbt_ns):
        return builder.build()
    if not view.num_decodes:
        tbt_ns = 0
    elif not could_prefill:
        # The budget is the least time between tokens at least, whatever the slack.
        steps = STEPS_AHEAD
        if not deadlines.ceiling.is_above(view, tbt_ns, steps):
            steps = StepLoad(view).with_all_decodes().steps_within(tbt_ns)
        if steps and grant_all_decodes(view.running, builder, view):
            return builder.build(max_steps=steps)
    now_ns, decodes = view.now_ns, view.decoding
    urgent, budget_ns, urgent_ns = decodes, FOREVER, FOREVER
    dates_ns: list[int] = []
    if decodes:
        dates_ns, first_ns = deadlines.of_decodes(view, decodes)
        budget_ns = max(first_ns - now_ns, tbt_ns)
        urgent_ns = now_ns + budget_ns + tbt_ns
        if could_prefill and max(dates_ns) >= urgent_ns:
            dated = zip(decodes, dates_ns, strict=True)
            urgent = [state for state, at_ns in dated if at_ns < urgent_ns]
    are_others = len(urgent) < len(decodes)
    empty = StepLoad(view)
    served, load = _decode(urgent, empty, budget_ns, builder, view, (), deadlines)
    prompts, is_full = _compute_prompts(load, budget_ns, builder, view, deadlines, are_others)
    num_served = len(served) + len(prompts)
    if are_others and not is_full:
        dated = zip(decodes, dates_ns, strict=True)
        others = [state for state, at_ns in dated if at_ns >= urgent_ns]
        both = (*served, *prompts)
        more, load = _decode(others, load, budget_ns, builder, view, both, deadlines)
        num_served += len(more)
    if load.is_empty and view.running and not builder.preempted:
        # Prompts under way block each other for memory.
        builder.preempt(latest_arrival(builder))
    if could_prefill or num_served < len(decodes):
        return builder.build()
    return builder.build(max_steps=max(load.steps_within(tbt_ns), 1))


def _grant_everyone(
    view: EngineView, builder: PlanBuilder, deadlines: Deadlines, tbt_ns: int
) -> bool:
    """Grant all decodes a token and all prompts whole, if that surely ends within the time.

    Then it does not matter who goes first, nor which decodes are urgent: nobody is looked at. Where
    a larger batch might take less time, or nobody decodes, it is not tried.
    """
    if not (view.num_decodes and view.prices_never_fall and everyone_fits(view, builder)):
        return False
    budget_ns = max(deadlines.none_before_ns - view.now_ns, tbt_ns)
    everyone = StepLoad(view).with_all_decodes()
    if not _all_within(everyone, [*view.prefilling, *view.waiting], budget_ns, deadlines):
        return False
    if not deadlines.ceiling.is_above(view, budget_ns):
        decodes = StepLoad(view).with_all_decodes()
        if not decodes.is_within(budget_ns):
            return False
    builder.grant_decodes()
    prompts: Iterable[RequestState] = view.waiting
    if view.prefilling:
        prompts = _by_slack(list(view.prefilling), prompts, deadlines.targets, builder)
    for state in builder.undeferred(prompts):
        if not builder.grant(state):
            break
    return True


def _all_within(
    decodes: StepLoad, prompts: Sequence[RequestState], budget_ns: float, deadlines: Deadlines
) -> bool:
    """Whether decodes with all that is left of some prompts end within the time."""
    if len(prompts) == 1:
        state = prompts[0]
        tokens = state.num_uncomputed_tokens
        if deadlines.prompt_ceilings.is_above(decodes, state, tokens, budget_ns):
            return True
    for state in prompts:
        decodes.add(state, state.num_uncomputed_tokens)
    return decodes.is_within(budget_ns)


def _compute_prompts(
    load: StepLoad,
    budget_ns: int,
    builder: PlanBuilder,
    view: EngineView,
    deadlines: Deadlines,
    decodes_left: bool,
) -> tuple[list[RequestState], bool]:
    """Grant prompts what ends within the time, by slack, and count them.

    Returns
    -------
    served : list of RequestState
        Whose they are.
    is_full : bool
        Whether surely nothing else ends within the time.
    """
    prompts: Iterable[RequestState] = view.waiting if not builder.preempted else ()
    under_way = [state for state in view.prefilling if state not in builder.preempted]
    if len(under_way) == 1 and not len(view.waiting):
        prompts = under_way
    elif under_way:
        prompts = _by_slack(under_way, prompts, deadlines.targets, builder)
    served: list[RequestState] = []
    for state in builder.undeferred(prompts):
        if not (builder.tokens_left and builder.rows_left):
            break
        most = min(state.num_uncomputed_tokens, builder.tokens_left)
        others = load.num_tokens
        within = most
        if not deadlines.prompt_ceilings.is_above(load, state, most, budget_ns):
            within = load.chunk_within(state, most, budget_ns, deadlines.full_tokens - others)
        if 0 < within < most:
            deadlines.full_tokens = others + within
        chunk = within or int(load.is_empty)
        granted = builder.grant(state, chunk) if chunk else 0
        if not granted:
            break
        load.add(state, granted)
        served.append(state)
        if within < most:
            prompts_left = len(view.waiting) + len(under_way) > len(served)
            if load.is_full(budget_ns, decodes_left, prompts_left):
                return served, True
    return served, False


def _by_slack(
    under_way: Sequence[RequestState],
    waiting: Iterable[RequestState],
    targets: Targets,
    builder: PlanBuilder,
) -> Iterator[RequestState]:
    """Merge prompts under way into those that wait, which are in order; few are ever asked for.

    Nobody who waits holds up a prompt under way once no seat is left.
    """
    entries = sorted([(_place(state, targets), state) for state in under_way], reverse=True)
    for state in waiting:
        if builder.residents_left < 1:
            break
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
    deadlines: Deadlines,
) -> tuple[Collection[RequestState], StepLoad]:
    """Grant the first due that fit the time, taking memory from who is not served."""
    if builder.preempted:
        states = [state for state in states if state not in builder.preempted]
    if not (states and builder.tokens_left and builder.rows_left):
        return (), load
    both = load.with_decodes(states)
    fits = load.is_empty and deadlines.ceiling.is_above(view, budget_ns)
    if (fits or both.is_within(budget_ns)) and grant_all_decodes(states, builder, view):
        return states, both
    targets = deadlines.targets
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
