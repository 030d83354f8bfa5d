"""The driver of several engines: a router in front, and every engine on one clock of SimPy.

Engines run on their own, or every step together (in lockstep), as those must that share experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

from schedlab.sim.core.audit import stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.step import Segment
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.arrivals import Source
from schedlab.sim.drive.collector import collector_off
from schedlab.sim.drive.engine_state import EngineState, LiveState, ReportedState
from schedlab.sim.drive.router import Router
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import PolicyError
from schedlab.sim.record.cluster_log import ClusterLog
from schedlab.sim.request import Arrival, Request, RequestState

_LATE = EventPriority(2)
"""An engine plans, and its steps end, after everything else at that instant: then whoever arrives
at that very instant has arrived."""

JointStep = Callable[[Sequence[Segment]], int]
"""How long (ns) steps take that engines begin together; one segment an engine with work."""


def simulate_cluster(
    engines: Sequence[Engine],
    router: Router,
    arrivals: Iterable[Arrival],
    max_concurrency: int | None = None,
    lockstep: JointStep | None = None,
    staleness_ns: int = 0,
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
        Closed loop: at most so many requests in flight on all engines together; see `simulate`.
    lockstep : callable, optional
        If given, the engines begin and end every step together, and it says how long the joint
        step takes (see `joint_steps_ns`). An engine without work waits for the others' step to end
        before it begins one.
    staleness_ns : int
        How often engines report to the router; 0 = it sees them as they are.

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
        If `arrivals` go back in time.

    Notes
    -----
    Engines on their own do not know when the next request comes to them. Each begins the steps
    that its plan holds for, and those not yet started are cut off when a request is routed to it
    (`Engine.cut`); the result is that of stepping one by one. A router that does not look at
    engines has chosen before anything runs: then each engine is run by itself, with its share.
    """
    if not (router.looks_at_engines or max_concurrency or lockstep):
        return _one_by_one(engines, router, arrivals)
    fleet = _Fleet(engines, router, max_concurrency is not None, lockstep, staleness_ns)
    fleet.run(arrivals, max_concurrency)
    for engine in engines:
        if engine.requests.num_in_flight:
            raise stalled(engine, "the policy waits and nothing is left to happen")
    return ClusterLog([engine.log for engine in engines])


def _one_by_one(
    engines: Sequence[Engine], router: Router, arrivals: Iterable[Arrival]
) -> ClusterLog:
    """Run each engine with its share of the requests."""
    states = [LiveState(i, engine, _nothing_runs) for i, engine in enumerate(engines)]
    shares: list[list[Arrival]] = [[] for _ in engines]
    for arrival in arrivals:
        shares[_chosen(router, arrival.request, states)].append(arrival)
    return ClusterLog([simulate(e, share) for e, share in zip(engines, shares, strict=True)])


def _nothing_runs() -> tuple[None, int]:
    return None, 0


def _chosen(router: Router, request: Request, states: Sequence[EngineState]) -> int:
    """Ask a router, and check its answer."""
    try:
        # What a router returns may be anything.
        place: object = router.route(request, states)
    except Exception as error:
        raise PolicyError(
            f"{_of(router, request)}: route() raised {type(error).__name__}: {error}"
        ) from error
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < len(states):
        raise PolicyError(
            f"{_of(router, request)}: route() returned {place!r}, and there are engines 0 to "
            f"{len(states) - 1}"
        )
    return states[place].index


def _of(router: Router, request: Request) -> str:
    return f"router {type(router).__name__}, request {request.id}"


class _Fleet:
    """Engines behind a router, and the clock on which everything happens."""

    def __init__(
        self,
        engines: Sequence[Engine],
        router: Router,
        is_closed: bool,
        lockstep: JointStep | None,
        staleness_ns: int,
    ) -> None:
        self._clock = simpy.Environment()
        self._is_closed = is_closed
        self._engines = engines
        self._router = router
        self._staleness_ns = staleness_ns
        self._servers: list[_Server | _Lockstep]
        if lockstep is None:
            self._servers = [_Server(self._clock, engine, is_closed) for engine in engines]
        else:
            self._servers = [_Lockstep(self._clock, engines, lockstep)] * len(engines)
        self._live = [
            LiveState(i, engine, partial(self._under_way, i)) for i, engine in enumerate(engines)
        ]
        self._known: Sequence[EngineState] = self._live
        for engine, state in zip(engines, self._live, strict=True):
            engine.cache_is_watched = router.looks_at_caches
            engine.requests.on_gone = partial(self._is_gone, state)

    def run(self, arrivals: Iterable[Arrival], max_concurrency: int | None) -> None:
        """Let everything happen, to the end."""
        self._source = Source(arrivals, self._submit, max_concurrency)
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
            _at(self._clock, next_ns - int(self._clock.now), NORMAL, self._send)

    def _send(self, _: simpy.Event) -> None:
        now_ns = int(self._clock.now)
        if now_ns >= self._next_call_ns:
            self._next_call_ns = FOREVER
        self._source.send_until(now_ns)
        self._call_clients()

    def _submit(self, arrival: Arrival, now_ns: int) -> None:
        request = arrival.request
        index = _chosen(self._router, request, self._known)
        state = self._known[index]
        if isinstance(state, ReportedState):
            state.is_sent(request)
        self._live[index].count(request, 1)
        self._engines[index].submit(arrival, now_ns)
        self._servers[index].is_sent_a_request()

    def _is_gone(self, engine: LiveState, state: RequestState, now_ns: int) -> None:
        """Learn of an answer, or of a refusal: a client of a closed loop may send."""
        engine.count(state.request, -1)
        if self._is_closed:
            self._source.request_is_gone(state, now_ns)
            self._call_clients()

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
            told = _at(clock, wait_ns, URGENT, _do_nothing)
            yield told


def _at(
    clock: simpy.Environment,
    delay_ns: int,
    priority: EventPriority,
    do: Callable[[simpy.Event], None],
) -> simpy.Event:
    """Let something happen, before or after other things at that instant."""
    event = simpy.Event(clock)
    event._ok = True
    event._value = None
    event.callbacks.append(do)
    clock.schedule(event, priority, delay_ns)
    return event


def _do_nothing(_: simpy.Event) -> None:
    pass


class _Server:
    """An engine on its own."""

    def __init__(self, clock: simpy.Environment, engine: Engine, is_closed: bool) -> None:
        self._clock = clock
        self._engine = engine
        self._is_closed = is_closed
        self._segment: Segment | None = None
        self._next: simpy.Event | None = None  # the only one that still counts

    def segment(self, _: int) -> Segment | None:
        """Return what runs now."""
        return self._segment

    def is_sent_a_request(self) -> None:
        """Plan anew as soon as the step under way ends; now, if there is none."""
        if self._segment is None:
            self._plan_soon()
        elif len(self._segment.steps.durations_ns) > 1:
            now_ns, end_ns = int(self._clock.now), self._segment.end_ns
            cut_ns = self._engine.cut(now_ns)
            if cut_ns < end_ns:
                self._next = _at(self._clock, cut_ns - now_ns, _LATE, self._end)

    def _plan_soon(self) -> None:
        """Plan when everything else has happened at this instant."""
        self._next = _at(self._clock, 0, _LATE, self._plan)

    def _plan(self, event: simpy.Event) -> None:
        if event is self._next:
            self._plan_now()

    def _plan_now(self) -> None:
        now_ns, engine = int(self._clock.now), self._engine
        segment = self._segment = engine.begin(now_ns)
        if segment is not None:
            self._next = _at(self._clock, segment.end_ns - now_ns, _LATE, self._end)
        elif engine.wait_until_ns < FOREVER:
            self._next = _at(self._clock, engine.wait_until_ns - now_ns, _LATE, self._plan)
        else:
            self._next = None

    def _end(self, event: simpy.Event) -> None:
        if event is self._next:
            self._segment = None
            self._engine.commit()
            if self._is_closed:  # whoever is sent because of an answer given now is to have come
                self._plan_soon()
            else:
                self._plan_now()


class _Lockstep:
    """Engines that begin and end every step together."""

    def __init__(
        self, clock: simpy.Environment, engines: Sequence[Engine], joint_step_ns: JointStep
    ) -> None:
        self._clock = clock
        self._engines = engines
        self._joint_step_ns = joint_step_ns
        self._segments: list[Segment | None] = [None] * len(engines)
        self._is_under_way = False
        self._next: simpy.Event | None = None

    def segment(self, index: int) -> Segment | None:
        """Return what an engine runs now."""
        return self._segments[index]

    def is_sent_a_request(self) -> None:
        """Plan now, if no step is under way."""
        if not self._is_under_way:
            self._plan_soon()

    def _plan_soon(self) -> None:
        self._next = _at(self._clock, 0, _LATE, self._plan)

    def _plan(self, event: simpy.Event) -> None:
        if event is not self._next:
            return
        now_ns = int(self._clock.now)
        self._segments = [engine.begin(now_ns, now_ns + 1) for engine in self._engines]
        active = [segment for segment in self._segments if segment is not None]
        self._is_under_way = bool(active)
        if active:
            duration_ns = self._joint_step_ns(active)
            for segment in active:
                segment.steps = segment.steps._replace(durations_ns=[duration_ns])
            self._next = _at(self._clock, duration_ns, _LATE, self._end)
            return
        wait_until_ns = min(engine.wait_until_ns for engine in self._engines)
        self._next = None
        if wait_until_ns < FOREVER:
            self._next = _at(self._clock, wait_until_ns - now_ns, _LATE, self._plan)

    def _end(self, _: simpy.Event) -> None:
        segments, self._segments = self._segments, [None] * len(self._engines)
        self._is_under_way = False
        for engine, segment in zip(self._engines, segments, strict=True):
            if segment is not None:
                engine.commit()
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
    step_ns = pricing.cost_model.step_ns
    tokens = sum(segment.shape.num_new_tokens for segment in segments)
    for segment in segments:
        pricing.meet(segment.shape, tokens)
    return [
        segment.steps.durations_ns[0]
        - step_ns(segment.shape)[0]
        + step_ns(segment.shape._replace(gathered_tokens=tokens))[0]
        for segment in segments
    ]
