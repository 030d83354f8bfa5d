"""The best values of a few keys within constraints: coarse to fine, confirmed on new seeds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from schedlab.experiments.running.workload import is_too_short
from schedlab.experiments.search.constraints import (
    Metrics,
    constraints_of,
    label_of,
    untold,
    with_values,
)
from schedlab.experiments.search.find import MOST_DOUBLINGS, find_each, suffices, told_way
from schedlab.experiments.search.integers import takes_integers
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.search import Find, Tune, is_key
from schedlab.experiments.specification.sweep import Point, points, shown
from schedlab.experiments.statistics import Estimate, estimate, paired_change, verdict
from schedlab.experiments.sweeps.jobs import Done
from schedlab.experiments.sweeps.runs import Runs
from schedlab.sim.errors import SchedlabError, SpecError

_SETTLED = 0.02

Value = float | str
Values = tuple[Value, ...]
"""A value for each key of `over`, in its order."""


@dataclass(frozen=True)
class Trial:
    """A setting that was tried.

    Attributes
    ----------
    values : mapping of str to float or str
        Key to value.
    goals : tuple of float
        What is maximized or minimized, one a replication.
    excess : tuple of float
        By how much each constraint is broken on average, as a share of the constraint; <= 0 holds.
    least : bool
        Whether less is better.
    is_bound : bool
        Whether what is maximized is a key of which no larger value was tried, though none breaks a
        constraint up to there.
    """

    values: Mapping[str, Value]
    goals: tuple[float, ...]
    excess: tuple[float, ...]
    least: bool = False
    is_bound: bool = False

    @property
    def goal(self) -> Estimate:
        """Mean of what is maximized or minimized, and half its 95 % confidence interval."""
        return estimate(self.goals)

    @property
    def holds(self) -> bool:
        """Whether every constraint holds on average over the replications."""
        return all(excess <= 0.0 for excess in self.excess)

    @property
    def rank(self) -> tuple[bool, float]:
        """What is better is larger: constraints held, then the goal, or the smaller excess."""
        if self.holds:
            mean = -self.goal.mean if self.least else self.goal.mean
            return True, mean if not math.isnan(mean) else -math.inf
        return False, -max(self.excess)


@dataclass(frozen=True)
class Tuned:
    """What tuning came to.

    Attributes
    ----------
    trials : tuple of Trial
        Everything tried, best first; on the seeds of the experiment.
    num_invalid : int
        Combinations that are not allowed together, or fail, and were left out.
    left_out : mapping of str to int
        Why, and how many for this reason.
    best : Trial
        The winner on seeds it was not chosen by.
    given : Trial or None
        The experiment's own values on the same new seeds; None if they are the winner.
    verdict : str
        How the two compare.
    remarks : tuple of str
        What a reader must know.
    """

    trials: tuple[Trial, ...]
    num_invalid: int
    best: Trial
    given: Trial | None
    verdict: str
    remarks: tuple[str, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


def tune(spec: ExperimentSpec, runs: Runs) -> Tuned:
    """Search the best setting of the keys of a `tune` section.

    Parameters
    ----------
    spec : ExperimentSpec
        An experiment with a `tune` section and without a sweep.
    runs : Runs
        Runs what is asked.

    Returns
    -------
    Tuned
        A grid of `levels` values a key, evenly spaced on a logarithmic scale, and of all names;
        then the neighbours of the best at half the spacing, with its names, again and again until
        they differ by no more than the tolerance, nothing is new, or `max_settings` were tried. All
        settings meet the same seeds. The winner and the experiment's own values are then run on new
        seeds: chosen as the best of many, a winner looks better on the seeds it won by than it is.

    Raises
    ------
    SpecError
        If there is no such section, there is a sweep, or no combination is allowed.
    SchedlabError
        If a run fails.
    """
    asked = spec.tune
    if asked is None:
        raise SpecError("tune: is required here, e.g. {maximize: ..., over: {...}}")
    if spec.sweep:
        raise SpecError("tune takes one experiment without a sweep; e.g. override sweep={}")
    search = _Search(spec, asked, runs)
    steps = {
        key: (high / low) ** (1 / (asked.levels - 1)) for key, (low, high) in asked.ranges.items()
    }
    axes: dict[str, Sequence[Value]] = {
        key: [asked.ranges[key][0] * steps[key] ** i for i in range(asked.levels)]
        if key in steps
        else names
        for key, names in asked.over.items()
    }
    search.try_all(itertools.product(*axes.values()))
    if not search.trials:
        raise SpecError(
            f"tune.over: no combination of values is allowed: {next(reversed(search.left_out))}"
        )
    while max(steps.values(), default=1.0) > 1 + asked.tolerance:
        steps = {key: math.sqrt(step) for key, step in steps.items()}
        for key, value in zip(asked.over, search.best_values(), strict=True):
            step = steps.get(key, 1.0)
            axes[key] = (value,) if isinstance(value, str) else (value / step, value, value * step)
        search.try_all(itertools.product(*axes.values()))
    return _confirmed(spec, asked, search, runs)


class _Search:
    """Settings tried so far, each once."""

    def __init__(self, spec: ExperimentSpec, asked: Tune, runs: Runs) -> None:
        self._spec, self._asked, self._runs = spec, asked, runs
        self._whole = {
            key: takes_integers(spec, key, (_value(spec, key), *ends))
            for key, ends in asked.ranges.items()
        }
        self.trials: dict[Values, Trial] = {}
        self.left_out: Counter[str] = Counter()
        self.is_cut = False
        self._invalid: set[Values] = set()

    def is_whole(self, key: str) -> bool:
        """Say whether a key takes integers only."""
        return self._whole[key]

    def best_values(self) -> Values:
        return max(self.trials, key=lambda values: self.trials[values].rank)

    def try_all(self, combinations: itertools.product[Values]) -> None:
        allowed: dict[Values, ExperimentSpec] = {}
        for combination in combinations:
            values = self._rounded(combination)
            if values in self.trials or values in allowed or values in self._invalid:
                continue
            try:
                allowed[values] = with_values(self._spec, self._named(values))
            except SpecError as error:
                self._invalid.add(values)
                self.left_out[str(error)] += 1
        room = self._asked.max_settings - len(self.trials)
        if len(allowed) > room:
            self.is_cut = True
            allowed = dict(list(allowed.items())[:room])
        settings = [(self._named(values), one) for values, one in allowed.items()]
        trials = evaluate(settings, self._asked, self._runs)
        for values, trial in zip(allowed, trials, strict=True):
            if isinstance(trial, Trial):
                self.trials[values] = trial
            else:
                self._invalid.add(values)
                self.left_out[trial] += 1

    def _rounded(self, combination: Values) -> Values:
        rounded: list[Value] = []
        for key, value in zip(self._asked.over, combination, strict=True):
            if isinstance(value, str):
                rounded.append(value)
                continue
            low, high = self._asked.ranges[key]
            bounded = min(max(value, low), high)
            if self._whole[key]:
                rounded.append(float(round(bounded)))
            else:  # an end of the range may have more digits
                rounded.append(min(max(float(f"{bounded:.4g}"), low), high))
        return tuple(rounded)

    def _named(self, values: Values) -> dict[str, Value]:
        return {
            key: int(value) if self._whole.get(key) else value
            for key, value in zip(self._asked.over, values, strict=True)
        }


def evaluate(
    settings: Sequence[tuple[Mapping[str, Value], ExperimentSpec]], asked: Tune, runs: Runs
) -> list[Trial | str]:
    """Run settings with all replications and weigh them.

    Parameters
    ----------
    settings : sequence of (mapping, ExperimentSpec)
        The values of each, and the experiment that has them.
    asked : Tune
        What is maximized or minimized, and the constraints.
    runs : Runs
        Runs what is asked.

    Returns
    -------
    list of Trial or str
        One a setting; why there is none, where a run of it failed.
    """
    values = [one for one, _ in settings]
    expanded = [
        Point(point.spec, {"setting": label_of("", one)}, point.replication, label_of("", one))
        for one, spec in settings
        for point in points(spec)
    ]
    constraints = constraints_of(asked.at_most, asked.at_least)
    if not expanded:
        return []
    if is_key(asked.goal):
        found, _ = find_each(expanded, _as_find(asked), runs)
        # Within them by construction, but for a setting that breaks one at the least value.
        return [
            one.error.removeprefix("cannot run: ")
            or Trial(
                v,
                tuple(one.values),
                (1.0 if one.bound == "below" else 0.0,),
                is_bound=one.bound == "at least",
            )
            for v, one in zip(values, found, strict=True)
        ]
    tried = runs.tried([(point.spec, point.label) for point in expanded])
    num = len(expanded) // len(settings)
    trials: list[Trial | str] = []
    for i, v in enumerate(values):
        own: list[Metrics] = []
        failed = ""
        for one in tried[i * num : (i + 1) * num]:
            if isinstance(one, Done):
                failed = failed or str(one.error)
            else:
                failed = failed or untold(
                    (asked.goal, *asked.at_most, *asked.at_least), one.metrics
                )
                own.append(one.metrics)
        if failed:
            trials.append(failed)
            continue
        goals = tuple(float(one[asked.goal]) for one in own)
        excess = tuple(
            math.fsum(constraint.excess(one) for one in own) / num / (abs(constraint.bound) or 1.0)
            for constraint in constraints
        )
        trials.append(Trial(v, goals, excess, asked.minimize is not None))
    return trials


def _confirmed(spec: ExperimentSpec, asked: Tune, search: _Search, runs: Runs) -> Tuned:
    ordered = sorted(search.trials.values(), key=lambda trial: trial.rank, reverse=True)
    fresh = spec.model_copy(update={"seed": spec.seed + spec.replications})
    own = _values(spec, asked)
    winner = dict(ordered[0].values)
    settings = [winner] if own == winner else [winner, own]  # the first is to be set
    (best, *others), told_length = _settled(fresh, asked, settings, runs)
    given = others[0] if others else None
    told = "the experiment's own values are the best found"
    if given is not None:
        names = label_of("", best.values), f"the given {label_of('', given.values)}"
        told = "no verdict from one run; set replications to 5 or more"
        if len(best.goals) > 1:
            change = paired_change(best.goals, given.goals)
            told = verdict(*names, asked.goal, change, asked.minimize is None)
        if not given.holds:
            told += " (which breaks a constraint)"
    remarks = [told_length] if told_length else []
    if not ordered[0].holds:
        remarks.append("NO SETTING HOLDS ALL CONSTRAINTS; this one breaks them least")
    elif not best.holds:
        remarks.append("the winner breaks a constraint on new seeds: it holds by luck only")
    if best.is_bound:
        num_others = sum(trial.is_bound for trial in ordered[1:])
        remarks.append(
            f"no constraint breaks up to the largest {asked.goal} tried (tune.between), here and "
            f"at {num_others} other settings: what is best among them is not told"
        )
    for key, (low, high) in asked.ranges.items():
        ends = (high,) if low == 1 and search.is_whole(key) else (low, high)
        if best.values[key] in ends:
            remarks.append(f"{key} is best at the end of its range: the best may lie beyond")
    alike = [t for t in ordered[1:] if t.holds and len(t.goals) > 1 and _alike(ordered[0], t)]
    if alike:
        remarks.append(
            f"{len(alike)} other settings are not shown to be worse, e.g. "
            + "; ".join(label_of("", trial.values) for trial in alike[:3])
        )
    if search.is_cut:
        remarks.append(f"stopped after {asked.max_settings} settings (tune.max_settings)")
    left_out = search.left_out
    return Tuned(tuple(ordered), left_out.total(), best, given, told, tuple(remarks), left_out)


def _settled(
    fresh: ExperimentSpec, asked: Tune, settings: Sequence[Mapping[str, Value]], runs: Runs
) -> tuple[list[Trial], str]:
    """Run settings with ever more requests until their goals stay; say how the first moved."""
    length = fresh.workload.num_requests
    history: list[tuple[int | None, list[Trial]]] = []
    failed = ""
    for _ in range(MOST_DOUBLINGS + 1):
        spec = fresh if length is None else with_values(fresh, {"workload.num_requests": length})
        best, *given = settings
        there = [(best, with_values(spec, {key: _plain(value) for key, value in best.items()}))]
        try:
            found = evaluate([*there, *((own, spec) for own in given)], asked, runs)
        except SchedlabError as error:
            if not history:
                raise
            failed = str(error)
            break
        failed = next((one for one in found if isinstance(one, str)), "")
        if failed and not history:
            raise SchedlabError(failed)
        if failed:
            break
        history.append((length, [one for one in found if isinstance(one, Trial)]))
        if not asked.settle or length is None or _all_stay(history):
            break
        length *= 2
    if is_too_short(failed):
        failed = ""
    if len(history) < 2 and not failed:
        return history[-1][1], ""
    path = [(n, trials[0].goal) for n, trials in history]
    way = told_way(path, _SETTLED, len(history[-1][1][0].goals), failed=failed)
    return history[-1][1], f"the best {way} (settings were tried with {history[0][0]})"


def _all_stay(history: Sequence[tuple[int | None, list[Trial]]]) -> bool:
    """Say whether the last doubling moved no goal; no before there was one."""
    if len(history) < 2:
        return False
    pairs = zip(history[-2][1], history[-1][1], strict=True)
    return all(
        suffices(before.goal, after.goal, _SETTLED, len(after.goals)) for before, after in pairs
    )


def _alike(best: Trial, other: Trial) -> bool:
    change = paired_change(other.goals, best.goals)
    return not (change.low > 0.0 if best.least else change.high < 0.0)


def _as_find(asked: Tune) -> Find:
    return Find(
        maximize=asked.goal,
        between=asked.between,
        at_most=asked.at_most,
        at_least=asked.at_least,
    )


def _values(spec: ExperimentSpec, asked: Tune) -> dict[str, Value]:
    """Return the value that each key that is varied has in an experiment."""
    return {
        key: _value(spec, key) if key in asked.ranges else _name(spec, key, names)
        for key, names in asked.over.items()
    }


def _value(spec: ExperimentSpec, key: str) -> float:
    data = _at(spec, key)
    if not isinstance(data, int | float):
        raise SpecError(
            f"tune.over: {key} has no number in this experiment to start from: give it one"
        )
    return data


def _name(spec: ExperimentSpec, key: str, names: Sequence[Value]) -> str:
    """Return which name stands at a key; what else stands there in short, if it is none of them."""
    data = _at(spec, key)
    same = [one for one in names if _stands_for(spec, key, one, data)]
    return str(same[0]) if same else shown(data)


def _stands_for(spec: ExperimentSpec, key: str, name: Value, data: object) -> bool:
    try:
        return _at(with_values(spec, {key: name}), key) == data
    except SpecError:
        return False  # a name that is not allowed here is not the one given


def _at(spec: ExperimentSpec, key: str) -> object:
    data: object = spec.to_data()
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _plain(value: Value) -> Value:
    return int(value) if isinstance(value, float) and value.is_integer() else value
