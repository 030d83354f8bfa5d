"""Who of the segments of output length may run, and what they are granted.

Functions of their own, which the compiled core has: they look at requests one by one where not all
of a segment run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from schedlab.policies.preemption import grant_or_preempt
from schedlab.policies.segments import Segments
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


class Choice:
    """Who of the segments may run.

    Attributes
    ----------
    taken : list of int
        Of each segment that runs how many from its entry, the first of them.
    is_whole : bool
        Whether all inside of these run as well: nowhere there are more at a stage than may.
    num_new : int
        How many of those who wait may come as well.
    steps : int
        For how many steps the same may run, if all of them do and nothing happens.
    until_ns : int
        When the time is over that the first of a segment waits for others, which stays; or FOREVER.
    """

    __slots__ = ("is_whole", "num_new", "steps", "taken", "until_ns")

    def __init__(
        self, taken: list[int], is_whole: bool, num_new: int, steps: int, until_ns: int
    ) -> None:
        self.taken = taken
        self.is_whole = is_whole
        self.num_new = num_new
        self.steps = steps
        self.until_ns = until_ns


def choose(
    segments: Segments,
    limits: Sequence[tuple[int, int]],
    view: EngineView,
    timeout_ns: int,
    drain: bool,
) -> Choice:
    """Choose the segments from the first up to the one whose entry still gathers.

    Parameters
    ----------
    segments : Segments
        Who runs.
    limits : sequence of (int, int)
        How many each may hold, and how many at one stage.
    view : EngineView
        The engine.
    timeout_ns : int
        How long the first at an entry waits for others.
    drain : bool
        Whether nobody waits for others where nobody can come.
    """
    now_ns, edges = view.now_ns, segments.edges
    num_waiting, last = len(view.waiting), len(edges) - 1
    taken: list[int] = []
    is_whole, num_new = True, 0
    steps = until_ns = FOREVER
    hurries = -1  # the last that runs on a time-out, now or after this step
    can_come = num_waiting > 0
    for i, segment in enumerate(segments.each):
        limit, group = limits[i]
        num_inside, num_at_entry = segment.num_inside, len(segment.entry)
        gathered = num_at_entry if i else num_waiting
        places = room = limit - num_inside
        if places > group:
            places = group
        if gathered < places and (can_come or not drain):
            stalled_ns = segments.least_since_ns(i)
            if i == 0 and gathered:
                stalled_ns = min(stalled_ns, view.waiting.head.request.arrival_ns)
            if stalled_ns + timeout_ns > now_ns:
                until_ns = stalled_ns + timeout_ns
                break
            hurries = i
        if i == 0:
            num_new = places
            can_come = False
        num_taken = 0
        if num_at_entry and places > 0:
            num_taken = places if places < num_at_entry else num_at_entry
            # Nobody is taken after them if they fill the segment, or were the last to come.
            if num_taken < room:
                if num_taken < gathered:
                    steps = 1
                elif can_come or not drain:
                    hurries = i
        taken.append(num_taken)
        if segment.most_at_stage > group and segment.exceeds(group):
            is_whole = False
            steps = 1
        elif steps > 1 and i < last:
            # All move on together to the end of the segment.
            left = steps
            if num_inside:
                left = segment.passes_at - segment.num_steps
            elif num_taken:
                left = edges[i] - edges[i - 1]
            if left < steps:
                steps = left if left > 1 else 1
        if num_inside or num_at_entry:
            can_come = True
    waited_until_ns = now_ns - timeout_ns
    if hurries >= 0 and steps > 1 and not segments.stays_timed_out(hurries, taken, waited_until_ns):
        steps = 1
    return Choice(taken, is_whole, num_new, steps, until_ns)


def grant_chosen(
    segments: Segments,
    choice: Choice,
    limits: Sequence[tuple[int, int]],
    view: EngineView,
    builder: PlanBuilder,
) -> bool:
    """Grant all who were chosen what they need if it fits, then new ones; return whether it did.

    In order of admission: were a late one granted first, an early one could make room only by
    giving up itself, and two that start over by turns would never finish.
    """
    prompts: Collection[RequestState] = view.prefilling if choice.taken else ()
    fits = not prompts or _fit(prompts, _num_chosen(segments, choice, limits), view, builder)
    all_granted = False
    if fits and segments.is_kept and choice.is_whole:
        all_granted = _grant_changes(segments, choice, builder)
    if not all_granted:
        turn = set(_chosen(segments, choice, limits))
        in_turn = [state for state in view.running if state in turn]
        if fits:
            unfinished = set(prompts)
            all_granted = builder.grant_all([s for s in in_turn if s not in unfinished])
        if not all_granted:
            victims = list(view.running)
            for state in in_turn:
                if state not in builder.preempted and builder.tokens_left:
                    grant_or_preempt(builder, state, victims)
    if all_granted:
        for state in prompts:
            builder.grant(state)
    if builder.preempted:
        return False
    left = choice.num_new
    if left > 0:
        for state in view.waiting:
            if not builder.grant(state):
                break
            left -= 1
            if not left:
                break
    return all_granted


def _grant_changes(segments: Segments, choice: Choice, builder: PlanBuilder) -> bool:
    """Grant the decodes chosen, by who of them did not decode last, and who did and is not.

    Of those who stay at an entry only who came there by the last plan can have decoded in it.
    """
    but: list[RequestState] = []
    also: list[RequestState] = []
    each, taken = segments.each, choice.taken
    for i, num_taken in enumerate(taken):
        if num_taken:
            also += each[i].entry[:num_taken]
    num_run, num_ran = len(taken), segments.num_run
    for i in segments.come:
        but += each[i].entry[taken[i] :] if i < num_run else each[i].entry
    for segment in each[num_ran:num_run]:
        also += segment.inside()
    for segment in each[num_run:num_ran]:
        but += segment.inside()
    return builder.grant_again(but, also)


def _num_chosen(segments: Segments, choice: Choice, limits: Sequence[tuple[int, int]]) -> int:
    """Count those who were chosen."""
    if not choice.is_whole:
        return len(_chosen(segments, choice, limits))
    num_inside = [segment.num_inside for segment in segments.each[: len(choice.taken)]]
    return sum(num_inside) + sum(choice.taken)


def _chosen(
    segments: Segments, choice: Choice, limits: Sequence[tuple[int, int]]
) -> list[RequestState]:
    """List those who were chosen, segment by segment."""
    states: list[RequestState] = []
    for i, num_taken in enumerate(choice.taken):
        segment = segments.each[i]
        states += segment.at_most(limits[i][1])
        states += segment.entry[:num_taken]
    return states


def _fit(
    prompts: Collection[RequestState], num_chosen: int, view: EngineView, builder: PlanBuilder
) -> bool:
    """Whether what is left of running prompts surely fits, in any order, beside other chosen."""
    config = view.config
    if config.num_speculative_tokens or config.kv_allocator != "paged":
        return False
    num_decodes = num_chosen - len(prompts)
    tokens_left = builder.tokens_left - num_decodes
    blocks_left = view.free_blocks - num_decodes
    for state in prompts:
        tokens_left -= state.num_uncomputed_tokens
        blocks_left -= -(-state.num_tokens // config.block_size)
    return tokens_left >= 0 and blocks_left >= 0
