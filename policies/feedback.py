"""Where requests stand in multi-level feedback queues, moved on at every plan.

Functions of their own, which the compiled core has: they look at each running request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

from schedlab.policies.shared_steps import SharedSteps
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.request import RequestState

_PROMPT = 2
"""Drops behind all decodes of its step, of which those who owe a token are 0 and the others 1."""


class Standing:
    """Where a request stands: its level, its position there, and what it has had.

    Attributes
    ----------
    level, position : int
        Its place; smaller is sooner.
    left_ns : int
        What is left of its quantum.
    last_ran_ns : int
        When it ran last, or came.
    output_tokens : int
        Tokens of its answer when it ran last.
    owes_token : bool
        Whether its prompt is under way.
    """

    __slots__ = ("last_ran_ns", "left_ns", "level", "output_tokens", "owes_token", "position")

    def __init__(self, level: int, quantum_ns: int, position: int, arrival_ns: int) -> None:
        self.level = level
        self.position = position
        self.left_ns = quantum_ns
        self.last_ran_ns = arrival_ns
        self.output_tokens = 0
        self.owes_token = False


_Due = tuple[int, int, int, int, Standing]


def charge(
    plan: BatchPlan,
    running: Collection[RequestState],
    durations_ns: Sequence[int],
    now_ns: int,
    places: dict[RequestState, Standing],
    drop: Callable[[Standing], None],
    drafts: bool = False,
) -> None:
    """Charge who ran, and let drop whose quantum is used up, at the end of the step that did it.

    Parameters
    ----------
    plan : BatchPlan
        What was executed; where it does not list its decodes, all who run took part.
    running : collection of RequestState
        Who runs after it.
    durations_ns : sequence of int
        How long each of its steps took; several only without chunks.
    now_ns : int
        When the last of these steps ended.
    places : dict of RequestState to Standing
        Of all requests.
    drop : callable
        Moves a request to the front of its next level: of those who drop in one step it is called
        for the worst ranked first, so that they keep their order, prompts behind decodes.
    drafts : bool
        Whether more than one token may come out of a step for a request.
    """
    num_steps = len(durations_ns)
    used_ns = now_ns - plan.start_ns
    decoded: Iterable[RequestState] = running
    if plan.decodes is not None:
        decoded = plan.decodes
    elif plan.chunks:
        prompts = {state for state, _ in plan.chunks}
        decoded = [state for state in running if state not in prompts]
    used_up: list[tuple[tuple[bool, int, int], Standing]] = []
    for state in decoded:
        place = places.get(state)
        if place is None:
            continue
        place.last_ran_ns = now_ns
        place.output_tokens = state.num_output_tokens if drafts else place.output_tokens + num_steps
        place.left_ns = left_ns = place.left_ns - used_ns
        if left_ns <= 0:
            used_up.append(((not place.owes_token, place.level, place.position), place))
        place.owes_token = False
    if num_steps > 1:
        if used_up:
            ends_ns = list(accumulate(durations_ns))
            due: list[_Due] = []
            for (no_prompt, level, position), place in used_up:
                step = bisect_left(ends_ns, ends_ns[-1] + place.left_ns)
                due.append((step, no_prompt or step > 0, level, position, place))
            _drop_step_by_step(due, ends_ns, drop)
        return
    used_up.sort()
    dropping = [place for _, place in used_up]
    for state, _ in plan.chunks:
        place = places.get(state)
        if place is None:
            continue
        place.last_ran_ns = now_ns
        place.left_ns -= used_ns
        place.owes_token = state.num_output_tokens == place.output_tokens
        place.output_tokens = state.num_output_tokens
        if not place.owes_token and place.left_ns <= 0:
            dropping.append(place)
    for place in reversed(dropping):
        drop(place)


def put_off(
    plan: BatchPlan,
    running: Collection[RequestState],
    durations_ns: Sequence[int],
    now_ns: int,
    places: dict[RequestState, Standing],
    shared: SharedSteps,
) -> bool:
    """Note steps that served everybody, who is charged for them when it is time to `settle`.

    As `charge`, which does it where this returns False: somebody was left out, or owes a token
    still whose prompt was computed.
    """
    for state, _ in plan.chunks:
        place = places.get(state)
        if place is not None and state.num_output_tokens == place.output_tokens:
            return False
    return shared.add(plan, running, durations_ns, now_ns)


def settle(
    places: dict[RequestState, Standing],
    shared: SharedSteps,
    drop: Callable[[Standing], None],
) -> None:
    """Charge all who took part in steps that were put off, and let drop who used up quanta."""
    if not shared.first_steps:
        return
    ends_ns, end_ns, prompts = shared.ends_ns, shared.end_ns, shared.prompts
    num_steps, used_ns = len(ends_ns), ends_ns[-1]
    due: list[_Due] = []
    for state, first_step, taken_ns in shared.taken():
        place = places.get(state)
        if place is None:
            continue
        place.last_ran_ns = end_ns
        place.output_tokens += num_steps - first_step
        place.left_ns = left_ns = place.left_ns - taken_ns
        if left_ns <= 0:
            step = bisect_left(ends_ns, used_ns + left_ns)
            if step == first_step and state in prompts:
                due.append((step, _PROMPT, prompts[state], 0, place))
            else:
                no_prompt = step > 0 or not place.owes_token
                due.append((step, no_prompt, place.level, place.position, place))
        place.owes_token = False
    _drop_step_by_step(due, ends_ns, drop)
    shared.clear()


def _drop_step_by_step(
    due: list[_Due], ends_ns: list[int], drop: Callable[[Standing], None]
) -> None:
    """Let those drop whose quanta were used up in the course of several steps.

    Parameters
    ----------
    due : list of (int, int, int, int, Standing)
        In which step it was, their ranks before it, and they, charged for all steps.
    ends_ns : list of int
        When each step ended, from the start of the first one on.
    drop : callable
        As for `charge`.
    """
    used_ns = ends_ns[-1]
    heapify(due)
    while due:
        step = due[0][0]
        dropping: list[Standing] = []
        while due and due[0][0] == step:
            dropping.append(heappop(due)[4])
        for place in reversed(dropping):
            drop(place)
            place.left_ns -= used_ns - ends_ns[step]
            if place.left_ns <= 0:
                again = bisect_left(ends_ns, used_ns + place.left_ns)
                heappush(due, (again, True, place.level, place.position, place))


def least_left_ns(
    running: Collection[RequestState], places: dict[RequestState, Standing]
) -> int | None:
    """Return what is left of the first quantum to be used up; None if somebody owes a token."""
    least_ns = FOREVER
    for state in running:
        place = places[state]
        if place.owes_token:
            return None
        if place.left_ns < least_ns:
            least_ns = place.left_ns
    return least_ns
