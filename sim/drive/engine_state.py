"""What a router knows of an engine: as it is now, or as it was last told."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from schedlab.sim.request import Request, RequestState

if TYPE_CHECKING:
    from collections.abc import Callable

    from schedlab.sim.core.engine import Engine
    from schedlab.sim.core.step import Segment
    from schedlab.sim.cost.shape import BatchShape


class LiveState:
    """An engine as it is now.

    All is told as of the step under way, whether or not it was planned with others at once.

    Parameters
    ----------
    index : int
        Which engine.
    engine : Engine
        It.
    under_way : callable
        Returns the segment that runs now, None if there is none, and the time (ns).

    Attributes
    ----------
    index : int
        Which engine of the fleet; it keeps it for the whole run.
    num_in_flight : int
        Requests sent to it and neither answered nor rejected.
    prompt_tokens_in_flight : int
        Their prompt tokens.
    predicted_tokens_in_flight : float
        What is predicted of their outputs, in tokens; 0 for those without a prediction.
    num_blocks, block_size : int
        KV blocks in all, and tokens in one.
    """

    __slots__ = (
        "_engine", "_requests", "_under_way", "block_size", "index", "num_blocks",
        "num_in_flight", "predicted_tokens_in_flight", "prompt_tokens_in_flight",
    )  # fmt: skip

    def __init__(
        self, index: int, engine: Engine, under_way: Callable[[], tuple[Segment | None, int]]
    ) -> None:
        self.index = index
        self.num_blocks = engine.config.num_blocks
        self.block_size = engine.config.block_size
        self.num_in_flight = 0
        self.prompt_tokens_in_flight = 0
        self.predicted_tokens_in_flight = 0.0
        self._engine = engine
        self._requests = engine.requests
        self._under_way = under_way

    def count(self, request: Request, sign: int) -> None:
        """Count a request that is sent there (+1), or is answered or rejected (-1)."""
        self.num_in_flight += sign
        self.prompt_tokens_in_flight += sign * request.prompt_tokens
        if request.predicted_tokens is not None:
            self.predicted_tokens_in_flight += sign * request.predicted_tokens

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return self._requests.num_waiting

    @property
    def num_running(self) -> int:
        """Unfinished requests with a seat."""
        return len(self._requests.running)

    @property
    def backlog_tokens(self) -> int:
        """Prompt (or recomputed) tokens that are not computed yet."""
        requests = self._requests
        waiting = [*requests.waiting, *requests.intake.requests, *requests.prefilling.values()]
        return sum([state.num_uncomputed_tokens for state in waiting])

    @property
    def used_blocks(self) -> int:
        """KV blocks that requests hold, those of the step under way included."""
        kv = self._requests.kv
        used = kv.num_blocks - kv.free_blocks
        segment, now_ns = self._under_way()
        if segment is None or not kv.grows or not segment.row.num_decodes:
            return used
        begun, start_ns = 0, segment.start_ns
        for duration_ns in segment.steps.durations_ns:
            if begun and start_ns >= now_ns:
                break
            begun += 1
            start_ns += duration_ns
        opened = sum(self._requests.decodes.blocks_per_step(begun))
        return used + opened - segment.first_step_blocks

    @property
    def first_waiting_blocks(self) -> int:
        """KV blocks that the request without a seat which came first needs; 0 if there is none."""
        requests = self._requests
        waiting = [*requests.waiting, *requests.intake.requests]
        if not waiting:
            return 0
        first: RequestState = min(waiting, key=lambda s: (s.request.arrival_ns, s.id))
        return -(-first.num_tokens // self.block_size)

    @property
    def num_urgent(self) -> int:
        """Unfinished requests with a seat whose priority is below 0."""
        return sum([state.request.priority < 0 for state in self._requests.running.values()])

    def cached_tokens(self, request: Request) -> int:
        """Count the leading prompt tokens that the prefix cache holds."""
        return self._requests.kv.lookup(RequestState(request)).tokens

    def estimate_step_ns(self, shape: BatchShape) -> int:
        """Estimate how long a step of this shape takes there."""
        return self._engine.executor.estimate_step_ns(shape)


class ReportedState:
    """An engine as it was when it last reported, and what was sent there since.

    Parameters
    ----------
    live : LiveState
        The engine at the moment of the report.
    """

    __slots__ = (
        "_live", "backlog_tokens", "block_size", "first_waiting_blocks", "index", "num_blocks",
        "num_in_flight", "num_running", "num_urgent", "num_waiting", "predicted_tokens_in_flight",
        "prompt_tokens_in_flight", "used_blocks",
    )  # fmt: skip

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self.index = live.index
        self.num_blocks = live.num_blocks
        self.block_size = live.block_size
        self.num_in_flight = live.num_in_flight
        self.prompt_tokens_in_flight = live.prompt_tokens_in_flight
        self.predicted_tokens_in_flight = live.predicted_tokens_in_flight
        self.num_waiting = live.num_waiting
        self.num_running = live.num_running
        self.backlog_tokens = live.backlog_tokens
        self.used_blocks = live.used_blocks
        self.first_waiting_blocks = live.first_waiting_blocks
        self.num_urgent = live.num_urgent

    def is_sent(self, request: Request) -> None:
        """Count a request that the router sends there: that it knows without a report."""
        self.num_in_flight += 1
        self.num_waiting += 1
        self.prompt_tokens_in_flight += request.prompt_tokens
        self.backlog_tokens += request.prompt_tokens
        if request.predicted_tokens is not None:
            self.predicted_tokens_in_flight += request.predicted_tokens

    def cached_tokens(self, request: Request) -> int:
        """Count the leading prompt tokens that the prefix cache holds at this moment."""
        return self._live.cached_tokens(request)

    def estimate_step_ns(self, shape: BatchShape) -> int:
        """Estimate how long a step of this shape takes there."""
        return self._live.estimate_step_ns(shape)


EngineState = LiveState | ReportedState
"""What a router knows of an engine."""


class Candidate(NamedTuple):
    """An engine that requests can leave, or go to unless it drains."""

    engine: LiveState
    is_draining: bool


def note_sent(request: Request, live: LiveState, known: EngineState) -> None:
    """Count a request as sent to an engine, also in what a router knows of it."""
    live.count(request, 1)
    if isinstance(known, ReportedState):
        known.is_sent(request)
