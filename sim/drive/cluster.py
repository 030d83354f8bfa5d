"""The driver of several engines: a router in front, and every engine on one clock of SimPy.

Engines run on their own, or every step together (in lockstep), as those must that share experts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from functools import partial

import simpy

from schedlab.sim.core.audit import stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.session_table import SessionTable
from schedlab.sim.core.step import Segment
from schedlab.sim.drive.collector import collector_off
from schedlab.sim.drive.engine_state import EngineState, LiveState, ReportedState, note_sent
from schedlab.sim.drive.handover import Disaggregation, Handover
from schedlab.sim.drive.instant import COMES, FOLLOWS, REPORTS, at
from schedlab.sim.drive.lockstep import JointStep, Lockstep
from schedlab.sim.drive.router import Router, chosen
from schedlab.sim.drive.server import Server
from schedlab.sim.drive.sessions import open_source, peeked
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.record.cluster_log import ClusterLog, Transfer
from schedlab.sim.request import Arrival, RequestState


def simulate_cluster(
    engines: Sequence[Engine],
    router: Router,
    arrivals: Iterable[Arrival],
    max_concurrency: int | None = None,
    lockstep: JointStep | None = None,
    staleness_ns: int = 0,
    disaggregation: Disaggregation | None = None,
) -> ClusterLog:
    """Run a workload to its end on several engines.

    Parameters
    ----------
    engines : sequence of Engine
        Fresh engines.
    router : Router
        Says which engine a request goes to when it arrives.
    arrivals : iterable of Arrival
        In order of `ready_ns`; read lazily, one ahead.
    max_concurrency : int, optional
        Closed loop: at most so many requests (or sessions) in flight on all engines together; see
        `simulate`.
    lockstep : callable, optional
        If given, the engines begin and end every step together, and it says how long the joint
        step takes (see `joint_steps_ns`). An engine without work waits for the others' step to end
        before it begins one.
    staleness_ns : int
        How often engines report to the router; 0 = it sees them as they are.
    disaggregation : Disaggregation, optional
        Which engines compute prompts alone, and which go on from there; those that compute prompts
        come first.

    Returns
    -------
    ClusterLog
        The logs of all engines as one.

    Raises
    ------
    Stalled
        If requests wait and nothing can ever happen.
    PolicyError
        If the router fails, or names no engine.
    ValueError
        If `arrivals` go back in time, or engines that hand requests over run in lockstep.

    Notes
    -----
    Engines on their own do not know when the next request comes to them. Each begins the steps
    that its plan holds for, and those not yet started are cut off when a request is routed to it
    (`Engine.cut`); the result is that of stepping one by one. A router that does not look at
    engines has chosen before anything runs: then each engine is run by itself, with its share.
    """
    has_sessions, arrivals = peeked(arrivals)
    is_closed = max_concurrency is not None or has_sessions
    if not (router.looks_at_engines or is_closed or lockstep or disaggregation):
        return _one_by_one(engines, router, arrivals)
    if lockstep is not None and disaggregation is not None:
        raise ValueError("engines in lockstep do not hand requests over")
    fleet = _Fleet(engines, router, is_closed, lockstep, staleness_ns, disaggregation)
    fleet.run(arrivals, max_concurrency)
    for engine in engines:
        if engine.requests.num_in_flight:
            raise stalled(engine, "the policy waits and nothing is left to happen")
        engine.requests.expire(FOREVER)  # nobody comes for what is kept
    return ClusterLog([engine.log for engine in engines], fleet.transfers)


def _one_by_one(
    engines: Sequence[Engine], router: Router, arrivals: Iterable[Arrival]
) -> ClusterLog:
    """Run each engine with its share of the requests."""
    states = [LiveState(i, engine, _nothing_runs) for i, engine in enumerate(engines)]
    shares: list[list[Arrival]] = [[] for _ in engines]
    for arrival in arrivals:
        shares[chosen(router, arrival.request, states)].append(arrival)
    return ClusterLog([simulate(e, share) for e, share in zip(engines, shares, strict=True)])


def _nothing_runs() -> tuple[None, int]:
    return None, 0


class _Fleet:
    """Engines behind a router, and the clock on which everything happens."""

    def __init__(
        self,
        engines: Sequence[Engine],
        router: Router,
        is_closed: bool,
        lockstep: JointStep | None,
        staleness_ns: int,
        disaggregation: Disaggregation | None,
    ) -> None:
        self._clock = simpy.Environment()
        self._is_closed = is_closed
        self._engines = engines
        self._router = router
        self._staleness_ns = staleness_ns
        own = [
            Server(
                self._clock,
                engine,
                None if disaggregation is None else partial(self._settle, i),
                is_closed,
            )
            for i, engine in enumerate(engines)
        ]
        self._servers: Sequence[Server | Lockstep] = own
        if lockstep is not None:
            self._servers = [Lockstep(self._clock, engines, lockstep)] * len(engines)
        self._live = [
            LiveState(i, engine, partial(self._under_way, i)) for i, engine in enumerate(engines)
        ]
        self._known: Sequence[EngineState] = self._live
        self._sessions = SessionTable()  # a session may go from engine to engine
        for engine, state in zip(engines, self._live, strict=True):
            engine.cache_is_watched = router.looks_at_caches
            engine.requests.sessions = self._sessions
            engine.requests.on_gone = partial(self._is_gone, state)
        self._takes_requests = list(range(len(engines)))
        self._handover: Handover | None = None
        if disaggregation is not None:
            self._handover = Handover(
                self._clock, engines, own, self._live, lambda: self._known, disaggregation
            )
            self._takes_requests = self._handover.takes_requests

    @property
    def transfers(self) -> list[Transfer]:
        """KV that went from engine to engine."""
        return [] if self._handover is None else self._handover.transfers

    def run(self, arrivals: Iterable[Arrival], max_concurrency: int | None) -> None:
        """Let everything happen, to the end."""
        self._source = open_source(
            arrivals, self._submit, self._cancel, self._sessions.forget, max_concurrency
        )
        self._next_call_ns = FOREVER
        self._call_clients()
        if self._staleness_ns:
            self._clock.process(self._report())
        with collector_off():
            self._clock.run()  # until nothing is left to happen

    def _under_way(self, index: int) -> tuple[Segment | None, int]:
        return self._servers[index].segment(index), int(self._clock.now)

    # -- clients -------------------------------------------------------------------------------

    def _call_clients(self) -> None:
        """Let clients send when the next request comes."""
        next_ns = self._source.next_ns
        if next_ns < self._next_call_ns:
            self._next_call_ns = next_ns
            wait_ns = next_ns - int(self._clock.now)
            at(self._clock, wait_ns, COMES if wait_ns else FOLLOWS, self._send)

    def _send(self, _: simpy.Event) -> None:
        now_ns = int(self._clock.now)
        if now_ns >= self._next_call_ns:
            self._next_call_ns = FOREVER
        self._source.send_until(now_ns)
        self._call_clients()

    def _submit(self, arrival: Arrival, now_ns: int) -> None:
        request = arrival.request
        index = chosen(self._router, request, [self._known[i] for i in self._takes_requests])
        note_sent(request, self._live[index], self._known[index])
        if self._handover is not None:
            self._handover.expect(arrival, index)
        self._engines[index].submit(arrival, now_ns)
        self._servers[index].wake()

    def _cancel(self, arrival: Arrival, now_ns: int) -> None:
        """Let the first engine's log have a request that goes to none."""
        self._engines[0].requests.cancel(arrival, now_ns)

    def _is_gone(self, engine: LiveState, state: RequestState, now_ns: int) -> None:
        """Learn of an answer, or of a refusal: a client of a closed loop may send."""
        engine.count(state.request, -1)
        if self._is_closed:
            self._source.request_is_gone(state, now_ns)
            self._call_clients()

    def _settle(self, index: int) -> None:
        if self._handover is not None:
            self._handover.settle_soon(index)

    # -- reports -------------------------------------------------------------------------------

    def _report(self) -> Generator[simpy.Event, None, None]:
        """Let the engines report to the router, as long as there is anything to route."""
        clock, every_ns = self._clock, self._staleness_ns
        while True:
            self._known = [ReportedState(state) for state in self._live]
            wait_ns = every_ns
            if not any(state.num_in_flight for state in self._live):
                if self._source.next_ns >= FOREVER:
                    return
                # Nothing changes until the next request comes.
                wait_ns *= max((self._source.next_ns - int(clock.now)) // every_ns, 1)
            yield at(clock, wait_ns, REPORTS)
