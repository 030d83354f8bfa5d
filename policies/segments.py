"""Segments of output length: who is at the entry of each, who inside, and who of them may run.

Functions of their own, which the compiled core has: they look at each running request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from schedlab.policies.preemption import grant_or_preempt
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


class Segment:
    """The running requests of one segment, in the order of their admission.

    Attributes
    ----------
    entry : list of RequestState
        Those whose answer is as long as the segment begins with.
    inside : list of RequestState
        All others of it.
    stages : list of int
        How long the answers of those inside are so far.
    """

    __slots__ = ("entry", "inside", "stages")

    def __init__(
        self, entry: list[RequestState], inside: list[RequestState], stages: list[int]
    ) -> None:
        self.entry = entry
        self.inside = inside
        self.stages = stages

    def at_most(self, group: int) -> list[RequestState]:
        """Return up to `group` inside at each stage; prompts are at stage 0 in any number."""
        stages = self.stages
        if len(stages) <= group or len(set(stages)) == len(stages):
            return self.inside
        return [self.inside[i] for i in first_at_stages(stages, group)]


def first_at_stages(stages: Sequence[int], group: int) -> list[int]:
    """Return the indices of the first `group` of each stage, and of all of stage 0."""
    chosen: list[int] = []
    at_stage: dict[int, int] = {}
    for i, stage in enumerate(stages):
        num = at_stage.get(stage, 0)
        if num < group or not stage:
            at_stage[stage] = num + 1
            chosen.append(i)
    return chosen


class Choice:
    """Who of the segments may run.

    Attributes
    ----------
    states : list of RequestState
        They, segment by segment.
    num_new : int
        How many of those who wait may come as well.
    steps : int
        For how many steps the same may run, if all of them do and nothing happens.
    until_ns : int
        When the time is over that the first of a segment waits for others, which stays; or FOREVER.
    takes : bool
        Whether some of them come from an entry.
    timed_out : int
        The last segment that runs because this time was over before; -1 if none does.
    """

    __slots__ = ("num_new", "states", "steps", "takes", "timed_out", "until_ns")

    def __init__(self) -> None:
        self.states: list[RequestState] = []
        self.num_new = 0
        self.steps = FOREVER
        self.until_ns = FOREVER
        self.takes = False
        self.timed_out = -1


def sort_by_segment(view: EngineView, edges: Sequence[int], slots: list[int]) -> list[Segment]:
    """Sort running requests into the segments that end at some lengths; longer ones to the last.

    Parameters
    ----------
    view : EngineView
        The engine.
    edges : sequence of int
        Where segments end.
    slots : list of int
        Of each length the number of its segment, or ``-1 -`` that if it begins there; as far as
        anybody was as long.
    """
    running = view.running
    lengths = view.output_tokens(running)
    if any([state.num_output_tokens for state in view.prefilling]):  # computed again: from stage 0
        prompts = set(view.prefilling)
        lengths = [0 if state in prompts else n for state, n in zip(running, lengths, strict=True)]
    for length in range(len(slots), max(lengths, default=0) + 1):
        number = min(bisect_right(edges, length), len(edges) - 1)
        begins = number > 0 and length == edges[number - 1]
        slots.append(-1 - number if begins else number)
    # Those inside from the front of these lists, those at an entry from the back.
    states: list[list[RequestState]] = [[] for _ in range(2 * len(edges))]
    stages: list[list[int]] = [[] for _ in states]
    for state, length in zip(running, lengths, strict=True):
        slot = slots[length]
        states[slot].append(state)
        stages[slot].append(length)
    return [Segment(states[-1 - i], states[i], stages[i]) for i in range(len(edges))]


def choose(
    segments: Sequence[Segment],
    edges: Sequence[int],
    limits: Sequence[tuple[int, int]],
    view: EngineView,
    ran_ns: dict[RequestState, int],
    timeout_ns: int,
    drain: bool,
) -> Choice:
    """Choose the segments from the first up to the one whose entry still gathers.

    Parameters
    ----------
    segments : sequence of Segment
        Who runs.
    edges : sequence of int
        Where segments end.
    limits : sequence of (int, int)
        How many each may hold, and how many at one stage.
    view : EngineView
        The engine.
    ran_ns : dict of RequestState to int
        When requests ran last.
    timeout_ns : int
        How long the first at an entry waits for others.
    drain : bool
        Whether nobody waits for others where nobody can come.
    """
    waiting, now_ns = view.waiting, view.now_ns
    choice = Choice()
    can_come = len(waiting) > 0
    for i, (limit, group) in enumerate(limits):
        segment = segments[i]
        num_inside = len(segment.inside)
        gathered = len(segment.entry) if i else len(waiting)
        places = max(min(group, limit - num_inside), 0)
        if gathered < places and (can_come or not drain):
            stalled_ns = least_since_ns(segments, i, ran_ns)
            if i == 0 and gathered:
                stalled_ns = min(stalled_ns, waiting.head.request.arrival_ns)
            if stalled_ns + timeout_ns > now_ns:
                choice.until_ns = stalled_ns + timeout_ns
                break
            choice.timed_out = i
        if i == 0:
            choice.num_new = places
            can_come = False
        within, taken = segment.at_most(group), segment.entry[:places]
        choice.states += within
        choice.states += taken
        if taken:
            choice.takes = True
            # Nobody is taken after them if they fill the segment, or were the last to come.
            is_full = limit - num_inside <= len(taken)
            if not is_full and (len(taken) < gathered or can_come or not drain):
                choice.steps = 1
        if len(within) < num_inside:
            choice.steps = 1
        elif choice.steps > 1 and (num_inside or taken) and i + 1 < len(edges):
            # All move on together to the end of the segment.
            longest = max(segment.stages) if num_inside else edges[i - 1]
            choice.steps = min(choice.steps, max(edges[i] - longest, 1))
        can_come = can_come or num_inside > 0 or len(segment.entry) > 0
    return choice


def least_since_ns(segments: Sequence[Segment], first: int, ran_ns: dict[RequestState, int]) -> int:
    """Return since when the first in a segment, or in one behind it, waits; FOREVER if none is.

    A request waits since it ran last, or if it never did, had its seat.
    """
    least_ns = FOREVER
    for i in range(first, len(segments)):
        segment = segments[i]
        for states in (segment.entry, segment.inside):
            if states:
                since_ns = min([ran_ns.get(s, s.first_scheduled_ns) for s in states])
                least_ns = min(least_ns, since_ns)
    return least_ns


def stays_timed_out(
    segments: Sequence[Segment], first: int, ran_ns: dict[RequestState, int], waited_until_ns: int
) -> bool:
    """Whether a segment that runs on a time-out will also in the steps to come.

    Who runs waits anew; who stays at an entry has waited as long as before. What is so of a segment
    is so of those before it, which wait for the same requests and more.
    """
    for i in range(first, len(segments)):
        for state in segments[i].entry:
            if ran_ns.get(state, state.first_scheduled_ns) <= waited_until_ns:
                return True
    return False


def grant_chosen(
    chosen: Collection[RequestState], num_new: int, view: EngineView, builder: PlanBuilder
) -> bool:
    """Grant all of them what they need if it fits, then new ones; return whether it did.

    In order of admission: were a late one granted first, an early one could make room only by
    giving up itself, and two that start over by turns would never finish.
    """
    turn = set(chosen)
    in_turn = [state for state in view.running if state in turn]
    all_granted = not view.prefilling and builder.grant_all(in_turn)
    if not all_granted and not _grant_with_prompts(in_turn, view, builder):
        victims = list(view.running)
        for state in in_turn:
            if state not in builder.preempted and builder.tokens_left:
                grant_or_preempt(builder, state, victims)
    if builder.preempted:
        return False
    if num_new > 0:
        for state in view.waiting:
            if num_new < 1 or not builder.grant(state):
                break
            num_new -= 1
    return all_granted


def _grant_with_prompts(
    states: Collection[RequestState], view: EngineView, builder: PlanBuilder
) -> bool:
    """Grant running requests, prompts among them, all they need if that surely fits in any order.

    If it may not, nobody is granted anything.
    """
    config, prefilling = view.config, view.prefilling
    if not prefilling or config.num_speculative_tokens or config.kv_allocator != "paged":
        return False
    chosen = set(states)
    prompts = [state for state in prefilling if state in chosen]
    num_decodes = len(states) - len(prompts)
    tokens_left = builder.tokens_left - num_decodes
    blocks_left = view.free_blocks - num_decodes
    for state in prompts:
        tokens_left -= state.num_uncomputed_tokens
        blocks_left -= -(-state.num_tokens // config.block_size)
    if tokens_left < 0 or blocks_left < 0:
        return False
    unfinished = set(prompts)
    if not builder.grant_all([state for state in states if state not in unfinished]):
        return False
    for state in prompts:
        builder.grant(state)
    return True
