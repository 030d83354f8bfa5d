"""What a step of vLLM's loop takes: as measured, or as a cost model has it."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from schedlab.gpu_backend.stopwatch import ElapsedTime, Stopwatch
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape


class StepTimes(NamedTuple):
    """When a step ran, in ns of the run, and where its time went."""

    start_ns: int
    end_ns: int
    overhead_ns: int
    """Scheduling overhead in it: all but the model's time."""
    schedule_ns: int
    """In `schedule()`."""
    model_ns: int
    """From the launch, or the end of the step before it, to the sampled tokens."""
    update_ns: int
    """In `update_from_output()`."""


class Planned(NamedTuple):
    """A step that was scheduled, and is not finished."""

    start_ns: int
    """By the clock; not before the end of the step in front of it."""
    schedule_ns: int
    launched_ns: int
    """When it went to the model."""
    duration_ns: int
    overhead_ns: int


class StepClock(Protocol):
    """Times the steps of a run; the names of its modes are those of the real backend."""

    mode: str
    read_ns: Stopwatch
    """Reads the time from which steps are timed."""
    now_ns: int
    """Time of the run, as driver and policies know it: it moves from step to step."""

    def start(self) -> None:
        """Set the clock to zero."""

    def planning_ns(self) -> int:
        """Return for when the next step is planned."""

    def planned(self, begun_ns: int, shape: BatchShape) -> Planned:
        """Note that a step was planned, by `schedule()` that was called at `begun_ns`."""

    def ended(self, step: Planned, ready_ns: int) -> StepTimes:
        """Note that a step is over, its tokens having been there at `ready_ns`, and move on."""

    def idle_until(self, instant_ns: int) -> None:
        """Let nothing happen until then."""


class MeasuredStepClock:
    """Steps take what they take.

    Parameters
    ----------
    mode : str
        ``wall`` waits as long as a run is idle; ``virtual`` and ``reference`` pass over it.
    stopwatch : Stopwatch, optional
        Says how long; time as it passes by default.

    Attributes
    ----------
    read_ns : Stopwatch
        The one given.

    Notes
    -----
    Steps of a busy engine follow each other without a gap: what lies between the end of one and
    the launch of the next is scheduling overhead of the second.
    """

    def __init__(self, mode: str = "virtual", stopwatch: Stopwatch | None = None) -> None:
        self.mode = mode
        self.read_ns: Stopwatch = stopwatch or ElapsedTime()
        self.now_ns = 0
        self._sleeps = mode == "wall"
        self._origin_ns = 0

    def start(self) -> None:
        """Set the clock to zero."""
        self.now_ns = 0
        self.read_ns.between_steps()
        self._origin_ns = self.read_ns()

    def planning_ns(self) -> int:
        """Return the time of the run."""
        return self.now_ns

    def planned(self, begun_ns: int, shape: BatchShape) -> Planned:
        """Note that a step was planned."""
        launched_ns = self.read_ns()
        return Planned(self.now_ns, launched_ns - begun_ns, launched_ns - self._origin_ns, 0, 0)

    def ended(self, step: Planned, ready_ns: int) -> StepTimes:
        """Note that a step is over: now."""
        ended_ns = self.read_ns()
        start_ns, end_ns = max(self.now_ns, step.start_ns), ended_ns - self._origin_ns
        model_ns = ready_ns - self._origin_ns - max(start_ns, step.launched_ns)
        self.now_ns = end_ns
        overhead_ns = end_ns - start_ns - model_ns
        self.read_ns.between_steps()
        return StepTimes(
            start_ns, end_ns, overhead_ns, step.schedule_ns, model_ns, ended_ns - ready_ns
        )

    def idle_until(self, instant_ns: int) -> None:
        """Wait, or let the clock jump."""
        if self._sleeps:
            while (left := instant_ns - (self.read_ns() - self._origin_ns)) > 0:
                time.sleep(left / 1e9)
            self.now_ns = self.read_ns() - self._origin_ns
        else:
            self.now_ns = max(instant_ns, self.now_ns)
            self._origin_ns = self.read_ns() - self.now_ns


class ModelledStepClock:
    """Steps take what a cost model says; the model runs for its tokens only.

    Parameters
    ----------
    pricing : Pricing
        What steps take; counts them.
    """

    mode = "modelled"

    def __init__(self, pricing: Pricing) -> None:
        self.read_ns: Stopwatch = ElapsedTime()
        self.now_ns = 0
        self._pricing = pricing
        self._last_end_ns = 0

    def start(self) -> None:
        """Set the clock to zero."""
        self.now_ns = self._last_end_ns = 0

    def planning_ns(self) -> int:
        """Return when the last step that was planned ends."""
        return max(self.now_ns, self._last_end_ns)

    def planned(self, begun_ns: int, shape: BatchShape) -> Planned:
        """Price a step that was planned."""
        schedule_ns = self.read_ns() - begun_ns
        start_ns, duration_ns, overhead_ns = self.planning_ns(), 0, 0
        if shape.num_decodes or shape.chunks:
            self._pricing.carried_out(shape)
            duration_ns = self._pricing.estimate_ns(shape)
            overhead_ns = self._pricing.overhead_ns(shape)
        self._last_end_ns = start_ns + duration_ns
        return Planned(start_ns, schedule_ns, self.read_ns(), duration_ns, overhead_ns)

    def ended(self, step: Planned, ready_ns: int) -> StepTimes:
        """Let the step's time pass; where it really went is told as measured."""
        self.now_ns = end_ns = step.start_ns + step.duration_ns
        return StepTimes(
            step.start_ns, end_ns, step.overhead_ns, step.schedule_ns,
            ready_ns - step.launched_ns, self.read_ns() - ready_ns,
        )  # fmt: skip

    def idle_until(self, instant_ns: int) -> None:
        """Let the clock jump."""
        self.now_ns = max(instant_ns, self.now_ns)
