"""The driver of several engines: a router, and a SimPy process for each engine.

Engines run on their own, or every step together (in lockstep), as those must that share experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence

import simpy
from simpy.events import EventPriority

from schedlab.sim.core.audit import stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.step import Segment
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.arrivals import Source
from schedlab.sim.drive.collector import collector_off
from schedlab.sim.drive.router import Router
from schedlab.sim.record.cluster_log import ClusterLog
from schedlab.sim.request import Arrival

_LATE = EventPriority(2)

Process = Generator[simpy.Event, object, None]


JointStep = Callable[[Sequence[Segment]], int]
"""How long (ns) steps take that engines begin together; one segment an engine with work."""


def simulate_cluster(
    engines: Sequence[Engine],
    router: Router,
    arrivals: Iterable[Arrival],
    max_concurrency: int | None = None,
    lockstep: JointStep | None = None,
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

    Returns
    -------
    ClusterLog
        The logs of all engines as one.

    Raises
    ------
    Stalled
        If requests wait and nothing can ever happen.
    ValueError
        If `arrivals` go back in time.

    Notes
    -----
    Engines on their own do not know when the next request comes to them. Each begins the steps
    that its plan holds for, and those not yet started are cut off when a request is routed to it
    (`Engine.cut`); the result is that of stepping one by one.
    """
    clock = simpy.Environment()
    views = [engine.view for engine in engines]
    barrier = None if lockstep is None else _Barrier(clock, len(engines), lockstep)
    servers = [_Server(clock, engine, barrier) for engine in engines]

    def submit(arrival: Arrival, now_ns: int) -> None:
        server = servers[router.route(arrival.request, views)]
        server.is_sent_a_request()
        server.engine.submit(arrival, now_ns)

    source = Source(arrivals, submit, max_concurrency)
    clients = _Clients(clock, source)
    if max_concurrency is not None:
        for engine in engines:
            engine.requests.on_gone = clients.request_is_gone
    for server in servers:
        clock.process(server.run())
    clock.process(clients.run())
    with collector_off():
        clock.run()  # until nothing is left to happen
    for engine in engines:
        if engine.requests.num_in_flight:
            raise stalled(engine, "the policy waits and nothing is left to happen")
    return ClusterLog([engine.log for engine in engines])


class _Turn(simpy.Event):
    """A timeout that is processed after everything else at its instant.

    An engine plans when its turn comes: then whoever arrives at that very instant has arrived.
    """

    def __init__(self, clock: simpy.Environment, delay_ns: int) -> None:
        super().__init__(clock)
        self._ok = True
        self._value = None
        clock.schedule(self, _LATE, delay_ns)


class _Clients:
    """The process that sends the workload."""

    def __init__(self, clock: simpy.Environment, source: Source) -> None:
        self._clock = clock
        self._source = source
        self._answer: simpy.Event | None = None

    def request_is_gone(self, now_ns: int) -> None:
        """Learn of an answer, or of a refusal: a client of a closed loop may send."""
        self._source.request_is_gone(now_ns)
        if self._answer is not None:
            answer, self._answer = self._answer, None
            answer.succeed()

    def run(self) -> Process:
        """Send everything, in order."""
        clock, source = self._clock, self._source
        while True:
            answer = self._answer = clock.event()
            if source.next_ns < FOREVER:
                yield clock.timeout(source.next_ns - int(clock.now)) | answer
            else:
                yield answer
            source.send_until(int(clock.now))


class _Server:
    """The process of one engine."""

    def __init__(self, clock: simpy.Environment, engine: Engine, barrier: _Barrier | None) -> None:
        self.engine = engine
        self._clock = clock
        self._barrier = barrier
        self._request: simpy.Event | None = None

    def is_sent_a_request(self) -> None:
        """Wake up: a request is submitted at this very instant."""
        if self._request is not None:
            request, self._request = self._request, None
            request.succeed()
        if self._barrier is not None:
            self._barrier.is_sent_a_request()

    def run(self) -> Process:
        """Serve as long as anything can happen."""
        serve_once = self._serve if self._barrier is None else self._serve_together
        while True:
            # Whoever arrives at this very instant, or is sent because of an answer given now, has
            # arrived when the next step is planned.
            yield _Turn(self._clock, 0)
            yield from serve_once()

    def _serve(self) -> Process:
        """Plan, and live through a segment, or wait for something to do."""
        clock, engine = self._clock, self.engine
        segment = engine.begin(int(clock.now))
        if segment is None:
            request = self._request = clock.event()
            wait_until_ns = engine.wait_until_ns
            if wait_until_ns < FOREVER:
                yield _Turn(clock, wait_until_ns - int(clock.now)) | request
            else:
                yield request
            return
        end = _Turn(clock, segment.end_ns - int(clock.now))
        while not end.processed:
            request = self._request = clock.event()
            yield end | request
            if request.triggered:
                end = _Turn(clock, engine.cut(int(clock.now)) - int(clock.now))
        self._request = None
        engine.commit()

    def _serve_together(self) -> Process:
        """Plan a step, meet the others, and live through the joint step."""
        barrier, now_ns = self._barrier, int(self._clock.now)
        assert barrier is not None
        segment = self.engine.begin(now_ns, now_ns + 1)
        yield barrier.meet(segment, self.engine.wait_until_ns)
        if segment is not None:
            self.engine.commit()


class _Barrier:
    """Where engines meet that run every step together."""

    def __init__(
        self, clock: simpy.Environment, num_engines: int, joint_step_ns: JointStep
    ) -> None:
        self._clock = clock
        self._num_engines = num_engines
        self._joint_step_ns = joint_step_ns
        self._segments: list[Segment | None] = []
        self._wait_until_ns = FOREVER
        self._end: simpy.Event | None = None
        self._idle: simpy.Event | None = None
        self._request_came = False

    def meet(self, segment: Segment | None, wait_until_ns: int) -> simpy.Event:
        """Bring the step that an engine has planned; return the end of the joint one.

        Parameters
        ----------
        segment : Segment or None
            None if the engine has nothing to do.
        wait_until_ns : int
            Until when its policy waits then.
        """
        if self._end is None:
            self._end = self._clock.event()
            self._request_came = False
        end = self._end
        self._segments.append(segment)
        if segment is None:
            self._wait_until_ns = min(self._wait_until_ns, wait_until_ns)
        if len(self._segments) == self._num_engines:
            self._clock.process(self._step_together())
        return end

    def is_sent_a_request(self) -> None:
        """End a wait in which no engine has anything to do, or see to it that none begins."""
        self._request_came = True
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle.succeed()

    def _step_together(self) -> Process:
        clock, end = self._clock, self._end
        assert end is not None
        active = [segment for segment in self._segments if segment is not None]
        wait_until_ns = self._wait_until_ns
        self._segments, self._end, self._wait_until_ns = [], None, FOREVER
        if active:
            duration_ns = self._joint_step_ns(active)
            for segment in active:
                segment.steps = segment.steps._replace(durations_ns=[duration_ns])
            yield _Turn(clock, duration_ns)
        elif not self._request_came:
            idle = self._idle = clock.event()
            if wait_until_ns < FOREVER:
                yield _Turn(clock, wait_until_ns - int(clock.now)) | idle
            else:
                yield idle
            self._idle = None
        end.succeed()


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
