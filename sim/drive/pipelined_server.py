"""An engine with several batches in flight on the clock of a fleet."""

from __future__ import annotations

from collections.abc import Callable

from schedlab.sim.core.pipelined_engine import PipelinedEngine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.drive.clock import ENDS, PLANS, Clock, Event
from schedlab.sim.drive.engine_state import LiveState


class PipelinedServer:
    """An engine on its own whose GPUs are the stages of a pipeline.

    Batches begin whenever something has happened, as long as the pipeline has room for one; the
    oldest one ends next. Every step is planned by itself, so there is nothing to cut off.

    Parameters
    ----------
    clock, engine, live, settles
        As for `Server`.
    """

    def __init__(
        self,
        clock: Clock,
        engine: PipelinedEngine,
        live: LiveState,
        settles: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._live = live
        self._settles = settles
        self._next_plan: Event | None = None  # the only one that still counts
        self._next_end: Event | None = None

    def wake(self) -> None:
        """Plan now, if the pipeline has room."""
        self.interrupt()
        self._plan_soon()

    def interrupt(self) -> None:
        """Look anew at the engine: something changes here."""
        self._live.has_changed(None)

    def stop(self) -> None:
        """Do nothing any more: the engine is dead, or gone."""
        self._next_plan = self._next_end = None

    @property
    def is_moving(self) -> bool:
        """Whether a batch is in flight, or is to be planned."""
        return self._next_plan is not None or self._next_end is not None

    def _plan_soon(self) -> None:
        """Plan when everything else has happened at this instant."""
        self._next_plan = self._clock.at(0, PLANS, self._plan)

    def _plan(self, event: Event) -> None:
        if event is not self._next_plan:
            return
        now_ns, engine, self._next_plan = self._clock.now_ns, self._engine, None
        while engine.can_begin(now_ns):
            if engine.begin(now_ns) is None:
                if engine.wait_until_ns < FOREVER:
                    wait_ns = engine.wait_until_ns - now_ns
                    self._next_plan = self._clock.at(wait_ns, PLANS, self._plan)
                break
        self._live.has_changed(None)
        if self._settles is not None:
            self._settles()
        if self._next_end is None and engine.next_end_ns < FOREVER:
            self._next_end = self._clock.at(engine.next_end_ns - now_ns, ENDS, self._end)

    def _end(self, event: Event) -> None:
        if event is not self._next_end:
            return
        self._engine.commit()
        self._next_end = None
        self._live.has_changed(None)
        if self._settles is not None:
            self._settles()
        self._plan_soon()
