"""Engines that begin and end every step together, as those must that share experts."""

from __future__ import annotations

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

JointStep = Callable[[Sequence[Stepping]], int]
"""How long (ns) steps take that engines begin together."""


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
        active = [
            (engine, segment)
            for engine, segment in zip(self._engines, segments, strict=True)
            if segment is not None
        ]
        self._is_under_way = bool(active)
        if active:
            duration_ns = self._joint_step_ns(active)
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


def joint_steps_ns(stepping: Sequence[Stepping]) -> list[int]:
    """Price, and count, steps whose experts get the tokens of all engines.

    Parameters
    ----------
    stepping : sequence of (Engine, Segment)
        A step each, of the engines that have work; their executors are simulated ones.

    Returns
    -------
    list of int
        What each would take by itself among the others; together they take as long as the slowest.

    Notes
    -----
    Engines that draft pass through a model several times a step. The passes meet one by one, those
    of an engine that makes fewer with nothing of its own.
    """
    executors = []
    for engine, _ in stepping:
        assert isinstance(engine.executor, SimExecutor)
        executors.append(engine.executor)
    of_passes = [executor.pass_tokens() for executor in executors]
    met_tokens = [sum(tokens) for tokens in zip_longest(*of_passes, fillvalue=0)]
    return [
        segment.steps.durations_ns[0] + executor.longer_among_ns(met_tokens)
        for executor, (_, segment) in zip(executors, stepping, strict=True)
    ]
