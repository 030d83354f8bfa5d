"""A recorded run replayed with its own times: whether decisions agree, and what steps cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from schedlab.experiments.comparing.validate import check_same, recording_of, timeline
from schedlab.experiments.comparing.vllm_recording import Floats, Timeline
from schedlab.experiments.running.backend import SimBackend
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor, Steps, Work
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival

_DECODES = (4, *range(8, 129, 8), 160, 192, 224, 256, 384, 512)
_KINDS = (
    *(f"{a + 1}-{b} decodes" for a, b in zip((0, *_DECODES), _DECODES, strict=False)),
    f"more than {_DECODES[-1]} decodes",
    "a step with prompts",
    "each further prompt in it",
    "1,000 prompt tokens in it",
    "100 decodes in it",
)
_SPREAD_NS = 3_000_000  # recorded times of one step differ by the time it takes to stamp them
_STAMP_NS = 500_000  # a request that waited for a step's end is stamped a little after it
_LEAST, _MOST = 0.5, 1.5  # of the predicted time, else a step is missing or one too many
_NEAR = 0.45  # share of a step within which a recorded boundary is taken for its end
_ROUNDS = 12
_PRIOR_MS = 3.0  # how far off a kind of step is thought to be before anything is seen


class Contradiction(NamedTuple):
    """Recorded times that do not fit the end of the step on which the replay puts them."""

    start_s: float
    """When the step began."""
    requests: tuple[int, ...]
    """Whose first or last token comes at its end, according to the replay."""
    recorded_s: tuple[float, ...]
    """When they came, according to the recording."""


class StepTime(NamedTuple):
    """One step of the replay."""

    start_ns: int
    duration_ns: int
    """Recorded where `num_times` is not zero, else estimated between recorded times."""
    predicted_ns: int
    """What the cost model and the scheduling overhead say."""
    shape: BatchShape
    num_times: int
    """Recorded first and last tokens at its end."""


@dataclass(frozen=True)
class Difference:
    """By how much steps of a kind took longer than predicted.

    Attributes
    ----------
    kind : str
        Steps with so many decodes and nothing else, or what a step with prompts is made of.
    count : float
        Steps, or units of it, between recorded times.
    predicted_ms : float or None
        Mean prediction of such a step; None for a part of a step.
    mean_ms, standard_error_ms : float
        Recorded minus predicted, of one step or unit.
    """

    kind: str
    count: float
    predicted_ms: float | None
    mean_ms: float
    standard_error_ms: float


@dataclass(frozen=True)
class ForcedReplay:
    """What `forced_replay` found.

    Attributes
    ----------
    steps : list of StepTime
        All steps.
    contradictions : list of Contradiction
        Steps on which replay and recording disagree; empty if every decision can be the real one.
    differences : list of Difference
        Cost error by kind of step.
    num_preemptions : int
        Of the replay.
    """

    steps: list[StepTime]
    contradictions: list[Contradiction]
    differences: list[Difference]
    num_preemptions: int

    def stretches(self) -> Floats:
        """Return the stretches between recorded ends of steps.

        Returns
        -------
        ndarray of float64, shape (num_stretches, 3)
            Recorded time and predicted time in milliseconds, and 1 if prompts were computed.
        """
        ends = np.flatnonzero([step.num_times for step in self.steps])
        columns = np.array([
            (s.duration_ns / 1e6, s.predicted_ns / 1e6, bool(s.shape.chunks)) for s in self.steps
        ])  # fmt: skip
        inside = columns[ends[0] + 1 : ends[-1] + 1]
        summed = np.add.reduceat(inside, ends[:-1] - ends[0], axis=0)
        summed[:, 2] = summed[:, 2] > 0
        return np.asarray(summed, dtype=np.float64)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table a forced replay prints: kind, count, predicted, difference."""
        return [
            (
                d.kind,
                f"{d.count:,.0f}" if d.predicted_ms is not None else f"{d.count:,.1f}",
                "" if d.predicted_ms is None else f"{d.predicted_ms:,.2f}",
                f"{d.mean_ms:+.2f} ± {d.standard_error_ms:.2f}",
            )
            for d in self.differences
        ]

    def lines(self) -> list[str]:
        """Return what is printed under it."""
        times = sum(step.num_times for step in self.steps)
        timed = sum(step.num_times > 0 for step in self.steps)
        lines = [
            f"decisions: {times:,} recorded times fall on {timed:,} of {len(self.steps):,} steps; "
            f"{len(self.contradictions)} of these steps contradict the recording; "
            f"preemptions {self.num_preemptions}"
        ]
        for found in self.contradictions[:3]:
            requests = ", ".join(map(str, found.requests))
            ends = ", ".join(f"{t:.3f}" for t in found.recorded_s)
            lines.append(
                f"  step at {found.start_s:.3f} s: tokens of requests {requests} "
                f"were recorded at {ends} s"
            )
        return lines

    def to_data(self) -> dict[str, object]:
        """Return all of it but the steps as plain data."""
        return {
            "num_steps": len(self.steps),
            "num_preemptions": self.num_preemptions,
            "recorded_times": sum(step.num_times for step in self.steps),
            "contradictions": [found._asdict() for found in self.contradictions],
            "differences": [vars(found) for found in self.differences],
        }


def forced_replay(spec: ExperimentSpec) -> ForcedReplay:
    """Replay a recorded run, its clock set by the recording wherever that says anything.

    Parameters
    ----------
    spec : ExperimentSpec
        One point with a recording, as for `validate`.

    Returns
    -------
    ForcedReplay
        Whether the decisions can be the real ones, and the cost error by kind of step.

    Raises
    ------
    SpecError
        As for `validate`.

    Notes
    -----
    Requests come when they were recorded as queued. A step in which, by the replay's decisions, a
    request gets its first or last token ends when that was recorded; another one ends where a
    request was queued or first scheduled nearby, or else after its predicted time. If the decisions
    are the real ones, all recorded times of a step agree (to 3 ms), and the steps since the
    recorded end before it took about as long as predicted (half to one and a half times, or a step
    is missing or one too many). A step where that fails contradicts the recording.

    Between two recorded ends the number of steps of each kind is known, so the cost error by kind
    follows by robust regression (Huber weights; kinds hardly seen are drawn to zero, as by a prior
    of 3 ms). Errors of the cost model can let the replay miscount steps where nothing was recorded
    for long, so replay and regression alternate, each correcting the other, until nothing changes;
    of all rounds the one with the fewest contradictions counts.
    """
    recording = recording_of(spec)
    if spec.engine.data_parallel_size > 1:
        raise SpecError("engine.data_parallel_size: a recording does not say which engine it was")
    correction_ms: Floats = np.zeros(len(_KINDS))
    best: ForcedReplay | None = None
    for _ in range(_ROUNDS):
        steps, contradictions, num_preemptions = _replay(spec, recording, correction_ms)
        parts = np.array([_parts(step.shape) for step in steps])
        mean_ms, standard_error_ms, counts = _fit(steps, parts)
        if best is None or len(contradictions) <= len(best.contradictions):
            found = _differences(steps, parts, mean_ms, standard_error_ms, counts)
            best = ForcedReplay(steps, contradictions, found, num_preemptions)
        if np.allclose(mean_ms, correction_ms, atol=0.01):
            break
        correction_ms = mean_ms
    assert best is not None
    return best


class _RecordedExecutor(SimExecutor):
    """A GPU whose steps end when a recording says so, and are corrected elsewhere."""

    def __init__(
        self,
        pricing: Pricing,
        recording: Timeline,
        correction_ms: Floats,
    ) -> None:
        super().__init__(pricing)
        start_s = recording.queued_s[0]
        self._first_ns = _ns(recording.first_token_s - start_s)
        self._last_ns = _ns(recording.last_token_s - start_s)
        boundaries = {*_ns(recording.queued_s - start_s)}
        if recording.scheduled_s is not None:
            boundaries |= {*_ns(recording.scheduled_s - start_s)}
        self._boundaries_ns = sorted(boundaries)
        self._correction_ms = correction_ms
        self._took_ns = self._expected_ns = 0  # since the last recorded end
        self.steps: list[StepTime] = []
        self.contradictions: list[Contradiction] = []

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        """Run one step to its recorded end, or to the likeliest one."""
        steps = super().execute(work, 1, horizon_ns)
        predicted_ns, now_ns = steps.durations_ns[0], work.now_ns
        ended = [(state.id, self._last_ns[state.id]) for state in steps.finished]
        ended += [
            (state.id, self._first_ns[state.id])
            for state, n in work.plan.chunks
            if state.num_uncomputed_tokens == n and not state.num_output_tokens
        ]
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
            error_ms = float(_parts(work.shape) @ self._correction_ms)
            end_ns = now_ns + max(int(predicted_ns + 1e6 * error_ms), 1)
            end_ns = self._boundary_near(end_ns, _NEAR * predicted_ns)
        duration_ns = max(end_ns - now_ns, 1)
        self._took_ns = 0 if ended else self._took_ns + duration_ns
        self._expected_ns = 0 if ended else self._expected_ns + predicted_ns
        step = StepTime(now_ns, duration_ns, predicted_ns, work.shape, len(ended))
        self.steps.append(step)
        return steps._replace(durations_ns=[duration_ns])

    def _boundary_near(self, at_ns: int, within_ns: float) -> int:
        i = bisect_left(self._boundaries_ns, at_ns)
        near = self._boundaries_ns[max(i - 1, 0) : i + 1]
        found = min(near, key=lambda ns: abs(ns - at_ns), default=at_ns)
        return found if abs(found - at_ns) <= within_ns else at_ns


class _RecordedBackend(SimBackend):
    """The simulation, with requests that come when they were recorded as queued."""

    def __init__(self, executor: _RecordedExecutor, recording: Timeline) -> None:
        super().__init__(executor)
        queued_ns = _ns(recording.queued_s - recording.queued_s[0])
        self._ready_ns = [max(ns - _STAMP_NS, 0) for ns in queued_ns]

    def drive(
        self, engine: Engine, arrivals: Iterable[Arrival], max_concurrency: int | None
    ) -> RunLog:
        """Run the workload to its end."""
        moved = []
        for arrival in arrivals:
            ready_ns = self._ready_ns[arrival.request.id]
            request = replace(arrival.request, arrival_ns=ready_ns)
            moved.append(arrival._replace(request=request, ready_ns=ready_ns))
        moved.sort(key=lambda arrival: (arrival.ready_ns, arrival.request.id))
        return simulate(engine, moved, max_concurrency)

    def describe(self) -> dict[str, object]:
        """Say that the times are recorded ones."""
        return {"clock": "recorded"}


def _replay(
    spec: ExperimentSpec, recording: Timeline, correction_ms: Floats
) -> tuple[list[StepTime], list[Contradiction], int]:
    executors = []

    def opened(pricing: Pricing) -> _RecordedBackend:
        executors.append(_RecordedExecutor(pricing, recording, correction_ms))
        return _RecordedBackend(executors[-1], recording)

    result = run(spec, opened=opened)
    check_same(recording, timeline(result), spec)
    preemptions = int(result.requests["num_preemptions"].sum())
    return executors[0].steps, executors[0].contradictions, preemptions


def _parts(shape: BatchShape) -> Floats:
    """Return how much of each kind a step holds, shape (len(_KINDS),)."""
    parts = np.zeros(len(_KINDS))
    if shape.chunks:
        tokens = sum(q for q, _ in shape.chunks)
        parts[-4:] = 1, len(shape.chunks) - 1, tokens / 1000, shape.num_decodes / 100
    else:
        parts[bisect_left(_DECODES, shape.num_decodes)] = 1
    return parts


def _fit(steps: list[StepTime], parts: Floats) -> tuple[Floats, Floats, Floats]:
    """Return cost error, standard error (ms) and count of each kind, between recorded times."""
    ends = [i for i, step in enumerate(steps) if step.num_times]
    if len(ends) < 2:
        raise SpecError("the recording has too few times to tell steps apart")
    error_ms = np.array([step.duration_ns - step.predicted_ns for step in steps]) / 1e6
    inside = slice(ends[0] + 1, ends[-1] + 1)
    starts = np.array(ends[:-1]) - ends[0]
    counts = np.add.reduceat(parts[inside], starts, axis=0)
    wanted = np.add.reduceat(error_ms[inside], starts)
    weight, scale = np.ones(len(wanted)), _PRIOR_MS
    found: Floats = np.zeros(len(_KINDS))
    for _ in range(30):
        weighted = counts * weight[:, None]
        precision = weighted.T @ weighted + (scale / _PRIOR_MS) ** 2 * np.eye(len(_KINDS))
        found = np.asarray(np.linalg.solve(precision, weighted.T @ (wanted * weight)), np.float64)
        left = np.abs(wanted - counts @ found)
        scale = max(1.4826 * float(np.median(left)), 0.1)
        weight = np.sqrt(1 / np.maximum(left / (1.345 * scale), 1))
    spread = np.sqrt(np.diag(np.linalg.inv(precision))) * scale
    return found, spread, counts.sum(axis=0)


def _differences(
    steps: list[StepTime],
    parts: Floats,
    mean_ms: Floats,
    standard_error_ms: Floats,
    counts: Floats,
) -> list[Difference]:
    predicted_ms = np.array([step.predicted_ns for step in steps]) / 1e6
    found = []
    for i, kind in enumerate(_KINDS):
        if not counts[i]:
            continue
        is_step = i < len(_DECODES) + 2
        mean = float(predicted_ms[parts[:, i] > 0].mean()) if is_step else None
        found.append(
            Difference(kind, float(counts[i]), mean, float(mean_ms[i]), float(standard_error_ms[i]))
        )
    return found


def _ns(seconds: Floats) -> list[int]:
    return [int(value) for value in np.round(seconds * 1e9)]
