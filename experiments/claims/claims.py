"""Hold what papers claim against runs: paired estimates over seeds, and a plain verdict."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from schedlab.experiments.claims.readings import Reading, Readings
from schedlab.experiments.specification.claim import Cause, Figure
from schedlab.experiments.specification.claim_settings import varied_spec
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.loading import load_spec
from schedlab.experiments.specification.own_modules import find_own_modules
from schedlab.experiments.specification.shipped import experiment_file
from schedlab.experiments.statistics import compared
from schedlab.experiments.sweeps.runs import Runs
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.sim.errors import SpecError
from schedlab.sim.user_modules import look_in
from schedlab.sim.yaml_lines import read_yaml

VERDICTS = (
    "reproduced", "in our band", "direction only", "not reproduced", "opposite", "not measured",
)  # fmt: skip

_NO_EFFECT = {"ratio": 1.0, "increase": 0.0, "reduction": 0.0, "difference": 0.0}


@dataclass(frozen=True)
class MeasuredFigure:
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
    shown_by : tuple of Measured
        The same with something varied each time, as the figure's `why` asks; empty if the figure
        is reproduced, or has its direction.
    """

    figure: Figure
    estimate: float
    low: float
    high: float
    of: tuple[Reading, ...]
    against: tuple[Reading, ...]
    verdict: str
    shown_by: tuple[MeasuredFigure, ...] = ()

    @property
    def cause(self) -> Cause | None:
        """Why it is not reproduced; None if it is, or has its direction, or nobody says."""
        return self.figure.why if self.verdict in ("not reproduced", "opposite") else None

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
    measured: tuple[MeasuredFigure, ...]
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
    folder : {"policies", "fleets", "claims"}
        Systems against their papers, several engines likewise, or what is said of serving in
        general.
    """
    return sorted((Path(__file__).resolve().parents[1] / "papers" / folder).glob("*.yaml"))


def load_claims(
    paths: Sequence[Path] | None = None, changes: Mapping[str, Any] | None = None
) -> list[tuple[Path, ExperimentSpec]]:
    """Load experiments with claims, all before any is run.

    Parameters
    ----------
    paths : sequence of Path, optional
        Their files or names; if none are given, those of `shipped("policies")`.
    changes : mapping, optional
        Keys to change in each, e.g. ``{"replications": 2}``.

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
    loaded = []
    for path in files:
        find_own_modules(path.absolute().parent)
        spec = load_spec(path, changes or {})
        if spec.claim is None:
            raise SpecError(f"{path}: claim: is required here; see experiments/papers")
        loaded.append((path, spec))
    return loaded


def source_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of an experiment's file, with that of the file it extends.

    Parameters
    ----------
    path : Path
        A YAML file; unlike `spec_hash` it also changes with the claim and with comments, and
        not with the defaults of the program. The line that tells editors its schema is not of it.
    """
    found = read_yaml(path).data
    parent = found.get("extends") if isinstance(found, dict) else None
    content = _content(path)
    if isinstance(parent, str):
        content += _content(path.parent / parent)
    return hashlib.sha256(content).hexdigest()


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    first, _, rest = content.partition(b"\n")
    return rest if first.startswith(b"# yaml-language-server:") else content


def examine(
    path: Path,
    spec: ExperimentSpec,
    runs: Runs | None = None,
    only: Collection[str] | None = None,
) -> Finding:
    """Run what the figures of a claim need, and compare.

    Parameters
    ----------
    path : Path
        Where the experiment was read.
    spec : ExperimentSpec
        An experiment with a claim.
    runs : Runs, optional
        Who runs points, and where they are kept; if none are given, this process does, and
        throws them away at the end.
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
    if runs is None:
        with tempfile.TemporaryDirectory() as scratch:
            here = Runs(Store(Path(scratch)), InProcess(raising=True))
            return examine(path, spec, here, only)
    look_in(spec.modules)
    figures = [f for f in spec.claim.figures if only is None or f.name in only]
    measured, cost_models = _measured(spec, figures, runs)
    explained = []
    for found in measured:
        shown_by = []
        for variation in found.cause.shown_by if found.cause else ():
            varied = varied_spec(spec, variation.change)
            again, more = _measured(varied, [found.figure.varied(variation)], runs)
            shown_by += again
            cost_models |= more
        explained.append(replace(found, shown_by=tuple(shown_by)))
    return Finding(path, spec, tuple(explained), tuple(cost_models))


def _measured(
    spec: ExperimentSpec, figures: Sequence[Figure], runs: Runs
) -> tuple[list[MeasuredFigure], dict[str, None]]:
    """Measure figures in an experiment; also return the cost models used."""
    readings = Readings(spec, runs)
    found = readings.read(figures)
    measured = []
    for figure in figures:
        of, against = found[figure.name, "of"], found.get((figure.name, "against"), ())
        middle, low, high = compared(
            figure.compare, [r.value for r in of], [r.value for r in against]
        )
        measured.append(
            MeasuredFigure(
                figure, middle, low, high, of, against, verdict(figure, middle, low, high)
            )
        )
    return measured, readings.cost_models


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

        ``reproduced``: the estimate lies in the accepted band, the interval meets what the source
        states (to the digits it states) where it states a number and, if the claim has a
        direction, the interval excludes no effect.
        ``in our band``: the same, but the interval lies wholly outside what the source states.
        ``direction only``: outside the band, but the interval lies wholly on the claimed side.
        ``opposite``: the interval lies wholly on the other side.
        ``not reproduced``: anything else. ``not measured``: there is no number.
    """
    if math.isnan(middle):
        return "not measured"
    side, no_effect = _direction(figure)
    confirmed = side == 0 or (low > no_effect if side > 0 else high < no_effect)
    if figure.accept[0] <= middle <= figure.accept[1] and confirmed:
        return "reproduced" if _meets_source(figure, low, high) else "in our band"
    if side == 0:
        return "not reproduced"
    if confirmed:
        return "direction only"
    refuted = high < no_effect if side > 0 else low > no_effect
    return "opposite" if refuted else "not reproduced"


def _meets_source(figure: Figure, low: float, high: float) -> bool:
    """Say whether an interval has a number in common with what the source states, if it does."""
    if figure.paper is None:
        return True
    least, most = figure.paper
    return high >= least - _rounding(least) and low <= most + _rounding(most)


def _rounding(stated: float) -> float:
    """Return half a unit of the last digit of a number; of a share, to the whole per cent.

    Examples
    --------
    >>> _rounding(2.7), _rounding(14), _rounding(0.4), _rounding(0.875)
    (0.05, 0.5, 0.005, 0.0005)
    """
    if not math.isfinite(stated):
        return 0.0
    decimals = len(f"{stated:.9f}".rstrip("0").partition(".")[2])
    return 0.5 / 10.0 ** max(decimals, 2 if abs(stated) < 1 else 0)


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
