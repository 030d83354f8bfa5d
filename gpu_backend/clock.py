"""What a step's duration means on the real backend: four clocks, and their names in results.

``wall``
    Time as it passes. Requests arrive while the engine works and waits.
``virtual``
    Steps take as long as they were measured to take, and waiting takes no time: the discrete-event
    loop skips it. Durations differ from run to run, and so may decisions.
``reference``
    As `virtual`, but a step takes its CPU time at the speed that the machine had when its profile
    was measured: a machine that is shared does not keep its speed; see
    `schedlab.gpu_backend.stopwatch.ReferenceTime`.
``modelled``
    The kernels run, but a step takes what a cost model says. Decisions are then the simulator's
    own, step by step, and repeatable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from schedlab.gpu_backend.stopwatch import ElapsedTime, Stopwatch
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape

_LOOK_AGAIN_NS = 100_000


class Clock(Protocol):
    """Times steps for an executor."""

    mode: str
    """Name in results."""
    times_copies: bool
    """Whether copies beside the steps take as long as they do, rather than what links say."""

    def let_pass(self, wait: Callable[[], object]) -> int:
        """Return how long an engine without a step waits, at most until `wait` has returned."""

    def step_begins(self, now_ns: int) -> None:
        """Note that the work planned at engine time `now_ns` begins."""

    def step_ends(self, shape: BatchShape) -> tuple[int, int]:
        """Return the step's duration and the part of it that is scheduling overhead, in ns."""


class WallClock:
    """Time as it passes since `start`.

    Notes
    -----
    A step lasts from the instant for which it was planned to its last token, so the time that
    accounting and planning took is part of it, as scheduling overhead.
    """

    mode = "wall"
    times_copies = True

    def __init__(self) -> None:
        self._origin_ns = time.perf_counter_ns()
        self._planned_ns = 0
        self._begun_ns = 0

    def start(self) -> None:
        """Set the clock to zero."""
        self._origin_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        """Read the clock."""
        return time.perf_counter_ns() - self._origin_ns

    def sleep_until(self, instant_ns: int) -> None:
        """Wait; not for longer than the system's timer is coarse."""
        while (left := instant_ns - self.now_ns()) > 0:
            time.sleep(left / 1e9)

    def let_pass(self, wait: Callable[[], object]) -> int:
        """Return after how long to look again: somebody may come meanwhile."""
        return _LOOK_AGAIN_NS

    def step_begins(self, now_ns: int) -> None:
        """Note planning time and the time now."""
        self._planned_ns = now_ns
        self._begun_ns = self.now_ns()

    def step_ends(self, shape: BatchShape) -> tuple[int, int]:
        """Return (now - planned, begun - planned)."""
        return self.now_ns() - self._planned_ns, self._begun_ns - self._planned_ns


class VirtualClock:
    """Time in which only steps take time, as long as they really take.

    Parameters
    ----------
    stopwatch : Stopwatch, optional
        Says how long; time as it passes by default.
    mode : str
        Name in results.

    Notes
    -----
    What lies between two steps (accounting, arrivals, planning) is counted as scheduling overhead
    of the second one. Before the first step nothing is counted.
    """

    times_copies = True

    def __init__(self, stopwatch: Stopwatch | None = None, mode: str = "virtual") -> None:
        self.mode = mode
        self.stopwatch = stopwatch or ElapsedTime()
        self._begun_ns = 0
        self._ended_ns: int | None = None

    def let_pass(self, wait: Callable[[], object]) -> int:
        """Wait, and return how long that took, which is no overhead of the next step."""
        begun_ns = self.stopwatch()
        wait()
        passed_ns = self.stopwatch() - begun_ns
        if self._ended_ns is not None:
            self._ended_ns += passed_ns
        return passed_ns

    def step_begins(self, now_ns: int) -> None:
        """Note the time."""
        if self._ended_ns is None:
            self.stopwatch.between_steps()
        self._begun_ns = self.stopwatch()

    def step_ends(self, shape: BatchShape) -> tuple[int, int]:
        """Return (now - end of the last step, begun - end of the last step)."""
        last_ns = self._begun_ns if self._ended_ns is None else self._ended_ns
        self._ended_ns = self.stopwatch()
        duration_ns = self._ended_ns - last_ns
        self.stopwatch.between_steps()
        return duration_ns, self._begun_ns - last_ns


class ModelledClock:
    """Time as a cost model has it; the kernels run for their tokens only.

    Parameters
    ----------
    pricing : Pricing
        What steps take; counts them.
    """

    mode = "modelled"
    times_copies = False

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing

    def let_pass(self, wait: Callable[[], object]) -> int:
        """Refuse: links say when copies are done."""
        raise NotImplementedError("nobody waits for copies whose time is modelled")

    def step_begins(self, now_ns: int) -> None:
        """Note nothing."""

    def step_ends(self, shape: BatchShape) -> tuple[int, int]:
        """Return what `schedlab.sim.core.executor.SimExecutor` would."""
        self._pricing.carried_out(shape)
        return self._pricing.estimate_ns(shape), self._pricing.overhead_ns(shape)
