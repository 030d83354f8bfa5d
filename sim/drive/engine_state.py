"""What a router knows of an engine: as it is now, or as it was last told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.drive.tournament import Tournament
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.request import Request, RequestState

if TYPE_CHECKING:
    from schedlab.sim.core.engine import Engine
    from schedlab.sim.core.step import Segment
    from schedlab.sim.cost.shape import BatchShape
    from schedlab.sim.drive.clock import Clock


class LiveState:
    """An engine as it is now.

    All is told as of the step under way, whether or not it was planned with others at once.

    Parameters
    ----------
    index : int
        Which engine.
    engine : Engine
        It.
    clock : Clock
        The time, in ns.

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
    num_waiting : int
        Requests without a seat, those among them that are to go on there and find no room yet.
    num_running : int
        Unfinished requests with a seat, also those whose KV is on its way.
    num_blocks, block_size : int
        KV blocks in all, and tokens in one.
    segment : Segment or None
        What runs now; None of an engine with several batches in flight.

    Notes
    -----
    A router reads far more often than an engine changes. So counts are written down when whoever
    drives the engine says that it has changed, and what takes longer is kept until then.
    """

    __slots__ = (
        "_backlog_tokens", "_begun", "_begun_blocks", "_begun_until_ns", "_blocks_per_step",
        "_board", "_clock", "_engine", "_first_waiting_blocks", "_num_urgent", "_place",
        "_queued", "_requests", "_used_blocks", "_used_until_ns", "_waiting_blocks", "block_size",
        "index",
        "num_blocks", "num_in_flight", "num_running", "num_waiting", "predicted_tokens_in_flight",
        "prompt_tokens_in_flight", "segment",
    )  # fmt: skip

    def __init__(self, index: int, engine: Engine, clock: Clock) -> None:
        self.index = index
        self.num_blocks = engine.config.num_blocks
        self.block_size = engine.config.block_size
        self.num_in_flight = 0
        self.prompt_tokens_in_flight = 0
        self.predicted_tokens_in_flight = 0.0
        self._engine = engine
        self._requests = engine.requests
        self._queued: dict[int, RequestState] = {}
        self._clock = clock
        self._used_blocks = 0
        # Of the steps of the segment that have begun: how many, what they opened, when they end.
        self._begun = self._begun_blocks = self._begun_until_ns = 0
        self._blocks_per_step: list[int] = []
        self._board: Board | None = None
        self._place = 0
        self.has_changed(None)

    def has_changed(self, segment: Segment | None) -> None:
        """Look anew: something came, went, began or ended.

        Parameters
        ----------
        segment : Segment or None
            What runs now.
        """
        requests = self._requests
        self.segment = segment
        self.num_waiting = requests.num_waiting + len(self._queued)
        self.num_running = requests.num_running
        if not requests.is_plain:  # nobody outside knows yet that they have ended
            self.num_running += len(requests.ended)
        self._backlog_tokens = self._used_until_ns = -1
        self._first_waiting_blocks = self._waiting_blocks = self._num_urgent = -1
        board = self._board
        if board is not None:
            board.has_changed(self._place, self.num_waiting, self.num_running)

    def stand_on(self, board: Board, place: int) -> None:
        """Keep the counts of a place of a board as well, and no other ones any more."""
        self._board, self._place = board, place
        if self._used_until_ns >= 0:
            board.has_aged(place, self._used_until_ns)

    def queue(self, state: RequestState) -> None:
        """Count a request as waiting that is to go on there as soon as there is room."""
        self._queued[state.id] = state
        self.has_changed(self.segment)

    def unqueue(self, state: RequestState) -> None:
        """Do not count it any more: there is room, or it is called off."""
        del self._queued[state.id]
        self.has_changed(self.segment)

    def count(self, request: Request, sign: int) -> None:
        """Count a request that is sent there (+1), or is answered or rejected (-1)."""
        self.num_in_flight += sign
        tokens = request.prompt_tokens
        self.prompt_tokens_in_flight += tokens if sign > 0 else -tokens
        if request.predicted_tokens is not None:
            self.predicted_tokens_in_flight += sign * request.predicted_tokens
        if self._board is not None:
            self._board.is_sent(self._place, self.num_in_flight)

    @property
    def backlog_tokens(self) -> int:
        """Prompt (or recomputed) tokens that are not computed yet."""
        if self._backlog_tokens < 0:
            requests = self._requests
            waiting = [*requests.waiting, *requests.intake.requests, *requests.prefilling.values()]
            waiting += requests.holding.values()
            away = (*requests.in_pipeline, *requests.loading.values())
            waiting += [state for state in away if not state.is_decoding]
            self._backlog_tokens = sum([state.num_uncomputed_tokens for state in waiting])
        return self._backlog_tokens

    @property
    def used_blocks(self) -> int:
        """KV blocks that requests hold, those of the step under way included."""
        now_ns = self._clock.now_ns
        if now_ns > self._used_until_ns:
            self._count_blocks(now_ns)
            if self._board is not None:
                self._board.has_aged(self._place, self._used_until_ns)
        return self._used_blocks

    def _count_blocks(self, now_ns: int) -> None:
        """Count the blocks in use, and say until when that holds."""
        kv, segment = self._requests.kv, self.segment
        is_new = self._used_until_ns < 0
        self._used_blocks = kv.num_blocks - kv.free_blocks
        self._used_until_ns = FOREVER
        if segment is None or not kv.grows or not segment.shape.num_decodes:
            return
        durations_ns = segment.steps.durations_ns
        if is_new:
            self._begun = self._begun_blocks = 0
            self._begun_until_ns = segment.start_ns
            self._blocks_per_step = self._requests.decodes.blocks_per_step(len(durations_ns))
        begun, until_ns = self._begun, self._begun_until_ns
        while begun < len(durations_ns) and (not begun or until_ns < now_ns):
            self._begun_blocks += self._blocks_per_step[begun]
            until_ns += durations_ns[begun]
            begun += 1
        self._begun, self._begun_until_ns = begun, until_ns
        if begun < len(durations_ns):
            self._used_until_ns = until_ns
        self._used_blocks += self._begun_blocks - segment.first_step_blocks

    @property
    def first_waiting_blocks(self) -> int:
        """KV blocks that the request without a seat which came first needs; 0 if there is none.

        Beside those that it holds, if it is loaded.
        """
        if self._first_waiting_blocks < 0:
            self._first_waiting_blocks = 0
            waiting = self._waiting()
            if waiting:
                first: RequestState = min(waiting, key=lambda s: (s.request.arrival_ns, s.id))
                self._first_waiting_blocks = self._blocks_to_come(first)
        return self._first_waiting_blocks

    @property
    def waiting_blocks(self) -> int:
        """KV blocks that all requests without a seat need, beside those that they hold."""
        if self._waiting_blocks < 0:
            self._waiting_blocks = sum([self._blocks_to_come(state) for state in self._waiting()])
        return self._waiting_blocks

    @property
    def num_preempted(self) -> int:
        """Requests without a seat that had one, and lost their memory."""
        return sum([state.num_preemptions > 0 for state in self._waiting()])

    def _waiting(self) -> list[RequestState]:
        """Return the requests without a seat."""
        requests = self._requests
        waiting = [*requests.waiting, *requests.intake.requests, *requests.holding.values()]
        waiting += self._queued.values()
        return waiting

    def _blocks_to_come(self, state: RequestState) -> int:
        """Count the blocks that a request without a seat needs and does not hold."""
        size = self.block_size
        is_loaded = state.id in self._requests.holding
        held_tokens = state.num_computed_tokens if is_loaded else 0
        return -(-state.num_tokens // size) - -(-held_tokens // size)

    @property
    def num_urgent(self) -> int:
        """Unfinished requests with a seat whose priority is below 0."""
        if self._num_urgent < 0:
            requests = self._requests
            running = [*requests.running.values(), *requests.in_pipeline]
            running += [*requests.fetching.values(), *requests.loading.values()]
            self._num_urgent = sum([state.request.priority < 0 for state in running])
        return self._num_urgent

    def cached_tokens(self, request: Request) -> int:
        """Count the leading prompt tokens that the prefix cache holds."""
        return self.found_tokens(RequestState(request))

    def found_tokens(self, state: RequestState) -> int:
        """As `cached_tokens`, of a request of which other engines are asked, too."""
        kv = self._requests.kv
        return kv.cached_tokens(state) if isinstance(kv, PrefixCachingKVCache) else 0

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
        "_board", "_live", "_place", "backlog_tokens", "block_size", "first_waiting_blocks",
        "index", "num_blocks", "num_in_flight", "num_running", "num_urgent", "num_waiting",
        "predicted_tokens_in_flight", "prompt_tokens_in_flight", "used_blocks", "waiting_blocks",
    )  # fmt: skip

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self._board: Board | None = None
        self._place = 0
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
        self.waiting_blocks = live.waiting_blocks
        self.num_urgent = live.num_urgent

    def stand_on(self, board: Board, place: int) -> None:
        """Keep the counts of a place of a board as well, and no other ones any more."""
        self._board, self._place = board, place

    def is_sent(self, request: Request) -> None:
        """Count a request that the router sends there: that it knows without a report."""
        self.num_in_flight += 1
        self.num_waiting += 1
        self.prompt_tokens_in_flight += request.prompt_tokens
        self.backlog_tokens += request.prompt_tokens
        blocks = -(-request.prompt_tokens // self.block_size)
        self.waiting_blocks += blocks
        # Until the next report nobody knows who of them still waits: each counts as the first.
        self.first_waiting_blocks += blocks
        self.num_urgent += request.priority < 0
        if request.predicted_tokens is not None:
            self.predicted_tokens_in_flight += request.predicted_tokens
        if self._board is not None:
            self._board.has_changed(self._place, self.num_waiting, self.num_running)
            self._board.is_sent(self._place, self.num_in_flight)

    def cached_tokens(self, request: Request) -> int:
        """Count the leading prompt tokens that the prefix cache holds at this moment."""
        return self._live.cached_tokens(request)

    def found_tokens(self, state: RequestState) -> int:
        """As `cached_tokens`, of a request of which other engines are asked, too."""
        return self._live.found_tokens(state)

    def estimate_step_ns(self, shape: BatchShape) -> int:
        """Estimate how long a step of this shape takes there."""
        return self._live.estimate_step_ns(shape)


EngineState = LiveState | ReportedState
"""What a router knows of an engine."""


class Board:
    """Engines that a router chooses among, column by column.

    Each engine writes its counts down at its place when they change, which is seldom beside how
    often a router reads all of them.

    Parameters
    ----------
    engines : sequence of EngineState
        They, in order.

    Attributes
    ----------
    index, num_blocks, block_size, num_in_flight, num_waiting, num_running : list of int
        What each says; not to be written to by who reads.
    """

    __slots__ = (
        "_changed", "_clock", "_engines", "_load", "_loads", "_running_weight", "_used_until_ns",
        "_waiting_weight", "_weighted", "block_size", "index", "num_blocks", "num_in_flight",
        "num_running", "num_waiting",
    )  # fmt: skip

    def __init__(self, engines: Sequence[EngineState]) -> None:
        self._engines = list(engines)
        clocks = [engine._clock for engine in engines if isinstance(engine, LiveState)]
        self._clock = clocks[0] if clocks else None
        # What `loads` returned last, and the places of engines whose counts changed since.
        self._load: object = None
        self._loads: list[Any] = []
        self._changed: set[int] = set()
        self._used_until_ns = [FOREVER] * len(engines)
        # The weighted counts that `place_of_least` was asked for last.
        self._waiting_weight = self._running_weight = -1.0
        self._weighted: Tournament | None = None
        self.index = [engine.index for engine in engines]
        self.num_blocks = [engine.num_blocks for engine in engines]
        self.block_size = [engine.block_size for engine in engines]
        self.num_in_flight = [engine.num_in_flight for engine in engines]
        self.num_waiting = [engine.num_waiting for engine in engines]
        self.num_running = [engine.num_running for engine in engines]
        for place, engine in enumerate(engines):
            engine.stand_on(self, place)

    def has_changed(self, place: int, num_waiting: int, num_running: int) -> None:
        """Write down the counts of an engine, of which anything may have changed."""
        if self._load is not None:
            self._changed.add(place)
        if self.num_waiting[place] == num_waiting and self.num_running[place] == num_running:
            return
        self.num_waiting[place] = num_waiting
        self.num_running[place] = num_running
        weighted = self._weighted
        if weighted is not None:
            load = self._waiting_weight * num_waiting + self._running_weight * num_running
            weighted.change(place, load)

    def is_sent(self, place: int, num_in_flight: int) -> None:
        """Write down how many requests were sent to an engine and are not answered."""
        self.num_in_flight[place] = num_in_flight
        if self._load is not None:
            self._changed.add(place)

    def has_aged(self, place: int, used_until_ns: int) -> None:
        """Learn that an engine has counted its blocks in use anew, and until when that holds."""
        self._used_until_ns[place] = used_until_ns
        if self._load is not None:  # whoever asked, the load that is kept is of the count before
            self._changed.add(place)

    @property
    def used_blocks(self) -> list[int]:
        """KV blocks that requests hold now."""
        return [engine.used_blocks for engine in self._engines]

    def cached_tokens(self, request: Request) -> list[int]:
        """Count the leading prompt tokens that each prefix cache holds."""
        state = RequestState(request)
        return [engine.found_tokens(state) for engine in self._engines]

    def loads(self, load: Callable[[EngineState], Any]) -> list[Any]:
        """Return the load of each engine, asking only those that changed.

        Parameters
        ----------
        load : callable
            Computes it of all that an engine says but `cached_tokens` and `estimate_step_ns`.
            The same for every request: else all are asked anew.
        """
        if load == self._load:
            if self._clock is not None and min(self._used_until_ns) < self._clock.now_ns:
                now_ns = self._clock.now_ns
                aged = [i for i, until_ns in enumerate(self._used_until_ns) if until_ns < now_ns]
                self._changed.update(aged)
            for place in self._changed:
                self._loads[place] = load(self._engines[place])
        else:
            self._load, self._loads = load, [load(engine) for engine in self._engines]
        self._changed.clear()
        return self._loads

    def place_of_least(self, waiting: float, running: float, start: int) -> int:
        """Return where ``waiting * num_waiting + running * num_running`` is least.

        Among equals the first from `start` on, in a circle.
        """
        weighted = self._weighted
        if weighted is None or waiting != self._waiting_weight or running != self._running_weight:
            self._waiting_weight, self._running_weight = waiting, running
            counts = zip(self.num_waiting, self.num_running, strict=True)
            loads = [waiting * here + running * there for here, there in counts]
            weighted = self._weighted = Tournament(loads)
        return weighted.first_least(start)


def first_least(loads: list[float], start: int) -> int:
    """Return the place of the least load, among equals the first from `start` on, in a circle."""
    place, least = start, loads[start]
    for i, load in enumerate(loads):
        if load < least or (load == least and place < start <= i):
            place, least = i, load
    return place


class Candidate(NamedTuple):
    """An engine that requests can leave, or go to unless it drains."""

    engine: LiveState
    is_draining: bool


def note_sent(request: Request, live: LiveState, known: EngineState) -> None:
    """Count a request as sent to an engine, also in what a router knows of it."""
    live.count(request, 1)
    if isinstance(known, ReportedState):
        known.is_sent(request)
