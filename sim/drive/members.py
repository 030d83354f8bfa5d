"""The engines of a fleet: which are there, which take requests, and since when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.drive.clock import Clock, Event
from schedlab.sim.drive.engine_state import EngineState, LiveState
from schedlab.sim.record.fleet import Span

if TYPE_CHECKING:
    from schedlab.sim.core.engine import Engine
    from schedlab.sim.drive.lockstep import Lockstep
    from schedlab.sim.drive.pipelined_server import PipelinedServer
    from schedlab.sim.drive.server import Server

Role = Literal["mixed", "prefill", "decode"]


@dataclass(frozen=True)
class Supply:
    """Where fresh engines come from.

    Attributes
    ----------
    new_engine : callable
        Takes the number of a pool and returns an engine of it.
    roles : sequence of {"mixed", "prefill", "decode"}
        Of each pool.
    start_up_ns : sequence of int
        How long an engine of each pool takes to start on devices that are there.
    """

    new_engine: Callable[[int], Engine]
    roles: Sequence[Role]
    start_up_ns: Sequence[int]


class Member:
    """A place in a fleet: one engine, and if it dies another one on the same devices.

    Parameters
    ----------
    clock : Clock
        The time, in ns.
    index : int
        Which place; it is that for the whole run.
    role : {"mixed", "prefill", "decode"}
        What its engines do.
    pool : int
        What kind they are.

    Attributes
    ----------
    engine : Engine
        The engine that is there, or the one that died last.
    server : Server, PipelinedServer or Lockstep
        What drives it.
    live, known : EngineState
        The engine as it is, and as routers know it.
    is_up : bool
        Whether it serves.
    is_draining : bool
        Whether it is sent no more requests, and leaves when it has none.
    num_outages : int
        Reasons for which it is down now.
    comes_back : bool
        Whether it starts when they are gone, or is starting.
    start_up : Event or None
        The end of its start; None if it is not starting.
    slow_by : list of float
        What makes its steps slower now, each by a factor.
    paid, served : list of Span
        When its devices were there, and when it was up.
    """

    def __init__(self, clock: Clock, index: int, role: Role, pool: int) -> None:
        self._clock = clock
        self.index = index
        self.role = role
        self.pool = pool
        self.engine: Engine
        self.server: Server | PipelinedServer | Lockstep
        self.live: LiveState
        self.known: EngineState
        self.is_up = False
        self.is_draining = False
        self.num_outages = 0
        self.comes_back = True
        self.start_up: Event | None = None
        self.slow_by: list[float] = []
        self.paid = [Span(clock.now_ns)]
        self.served: list[Span] = []

    def start(
        self, engine: Engine, live: LiveState, server: Server | PipelinedServer | Lockstep
    ) -> None:
        """Let a fresh engine serve."""
        self.engine = engine
        self.live = self.known = live
        self.server = server
        self.is_up = True
        self.served.append(Span(self._clock.now_ns))

    def keep_pace(self) -> None:
        """Let the steps that have not begun take as long as they do now."""
        assert isinstance(self.engine.executor, SimExecutor)
        self.engine.executor.slowness = prod(self.slow_by, start=1.0)
        self.server.interrupt()

    @property
    def has_requests(self) -> bool:
        """Whether anything of a request is there: it waits, runs, or its KV is not delivered."""
        requests = self.engine.requests
        return bool(self.live.num_in_flight or requests.num_in_flight or requests.handed_over)

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way."""
        return self.live.segment is not None

    @property
    def is_moving(self) -> bool:
        """Whether anything is to happen here: a step ends, or the engine starts again."""
        if self.is_up:
            return self.server.is_moving
        return self.comes_back

    @property
    def is_there(self) -> bool:
        """Whether it serves, or will again."""
        return self.is_up or self.comes_back

    def leave(self, now_ns: int, for_good: bool) -> None:
        """Serve no more; if for good, the devices are gone as well."""
        if self.is_up:
            self.is_up = False
            self.served[-1] = self.served[-1]._replace(until_ns=now_ns)
        if for_good:
            self.comes_back = False
            self.start_up = None
            self.paid[-1] = self.paid[-1]._replace(until_ns=now_ns)
