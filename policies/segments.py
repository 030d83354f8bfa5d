"""Segments of output length: who is at the entry of each, and who inside, at every plan.

Functions of their own, which the compiled core has: they look at each running request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from schedlab.sim.request import RequestState, Status


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

    def __init__(self) -> None:
        self.entry: list[RequestState] = []
        self.inside: list[RequestState] = []
        self.stages: list[int] = []

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


def sort_by_segment(
    running: Collection[RequestState], prefilling: Collection[RequestState], edges: Sequence[int]
) -> list[Segment]:
    """Sort running requests into the segments that end at some lengths; longer ones to the last."""
    last = len(edges) - 1
    segments = [Segment() for _ in edges]
    prompts = set(prefilling)
    for state in running:
        generated = 0 if prompts and state in prompts else state.num_output_tokens
        number = bisect_right(edges, generated)
        if number > last:
            number = last
        segment = segments[number]
        if number and generated == edges[number - 1]:
            segment.entry.append(state)
        else:
            segment.inside.append(state)
            segment.stages.append(generated)
    return segments


def since_ns(states: Collection[RequestState], ran_ns: dict[int, int]) -> list[int]:
    """Return since when requests wait: since they ran last, or if never, had their seat."""
    return [ran_ns.get(state.id, state.first_scheduled_ns) for state in states]


def note_ran(states: Collection[RequestState], now_ns: int, ran_ns: dict[int, int]) -> None:
    """Remember of requests that still run that they ran until now."""
    for state in states:
        if state.status is Status.RUNNING:  # whose answer ended has been forgotten already
            ran_ns[state.id] = now_ns


def in_order_of_admission(
    running: Collection[RequestState], chosen: Collection[RequestState]
) -> list[RequestState]:
    """Return the chosen ones of the running requests, as these are ordered."""
    turn = set(chosen)
    return [state for state in running if state in turn]
