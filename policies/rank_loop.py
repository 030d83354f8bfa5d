"""The loop behind `Ranked`: a function of its own, which the compiled core has."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Final

from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.request import RequestState

Key = Callable[[RequestState, int], Any]
Entry = tuple[tuple[Any, int, int], RequestState]
"""The rank of a request, and the request."""

_rank: Final[Callable[[Entry], Any]] = itemgetter(0)
"""Tells entries apart: ranks are found sooner to be different than pairs of which they are one."""


def grant_by_rank(
    running: Iterable[RequestState],
    candidates: Iterable[RequestState],
    builder: PlanBuilder,
    key: Key,
    now_ns: int,
) -> None:
    """Grant tokens to running requests and to candidates of the queue, all by rank.

    Parameters
    ----------
    running, candidates : iterable of RequestState
        The running requests, in any order, and those waiting who may be admitted, by rank.
    builder : PlanBuilder
        The ledger.
    key, now_ns : callable, int
        `Policy.key`, and the time to ask it with.
    """
    ranked = [((key(s, now_ns), s.request.arrival_ns, s.id), s) for s in running]  # as `_entry`
    ranked.sort(key=_rank)
    residents = deque(ranked)
    waiting = iter(builder.undeferred(candidates))
    head = _next_entry(waiting, key, now_ns)
    while builder.rows_left and builder.tokens_left and (residents or head is not None):
        if head is not None and (not residents or head[0] < residents[0][0]):
            fits = _admit(head[1], residents, builder)
            head = _next_entry(waiting, key, now_ns) if fits else None
        elif not _grant_decodes(residents, head, builder):
            _, state = residents.popleft()
            while not builder.grant(state) and residents:
                builder.preempt(residents.pop()[1])


def _entry(state: RequestState, key: Key, now_ns: int) -> Entry:
    return (key(state, now_ns), state.request.arrival_ns, state.id), state


def _next_entry(waiting: Iterator[RequestState], key: Key, now_ns: int) -> Entry | None:
    state = next(waiting, None)
    return None if state is None else _entry(state, key, now_ns)


def _grant_decodes(residents: deque[Entry], head: Entry | None, builder: PlanBuilder) -> bool:
    """Grant the decodes in front of all others, the queue included, if they all fit."""
    num_ahead = len(residents) if head is None else bisect_left(residents, head[0], key=_rank)
    decodes: list[RequestState] = []
    for _, state in islice(residents, num_ahead):
        if not state.is_decoding:
            break
        decodes.append(state)
    if len(decodes) < 2 or not builder.grant_all(decodes):
        return False
    for _ in decodes:
        residents.popleft()
    return True


def _admit(state: RequestState, worse: deque[Entry], builder: PlanBuilder) -> bool:
    if builder.grant(state):
        return True
    if builder.defers(state) or not builder.fits_without([victim for _, victim in worse], state):
        return False
    while worse:
        builder.preempt(worse.pop()[1])
        if builder.grant(state):
            return True
    return False
