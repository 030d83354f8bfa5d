"""Where requests stand in multi-level feedback queues, moved on at every plan.

Functions of their own, which the compiled core has: they look at each running request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.request import RequestState


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


def charge(
    plan: BatchPlan,
    running: Collection[RequestState],
    num_steps: int,
    now_ns: int,
    places: dict[RequestState, Standing],
) -> list[Standing]:
    """Charge who ran; return whose quantum is used up, decodes by their rank, then prompts.

    Parameters
    ----------
    plan : BatchPlan
        What was executed; where it does not list its decodes, all who run took part.
    running : collection of RequestState
        Who runs after it.
    num_steps : int
        How often it was executed.
    now_ns : int
        When the last of these steps ended.
    places : dict of RequestState to Standing
        Of all requests.
    """
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
        place.output_tokens += num_steps
        place.left_ns = left_ns = place.left_ns - used_ns
        if left_ns <= 0:
            used_up.append(((not place.owes_token, place.level, place.position), place))
        place.owes_token = False
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
    return dropping


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
