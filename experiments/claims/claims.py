"""Hold what papers claim against runs: paired estimates over seeds, and a plain verdict."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from schedlab.experiments.specification.claim import Capacity, Figure, Measure
from schedlab.experiments.specification.claim_settings import (
    Setting,
    measure_key,
    measures_of,
    setting_index,
    settings_of,
)
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.loading import load_spec
from schedlab.experiments.specification.shipped import experiment_file
from schedlab.experiments.specification.sweep import Point, points
from schedlab.experiments.statistics import compared
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.yaml_lines import read_yaml

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult

Progress = Callable[[int, int, str], None]
"""Called with: figures done, figures in all, what is measured next."""

VERDICTS = ("reproduced", "direction only", "not reproduced", "opposite", "not measured")

_NO_EFFECT = {"ratio": 1.0, "increase": 0.0, "reduction": 0.0, "difference": 0.0}


class Reading(NamedTuple):
    """A number on one side of a comparison, of one replication.

    Attributes
    ----------
    value : float
        NaN if there is nothing to measure.
    is_bound : bool
        Whether a capacity lies beyond the sweep, so that the value is its end.
    """

    value: float
    is_bound: bool = False


@dataclass(frozen=True)
class Measured:
    """A figure of a claim as it came out.

    Attributes
    ----------
    figure : Figure
        What was asked.
    estimate : float
        See `compared`; NaN if a replication had nothing to measure.
    low, high : float
        95 % confidence interval over the replications.
    of, against : tuple of Reading
        One a replication; `against` is empty for a plain value.
    verdict : str
        One of `VERDICTS`; see `verdict`.
    """

    figure: Figure
    estimate: float
    low: float
    high: float
    of: tuple[Reading, ...]
    against: tuple[Reading, ...]
    verdict: str

    @property
    def num_bounds(self) -> int:
        """Replications in which a capacity lies beyond the sweep."""
        return sum(reading.is_bound for reading in (*self.of, *self.against))


@dataclass(frozen=True)
class Finding:
    """A claim and what its figures came to.

    Attributes
    ----------
    path : Path
        The experiment's file.
    spec : ExperimentSpec
        The experiment.
    measured : tuple of Measured
        Its figures, in order.
    cost_models : tuple of str
        Name, calibration, model and hardware of the cost models used.
    """

    path: Path
    spec: ExperimentSpec
    measured: tuple[Measured, ...]
    cost_models: tuple[str, ...]

    @property
    def spec_hash(self) -> str:
        """Identity of the experiment, claim apart."""
        return spec_hash(self.spec)

    @property
    def source_sha256(self) -> str:
        """Digest of the file, and of the one it extends."""
        return source_sha256(self.path)


def shipped(folder: str) -> list[Path]:
    """Return the experiments with claims that come with the program, by name.

    Parameters
    ----------
    folder : {"policies", "claims"}
        Systems against their papers, or what is said of serving in general.
    """
    return sorted((Path(__file__).resolve().parents[1] / "papers" / folder).glob("*.yaml"))


def load_claims(paths: Sequence[Path] | None = None) -> list[tuple[Path, ExperimentSpec]]:
    """Load experiments with claims, all before any is run.

    Parameters
    ----------
    paths : sequence of Path, optional
        Their files or names; if none are given, those of `shipped("policies")`.

    Returns
    -------
    list of (Path, ExperimentSpec)
        In the order given.

    Raises
    ------
    SpecError
        If a file is wrong, or has no claim.
    """
    files = [experiment_file(path) for path in paths or shipped("policies")]
    loaded = [(path, load_spec(path)) for path in files]
    for path, spec in loaded:
        if spec.claim is None:
            raise SpecError(f"{path}: claim: is required here; see experiments/policies")
    return loaded


def source_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of an experiment's file, with that of the file it extends.

    Parameters
    ----------
    path : Path
        A YAML file; unlike `spec_hash` it also changes with the claim and with comments, and
        not with the defaults of the program.
    """
    found = read_yaml(path).data
    parent = found.get("extends") if isinstance(found, dict) else None
    content = path.read_bytes()
    if isinstance(parent, str):
        content += (path.parent / parent).read_bytes()
    return hashlib.sha256(content).hexdigest()


def examine(
    path: Path,
    spec: ExperimentSpec,
    progress: Progress | None = None,
    only: Collection[str] | None = None,
) -> Finding:
    """Run what the figures of a claim need, in this process, and compare.

    Parameters
    ----------
    path : Path
        Where the experiment was read.
    spec : ExperimentSpec
        An experiment with a claim.
    progress : callable, optional
        Told which figure is being measured.
    only : collection of str, optional
        Names of the figures wanted; what the others need is not run.

    Returns
    -------
    Finding
        A pure function of the specification: the same input gives the same numbers.

    Raises
    ------
    SchedlabError
        If a point is invalid or a run ends with an error.
    """
    assert spec.claim is not None
    runs = _Runs(spec)
    measured = []
    figures = [f for f in spec.claim.figures if only is None or f.name in only]
    for i, figure in enumerate(figures):
        if progress is not None:
            progress(i, len(figures), f"{spec.name}: {figure.name}")
        of = runs.readings(figure, "of")
        against = runs.readings(figure, "against") if figure.against is not None else ()
        middle, low, high = compared(
            figure.compare, [r.value for r in of], [r.value for r in against]
        )
        measured.append(
            Measured(figure, middle, low, high, of, against, verdict(figure, middle, low, high))
        )
    return Finding(path, spec, tuple(measured), tuple(runs.cost_models))


def verdict(figure: Figure, middle: float, low: float, high: float) -> str:
    """Return the verdict on a figure.

    Parameters
    ----------
    figure : Figure
        What was claimed, and accepted.
    middle, low, high : float
        Estimate and 95 % confidence interval.

    Returns
    -------
    str
        A claim has a direction if its band (the paper's, else the accepted one) lies on one side
        of no effect: 1 for a ratio, 0 for the others; a value has none.

        ``reproduced``: the estimate lies in the accepted band and, if the claim has a direction,
        the interval excludes no effect.
        ``direction only``: outside the band, but the interval lies wholly on the claimed side.
        ``opposite``: the interval lies wholly on the other side.
        ``not reproduced``: anything else. ``not measured``: there is no number.
    """
    if math.isnan(middle):
        return "not measured"
    side, no_effect = _direction(figure)
    confirmed = side == 0 or (low > no_effect if side > 0 else high < no_effect)
    if figure.accept[0] <= middle <= figure.accept[1] and confirmed:
        return "reproduced"
    if side == 0:
        return "not reproduced"
    if confirmed:
        return "direction only"
    refuted = high < no_effect if side > 0 else low > no_effect
    return "opposite" if refuted else "not reproduced"


def _direction(figure: Figure) -> tuple[int, float]:
    """Return on which side of no effect a claim lies (0: on neither), and no effect itself."""
    if figure.compare == "value":
        return 0, 0.0
    no_effect = _NO_EFFECT[figure.compare]
    low, high = figure.paper or figure.accept
    if low >= no_effect and high > no_effect:
        return 1, no_effect
    if high <= no_effect and low < no_effect:
        return -1, no_effect
    return 0, no_effect


class _Runs:
    """The runs of an experiment, made when a figure first asks, and kept as numbers only."""

    def __init__(self, spec: ExperimentSpec) -> None:
        assert spec.claim is not None
        self._spec = spec
        self._points: list[Point] = points(spec)
        self._done: dict[tuple[Setting, int], dict[str, float]] = {}
        self._wanted: dict[Setting, dict[str, Measure]] = {}
        self.cost_models: dict[str, None] = {}
        for figure in spec.claim.figures:
            for side in ("of", "against"):
                if getattr(figure, side) is None:
                    continue
                for setting in settings_of(spec, figure, side):
                    wanted = self._wanted.setdefault(setting, {})
                    wanted.update({measure_key(m): m for m in measures_of(figure)})

    def readings(self, figure: Figure, side: str) -> tuple[Reading, ...]:
        """Return what one side of a figure came to, a reading a replication."""
        settings = settings_of(self._spec, figure, side)
        return tuple(
            self._capacity(figure.capacity, settings, replication)
            if figure.capacity is not None
            else Reading(self._value(settings[0], replication, measures_of(figure)[0]))
            for replication in range(self._spec.replications)
        )

    def _value(self, setting: Setting, replication: int, measure: Measure) -> float:
        if (setting, replication) not in self._done:
            self._done[setting, replication] = self._run(setting, replication)
        return self._done[setting, replication][measure_key(measure)]

    def _run(self, setting: Setting, replication: int) -> dict[str, float]:
        from schedlab.experiments.running.run import run

        index = setting_index(self._spec, setting) * self._spec.replications + replication
        result = run(self._points[index].spec)
        self.cost_models[_cost_model(result)] = None
        observed = result.observation()
        return {
            key: metric_named(m.name, **m.knobs).of(observed)
            for key, m in self._wanted[setting].items()
        }

    def _capacity(
        self, capacity: Capacity, settings: Sequence[Setting], replication: int
    ) -> Reading:
        """Walk up the load until a bar breaks; what lies above is not run."""
        over = list(self._spec.sweep).index(capacity.over)
        loads = self._spec.sweep[capacity.over]
        # A bar holds where the excess is <= 0.
        bars = [(name, bar, 1.0) for name, bar in capacity.at_most.items()]
        bars += [(name, bar, -1.0) for name, bar in capacity.at_least.items()]
        before: tuple[float, list[float]] | None = None
        for setting in settings:
            load = float(loads[setting[over]])
            excess = [
                sign * (self._value(setting, replication, Measure(name=name)) - bar)
                for name, bar, sign in bars
            ]
            if not all(e <= 0.0 for e in excess):
                if before is None or any(math.isnan(e) for e in excess):
                    return Reading(math.nan)
                held_load, held = before
                crossings = [
                    held_load + (load - held_load) * -low / (high - low)
                    for low, high in zip(held, excess, strict=True)
                    if high > 0.0
                ]
                return Reading(min(crossings))
            before = load, excess
        assert before is not None
        return Reading(before[0], is_bound=True)


def _cost_model(result: RunResult) -> str:
    described = result.provenance["cost_model"]
    assert isinstance(described, dict)
    calibration = described.get("calibration")
    return (
        f"{described.get('name')} ({calibration}), {described.get('model')} on "
        f"{described.get('hardware')}"
    )
