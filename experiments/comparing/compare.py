"""The same trace, policies and seeds on both backends: how far is the simulation off, and why."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedlab.experiments.analysis.comparison import (
    Compared,
    compare_runs,
    step_errors,
)
from schedlab.experiments.comparing.level_runs import (
    Level,
    LevelLoad,
    at_level,
    check_level,
    level_of,
    levels_of,
    load_beside,
    simulated_at,
    warm_up,
)
from schedlab.experiments.comparing.machine import check_profile, machine_name
from schedlab.experiments.comparing.measured_runs import (
    MeasuredRun,
    MeasuredRuns,
    measure,
    steps_at_level,
)
from schedlab.experiments.running.resolved import make_cost_model
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.sweep import Point, points
from schedlab.sim.core.plan_log import RecordedStep, first_difference, teacher_forced
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.errors import SpecError
from schedlab.sim.result import RunResult

_DRAWS = 100
"""So often a point whose steps scatter is simulated. All policies have the same draws: the mean of
a P99 over 60 of them was once 5 % beside that over 300, for nearly each policy."""

_MODELLED = {"clock": "modelled", "level_requests_per_client": None}
"""What a run is that checks decisions."""

Progress = Callable[[int, int, str], None]


@dataclass
class PointComparison:
    """One policy at one load.

    Attributes
    ----------
    label, policy, load : str
        The settings; `load` is what they are without the policy.
    rows : list of Compared
        By metric.
    num_runs : int
        How often it was measured; `real.repeats`, or less if time was up.
    is_checked : bool
        Whether both backends also ran with the same step times.
    modelled_difference : str or None
        Where decisions differed then: must be None.
    measured_difference : str or None
        Where decisions of the first run differ from the simulation, by its measured times.
    steps : dict of str to float
        Error of the cost model alone: the measured runs' own steps, priced.
    predicted_ns, measured_ns : ndarray
        Those steps.
    measured, simulated : RunResult
        The first measured run and the first simulated one, for figures.
    num_simulated : int
        How often it was simulated: several times if steps scatter, each with another draw.
    levels : dict of int to Level
        By measured run, that of its round, at which the simulation is priced; empty if none was
        measured.
    """

    label: str
    policy: str
    load: str
    rows: list[Compared]
    num_runs: int
    is_checked: bool
    modelled_difference: str | None
    measured_difference: str | None
    steps: dict[str, float]
    predicted_ns: np.ndarray[Any, np.dtype[np.int64]]
    measured_ns: np.ndarray[Any, np.dtype[np.int64]]
    measured: RunResult
    simulated: RunResult
    num_simulated: int = 1
    levels: Mapping[int, Level] = field(default_factory=dict)


class _DeviceRun(NamedTuple):
    """One run on the device that a comparison asks for."""

    point: int
    repeat: int
    is_check: bool


def compare(
    spec: ExperimentSpec,
    progress: Progress | None = None,
    *,
    keep: Path | None = None,
    max_s: float = math.inf,
    check: bool | None = None,
    write_only: bool = False,
) -> list[PointComparison]:
    """Run every point of an experiment on both backends.

    On the real one, or in vLLM if the experiment says ``backend: vllm``, it runs `real.repeats`
    times by the clock of the experiment. With `check` it runs once more by the modelled clock,
    which shows whether both decide alike when steps take the same time.

    If the experiment says `real.level_requests_per_client`, the level of the steps is measured
    beside, and a point is simulated at those of the rounds that it was measured in, as often at
    each; a round is a load's policies one after the other.

    Parameters
    ----------
    spec : ExperimentSpec
        Its ``real`` section says where. One load after the other is measured, each in ABBA order:
        its policies forwards, then backwards, so that a slow drift of the machine hits all alike
        and what is measured first is complete first.
    progress : callable, optional
        Called with runs done, runs in all, and what comes next.
    keep : Path, optional
        Folder for the runs on the device; those found there are not repeated.
    max_s : float
        No run on the device begins that would end later than this, if it takes as long as the
        longest so far; points that have a run by then are compared.
    check : bool, optional
        By default on a CPU only: the decisions of a model are the same on any device.
    write_only : bool
        Compare runs that are kept, wherever they were measured; use no device.

    Returns
    -------
    list of PointComparison
        In the order of the sweep, of the points that have been measured at least once.

    Raises
    ------
    SpecError
        If no point has a run; if a point cannot run on one of the backends; if the profile, or a
        run that was kept, is of another machine; if the level of a cost model that is no profile is
        asked for.
    """
    if write_only and keep is None:
        raise SpecError("write_only compares runs that were kept: say where, with keep")
    todo = points(spec)
    for point in todo:
        check_level(point.spec)
    kept = MeasuredRuns(keep) if keep is not None else None
    here = None if write_only else machine_name(spec.real.device)
    if here is not None:
        _check_profiles(todo, here)
    if check is None:
        check = spec.real.device == "cpu"
    turns = list(_turns(todo, spec.real.repeats, check))
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, len(turns) + len(todo), what)
        done += 1

    beside = _Beside(measured_backend(spec))
    runs: list[dict[int, MeasuredRun]] = [{} for _ in todo]
    checks: list[MeasuredRun | None] = [None] * len(todo)
    end_s, longest_s = time.monotonic() + max_s, 0.0
    is_cold = spec.real.device != "cpu"
    for turn in turns:
        point = todo[turn.point]
        tell(
            f"checking decisions of {point.label}" if turn.is_check
            else f"measuring {point.label} ({turn.repeat + 1}/{spec.real.repeats})"
        )  # fmt: skip
        wanted = _on(point.spec, measured_backend(spec), **(_MODELLED if turn.is_check else {}))
        found = kept.find(wanted, turn.repeat) if kept is not None else None
        begun_s = time.monotonic()
        if found is None:
            if write_only or begun_s + longest_s > end_s:
                continue
            if is_cold:
                warm_up(wanted)
                is_cold = False
            found = measure(wanted, turn.repeat, None if turn.is_check else beside.load_of(point))
            if kept is not None:
                kept.keep(wanted, turn.repeat, found)
            longest_s = max(longest_s, time.monotonic() - begun_s)
        if turn.is_check:
            checks[turn.point] = found
        else:
            runs[turn.point][turn.repeat] = found
    machines = {run.machine for some in runs for run in some.values()} | ({here} if here else set())
    if len(machines) > 1:
        raise SpecError(
            f"{keep}: runs of {' and '.join(sorted(machines))} cannot be compared with each other; "
            "choose another folder to keep runs in"
        )
    if not any(runs):
        said = f": {kept.describe()}, none of them of this experiment" if kept is not None else ""
        raise SpecError(f"no run of {spec.name} is measured{said}")
    if write_only:
        _check_profiles(todo, *machines)
    levels = _levels(todo, runs)
    return [
        _compared(point, measured, checked, levels.get(_load(point), {}), spec.seed, tell)
        for point, measured, checked in zip(todo, runs, checks, strict=True)
        if measured
    ]


class _Beside:
    """What level runs are like beside the runs of each point, at the level its load begins at."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._levels: dict[str, Level] = {}
        self._loads: dict[str, LevelLoad] = {}

    def load_of(self, point: Point) -> LevelLoad | None:
        """Return what they are like for a point; None if its experiment asks for none.

        Before the first run of a load some are served as the profile has it. At the level that
        these tell the points are simulated again, so that as many requests run in level runs as in
        those that are compared, however far the machine is from its profile.
        """
        spec, load = point.spec, _load(point)
        if spec.real.level_requests_per_client is None:
            return None
        if load not in self._levels:
            first = steps_at_level(_on(spec, self._backend), load_beside(spec), spec.real.repeats)
            self._levels[load] = level_of(_profile_of(point), first)
        if point.label not in self._loads:
            self._loads[point.label] = load_beside(spec, self._levels[load])
        return self._loads[point.label]


def _turns(todo: list[Point], repeats: int, check: bool) -> Iterator[_DeviceRun]:
    """Yield the runs of a comparison in the order they are made in."""
    for load in dict.fromkeys(map(_load, todo)):
        here = [i for i, point in enumerate(todo) if _load(point) == load]
        for repeat in range(repeats):
            forwards = repeat % 2 == 0
            yield from (_DeviceRun(i, repeat, False) for i in (here if forwards else here[::-1]))
    if check:
        yield from (_DeviceRun(i, 0, True) for i in range(len(todo)))


def _check_profiles(todo: list[Point], machine: str) -> None:
    for point in todo:
        cost_model = make_cost_model(point.spec)
        if isinstance(cost_model, FittedCostModel):
            check_profile(point.spec, cost_model, machine)


def _levels(todo: list[Point], runs: list[dict[int, MeasuredRun]]) -> dict[str, dict[int, Level]]:
    """Return the level of each round that has level runs, by load and repeat."""
    steps: dict[str, dict[int, list[RecordedStep]]] = {}
    profiles: dict[str, FittedCostModel] = {}
    for point, measured in zip(todo, runs, strict=True):
        for repeat, one in measured.items():
            if one.level_steps:
                load = _load(point)
                steps.setdefault(load, {}).setdefault(repeat, []).extend(one.level_steps)
                if load not in profiles:
                    profiles[load] = _profile_of(point)
    return {load: levels_of(profiles[load], rounds) for load, rounds in steps.items()}


def _profile_of(point: Point) -> FittedCostModel:
    profile = make_cost_model(point.spec)
    assert isinstance(profile, FittedCostModel)  # check_level has seen to it
    return profile


def _compared(
    point: Point,
    measured: dict[int, MeasuredRun],
    checked: MeasuredRun | None,
    levels: dict[int, Level],
    seed: int,
    tell: Callable[[str], None],
) -> PointComparison:
    """Simulate a point and hold it against its measured runs."""
    tell(f"simulating {point.label}")
    simulated_steps: list[RecordedStep] = []
    on_price = run(_on(_scattering(point.spec, False), "sim"), record=simulated_steps)
    simulated = [on_price]
    rounds = [levels[repeat] for repeat in measured] if levels else []
    if make_cost_model(point.spec).step_spread is not None:
        draws = (_scattering(point.spec, True, draw) for draw in range(_DRAWS))
        simulated = [
            simulated_at(rounds[draw % len(rounds)] if rounds else None, spec)
            for draw, spec in enumerate(draws)
        ]
    elif rounds:
        simulated = [simulated_at(level, point.spec) for level in rounds]
    modelled = None if checked is None else first_difference(checked.steps, simulated_steps)
    first = next(iter(measured.values()))
    difference = first_difference(first.steps, simulated_steps)
    priced = [
        teacher_forced(one.steps, at_level(make_cost_model(point.spec), levels.get(repeat)))
        for repeat, one in measured.items()
    ]
    predicted_ns, measured_ns = (np.concatenate(some) for some in zip(*priced, strict=True))
    columns = on_price.requests
    ids, times_ns = columns["id"].tolist(), columns["arrival_ns"].tolist()
    arrivals_ns = dict(zip(ids, times_ns, strict=True))
    return PointComparison(
        label=point.label,
        policy=_policy(point),
        load=_load(point),
        rows=compare_runs(
            point.label,
            [one.result for one in measured.values()],
            simulated,
            seed,
            throughput_bar=point.spec.real.throughput_bar,
            latency_bar=point.spec.real.latency_bar,
        ),
        num_runs=len(measured),
        is_checked=checked is not None,
        modelled_difference=modelled.explain() if modelled else None,
        measured_difference=difference.explain(arrivals_ns) if difference else None,
        steps=step_errors(predicted_ns, measured_ns),
        predicted_ns=predicted_ns,
        measured_ns=measured_ns,
        measured=first.result,
        simulated=simulated[0],
        num_simulated=len(simulated),
        levels={repeat: levels[repeat] for repeat in measured} if levels else {},
    )


def _scattering(spec: ExperimentSpec, scatters: bool, draw: int = 0) -> ExperimentSpec:
    """Return a point whose steps scatter or do not, whatever it says, if its profile can."""
    said = spec.cost_model.model_dump(exclude_none=True)
    if "scatters" not in said:
        return spec
    changed = type(spec.cost_model).model_validate({**said, "scatters": scatters, "draw": draw})
    return spec.model_copy(update={"cost_model": changed})


def _on(spec: ExperimentSpec, backend: str, **real: Any) -> ExperimentSpec:  # noqa: ANN401
    return spec.model_copy(
        update={"backend": backend, "real": spec.real.model_copy(update=real), "replications": 1}
    )


def measured_backend(spec: ExperimentSpec) -> str:
    """Return the backend that an experiment is measured on: vLLM if it says so, else ours."""
    return "vllm" if spec.backend == "vllm" else "real"


def _policy(point: Point) -> str:
    return point.settings.get("policy", point.spec.policy.name)


def _load(point: Point) -> str:
    rest = {key: value for key, value in point.settings.items() if key != "policy"}
    return ", ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in rest.items())
