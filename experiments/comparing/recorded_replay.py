"""A run replayed with the times of a recording, for one engine or several."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedlab.experiments.comparing.recorded_engines import RecordedRouter
from schedlab.experiments.comparing.validate import check_same, timeline
from schedlab.experiments.comparing.vllm_recording import Floats, Timeline
from schedlab.experiments.running.backend import SimBackend, Task
from schedlab.experiments.running.fleet import Kind
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor, SimExecutor, Steps, Work
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.lockstep import Stepping, joint_steps_ns
from schedlab.sim.record.cluster_log import ClusterLog
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import RequestState

ErrorMs = Callable[[BatchShape], float]

_SPREAD_NS = 3_000_000  # recorded times of one step differ by the time it takes to stamp them
_STAMP_NS = 500_000  # a request that waited for a step's end is stamped a little after it
_LEAST, _MOST = 0.5, 1.5  # of the predicted time, else a step is missing or one too many
_NEAR = 0.45  # share of a step within which a recorded boundary is taken for its end


class Contradiction(NamedTuple):
    """Recorded times that do not fit the end of the step on which the replay puts them."""

    start_s: float
    """When the step began."""
    requests: tuple[int, ...]
    """Whose first or last token comes at its end, according to the replay."""
    recorded_s: tuple[float, ...]
    """When they came, according to the recording."""


class ReplayedStep(NamedTuple):
    """One step of the replay."""

    start_ns: int
    duration_ns: int
    """Recorded where `num_times` is not zero, else estimated between recorded times."""
    predicted_ns: int
    """What the cost model and the scheduling overhead say."""
    shape: BatchShape
    """Of several engines in lockstep that of the slowest."""
    num_times: int
    """Recorded first and last tokens at its end."""


class _Clock:
    """Says when steps end: when a recording says so, and as corrected elsewhere."""

    def __init__(self, recording: Timeline, error_ms: ErrorMs) -> None:
        start_s = recording.queued_s[0]
        self._first_ns = _ns(recording.first_token_s - start_s)
        self._last_ns = _ns(recording.last_token_s - start_s)
        boundaries = {*_ns(recording.queued_s - start_s)}
        if recording.scheduled_s is not None:
            boundaries |= {*_ns(recording.scheduled_s - start_s)}
        self._boundaries_ns = sorted(boundaries)
        self._error_ms = error_ms
        self._took_ns = self._expected_ns = 0  # since the last recorded end
        self.steps: list[ReplayedStep] = []
        self.contradictions: list[Contradiction] = []

    def recorded(self, plan: BatchPlan, finished: Iterable[RequestState]) -> list[tuple[int, int]]:
        """Return requests, and when the first or last token was recorded that a step gives them."""
        ended = [(state.id, self._last_ns[state.id]) for state in finished]
        ended += [
            (state.id, self._first_ns[state.id])
            for state, n in plan.chunks
            if state.num_uncomputed_tokens == n and not state.num_output_tokens
        ]
        return ended

    def duration_ns(
        self, now_ns: int, predicted_ns: int, shape: BatchShape, ended: list[tuple[int, int]]
    ) -> int:
        """Return how long a step takes, to its recorded end or to the likeliest one."""
        if ended:
            times = sorted(ns for _, ns in ended)
            end_ns = times[len(times) // 2]
            took_ns = self._took_ns + end_ns - now_ns
            share = took_ns / (self._expected_ns + predicted_ns)
            if times[-1] - times[0] > _SPREAD_NS or not _LEAST <= share <= _MOST:
                requests = tuple(i for i, _ in ended)
                recorded = tuple(ns / 1e9 for _, ns in ended)
                self.contradictions.append(Contradiction(now_ns / 1e9, requests, recorded))
        else:
            end_ns = now_ns + max(int(predicted_ns + 1e6 * self._error_ms(shape)), 1)
            end_ns = self._boundary_near(end_ns, _NEAR * predicted_ns)
        duration_ns = max(end_ns - now_ns, 1)
        self._took_ns = 0 if ended else self._took_ns + duration_ns
        self._expected_ns = 0 if ended else self._expected_ns + predicted_ns
        self.steps.append(ReplayedStep(now_ns, duration_ns, predicted_ns, shape, len(ended)))
        return duration_ns

    def _boundary_near(self, at_ns: int, within_ns: float) -> int:
        i = bisect_left(self._boundaries_ns, at_ns)
        near = self._boundaries_ns[max(i - 1, 0) : i + 1]
        found = min(near, key=lambda ns: abs(ns - at_ns), default=at_ns)
        return found if abs(found - at_ns) <= within_ns else at_ns


class _Executor(SimExecutor):
    """A GPU on the clock of a recording."""

    def __init__(self, pricing: Pricing, clock: _Clock) -> None:
        super().__init__(pricing)
        self._clock = clock

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        """Run one step to its recorded end, or to the likeliest one."""
        steps = super().execute(work, 1, horizon_ns)
        ended = self._clock.recorded(work.plan, steps.finished)
        took_ns = self._clock.duration_ns(work.now_ns, steps.durations_ns[0], work.shape, ended)
        steps.durations_ns = [took_ns]
        return steps


class _Backend(SimBackend):
    """The simulation, with requests that come when they were recorded as queued."""

    def __init__(
        self, pricing: Pricing, recording: Timeline, error_ms: ErrorMs, num_engines: int
    ) -> None:
        self.clock = _Clock(recording, error_ms)
        self.recorded = RecordedRouter(recording, num_engines) if num_engines > 1 else None
        super().__init__(pricing, router=self.recorded)
        queued_ns = _ns(recording.queued_s - recording.queued_s[0])
        self._ready_ns = [max(ns - _STAMP_NS, 0) for ns in queued_ns]

    def executors(self, kinds: Sequence[Kind]) -> list[Executor]:
        """Return a GPU for each engine; of several, the joint step goes by the recording."""
        if sum(kind.num_engines for kind in kinds) > 1:
            return super().executors(kinds)
        return [_Executor(self._pricing, self.clock)]

    def drive(
        self, engines: Sequence[Engine], task: Task, new_engine: Callable[[int], Engine]
    ) -> RunLog | ClusterLog:
        """Run the workload to its end."""
        moved = []
        for arrival in task.arrivals:
            ready_ns = self._ready_ns[arrival.request.id]
            request = replace(arrival.request, arrival_ns=ready_ns)
            # What a session waited for is in its recorded times.
            moved.append(replace(arrival, request=request, ready_ns=ready_ns, turn=None))
        moved.sort(key=lambda arrival: (arrival.ready_ns, arrival.request.id))
        return super().drive(engines, replace(task, arrivals=moved), new_engine)

    def _joint_step_ns(self, stepping: Sequence[Stepping], idle: Sequence[Engine]) -> int:
        clock, segments = self.clock, [segment for _, segment in stepping]
        predicted_ns = joint_steps_ns(stepping, idle)
        slowest = int(np.argmax(predicted_ns))
        ended = [e for s in segments for e in clock.recorded(s.plan, s.steps.finished)]
        shape = segments[slowest].shape
        return clock.duration_ns(segments[0].start_ns, predicted_ns[slowest], shape, ended)

    def describe(self) -> dict[str, object]:
        """Say that the times are recorded ones."""
        return {"clock": "recorded"}


class Replayed(NamedTuple):
    """A run that went by a recording."""

    steps: list[ReplayedStep]
    contradictions: list[Contradiction]
    num_preemptions: int
    router: RecordedRouter | None
    """What told several engines apart; None of one engine."""


def replay(spec: ExperimentSpec, recording: Timeline, error_ms: ErrorMs) -> Replayed:
    """Run an experiment with the times of a recording.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    recording : Timeline
        Of the same requests.
    error_ms : callable
        What a step is thought to take more than predicted, used where nothing was recorded.

    Raises
    ------
    SpecError
        If the recording is of other requests, or not all of them finish.
    """
    backends = []

    def opened(pricing: Pricing) -> _Backend:
        size = spec.engine.data_parallel_size
        backends.append(_Backend(pricing, recording, error_ms, size))
        return backends[-1]

    result = run(spec, opened=opened)
    check_same(recording, timeline(result), spec)
    (backend,) = backends
    preemptions = int(result.requests["num_preemptions"].sum())
    clock = backend.clock
    return Replayed(clock.steps, clock.contradictions, preemptions, backend.recorded)


def _ns(seconds: Floats) -> list[int]:
    return [int(value) for value in np.round(seconds * 1e9)]
