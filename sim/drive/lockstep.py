"""Engines that begin and end every step together, as those must that share experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.step import Segment
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.clock import ENDS, PLANS, Clock, Event
from schedlab.sim.drive.engine_state import LiveState

JointStep = Callable[[Sequence[Segment]], int]
"""How long (ns) steps take that engines begin together; one segment an engine with work."""


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
        active = [segment for segment in segments if segment is not None]
        self._is_under_way = bool(active)
        if active:
            duration_ns = self._joint_step_ns(active)
            for segment in active:
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


def joint_steps_ns(pricing: Pricing, segments: Sequence[Segment]) -> list[int]:
    """Price, and count, steps whose experts get the tokens of all engines.

    Parameters
    ----------
    pricing : Pricing
        What steps take; counts them anew, with the tokens of all.
    segments : sequence of Segment
        A step each, of the engines that have work.

    Returns
    -------
    list of int
        What each would take by itself among the others; together they take as long as the slowest.
    """
    step_ns = pricing.step_ns
    tokens = sum(segment.shape.num_new_tokens for segment in segments)
    for segment in segments:
        pricing.meet(segment.shape, tokens)
    return [
        segment.steps.durations_ns[0]
        - step_ns(segment.shape, 1)[0]
        + step_ns(replace(segment.shape, gathered_tokens=tokens), 1)[0]
        for segment in segments
    ]
