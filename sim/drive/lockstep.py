"""Engines that begin and end every step together, as those must that share experts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import zip_longest

from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.step import Segment
from schedlab.sim.drive.clock import ENDS, PLANS, Clock, Event
from schedlab.sim.drive.engine_state import LiveState

Stepping = tuple[Engine, Segment]
"""An engine with work, and the step that it begins."""

JointStep = Callable[[Sequence[Stepping], Sequence[Engine]], int]
"""How long (ns) steps take that engines begin together, while others have no work."""


class Lockstep:
    """Engines that begin and end every step together."""

    def __init__(
        self,
        clock: Clock,
        engines: Sequence[Engine],
        lives: Sequence[LiveState],
        joint_step_ns: JointStep,
    ) -> None:
        self._clock = clock
        self._engines = engines
        self._lives = lives
        self._joint_step_ns = joint_step_ns
        self._is_under_way = False
        self._next: Event | None = None

    def wake(self) -> None:
        """Plan now, if no step is under way."""
        self.interrupt()
        if not self._is_under_way:
            self._plan_soon()

    @property
    def is_moving(self) -> bool:
        """Whether a step is under way, or is to be planned."""
        return self._next is not None

    def stop(self) -> None:
        """Do nothing any more."""
        self._next = None

    def interrupt(self) -> None:
        """Look anew at who changes; every step is planned by itself anyway."""
        for live in self._lives:
            live.has_changed(live.segment)

    def _plan_soon(self) -> None:
        self._next = self._clock.at(0, PLANS, self._plan)

    def _plan(self, event: Event) -> None:
        if event is not self._next:
            return
        now_ns = self._clock.now_ns
        segments = [engine.begin(now_ns, now_ns + 1) for engine in self._engines]
        for live, segment in zip(self._lives, segments, strict=True):
            live.has_changed(segment)
        active: list[Stepping] = []
        idle: list[Engine] = []
        for engine, segment in zip(self._engines, segments, strict=True):
            if segment is None:
                idle.append(engine)
            else:
                active.append((engine, segment))
        self._is_under_way = bool(active)
        if active:
            duration_ns = self._joint_step_ns(active, idle)
            for _, segment in active:
                segment.retime([duration_ns])
            self._next = self._clock.at(duration_ns, ENDS, self._end)
            return
        wait_until_ns = min(engine.wait_until_ns for engine in self._engines)
        self._next = None
        if wait_until_ns < FOREVER:
            self._next = self._clock.at(wait_until_ns - now_ns, PLANS, self._plan)

    def _end(self, _: Event) -> None:
        self._is_under_way = False
        for engine, live in zip(self._engines, self._lives, strict=True):
            if live.segment is not None:
                engine.commit()
                live.has_changed(None)
        self._plan_soon()


def joint_steps_ns(stepping: Sequence[Stepping], idle: Sequence[Engine] = ()) -> list[int]:
    """Price, and count, steps whose experts get the tokens of all engines.

    Parameters
    ----------
    stepping : sequence of (Engine, Segment)
        A step each, of the engines that have work; their executors are simulated ones.
    idle : sequence of Engine
        The others, which compute a batch of one request for nobody meanwhile: experts on them are
        needed all the same.

    Returns
    -------
    list of int
        What each would take by itself among the others; together they take as long as the slowest.

    Notes
    -----
    As vLLM does (0.32, ``v1/worker/dp_utils.py``, ``coordinate_batch_across_dp``): where all
    batches fit a captured graph, all are padded to the largest of them, those of idle engines, too
    (``v1/worker/gpu_worker.py``, ``execute_dummy_batch``). Where one is too large none is replayed
    from a graph, and nobody pads for another.

    Engines that draft pass through a model several times a step. The passes meet one by one, those
    of an engine that makes fewer with nothing of its own. Padded for others are the passes of the
    model, and with them the first ones of drafters.
    """
    executors = [_simulated(engine) for engine, _ in stepping]
    tokens = [executor.pass_tokens()[0] for executor in executors]
    for engine in idle:
        executors.append(_simulated(engine))
        tokens.append(_captured(engine, executors[-1].idle_tokens()))
    most = max(tokens)
    sizes = [engine.config.cudagraph_capture_sizes for engine, _ in stepping]
    is_graph = all([bool(captured) and most <= captured[-1] for captured in sizes])
    padding = [most - n if is_graph else 0 for n in tokens]
    num_busy = len(stepping)
    of_passes: list[list[int]] = []
    for i, executor in enumerate(executors):
        if i < num_busy:
            of_passes.append(executor.pass_tokens(padding[i]))
        else:
            of_passes.append(executor.idle_pass_tokens(tokens[i] + padding[i]))
    met_tokens = [sum(of_pass) for of_pass in zip_longest(*of_passes, fillvalue=0)]
    found: list[int] = []
    for i, (_, segment) in enumerate(stepping):
        segment.row.padding_tokens += padding[i]
        longer_ns = executors[i].longer_among_ns(met_tokens, padding[i])
        found.append(segment.steps.durations_ns[0] + longer_ns)
    return found


def _simulated(engine: Engine) -> SimExecutor:
    executor = engine.executor
    assert isinstance(executor, SimExecutor)
    return executor


def _captured(engine: Engine, num_tokens: int) -> int:
    """Return the next captured batch size; the tokens themselves beyond the largest."""
    sizes = engine.config.cudagraph_capture_sizes
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else num_tokens
