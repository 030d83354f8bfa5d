"""Which of several engines each request of a recording was on, told by the times of its tokens.

An engine stamps all tokens of a step with one time, so tokens with equal times are of one engine.
In lockstep the engines end a step within moments of each other, so tokens with nearly equal times
are of one joint step and of different engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from schedlab.experiments.comparing.vllm_recording import Timeline
from schedlab.policies.routers.vllm import Vllm
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.request import Request

JOINT_S = 0.002
"""Ends of one joint step are closer together than this."""


class RecordedRouter:
    """Sends each request to the engine that it was on, as far as a recording tells.

    Parameters
    ----------
    recording : Timeline
        Of engines in lockstep; requests by row. The id of a request is its row.
    num_engines : int
        Engines there were.

    Attributes
    ----------
    num_asked : int
        Requests, so far, that were placed by vLLM's router for want of a recorded reason.

    Notes
    -----
    A request goes where one is that has a token time in common with it, and not where one is that
    has a token time very near one of its own. As soon as one engine is left, it is placed, and
    so are those that follow from that. Engines have no names in a recording: whom nothing follows
    for is placed by vLLM's router, by the load of the replay.
    """

    looks_at_engines = True
    looks_at_caches = False

    def __init__(self, recording: Timeline, num_engines: int) -> None:
        self.num_asked = 0
        self._num_engines = num_engines
        self._shared, self._apart = _related(recording)
        self._others: dict[int, set[int]] = {one: set() for one in self._shared}
        for a, b in self._apart:
            self._others[self._shared[a]].add(self._shared[b])
            self._others[self._shared[b]].add(self._shared[a])
        self._engine: dict[int, int] = {}
        self._vllm = Vllm()

    def engine_is_gone(self, index: int) -> None:
        """Do nothing: no engine of a recording dies."""

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Return the index of the engine for a request; see the notes of the class."""
        likely = self._vllm.route(request, engines)
        one = self._shared[request.id]
        if one not in self._engine:
            self.num_asked += 1
            left = self._left(one)
            self._place(one, likely if likely in left or not left else left[0])
        self._vllm.turn = (self._engine[one] + 1) % self._num_engines
        return self._engine[one]

    @property
    def num_doubtful(self) -> int:
        """Pairs of requests placed together, though nearly equal times say they were apart."""
        engine = [self._engine.get(one) for one in self._shared]
        return sum(engine[a] is not None and engine[a] == engine[b] for a, b in self._apart)

    def _left(self, one: int) -> list[int]:
        """Return the engines that a request can have been on, given those that are placed."""
        taken = {self._engine.get(other) for other in self._others[one]}
        return [i for i in range(self._num_engines) if i not in taken]

    def _place(self, one: int, engine: int) -> None:
        self._engine[one] = engine
        front = [one]
        while front:
            for other in sorted(self._others[front.pop()]):
                left = self._left(other)
                if other not in self._engine and len(left) == 1:
                    self._engine[other] = left[0]
                    front.append(other)


def _related(recording: Timeline) -> tuple[list[int], list[tuple[int, int]]]:
    """Return for each request who stands for all on its engine, and pairs on different engines."""
    num_requests = len(recording.queued_s)
    times = np.concatenate([recording.first_token_s, recording.last_token_s])
    order = np.argsort(times, kind="stable").tolist()
    stands_for = list(range(num_requests))

    def root(i: int) -> int:
        while stands_for[i] != i:
            stands_for[i] = stands_for[stands_for[i]]
            i = stands_for[i]
        return i

    for before, after in pairwise(order):
        if times[after] == times[before]:
            stands_for[root(after % num_requests)] = root(before % num_requests)
    apart: list[tuple[int, int]] = []
    step: list[int] = []
    for row in order:
        step = [other for other in step if times[row] - times[other] < JOINT_S]
        near = [other for other in step if times[other] != times[row]]
        apart += [(other % num_requests, row % num_requests) for other in near]
        step.append(row)
    return [root(i) for i in range(num_requests)], apart
