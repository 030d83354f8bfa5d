"""Who of the segments of output length may run, and what they are granted.

Functions of their own, which the compiled core has: they look at requests one by one where not all
of a segment run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from schedlab.policies.preemption import grant_or_preempt
from schedlab.policies.segments import Choice, Segment, Segments
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


def choose(
    segments: Segments,
    limits: Sequence[tuple[int, int]],
    view: EngineView,
    builder: PlanBuilder,
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
    view, builder : EngineView, PlanBuilder
        The engine, and its ledger, with nothing granted yet.
    timeout_ns : int
        How long the first at an entry waits for others.
    drain : bool
        Whether nobody waits for others where nobody can come.
    """
    each, edges, now_ns = segments.each, segments.edges, view.now_ns
    first, num_waiting = each[0], view.waiting.size
    taken: dict[int, int] = {}
    held: dict[int, list[RequestState]] = {}
    steps = FOREVER
    hurries = -1  # the last that runs on a time-out, now or after this step
    limit, group = limits[0]
    num_new = limit - first.num_inside
    if num_new > group:
        num_new = group
    if num_waiting < num_new:
        num_new = num_waiting
        if num_waiting or not drain:
            stalled_ns, _ = segments.least_since_ns(0)
            if num_waiting:
                stalled_ns = min(stalled_ns, view.waiting.head.request.arrival_ns)
            if stalled_ns + timeout_ns > now_ns:
                return Choice(0, taken, held, 0, steps, stalled_ns + timeout_ns)
            hurries = 0
    # Somebody can come to the segments behind the first that is not empty.
    busy = -1
    if drain:
        if first.num_inside:
            busy = 0
        elif num_waiting and _may_come(view.waiting.head, builder):
            busy, steps = 0, 1  # the others may take that room from it
        else:
            busy = _first_busy(each)
    until_ns, i, late = FOREVER, 0, 0  # somebody has waited for too long in segment `late`
    for segment, (limit, group) in zip(each, limits, strict=True):
        if segment.num_inside < limit and i:
            room = limit - segment.num_inside
            places = room if room < group else group
            gathered = len(segment.entry)
            if gathered < places and i > busy:
                if i > late:
                    stalled_ns, late = segments.least_since_ns(i)
                    if stalled_ns + timeout_ns > now_ns:
                        until_ns = stalled_ns + timeout_ns
                        break
                hurries = i
            if gathered:
                taken[i] = num_taken = places if places < gathered else gathered
                # Nobody is taken after them if they fill the segment, or were the last to come.
                if num_taken < room:
                    if num_taken < gathered:
                        steps = 1
                    elif i > busy:
                        hurries = i
                if not segment.num_inside and i + 1 < len(edges):
                    steps = min(steps, edges[i] - edges[i - 1])
        if segment.most_at_stage > group:
            beyond = segment.beyond(group)
            if beyond:
                held[i] = beyond
                steps = 1
        # All move on together to the end of the segment.
        steps_left = segment.passes_at - segment.num_steps
        if steps_left < steps:
            steps = steps_left
        i += 1
    chosen = Choice(i, taken, held, num_new, steps, until_ns)
    if hurries >= 0 and steps > 1:
        waited_until_ns = now_ns - timeout_ns
        if not segments.stays_timed_out(hurries, chosen, waited_until_ns):
            chosen.steps = 1
    return chosen


def _may_come(state: RequestState, builder: PlanBuilder) -> bool:
    """Whether a waiting request has a seat and memory beside all who pause.

    One that must wait for these to go on reaches nobody. Where memory is reserved in contiguous
    ranges none is said to have room.
    """
    return builder.seats_left > 0 and builder.fits_without((), state)


def _first_busy(each: Sequence[Segment]) -> int:
    """Return the number of the first segment with a request, at its entry or inside."""
    for i, segment in enumerate(each):
        if segment.num_inside or segment.entry:
            return i
    return len(each)


def grant_chosen(
    segments: Segments,
    chosen: Choice,
    view: EngineView,
    builder: PlanBuilder,
) -> bool:
    """Grant all who were chosen what they need if it fits, then new ones; return whether it did.

    In order of admission: were a late one granted first, an early one could make room only by
    giving up itself, and two that start over by turns would never finish.
    """
    prompts: Collection[RequestState] = view.prefilling if chosen.num_run else ()
    fits = True
    if prompts:
        fits = _fit(prompts, _num_inside(segments, chosen) - len(prompts), view, builder)
    if fits and segments.is_kept and _grant_changes(segments, chosen, builder):
        all_granted = True
    else:
        all_granted = _grant_by_name(segments, chosen, prompts if fits else None, view, builder)
    if prompts and all_granted:
        for state in prompts:
            if not builder.grant(state):
                break
    if builder.preempted:
        return False
    left = chosen.num_new
    if left > 0:
        for state in builder.undeferred(view.waiting):
            if not builder.grant(state):
                break
            left -= 1
            if not left:
                break
    return all_granted


def _grant_by_name(
    segments: Segments,
    chosen: Choice,
    prompts: Collection[RequestState] | None,
    view: EngineView,
    builder: PlanBuilder,
) -> bool:
    """Grant those chosen what they need but some prompts, at once if that fits; whether it did.

    Otherwise one by one, prompts as well; so it is without a look where `prompts` is None.
    """
    turn = set(_listed(segments, chosen))
    in_turn = [state for state in view.running if state in turn]
    if prompts is not None:
        unfinished = set(prompts)
        if builder.grant_all([state for state in in_turn if state not in unfinished]):
            return True
    victims = list(view.running)
    for state in in_turn:
        if state not in builder.preempted and builder.tokens_left:
            grant_or_preempt(builder, state, victims)
    return False


def _grant_changes(segments: Segments, chosen: Choice, builder: PlanBuilder) -> bool:
    """Grant the decodes chosen, by who of them did not decode last, and who did and is not.

    Of those who stay at an entry only who came there by the last plan can have decoded in it.
    """
    but: list[RequestState] = []
    also: list[RequestState] = []
    each, taken = segments.each, chosen.taken
    num_run, num_ran = chosen.num_run, segments.num_run
    for i, num_taken in taken.items():
        also += each[i].entry[:num_taken]
    for i in segments.come:
        but += each[i].entry[taken[i] :] if i in taken else each[i].entry
    if num_run != num_ran:
        for segment in each[num_ran:num_run]:
            also += segment.inside()
        for segment in each[num_run:num_ran]:
            but += segment.inside()
    if segments.holding or chosen.held:
        for i in segments.holding:
            if i < num_run and i < num_ran:
                also += each[i].held
        for states in chosen.held.values():
            but += states
            also = [state for state in also if state not in states]
    return builder.grant_again(but, also)


def _listed(segments: Segments, chosen: Choice) -> list[RequestState]:
    """List those who were chosen, segment by segment."""
    states: list[RequestState] = []
    for i, segment in enumerate(segments.each[: chosen.num_run]):
        held = chosen.held.get(i, ())
        states += [state for state in segment.inside() if state not in held]
        states += segment.entry[: chosen.taken.get(i, 0)]
    return states


def _num_inside(segments: Segments, chosen: Choice) -> int:
    """Count those who were chosen, prompts among them."""
    inside = sum([segment.num_inside for segment in segments.each[: chosen.num_run]])
    return inside + sum(chosen.taken.values()) - sum(map(len, chosen.held.values()))


def _fit(
    prompts: Collection[RequestState], num_decodes: int, view: EngineView, builder: PlanBuilder
) -> bool:
    """Whether decodes fit surely, in any order, beside all that is left of running prompts.

    Or beside what the token budget leaves of them, if the prompts come last anyway.
    """
    config = view.config
    if config.num_speculative_tokens or config.kv_allocator != "paged":
        return False
    tokens_left = builder.tokens_left - num_decodes
    blocks_left = view.free_blocks - num_decodes
    for state in prompts:
        tokens_left -= state.num_uncomputed_tokens
        blocks_left -= -(-state.num_tokens // config.block_size)
    if blocks_left < 0:
        return False
    if tokens_left >= 0:
        return True
    last = list(view.running)[-len(prompts) :]
    return all([state is prompt for state, prompt in zip(last, prompts, strict=True)])
