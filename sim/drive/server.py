"""An engine on the clock of a fleet."""

from __future__ import annotations

from collections.abc import Callable

from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.step import Segment
from schedlab.sim.drive.clock import ENDS, PLANS, Clock, Event
from schedlab.sim.drive.engine_state import LiveState


class Server:
    """An engine on its own.

    Parameters
    ----------
    clock : Clock
        The time, in ns.
    engine : Engine
        It.
    live : LiveState
        The engine as others see it; told of every change.
    settles : callable, optional
        Called when its memory may have become free; where there is one, or if `is_closed`, what
        follows from the end of a step happens before the next one is planned.
    is_closed : bool
        Whether clients send because of answers.
    place : int, optional
        Of the engine among all, if what one does is seen by others at that very instant: then all
        steps end before any is planned, and both by place.

    Attributes
    ----------
    on_begun : callable, optional
        Called with every segment that begins.
    """

    def __init__(
        self,
        clock: Clock,
        engine: Engine,
        live: LiveState,
        settles: Callable[[], None] | None = None,
        is_closed: bool = False,
        place: int | None = None,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._live = live
        self._settles = settles
        self.on_begun: Callable[[Segment], None] | None = None
        self._plans_at_once = not is_closed and settles is None and place is None
        self._place = place or 0
        self._next: Event | None = None  # the only one that still counts
        self._ends = self._end  # bound once, not for each step

    def wake(self) -> None:
        """Plan anew as soon as the step under way ends; now, if there is none."""
        self.interrupt()
        if self._live.segment is None:
            self._plan_soon()

    def interrupt(self) -> None:
        """Let the step under way be the last one of its plan: something changes here."""
        segment = self._live.segment
        self._live.has_changed(segment)
        if segment is not None and segment.num_steps > 1:
            now_ns, end_ns = self._clock.now_ns, segment.end_ns
            cut_ns = self._engine.cut(now_ns)
            if cut_ns < end_ns:
                self._next = self._clock.at(cut_ns - now_ns, ENDS, self._ends, self._place)

    def stop(self) -> None:
        """Do nothing any more: the engine is dead, or gone."""
        self._live.has_changed(None)
        self._next = None

    @property
    def is_moving(self) -> bool:
        """Whether a step is under way, or is to be planned."""
        return self._next is not None

    def _plan_soon(self, happened: Event | None = None) -> None:
        """Plan when everything else has happened at this instant."""
        self._next = self._clock.at(0, PLANS, self._plan, self._place, happened)

    def _plan(self, event: Event) -> None:
        if event is self._next:
            self._plan_now(event)

    def _plan_now(self, event: Event) -> None:
        now_ns, engine = self._clock.now_ns, self._engine
        segment = engine.begin(now_ns)
        self._live.has_changed(segment)
        if segment is not None:
            wait_ns = segment.end_ns - now_ns
            self._next = self._clock.at(wait_ns, ENDS, self._ends, self._place, event)
            if self.on_begun is not None:
                self.on_begun(segment)
            return
        if self._settles is not None:
            self._settles()
        if engine.wait_until_ns < FOREVER:
            wait_ns = engine.wait_until_ns - now_ns
            self._next = self._clock.at(wait_ns, PLANS, self._plan, self._place, event)
        else:
            self._next = None

    def _end(self, event: Event) -> None:
        if event is self._next:
            self._engine.commit()
            if self._plans_at_once:
                self._plan_now(event)
                return
            self._live.has_changed(None)
            if self._settles is not None:
                self._settles()
            self._plan_soon(event)
