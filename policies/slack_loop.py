"""The loop behind `FairBatching`: functions of their own, which the compiled core has."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from operator import not_

from schedlab.policies.deadlines import Target, all_due_ns, due_ns
from schedlab.policies.preemption import (
    everyone_fits,
    grant_all_decodes,
    grant_or_preempt,
)
from schedlab.policies.step_load import STEPS_AHEAD, Ceiling, PromptCeilings, StepLoad
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RUNS, RequestState

Targets = dict[RequestState, Target]

_ROUNDED_NS = 2
"""By so much the distance of two dates may change as both requests move on: each is rounded."""


class Deadlines:
    """When the next tokens of requests are due.

    Attributes
    ----------
    targets : dict of RequestState to Target
        Of all requests.
    none_before_ns : int
        No token is due before. It may be too early: what is due later and later is looked at only
        where that matters.
    together : list of (int, int, RequestState, int)
        Decodes that have moved on together since all were looked at, in the order of their dates:
        when their tokens were due then, their numbers, and how many they had. Who joined them later
        is written down as if he had been there. Empty where it is not known.
    apart : list of RequestState
        All other decodes while some are together, and whose prompts were computed last.
    full_tokens : int
        Tokens of the last step that its time cut off in a prompt: often those of the next one, too,
        since times rise by stairs.
    ceiling : Ceiling
        Of all decodes alone.
    prompt_ceilings : PromptCeilings
        Of decodes with a prompt.
    """

    __slots__ = (
        "apart", "ceiling", "full_tokens", "none_before_ns", "prompt_ceilings", "targets",
        "together",
    )  # fmt: skip

    def __init__(self) -> None:
        self.targets: Targets = {}
        self.full_tokens = 0
        self.none_before_ns = FOREVER
        self.together: list[tuple[int, int, RequestState, int]] = []
        self.apart: list[RequestState] = []
        self.ceiling = Ceiling()
        self.prompt_ceilings = PromptCeilings()

    def add(self, state: RequestState, target: Target) -> None:
        """Let a request have a target."""
        self.targets[state] = target
        self.none_before_ns = min(self.none_before_ns, due_ns(state, self.targets))
        if state.status is RUNS:  # it decodes already, on its way from another engine
            self.together = []

    def forget(self, state: RequestState) -> None:
        """Let a request be gone that has ended."""
        self.targets.pop(state, None)
        if state in self.apart:
            self.apart.remove(state)
        for i, entry in enumerate(self.together):
            if entry[2] is state:
                del self.together[i]
                break

    def follow(
        self, states: Sequence[RequestState], dates_ns: Sequence[int], apart: list[RequestState]
    ) -> None:
        """Learn that some decodes move on together, and which others there are."""
        dated = zip(dates_ns, states, strict=True)
        self.together = sorted([(ns, s.id, s, s.num_output_tokens) for ns, s in dated])
        self.apart = apart

    def computes(self, prompts: Collection[RequestState]) -> None:
        """Learn whose prompts are computed while all who are together decode."""
        if self.together:
            self.apart += [state for state in prompts if state not in self.apart]

    def find_others(self, view: EngineView, tbt_ns: int) -> list[RequestState] | None:
        """Find which decodes are not urgent, where a step surely has the least time.

        Looked at are the first and the last of those who are together, and those apart. Who of them
        is urgent is together with the others from now on. None if all are to be looked at.
        """
        together, targets = self.together, self.targets
        if not together or tbt_ns <= 2 * _ROUNDED_NS:  # rounding could make the first wait
            return None
        _, _, first, num_tokens = together[0]
        soon_ns = view.now_ns + tbt_ns
        if due_ns(first, targets) > soon_ns:
            return None
        urgent_ns, num_steps = soon_ns + tbt_ns, first.num_output_tokens - num_tokens
        passed_ns = round(num_steps * targets[first][3] * 1e6)
        while together[-1][0] + passed_ns + _ROUNDED_NS >= urgent_ns:
            self.apart.append(together.pop()[2])
        others: list[RequestState] = []
        for state in self.apart:
            if not state.is_decoding:
                continue
            at_ns = due_ns(state, targets)
            if at_ns < urgent_ns:
                then = at_ns - passed_ns, state.id, state, state.num_output_tokens - num_steps
                insort(together, then)
            else:
                others.append(state)
        self.apart = others
        return [*others]

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
            if view.waiting.size:
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
    num_decodes = view.num_decodes
    could_prefill = len(view.prefilling) > 0 or (view.waiting.size > 0 and builder.seats_left > 0)
    if could_prefill and (
        _serve_late(view, builder, deadlines, tbt_ns)
        or _grant_everyone(view, builder, deadlines, tbt_ns)
    ):
        return builder.build()
    if not num_decodes:
        tbt_ns = 0
    elif not could_prefill:
        # The budget is the least time between tokens at least, whatever the slack.
        steps, everyone = STEPS_AHEAD, StepLoad(view).with_all_decodes()
        if not deadlines.ceiling.is_above(everyone, tbt_ns, steps):
            steps = everyone.steps_within(tbt_ns)
        if steps and grant_all_decodes(view.running, builder, view):
            return builder.build(max_steps=steps)
    now_ns, decodes = view.now_ns, view.decoding
    urgent, budget_ns, first_ns = decodes, FOREVER, FOREVER
    dates_ns: list[int] = []
    others: list[RequestState] = []
    if decodes:
        dates_ns, first_ns = deadlines.of_decodes(view, decodes)
        budget_ns = max(first_ns - now_ns, tbt_ns)
        urgent_ns = now_ns + budget_ns + tbt_ns
        if could_prefill and max(dates_ns) >= urgent_ns:
            is_urgent = [at_ns < urgent_ns for at_ns in dates_ns]
            urgent = [*compress(decodes, is_urgent)]
            others = [*compress(decodes, map(not_, is_urgent))]
            dates_ns = [*compress(dates_ns, is_urgent)]
    load = StepLoad(view)
    served, load = _decode(urgent, load, budget_ns, builder, view, (), deadlines)
    prompts, is_full = _compute_prompts(load, budget_ns, builder, view, deadlines, len(others) > 0)
    num_served = len(served)
    if others and not is_full:
        both = (*served, *prompts)
        more, load = _decode(others, load, budget_ns, builder, view, both, deadlines)
        num_served += len(more)
    if load.is_empty and view.running and not builder.preempted:
        # Prompts under way block each other for memory. Who is due last gives way: were it who
        # arrived last, and is due first, it would come back for the same memory again and again.
        builder.preempt(max(builder.running(), key=lambda s: _place(s, deadlines.targets)))
    deadlines.together = []
    all_served = len(served) == len(urgent) and not builder.preempted
    if first_ns <= now_ns and all_served and view.is_in_step:
        deadlines.follow(urgent, dates_ns, others)
        deadlines.computes(prompts)
    if could_prefill or num_served < len(decodes):
        return builder.build()
    return builder.build(max_steps=max(load.steps_within(tbt_ns), 1))


def _serve_late(view: EngineView, builder: PlanBuilder, deadlines: Deadlines, tbt_ns: int) -> bool:
    """Serve urgent decodes, prompts, others, if it is known who is urgent, and that one is late.

    Then a step has the least time. It is not tried where not all who are urgent fit.
    """
    others = deadlines.find_others(view, tbt_ns)
    if others is None:
        return False
    load, left_out = StepLoad(view).with_all_decodes(others), set(others)
    if not (deadlines.ceiling.is_above(load, tbt_ns) or load.is_within(tbt_ns)):
        return False
    if others:
        granted = builder.grant_again(others, [s for s in view.paused if s not in left_out])
    else:
        has_room = view.num_decodes <= min(builder.tokens_left, builder.rows_left)
        granted = has_room and builder.grant_decodes()
    if not granted:
        return False
    prompts, is_full = _compute_prompts(load, tbt_ns, builder, view, deadlines, len(others) > 0)
    deadlines.computes(prompts)
    if others and not is_full:
        served = [state for state in view.decoding if state not in left_out]
        _decode(others, load, tbt_ns, builder, view, (*served, *prompts), deadlines)
        if builder.preempted:
            deadlines.together = []
    return True


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
    load = StepLoad(view).with_all_decodes()
    if not (deadlines.ceiling.is_above(load, budget_ns) or load.is_within(budget_ns)):
        return False
    if not _all_within(load, [*view.prefilling, *view.waiting], budget_ns, deadlines):
        return False
    builder.grant_decodes()
    prompts: Iterable[RequestState] = view.waiting
    if view.prefilling:
        prompts = _by_slack(list(view.prefilling), prompts, deadlines.targets, builder)
    for state in builder.undeferred(prompts):
        if not builder.grant(state):
            break
        deadlines.computes((state,))
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
    if len(under_way) == 1 and not view.waiting.size:
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
            prompts_left = view.waiting.size + len(under_way) > len(served)
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
    fits = load.is_empty and deadlines.ceiling.is_above(both, budget_ns)
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
