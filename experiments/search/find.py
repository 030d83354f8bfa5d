"""The largest, or least, value of a key within constraints.

E.g. the highest rate that meets a latency target, or the fewest engines that do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from schedlab.experiments.analysis.rate_curves import SATURATED, is_saturated
from schedlab.experiments.results.tables import Row
from schedlab.experiments.running.workload import is_too_short
from schedlab.experiments.search.bracket import Bracket, Probe, Search, bracket
from schedlab.experiments.search.constraints import (
    Constraint,
    Metrics,
    constraints_of,
    label_of,
    untold,
    with_values,
)
from schedlab.experiments.search.integers import takes_integers
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.search import Find
from schedlab.experiments.specification.sweep import Point, points
from schedlab.experiments.specification.swept import swept_keys
from schedlab.experiments.statistics import (
    LEAST_SEEDS,
    Estimate,
    corrected,
    estimate,
    paired_change,
    verdict,
)
from schedlab.experiments.sweeps.jobs import Done
from schedlab.experiments.sweeps.runs import Runs, check
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.text import percent

_LENGTH = "workload.num_requests"
_RIPPLE = 0.01
"""A share of a metric by which it may go the wrong way without a remark."""

_BOUNDS = {
    "at least": "no constraint breaks up to the largest value tried",
    "below": "a constraint breaks at the smallest value tried already",
    "at most": "no constraint breaks down to the smallest value tried",
    "above": "a constraint breaks at the largest value tried still",
}

_MOST_UNSURE = 0.05
"""The share by which an answer may move at most and have settled, however wide its interval."""

_WIDEST = 0.1
"""The share of an answer that half its interval may be; a wider one asks for longer runs."""

MOST_DOUBLINGS = 4
"""Of the length of runs, until an answer no longer depends on it."""

_CANNOT_RUN = "cannot run: "

_LONGER = f"{_LENGTH}={{}}"
"""How an experiment asks for runs of so many requests."""


@dataclass(frozen=True)
class Found:
    """What a search came to at one setting of the sweep.

    Attributes
    ----------
    label : str
        The setting.
    brackets : tuple of Bracket
        One a replication, each searched with its own seed.
    metrics : tuple of mapping
        Metrics of each replication at its answer.
    remarks : tuple of str
        What a reader of the answer must know.
    error : str
        Why there is no answer, where a run of this setting failed; then there are no brackets.
    num_requests : int or None
        Requests of a run behind the answer; None for a whole trace.
    settled : bool or None
        Whether it stayed when runs became twice as long, with an interval that is narrow enough and
        five seeds or more, and no longer run failed; None if that was not tried.
    """

    label: str
    brackets: tuple[Bracket, ...]
    metrics: tuple[Metrics, ...]
    remarks: tuple[str, ...]
    error: str = ""
    num_requests: int | None = None
    settled: bool | None = None

    @property
    def values(self) -> list[float]:
        """The answer of each replication."""
        return [one.value for one in self.brackets]

    @property
    def value(self) -> Estimate:
        """Mean of the answers, and half its 95 % confidence interval."""
        return estimate(self.values)

    @property
    def bound(self) -> str:
        """As `Bracket.bound`, if the answer of a replication lies beyond what was tried."""
        return next((one.bound for one in self.brackets if one.bound), "")


def find(spec: ExperimentSpec, runs: Runs) -> list[Found]:
    """Search the largest (or least) value within the constraints, for every setting of the sweep.

    Parameters
    ----------
    spec : ExperimentSpec
        An experiment with a `find` section.
    runs : Runs
        Runs what is asked.

    Returns
    -------
    list of Found
        One a setting. Each replication is searched alone, with its seed at every value (common
        random numbers), so that the spread of the answers is the uncertainty of the answer.

    Raises
    ------
    SpecError
        If there is no such section, or a value of the range is not allowed.
    SchedlabError
        If a run fails.
    """
    asked = spec.find
    if asked is None:
        raise SpecError("find: is required here, e.g. max workload.request_rate subject to ...")
    length = spec.workload.num_requests
    is_searched = any(_LENGTH in swept_keys(key) for key in (*spec.sweep, asked.key))
    if length is None or is_searched or not asked.settle:
        return find_all(points(spec), asked, runs)
    return settled(lambda n: points(with_values(spec, {_LENGTH: n})), length, asked, runs)


def find_all(
    todo: Sequence[Point],
    asked: Find,
    runs: Runs,
    near: Mapping[str, Sequence[float]] | None = None,
) -> list[Found]:
    """Search at several points at the same time.

    Parameters
    ----------
    todo : sequence of Point
        Settings with their replications.
    asked : Find
        What is searched.
    runs : Runs
        Runs what is asked.
    near : mapping of str to sequence of float, optional
        Label of a setting to where the answer of each replication is expected.

    Returns
    -------
    list of Found
        One a setting, in order. A setting of which a run fails has no answer, and does not keep
        the others from theirs.

    Raises
    ------
    SchedlabError
        If a run of every setting fails.
    """
    found, failed = find_each(todo, asked, runs, near)
    if len(failed) == len(found):
        check(failed)
    return found


def find_each(
    todo: Sequence[Point],
    asked: Find,
    runs: Runs,
    near: Mapping[str, Sequence[float]] | None = None,
) -> tuple[list[Found], list[Done]]:
    """Search as `find_all`, and raise no error though a run of every setting fails.

    Returns
    -------
    list of Found
        One a setting, in order.
    list of Done
        The first failure of each setting that has one.
    """
    constraints = constraints_of(asked.at_most, asked.at_least)
    groups: dict[Setting, list[int]] = {}
    for i, point in enumerate(todo):
        groups.setdefault(_setting(point), []).append(i)
    brackets, failed = _search_all(todo, asked, constraints, runs, near or {})
    answered = [i for i in range(len(todo)) if _setting(todo[i]) not in failed]
    answers = [_point(todo[i], asked, brackets[i].value) for i in answered]
    at_answer = dict(zip(answered, (point.metrics for point in runs.points(answers)), strict=True))
    found = []
    for setting, members in groups.items():
        first = todo[members[0]]
        length = first.spec.workload.num_requests
        if setting in failed:
            error = f"{_CANNOT_RUN}{failed[setting].error}"
            found.append(Found(first.label, (), (), (), error, length))
            continue
        of = tuple(brackets[i] for i in members)
        metrics = tuple(at_answer[i] for i in members)
        remarks = _remarks(constraints, of, metrics, is_part=first.spec.measure is not None)
        found.append(Found(first.label, of, metrics, tuple(remarks), "", length))
    return found, list(failed.values())


def settled(
    todo: Callable[[int | None], Sequence[Point]],
    length: int | None,
    asked: Find,
    runs: Runs,
    longer: str = _LONGER,
) -> list[Found]:
    """Search, and again with twice the requests, until no answer moves; say how they moved.

    With five seeds or more also until no half interval is more than a tenth of its answer; fewer
    seeds have wide intervals however long they run.

    Parameters
    ----------
    todo : callable
        Returns the points with so many requests each.
    length : int or None
        Requests of the first search; None for a whole trace, which is searched once.
    asked : Find
        What is searched; answers that move by no more than its tolerance, or than half their
        own interval, stay.
    runs : Runs
        Runs what is asked.
    longer : str
        As of `told_way`.

    Returns
    -------
    list of Found
        Those of the longest runs, with a remark on the way there.
    """
    if length is not None:
        runs.stage(_round(1, length))
    ways = [[one] for one in find_all(todo(length), asked, runs)]
    ended: dict[int, str] = {}
    for doubling in range(MOST_DOUBLINGS):
        going = [i for i, way in enumerate(ways) if not way[-1].error and i not in ended]
        if length is None or not any(_is_answer(ways[i][-1]) for i in going):
            break
        length *= 2
        runs.stage(_round(2 + doubling, length))
        again = _longer(todo, length, [ways[i][-1] for i in going], asked, runs)
        for i, one in zip(going, again, strict=True):
            if isinstance(one, str):
                ended[i] = one
            else:
                ways[i].append(one)
        pairs = [ways[i][-2:] for i in going if i not in ended]
        if all(_suffices(one, other, asked.tolerance) for one, other in pairs):
            break
    return [
        _with_its_way(way, asked.tolerance, longer, ended.get(i, "")) for i, way in enumerate(ways)
    ]


def _round(number: int, length: int) -> str:
    """Say which search of several this is; fewer may do."""
    return f"round {number} of at most {1 + MOST_DOUBLINGS}, {length:,} requests a run"


def _longer(
    todo: Callable[[int | None], Sequence[Point]],
    length: int,
    before: Sequence[Found],
    asked: Find,
    runs: Runs,
) -> list[Found | str]:
    """Search settings again near their answers; say why, where a run of so many requests fails."""
    labels = {one.label for one in before}
    reached = {one.label: one.values for one in before if _is_answer(one)}
    try:
        again = [point for point in todo(length) if point.label in labels]
        found, _ = find_each(again, asked, runs, reached)
    except SchedlabError as error:  # no such experiment, or workers that raise
        return [str(error)] * len(before)
    return [one.error.removeprefix(_CANNOT_RUN) or one for one in found]


def _is_answer(one: Found) -> bool:
    return not one.error and not one.bound


def _suffices(one: Found, other: Found, tolerance: float) -> bool:
    """Say whether runs are long enough; where there is no answer, nothing moved."""
    if not (_is_answer(one) and _is_answer(other)):
        return True
    return suffices(one.value, other.value, tolerance, len(other.brackets))


def _with_its_way(way: Sequence[Found], tolerance: float, longer: str, failed: str) -> Found:
    """Return the last answer of a setting with how it depends on the length of a run.

    A run that failed makes it doubtful, unless only the trace is not so long.
    """
    last = way[-1]
    is_doubtful = bool(failed) and not is_too_short(failed)
    if not is_doubtful and (len(way) == 1 or not _is_answer(last)):
        return last
    path = [(one.num_requests, one.value) for one in way]
    num_seeds = len(last.brackets)
    told = told_way(path, tolerance, num_seeds, longer, failed if is_doubtful else "")
    settled = not is_doubtful and num_seeds >= LEAST_SEEDS and _suffices(way[-2], last, tolerance)
    return replace(last, remarks=(told, *last.remarks), settled=settled)


def stays(before: Estimate, after: Estimate, tolerance: float) -> bool:
    """Say whether twice the requests moved a mean by no more than a share, or than its interval.

    Half an interval, that is, and 5 % at most: a wide one says that runs are too short.
    """
    if before.mean == 0.0:
        return after.mean == 0.0
    moved = abs(after.mean / before.mean - 1.0)
    return moved <= max(tolerance, min(_unsure(after), _MOST_UNSURE))


def suffices(before: Estimate, after: Estimate, tolerance: float, num_seeds: int) -> bool:
    """Say whether a mean stayed and longer runs are not worth it.

    They are while half its interval is more than a tenth of it, and there are seeds enough for that
    to tell of the runs.
    """
    is_wide = num_seeds >= LEAST_SEEDS and _unsure(after) > _WIDEST
    return stays(before, after, tolerance) and not is_wide


def _unsure(value: Estimate) -> float:
    return (value.half_width or 0.0) / abs(value.mean) if value.mean else 0.0


def told_way(
    path: Sequence[tuple[int | None, Estimate]],
    tolerance: float,
    num_seeds: int,
    longer: str = _LONGER,
    failed: str = "",
) -> str:
    """Say how an answer depends on the length of a run, and whether it has settled.

    Parameters
    ----------
    path : sequence of (int or None, Estimate)
        Requests of a run and what came out, from short to long; two at least, or one and why there
        is no other.
    tolerance : float
        The share by which it may move and has settled.
    num_seeds : int
        How many the answer is a mean of; of fewer than five none has settled.
    longer : str
        How one asks for runs of so many requests, with ``{}`` for the number.
    failed : str
        Why a run of twice the requests of the longest ended with an error, if one did.
    """
    way = ", ".join(f"{one.mean:.4g} with {length}" for length, one in path)
    told = f"by requests a run: {way}; "
    if failed:
        return f"{told}NOT SETTLED: a run with {2 * (path[-1][0] or 0)} fails: {failed}"
    (_, before), (length, after) = path[-2:]
    moved = percent(after.mean / before.mean - 1.0, signed=True) if before.mean else "from 0"
    goes_on = f"{longer.format(2 * (length or 0))} goes on from there"
    moves = f"the last doubling moved it by {moved}"
    if not stays(before, after, tolerance):
        return f"{told}NOT SETTLED: {moves}, and longer runs may move it as much again; {goes_on}"
    wide = f"its interval is {percent(_unsure(after))} of it to either side"
    if num_seeds < LEAST_SEEDS:
        seeds = "one seed has no interval" if num_seeds == 1 else f"of {num_seeds} seeds {wide}"
        return f"{told}NOT SETTLED: {moves}, but {seeds}; replications={LEAST_SEEDS} tells more"
    if not suffices(before, after, tolerance, num_seeds):
        return f"{told}NOT SETTLED: {moves}, and {wide}; {goes_on}"
    return f"{told}settled: {moves}"


def verdicts(asked: Find, found: Sequence[Found]) -> list[str]:
    """Hold every setting against the first: a sentence each.

    Parameters
    ----------
    asked : Find
        What was searched.
    found : sequence of Found
        The answers.

    Returns
    -------
    list of str
        None for one replication, or where an answer lies beyond what was tried.
    """
    ran = [one for one in found if not one.error]
    first, *others = ran
    if len(first.brackets) < 2:
        return []
    known = [one for one in others if not one.bound and not first.bound]
    changes = corrected([paired_change(one.values, first.values) for one in known])
    return [
        verdict(one.label, first.label, asked.key, change, not asked.least)
        + _lengths(one.num_requests, first.num_requests)
        for one, change in zip(known, changes, strict=True)
    ]


def _lengths(one: int | None, other: int | None) -> str:
    """Say that answers are of runs of different length, as where longer ones of a setting fail."""
    return "" if one == other else f" (runs of {one} against {other} requests)"


Setting = tuple[str, ...]


def _setting(point: Point) -> Setting:
    """Return what replications of a setting have in common."""
    return (point.label, *point.settings.values())


def _search_all(
    todo: Sequence[Point],
    asked: Find,
    constraints: Sequence[Constraint],
    runs: Runs,
    near: Mapping[str, Sequence[float]],
) -> tuple[dict[int, Bracket], dict[Setting, Done]]:
    """Let every search take a step at a time, and run what all of them ask for together.

    Returns the answers by point, and the first failure of each setting that has one: nothing more
    of such a setting is run.
    """
    whole = _is_whole(todo[0].spec, asked)
    searches: dict[int, Search] = {}
    wanted: dict[int, list[float]] = {}
    answers: dict[int, Bracket] = {}
    failed: dict[Setting, Done] = {}
    for i, point in enumerate(todo):
        start = _present(point.spec, asked.key) or 1.0
        expected = near[point.label][point.replication] if point.label in near else None
        searches[i] = bracket(
            asked.between, start, asked.tolerance, whole, expected, least=asked.least
        )
        wanted[i] = next(searches[i])
    while wanted:
        pairs = [(i, value) for i, values in wanted.items() for value in values]
        tried = runs.tried([_point(todo[i], asked, value, whole) for i, value in pairs])
        probes: dict[int, list[Probe]] = {i: [] for i in wanted}
        for (i, value), one in zip(pairs, tried, strict=True):
            if isinstance(one, Done):
                failed.setdefault(_setting(todo[i]), one)
            elif why := untold((constraint.metric for constraint in constraints), one.metrics):
                job = runs.store.job(*_point(todo[i], asked, value, whole))
                failed.setdefault(_setting(todo[i]), Done(job, one.seconds, why))
            else:
                probes[i].append(
                    Probe(
                        value, tuple(constraint.excess(one.metrics) for constraint in constraints)
                    )
                )
        wanted = {}
        for i, found in probes.items():
            if _setting(todo[i]) in failed:
                continue
            try:
                wanted[i] = searches[i].send(found)
            except StopIteration as end:
                answers[i] = end.value
    return answers, failed


def _point(
    point: Point, asked: Find, value: float, whole: bool | None = None
) -> tuple[ExperimentSpec, str]:
    whole = _is_whole(point.spec, asked) if whole is None else whole
    values = {asked.key: int(value) if whole else float(f"{value:.6g}")}
    swept = point.label if point.settings else ""
    try:
        spec = with_values(point.spec, values)
    except SpecError as error:
        if asked.between:
            raise
        raise SpecError(f"{error}: find tried it; between says how far to go") from error
    return spec, label_of(swept, values)


def _present(spec: ExperimentSpec, key: str) -> float | None:
    data: object = spec.to_data()
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    if not isinstance(data, int | float) or isinstance(data, bool):
        return None
    return float(data) if 0 < data < math.inf else None


def _is_whole(spec: ExperimentSpec, asked: Find) -> bool:
    near = asked.between or (_present(spec, asked.key) or 1.0,)
    if not takes_integers(spec, asked.key, near):
        return False
    with_values(spec, {asked.key: max(1, int(near[0]))})  # what else is wrong is told
    return True


def _remarks(
    constraints: Sequence[Constraint],
    brackets: Sequence[Bracket],
    metrics: Sequence[Metrics],
    is_part: bool,
) -> list[str]:
    """Return what a reader must know; `is_part` says that only a part of a run is measured."""
    remarks = []
    again = sorted({value for one in brackets for value in one.holds_again})
    if again:
        least = brackets[0].least
        breaks = [one.breaks_at for one in brackets if one.holds_again]
        first = max(breaks) if least else min(breaks)
        remarks.append(
            f"NOT MONOTONE: a constraint breaks at {first:.4g} and all hold again at "
            f"{', '.join(f'{value:.4g}' for value in again[:3])}; the answer is "
            f"{'above' if least else 'below'} the first break"
        )
    for i, constraint in enumerate(constraints):
        falls = [(low, high) for one in brackets for low, high in one.falls(i)]
        if not falls:
            continue
        low, high = max(falls, key=lambda pair: abs(pair[0].excess[i] - pair[1].excess[i]))
        sign = 1.0 if constraint.at_most else -1.0
        begin, end = (constraint.bound + sign * probe.excess[i] for probe in (low, high))
        if abs(end - begin) > _RIPPLE * abs(begin):
            remarks.append(
                f"{constraint.metric} is not monotone over what was tried: most from "
                f"{begin:.4g} at {low.value:.4g} to {end:.4g} at {high.value:.4g}"
            )
    bounds = [one.bound for one in brackets]
    remarks += [text for bound, text in _BOUNDS.items() if bound in bounds]
    means = {name: estimate([one[name] for one in metrics]) for name in metrics[0]}
    row = Row("", "", {}, len(metrics), means)
    # Where only a part is measured, what leaves inside stands beside what arrives inside.
    behind = row.mean("offered_request_rate") > SATURATED * row.mean("request_throughput")
    if behind if is_part else is_saturated(row):
        longer = "asks for more" if brackets[0].least else "gives less"
        remarks.append(
            f"requests arrive more than {100 * SATURATED - 100:.0f} % faster than served at the "
            f"answer: it depends on the length of the run, and a longer one {longer}"
        )
    return remarks
