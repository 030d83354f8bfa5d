"""Engines behind a router, and the clock on which everything happens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import simpy

from schedlab.sim.core.pipelined_engine import PipelinedEngine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.session_table import SessionTable
from schedlab.sim.drive.clock import COMES, FOLLOWS, NUM_PLACES, REPORTS, Clock, Event
from schedlab.sim.drive.collector import collector_off
from schedlab.sim.drive.engine_state import EngineState, LiveState, ReportedState, note_sent
from schedlab.sim.drive.lockstep import JointStep, Lockstep
from schedlab.sim.drive.members import Member, Role, Supply
from schedlab.sim.drive.offer import Offer
from schedlab.sim.drive.pipelined_server import PipelinedServer
from schedlab.sim.drive.processes import Processes
from schedlab.sim.drive.retries import Retries, as_received
from schedlab.sim.drive.router import Router, chosen, tell_gone
from schedlab.sim.drive.server import Server
from schedlab.sim.drive.sessions import open_source
from schedlab.sim.kv.tier import SharedTier
from schedlab.sim.record.rows import CommonRows
from schedlab.sim.record.spool import SpoolFile
from schedlab.sim.request import RequestState

if TYPE_CHECKING:
    from schedlab.sim.core.engine import Engine
    from schedlab.sim.record.log import RunLog
    from schedlab.sim.request import Arrival, Request

Shortcut = Callable[["Request"], Member | None]
"""Says which engine serves a request whole; None if its router is to choose."""


class Watcher(Protocol):
    """What moves KV from engine to engine, and so must know what becomes of them."""

    @property
    def is_moving(self) -> bool:
        """Whether KV is on its way."""

    def settle(self, changed: set[int]) -> None:
        """Do what follows, between steps of these engines, from all that happened at an instant."""

    def started(self, member: Member) -> None:
        """Learn that an engine is up: fresh, and empty."""

    def died(self, member: Member) -> list[RequestState]:
        """Learn that an engine is dead; return whose KV was on its way from it, and is lost."""


class Fleet:
    """Engines behind a router.

    Parameters
    ----------
    engines : sequence of Engine
        Those that are there from the start, fresh.
    roles : sequence of {"mixed", "prefill", "decode"}
        What each does.
    router : Router
        Says which engine a request goes to.
    is_closed : bool
        Whether clients send because of answers.
    staleness_ns : int
        How often engines report to routers; 0 = they are seen as they are.
    lockstep : callable, optional
        How long a joint step takes, if engines begin and end every step together.
    pools : sequence of int, optional
        Of which kind each engine is; each of its own, if not given.
    supply : Supply, optional
        Where fresh engines come from.
    settles : bool
        Whether more follows from the end of a step than what clients do.

    Attributes
    ----------
    clock : Clock
        The time.
    processes : Processes
        What happens to the fleet by itself.
    members : list of Member
        All places; those that are left for good stay in the list.
    logs : list of (int, RunLog)
        The log of every engine that ever was, and its place.
    retries : Retries
        What becomes of requests that lose their engine, or find none.
    watchers : list of Watcher
        Who is told what becomes of engines.
    may_grow : callable
        Whether a new engine of some role may still come, which nobody has asked for yet.
    on_added : callable, optional
        Called with every place that is added.
    stays_local : callable, optional
        Says which requests are served whole though prompts have engines of their own, and by whom.
    on_request_gone : callable, optional
        Called with the id of a request that is about to be answered or turned away.
    heard_of_came, heard_of_gone : list of list
        Of those who want to know: each list is told what came, and what was answered or turned
        away and when.
    arrivals : dict of int to Arrival
        Requests that came and were neither answered nor rejected, by id, if more follows from the
        end of a step.
    sessions : SessionTable
        What is known of all sessions.
    num_pending : int
        Requests that came and were neither answered nor rejected.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        roles: Sequence[Role],
        router: Router,
        is_closed: bool,
        staleness_ns: int = 0,
        lockstep: JointStep | None = None,
        pools: Sequence[int] | None = None,
        supply: Supply | None = None,
        settles: bool = False,
    ) -> None:
        self.clock = Clock()
        self.processes = Processes(self.clock)
        self.retries = Retries(self)
        self.watchers: list[Watcher] = []
        self.logs: list[tuple[int, RunLog]] = []
        self.may_grow: Callable[[Sequence[Role]], bool] = lambda _: False
        self.on_added: Callable[[Member], None] | None = None
        self.stays_local: Shortcut | None = None
        self.on_request_gone: Callable[[int], None] | None = None
        self.heard_of_came: list[list[Request]] = []
        self.heard_of_gone: list[list[tuple[RequestState, int]]] = []
        self.arrivals: dict[int, Arrival] = {}
        self.sessions = SessionTable()  # a session may go from engine to engine
        self.num_pending = 0
        self._sends = self._send  # bound once, not for each request
        self._router = router
        self._is_closed = is_closed
        self._staleness_ns = staleness_ns
        self._supply = supply
        self._rows = CommonRows(SpoolFile())
        self._settles = settles
        tiers = engines[0].config.kv_tiers
        self._shared = SharedTier(tiers[-1]) if tiers and tiers[-1].is_shared else None
        self._takers: list[Member] = []
        self._known_takers: Sequence[EngineState] = ()
        self._changed: set[int] = set()
        pools = range(len(engines)) if pools is None else pools
        self.members = [
            Member(self.clock, index, role, pool)
            for index, (role, pool) in enumerate(zip(roles, pools, strict=True))
        ]
        lives = [LiveState(index, engine, self.clock) for index, engine in enumerate(engines)]
        joint = None if lockstep is None else Lockstep(self.clock, engines, lives, lockstep)
        for member, engine, live in zip(self.members, engines, lives, strict=True):
            self._start(member, engine, live, joint)

    def run(self, arrivals: Iterable[Arrival], max_concurrency: int | None) -> None:
        """Let everything happen, to the end."""
        self._source = open_source(
            arrivals, self._submit, self._cancel, self.sessions.forget, max_concurrency
        )
        self._next_call_ns = FOREVER
        self._call_clients()
        if self._staleness_ns:
            self.processes.process(self._report())
        with collector_off():
            self.clock.run()  # until nothing is left to happen

    @property
    def now_ns(self) -> int:
        """The time."""
        return self.clock.now_ns

    @property
    def has_work(self) -> bool:
        """Whether a request is to come, or is there and something will happen to it.

        What happens every so often ends with it: else a run in which nothing else can happen would
        go on for ever.
        """
        if self._source.next_ns < FOREVER:
            return True
        return self.num_pending > 0 and (
            any(member.is_moving for member in self.members)
            or any(watcher.is_moving for watcher in self.watchers)
            or (self.retries.num_parked > 0 and self.expects("mixed", "prefill"))
        )

    # -- engines -----------------------------------------------------------------------------------

    def serving(self, *roles: Role) -> list[Member]:
        """Return who serves in one of some roles and is sent requests, in order."""
        return [m for m in self.members if m.is_up and not m.is_draining and m.role in roles]

    def expects(self, *roles: Role) -> bool:
        """Whether an engine of one of some roles serves, or ever will."""
        return self.may_grow(roles) or any(
            m.is_there and not m.is_draining and m.role in roles for m in self.members
        )

    def add(self, pool: int) -> None:
        """Take devices for one more engine; it serves when it has started."""
        assert self._supply is not None
        member = Member(self.clock, len(self.members), self._supply.roles[pool], pool)
        self.members.append(member)
        self._start_up(member)
        if self.on_added is not None:
            self.on_added(member)

    def drain(self, member: Member) -> None:
        """Send no more requests to an engine; it leaves when it has none."""
        member.is_draining = True
        self._find_takers()
        self.settle_soon(member)

    def keep(self, member: Member) -> None:
        """Take back `drain`, of an engine that has not left yet."""
        member.is_draining = False
        self._find_takers()
        self.settle_soon(member)
        self.retries.send_parked()

    def fail(self, member: Member, comes_back: bool) -> None:
        """Let an engine die, with all that is in its memory; its requests are sent again."""
        member.num_outages += 1
        member.start_up = None
        if not comes_back:
            member.comes_back = False
        if member.is_up:
            left = member.engine.die(self.now_ns)
            member.server.stop()
            member.leave(self.now_ns, for_good=False)
            self._find_takers()
            tell_gone(self._router, member.index)
            for watcher in self.watchers:
                left += watcher.died(member)
            left.sort(key=lambda state: (state.request.arrival_ns, state.id))
            for state in left:
                self.retries.lost(state, member)
        self._leave_if_drained(member)
        self.retries.give_up_if_nobody_comes()

    def repair(self, member: Member) -> None:
        """Take back one `fail`: an engine that has no reason left to be down starts."""
        member.num_outages -= 1
        if not member.num_outages and member.comes_back:
            self._start_up(member)

    def set_pace(self, member: Member, slow_by: Sequence[float]) -> None:
        """Let steps of an engine take longer from now on, by a product of factors."""
        member.slow_by = list(slow_by)
        if member.is_up:
            member.keep_pace()

    def start_up_ns(self, member: Member) -> int:
        """Return how long an engine takes to start there."""
        assert self._supply is not None
        return self._supply.start_up_ns[member.pool]

    def _start_up(self, member: Member) -> None:
        wait_ns = self.start_up_ns(member)
        member.start_up = self.clock.at(wait_ns, COMES, partial(self._is_started, member))

    def _is_started(self, member: Member, event: Event) -> None:
        if event is not member.start_up:
            return
        assert self._supply is not None
        member.start_up = None
        engine = self._supply.new_engine(member.pool)
        self._start(member, engine, LiveState(member.index, engine, self.clock))
        for watcher in self.watchers:
            watcher.started(member)
        self.retries.send_parked()

    def _start(
        self, member: Member, engine: Engine, live: LiveState, joint: Lockstep | None = None
    ) -> None:
        settles = partial(self.settle_soon, member) if self._settles else None
        place = None
        if self._shared is not None:
            place = member.index % NUM_PLACES
            tiers = engine.config.kv_tiers
            if tiers and tiers[-1].is_shared:  # who goes on with prompts of others looks nothing up
                assert engine.requests.tiers is not None
                engine.requests.tiers.share(self._shared, member.index)
        server: Server | PipelinedServer | Lockstep
        if joint is not None:
            server = joint
        elif isinstance(engine, PipelinedEngine):
            server = PipelinedServer(self.clock, engine, live, settles)
        else:
            server = Server(self.clock, engine, live, settles, self._is_closed, place)
        member.start(engine, live, server)
        if self._staleness_ns:
            member.known = ReportedState(member.live)
        engine.cache_is_watched = self._router.looks_at_caches
        engine.requests.sessions = self.sessions
        engine.requests.on_gone = partial(self._is_gone, member)
        engine.log.write_to(self._rows)
        self.logs.append((member.index, engine.log))
        if member.slow_by:
            member.keep_pace()
        self._find_takers()

    def _find_takers(self) -> None:
        self._takers = self.serving("mixed", "prefill")
        self._known_takers = Offer([member.known for member in self._takers])

    def settle_soon(self, member: Member) -> None:
        """Look, after all steps that end at this instant, what follows for an engine."""
        if not self._changed:
            self.clock.at(0, FOLLOWS, self._settle)
        self._changed.add(member.index)

    def _settle(self, _: Event) -> None:
        changed, self._changed = self._changed, set()
        for watcher in self.watchers:
            watcher.settle(changed)
        for index in sorted(changed):
            self._leave_if_drained(self.members[index])

    def _leave_if_drained(self, member: Member) -> None:
        if member.is_draining and not (member.is_up and member.has_requests):
            if member.is_up:
                member.server.stop()
            member.leave(self.now_ns, for_good=True)

    # -- requests ----------------------------------------------------------------------------------

    def _call_clients(self, happened: Event | None = None) -> None:
        """Let clients send when the next request comes."""
        next_ns = self._source.next_ns
        if next_ns < self._next_call_ns:
            self._next_call_ns = next_ns
            wait_ns = next_ns - self.now_ns
            self.clock.at(wait_ns, COMES if wait_ns else FOLLOWS, self._sends, 0, happened)

    def _send(self, event: Event) -> None:
        now_ns = self.now_ns
        if now_ns >= self._next_call_ns:
            self._next_call_ns = FOREVER
        self._source.send_until(now_ns)
        self._call_clients(event)

    def _submit(self, arrival: Arrival, now_ns: int) -> None:
        self.num_pending += 1
        if self._settles:
            self.arrivals[arrival.request.id] = arrival
        for heard in self.heard_of_came:
            heard.append(arrival.request)
        member = self._choose(arrival.request)
        if member is None:
            self.retries.park(RequestState(arrival.request))
            return
        member.engine.submit(arrival, now_ns)
        member.server.wake()

    def _cancel(self, arrival: Arrival, now_ns: int) -> None:
        """Let the first engine's log have a request that goes to none."""
        self.members[0].engine.requests.cancel(arrival, now_ns)

    def resume(self, state: RequestState) -> bool:
        """Send a request that lost its engine to another one; False if there is none."""
        member = self._choose(state.request)
        if member is None:
            return False
        requests, arrival = member.engine.requests, self.arrivals[state.id]
        requests.resume(as_received(state, requests.config), arrival, self.now_ns)
        member.server.wake()
        return True

    def _choose(self, request: Request) -> Member | None:
        member = None if self.stays_local is None else self.stays_local(request)
        if member is None:
            if not self._known_takers:
                return None
            member = self.members[chosen(self._router, request, self._known_takers)]
        note_sent(request, member.live, member.known)
        return member

    def _is_gone(self, member: Member, state: RequestState, now_ns: int) -> None:
        """Learn of an answer, or of a refusal."""
        member.live.count(state.request, -1)
        self.request_is_gone(state, now_ns)

    def request_is_gone(self, state: RequestState, now_ns: int) -> None:
        """Count a request as answered or turned away: a client of a closed loop may send."""
        self.num_pending -= 1
        if self.on_request_gone is not None:
            self.on_request_gone(state.id)
        self.arrivals.pop(state.id, None)
        for heard in self.heard_of_gone:
            heard.append((state, now_ns))
        if self._is_closed:
            self._source.request_is_gone(state, now_ns)
            self._call_clients()

    # -- reports -----------------------------------------------------------------------------------

    def _report(self) -> Generator[simpy.Event, None, None]:
        """Let the engines report to the router, as long as there is anything to route."""
        every_ns = self._staleness_ns
        while True:
            for member in self.members:
                if member.is_up:
                    member.known = ReportedState(member.live)
            self._find_takers()
            if not self.has_work:
                return
            wait_ns = every_ns
            if not self.num_pending:
                # Nothing changes until the next request comes.
                wait_ns *= max((self._source.next_ns - self.now_ns) // every_ns, 1)
            yield self.processes.wait(wait_ns, REPORTS)
