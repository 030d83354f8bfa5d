"""A recorded run replayed with its own times: whether decisions agree, and what steps cost."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import numpy as np

from schedlab.experiments.comparing.recorded_engines import RecordedRouter
from schedlab.experiments.comparing.recorded_replay import Contradiction, ReplayedStep, replay
from schedlab.experiments.comparing.validate import recording_of
from schedlab.experiments.comparing.vllm_recording import Floats
from schedlab.experiments.specification.deployment import runs_in_lockstep
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError

_DECODES = (4, *range(8, 129, 8), 160, 192, 224, 256, 384, 512)
_KINDS = (
    *(f"{a + 1}-{b} decodes" for a, b in zip((0, *_DECODES), _DECODES, strict=False)),
    f"more than {_DECODES[-1]} decodes",
    "a step with prompts",
    "each further prompt in it",
    "1,000 prompt tokens in it",
    "100 decodes in it",
)
_ROUNDS = 12
_PRIOR_MS = 3.0  # how far off a kind of step is thought to be before anything is seen


@dataclass(frozen=True)
class StepExcess:
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
    steps : list of ReplayedStep
        All steps.
    contradictions : list of Contradiction
        Steps on which replay and recording disagree; empty if every decision can be the real one.
    differences : list of StepExcess
        Cost error by kind of step.
    num_preemptions : int
        Of the replay.
    router : RecordedRouter or None
        What told several engines apart; None of one engine.
    """

    steps: list[ReplayedStep]
    contradictions: list[Contradiction]
    differences: list[StepExcess]
    num_preemptions: int
    router: RecordedRouter | None = None

    def stretches(self) -> Floats:
        """Return the stretches between recorded ends of steps.

        Returns
        -------
        ndarray of float64, shape (num_stretches, 3)
            Recorded time and predicted time in milliseconds, and 1 if prompts were computed.
        """
        columns = np.array([
            (s.duration_ns / 1e6, s.predicted_ns / 1e6, bool(s.shape.chunks)) for s in self.steps
        ])  # fmt: skip
        summed = _between_ends(self.steps, columns)
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
        if self.router is not None:
            lines.append(
                f"engines: vLLM's router placed {self.router.num_asked:,} requests, the others "
                f"follow from equal times; {self.router.num_doubtful:,} pairs do not fit"
            )
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
            **self._routed(),
            "recorded_times": sum(step.num_times for step in self.steps),
            "contradictions": [found._asdict() for found in self.contradictions],
            "differences": [vars(found) for found in self.differences],
        }

    def _routed(self) -> dict[str, int]:
        if self.router is None:
            return {}
        return {
            "requests_placed_by_load": self.router.num_asked,
            "doubtful_pairs": self.router.num_doubtful,
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

    Of several engines a recording says by the times of tokens who shared one, and vLLM's router is
    asked for the others (see `RecordedRouter`). Where it answers otherwise than the real one did,
    whose counts are stale, steps are contradicted that no scheduler is to blame for. In lockstep
    a joint step ends when the tokens of all engines were recorded, and its error is counted by the
    batch of the slowest engine.
    """
    recording = recording_of(spec)
    engine = spec.engine
    if engine.data_parallel_size > 1 and not runs_in_lockstep(spec):
        raise SpecError(
            "engine.data_parallel_lockstep: engines on their own seldom end a step together, so a "
            "recording does not say which engine a request was on"
        )
    correction_ms: Floats = np.zeros(len(_KINDS))
    best: ForcedReplay | None = None
    for _ in range(_ROUNDS):
        steps, contradictions, num_preemptions, router = replay(
            spec, recording, partial(_error_ms, correction_ms)
        )
        parts = np.array([_parts(step.shape) for step in steps])
        mean_ms, standard_error_ms, counts = _fit(steps, parts)
        if best is None or len(contradictions) <= len(best.contradictions):
            found = _differences(steps, parts, mean_ms, standard_error_ms, counts)
            best = ForcedReplay(steps, contradictions, found, num_preemptions, router)
        if np.allclose(mean_ms, correction_ms, atol=0.01):
            break
        correction_ms = mean_ms
    assert best is not None
    return best


def _parts(shape: BatchShape) -> Floats:
    """Return how much of each kind a step holds, shape (len(_KINDS),)."""
    parts = np.zeros(len(_KINDS))
    if shape.chunks:
        tokens = sum(q for q, _ in shape.chunks)
        parts[-4:] = 1, len(shape.chunks) - 1, tokens / 1000, shape.num_decodes / 100
    else:
        parts[bisect_left(_DECODES, shape.num_decodes)] = 1
    return parts


def _error_ms(correction_ms: Floats, shape: BatchShape) -> float:
    return float(_parts(shape) @ correction_ms)


def _fit(steps: list[ReplayedStep], parts: Floats) -> tuple[Floats, Floats, Floats]:
    """Return cost error, standard error (ms) and count of each kind, between recorded times."""
    error_ms = np.array([step.duration_ns - step.predicted_ns for step in steps]) / 1e6
    counts = _between_ends(steps, parts)
    wanted = _between_ends(steps, error_ms)
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


def _between_ends(steps: list[ReplayedStep], values: Floats) -> Floats:
    """Sum values of steps over the stretches between recorded ends."""
    ends = np.flatnonzero([step.num_times for step in steps])
    if len(ends) < 2:
        raise SpecError("the recording has too few times to tell steps apart")
    inside = values[ends[0] + 1 : ends[-1] + 1]
    return np.asarray(np.add.reduceat(inside, ends[:-1] - ends[0], axis=0), dtype=np.float64)


def _differences(
    steps: list[ReplayedStep],
    parts: Floats,
    mean_ms: Floats,
    standard_error_ms: Floats,
    counts: Floats,
) -> list[StepExcess]:
    predicted_ms = np.array([step.predicted_ns for step in steps]) / 1e6
    found = []
    for i, kind in enumerate(_KINDS):
        if not counts[i]:
            continue
        is_step = i < len(_DECODES) + 2
        mean = float(predicted_ms[parts[:, i] > 0].mean()) if is_step else None
        found.append(
            StepExcess(kind, float(counts[i]), mean, float(mean_ms[i]), float(standard_error_ms[i]))
        )
    return found
