"""Run the matrix of a regression check, keep what it gave, and judge what has moved since."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from schedlab.experiments.regression.baseline import (
    SHOWN_HASH,
    Baseline,
    MeasuredPoint,
    write_baseline,
)
from schedlab.experiments.regression.matrix import Matrix, MatrixPoint, Tolerance
from schedlab.experiments.sweeps.runs import Runs
from schedlab.sim.errors import SpecError

Status = Literal["same", "better", "worse", "not reproduced", "other question", "new", "gone",
                 "failed"]  # fmt: skip
FAILING: frozenset[Status] = frozenset(
    {"worse", "not reproduced", "other question", "new", "gone", "failed"}
)


@dataclass(frozen=True)
class Outcome:
    """What a matrix gives now.

    Attributes
    ----------
    points : dict of str to Measured
        Those that ran to their end, by key.
    errors : dict of str to str
        Why the others did not.
    seconds : dict of str to float
        How long each took.
    """

    points: dict[str, MeasuredPoint]
    errors: dict[str, str]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Move:
    """A figure that is not what it was.

    Attributes
    ----------
    metric : str
        Which.
    before, now : float
        Kept and new value; of a comparison by tolerance the means over the seeds.
    allowed : float
        How far it may move; 0 in an exact comparison.
    better : bool
        Whether it moved the good way.
    seed : int or None
        The run, in an exact comparison.
    """

    metric: str
    before: float
    now: float
    allowed: float
    better: bool
    seed: int | None = None

    @property
    def change(self) -> float:
        """Change as a share of the kept value; infinite from 0, NaN from or to nothing."""
        difference = self.now - self.before
        return difference / abs(self.before) if self.before else math.copysign(math.inf, difference)


@dataclass
class CaseVerdict:
    """The verdict on one policy on one workload, all seeds together.

    Attributes
    ----------
    workload, policy : str
        Labels of the matrix.
    status : Status
        Which of them it is; those in `FAILING` fail the check.
    exact : bool
        Whether every seed was compared to the last bit.
    moves : list of Move
        What moved further than it may, the worst first.
    num_within : int
        Figures that moved, but no further than they may.
    detail : str
        What else there is to say.
    seconds : float
        How long its runs took.
    """

    workload: str
    policy: str
    status: Status = "same"
    exact: bool = False
    moves: list[Move] = field(default_factory=list)
    num_within: int = 0
    detail: str = ""
    seconds: float = 0.0


def measure(matrix: Matrix, runs: Runs) -> Outcome:
    """Run every point of a matrix.

    Parameters
    ----------
    matrix : Matrix
        What to run.
    runs : Runs
        Runs it.

    Returns
    -------
    Outcome
        An error of one point does not keep the others from running.
    """
    jobs = [runs.store.job(point.spec, point.key) for point in matrix.points]
    # A bug in what is checked is a finding of the check.
    failed = {done.job.content_hash: done for done in runs.run(jobs)}
    outcome = Outcome({}, {}, {})
    for point, job in zip(matrix.points, jobs, strict=True):
        if done := failed.get(job.content_hash):
            outcome.errors[point.key] = str(done.error)
            outcome.seconds[point.key] = done.seconds
            continue
        found = runs.store.load(job)
        outcome.seconds[point.key] = found.seconds
        outcome.points[point.key] = MeasuredPoint(
            question=point.question[:SHOWN_HASH],
            version=job.content_hash[:SHOWN_HASH],
            metrics={name: found.metrics[name] for name in matrix.metrics},
            requests_sha256=found.requests_sha256[:SHOWN_HASH],
        )
    return outcome


def compare(matrix: Matrix, baseline: Baseline, outcome: Outcome) -> list[CaseVerdict]:
    """Judge what a matrix gives now by what was kept.

    Parameters
    ----------
    matrix : Matrix
        The matrix of both.
    baseline : Baseline
        What was kept.
    outcome : Outcome
        What it gives now.

    Returns
    -------
    list of CaseVerdict
        One a policy and workload: those of the matrix in its order, then those only kept.

    Notes
    -----
    A point whose `MeasuredPoint.version` is the kept one must give the same to the last bit: any
    difference, good or bad, is "not reproduced". Otherwise the means over the seeds are compared:
    ``|now - kept| <= max(absolute, relative * |kept|)`` holds, or the metric is worse or better.
    """
    cases: dict[tuple[str, str], list[MatrixPoint]] = {}
    for point in matrix.points:
        cases.setdefault((point.workload, point.policy), []).append(point)
    found = [_judged(group, matrix.metrics, baseline, outcome) for group in cases.values()]
    gone: dict[tuple[str, str], list[str]] = {}
    for key in sorted(set(baseline.points) - {point.key for point in matrix.points}):
        workload, policy, seed = key.split("/")
        gone.setdefault((workload, policy), []).append(seed)
    for (workload, policy), seeds in gone.items():
        detail = f"kept for seed {', '.join(seeds)}, but the matrix does not ask for it any more"
        found.append(CaseVerdict(workload, policy, "gone", detail=detail))
    return found


def keep(folder: Path, outcome: Outcome) -> None:
    """Write what a matrix gives as its baseline: sorted, a line a point.

    Raises
    ------
    SpecError
        If a point did not run to its end: a baseline must not be less than its matrix.
    """
    if outcome.errors:
        key, error = next(iter(outcome.errors.items()))
        raise SpecError(
            f"nothing kept: {len(outcome.errors)} of {len(outcome.seconds)} points failed, "
            f"first {key}: {error}"
        )
    write_baseline(folder, outcome.points)


def _judged(
    group: Sequence[MatrixPoint],
    metrics: Mapping[str, Tolerance],
    baseline: Baseline,
    outcome: Outcome,
) -> CaseVerdict:
    """Return the verdict on the seeds of one policy on one workload."""
    case = CaseVerdict(group[0].workload, group[0].policy)
    case.seconds = sum(outcome.seconds[point.key] for point in group)
    for point in group:
        if point.key in outcome.errors:
            case.status, case.detail = "failed", f"seed {point.seed}: {outcome.errors[point.key]}"
            return case
    without = [str(point.seed) for point in group if point.key not in baseline.points]
    if without:
        case.status = "new"
        case.detail = f"no baseline for seed {', '.join(without)}"
        return case
    pairs = {p.seed: (baseline.points[p.key], outcome.points[p.key]) for p in group}
    if any(kept.question != now.question for kept, now in pairs.values()):
        case.status = "other question"
        case.detail = "the matrix, or a file it names, asks for another run than the one kept"
        return case
    if any(set(kept.metrics) != set(metrics) for kept, _ in pairs.values()):
        case.status = "other question"
        case.detail = "the matrix compares other metrics than those kept"
        return case
    case.exact = all(kept.version == now.version for kept, now in pairs.values())
    if case.exact:
        _judge_exactly(case, metrics, pairs)
    else:
        _judge_by_tolerance(case, metrics, list(pairs.values()))
    return case


def _judge_exactly(
    case: CaseVerdict,
    metrics: Mapping[str, Tolerance],
    pairs: Mapping[int, tuple[MeasuredPoint, MeasuredPoint]],
) -> None:
    for seed, (kept, now) in pairs.items():
        if kept.requests_sha256 != now.requests_sha256 or not _equal(kept.metrics, now.metrics):
            case.status = "not reproduced"
            case.detail = "the same program and question gave another result"
        for name, tolerance in metrics.items():
            before, after = kept.metrics[name], now.metrics[name]
            if not _equal({name: before}, {name: after}):
                better = _is_better(tolerance, before, after)
                case.moves.append(Move(name, before, after, 0.0, better, seed))


def _judge_by_tolerance(
    case: CaseVerdict,
    metrics: Mapping[str, Tolerance],
    pairs: Sequence[tuple[MeasuredPoint, MeasuredPoint]],
) -> None:
    for name, tolerance in metrics.items():
        before = sum(kept.metrics[name] for kept, _ in pairs) / len(pairs)
        after = sum(now.metrics[name] for _, now in pairs) / len(pairs)
        if _equal({name: before}, {name: after}):
            continue
        allowed = tolerance.allowed(before)
        if abs(after - before) <= allowed:
            case.num_within += 1
        else:
            better = _is_better(tolerance, before, after)
            case.moves.append(Move(name, before, after, allowed, better))
    if case.moves:
        case.moves.sort(key=lambda move: (move.better, -_severity(move)))
        case.status = "better" if case.moves[0].better else "worse"


def _is_better(tolerance: Tolerance, before: float, after: float) -> bool:
    """Say whether a value moved the good way; to or from nothing is never good."""
    return after < before if tolerance.better == "lower" else after > before


def _severity(move: Move) -> float:
    difference = abs(move.now - move.before)
    return math.inf if math.isnan(difference) or not move.allowed else difference / move.allowed


def _equal(kept: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return all(
        kept[name] == now[name] or (math.isnan(kept[name]) and math.isnan(now[name]))
        for name in kept
    )
