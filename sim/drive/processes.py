"""Processes of SimPy on the clock of a fleet: what happens to it every so often, or by a plan."""

from __future__ import annotations

import simpy
from simpy.events import NORMAL, EventPriority

from schedlab.sim.drive.clock import Clock


class Processes(simpy.Environment):
    """An environment whose events happen among all others of a clock, which alone moves the time.

    Engines take thousands of steps between two events of a process, so steps are none of SimPy's
    (ADR 18).

    Parameters
    ----------
    clock : Clock
        The time, in ns.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def schedule(
        self, event: simpy.Event, priority: EventPriority = NORMAL, delay: float = 0
    ) -> None:
        """Let an event happen after some time; priorities are the phases of an instant.

        SimPy's queue has the order of the clock, so whatever it is that happens next is its first.
        """
        self._now = self._clock.now_ns
        super().schedule(event, priority, delay)
        self._clock.at(int(delay), priority, lambda _: self.step())

    def wait(self, delay_ns: int, phase: int) -> simpy.Event:
        """Return an event for a process to wait for: some time passes, up to a phase."""
        return _Wait(self, delay_ns, phase)


class _Wait(simpy.Event):
    """As `simpy.Timeout`, with a priority."""

    def __init__(self, env: Processes, delay_ns: int, phase: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, EventPriority(phase), delay_ns)
