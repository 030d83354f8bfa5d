"""The loop behind `SLAI`: functions of their own, which the compiled core has."""

from __future__ import annotations

from collections.abc import Collection

from schedlab.policies.deadlines import due_by
from schedlab.policies.preemption import Place, grant_or_preempt
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

Dates = dict[RequestState, int]


class LastMoments:
    """The last times at which the next tokens of requests may be scheduled.

    Attributes
    ----------
    dates_ns : dict of RequestState to int
        These times, of those who got a token since everybody who runs did.
    others_ns : int
        That of all others.
    none_before_ns : int
        Nobody who decodes is due before, so that before nobody is looked at. It may be too early.
    """

    __slots__ = ("_after_plan", "dates_ns", "none_before_ns", "others_ns")

    def __init__(self) -> None:
        self.dates_ns: Dates = {}
        self.others_ns = 0
        self.none_before_ns = 0
        self._after_plan: tuple[BatchPlan | None, int] = None, 0

    def is_due(self, state: RequestState) -> None:
        """Say that a request may not wait at all."""
        self.dates_ns[state] = self.none_before_ns = 0

    def due_by(self, decodes: Collection[RequestState], now_ns: int) -> list[RequestState]:
        """Return who of all decodes is due by a time."""
        due, later_ns = due_by(decodes, self.dates_ns, self.others_ns, now_ns)
        self.none_before_ns = 0 if due else later_ns
        self._after_plan = None, later_ns
        return due

    def serves_due(self, plan: BatchPlan) -> None:
        """Say that a plan gives all who were found due a token: after it they are not."""
        self._after_plan = plan, self._after_plan[1]

    def in_order(self, states: Collection[RequestState]) -> list[RequestState]:
        """Return requests in the order of these times."""
        dates_ns, others_ns = self.dates_ns, self.others_ns
        dated = [(dates_ns.get(s, others_ns), s.request.arrival_ns, s.id, s) for s in states]
        dated.sort()
        return [entry[3] for entry in dated]

    def note_tokens(
        self,
        plan: BatchPlan,
        decoded: Collection[RequestState] | None,
        view: EngineView,
        now_ns: int,
        target_ns: int,
        own_targets_ns: dict[RequestState, int],
    ) -> None:
        """Set the times of all who got a token to one from now, their own if they have one.

        Parameters
        ----------
        plan : BatchPlan
            What was executed.
        decoded : collection of RequestState, or None
            See `decoded_by`.
        view : EngineView
            The engine after it.
        now_ns, target_ns : int
            A time, and a time from then.
        own_targets_ns : dict of RequestState to int
            The times of those who have their own.
        """
        dates_ns, date_ns = self.dates_ns, now_ns + target_ns
        if decoded is None:
            if not own_targets_ns and self.none_before_ns > 0 and not _may_return(view):
                # Nobody else needs a time: nobody came who is due, prompts get theirs when
                # complete.
                self.others_ns = self.none_before_ns = date_ns
                if dates_ns:
                    dates_ns.clear()
                return
            decoded = view.running
        dates_ns.update(dict.fromkeys(decoded, date_ns))
        if own_targets_ns:
            for state in decoded:
                dates_ns[state] = own_ns = now_ns + own_targets_ns.get(state, target_ns)
                date_ns = min(date_ns, own_ns)
        served, later_ns = self._after_plan
        before_ns = later_ns if served is plan else self.none_before_ns
        self.none_before_ns = min(before_ns, date_ns) if decoded else before_ns


def decoded_by(plan: BatchPlan) -> Collection[RequestState] | None:
    """Return who decodes after a step and has a token of it, or None if all who decode have."""
    decodes = plan.decodes
    if decodes is None or not plan.chunks:
        return decodes
    return (*decodes, *[state for state, _ in plan.chunks if state.is_decoding])


def _may_return(view: EngineView) -> bool:
    """Whether decodes may come back that did not run meanwhile, with the times that they had."""
    return view.has_swapped or len(view.config.kv_tiers) > 0


def plan_at_last_moment(
    view: EngineView,
    builder: PlanBuilder,
    moments: LastMoments,
    place: Place,
    token_budget: int,
    max_decodes: int,
) -> BatchPlan:
    """Plan critical decodes, prompts under way, new prompts, other decodes.

    Parameters
    ----------
    view, builder : EngineView, PlanBuilder
        As `Policy.plan` gets them.
    moments : LastMoments
        Of the decodes.
    place : callable
        Where a request stands in the order of new prompts, which is that of the queue.
    token_budget, max_decodes : int
        Tokens and decodes of a step.
    """
    prefilling, waiting, num_decodes = view.prefilling, view.waiting, view.num_decodes
    num_waiting = waiting.size
    by_name = view.config.num_speculative_tokens > 0  # of all drafts not all may fit
    if not (prefilling or num_waiting or view.num_paused) and num_decodes <= min(
        max_decodes, token_budget, builder.tokens_left, builder.rows_left
    ):
        fits = builder.grant_all(view.running) if by_name else builder.grant_decodes()
        if fits:
            return builder.build(max_steps=FOREVER)  # it matters to nobody who is due
    now_ns = view.now_ns
    critical: list[RequestState] = []
    if moments.none_before_ns <= now_ns or _may_return(view):
        critical = moments.due_by(view.decoding, now_ns)
    floor = max(builder.tokens_left - token_budget, 0)
    num_served = num_critical = 0
    if critical:
        num_critical = num_served = _decode(
            critical, max_decodes, view, builder, floor, moments, by_name
        )
    gone = builder.preempted
    is_blocked = not num_decodes
    for state in prefilling:
        if builder.tokens_left <= floor:
            break
        if state not in gone and builder.grant(state, builder.tokens_left - floor):
            is_blocked = False
    if num_waiting and builder.tokens_left > floor:
        # Who was evicted in this step is back in the queue of the original, and does not fit: only
        # those before it in the order may take the memory it left.
        first_gone = min(map(place, gone)) if gone else None
        for state in builder.undeferred(waiting):
            left = builder.tokens_left - floor
            overtakes = first_gone is not None and place(state) > first_gone
            if left < 1 or overtakes or not builder.grant(state, left):
                break
            by_name = by_name or state.next_is_decode  # who comes back granted one already
    room = min(max_decodes - num_served, builder.tokens_left - floor, builder.rows_left)
    if room > 0 and len(critical) < num_decodes:
        everyone = not (critical or by_name) and num_decodes <= room
        if everyone and builder.grant_decodes():
            num_served = num_decodes
        else:
            due = set(critical)
            others = [state for state in view.decoding if state not in due]
            room = max_decodes - num_served
            num_served += _decode(others, room, view, builder, floor, moments, True)
    if is_blocked and prefilling and not gone:
        # Prompts under way block each other for memory; the original reserves them whole.
        builder.preempt(list(prefilling)[-1])
    # Which decodes are due changes with time: it changes nothing only while all of them run
    # and nobody has a prompt to go before them.
    all_run = num_served == num_decodes
    may_prefill = prefilling or (num_waiting and builder.residents_left)
    plan = builder.build(max_steps=FOREVER if all_run and not may_prefill else 1)
    if critical and num_critical == len(critical) and not gone:
        moments.serves_due(plan)
    return plan


def _decode(
    states: list[RequestState],
    room: int,
    view: EngineView,
    builder: PlanBuilder,
    floor: int,
    moments: LastMoments,
    by_name: bool,
) -> int:
    """Grant up to `room` of some decodes, those due first before others, and count them.

    Where these are all that decode, the plan lists them only if it must.
    """
    if len(states) > room:
        states = moments.in_order(states)[:room]
    first = states
    if not view.config.num_speculative_tokens:
        most = min(builder.tokens_left - floor, builder.rows_left)
        if len(states) > most:
            first = moments.in_order(states)[:most]
    elif len(states) > builder.tokens_left - floor:
        first = []
    if first:
        everyone = not by_name and len(first) == view.num_decodes
        if builder.grant_decodes() if everyone else builder.grant_all(first):
            return len(first)
    prompts = [
        state
        for state in view.prefilling
        if state not in builder.preempted and not builder.serves(state)
    ]
    granted = 0
    for state in moments.in_order(states):
        if builder.tokens_left <= floor or builder.rows_left < 1:
            break
        victims = [state, *prompts]
        granted += grant_or_preempt(builder, state, victims)
        prompts = [victim for victim in victims if victim is not state]
    return granted
