"""The matrix of a regression check: which runs, which metrics, how far they may move."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field, ValidationError

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.fields import Data, NonNegative, Section
from schedlab.experiments.specification.identity import data_hash
from schedlab.experiments.specification.key_errors import describe_error
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.paths import absolute_paths
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.yaml_lines import KeyPath, dotted, read_yaml

MATRIX = "matrix.yaml"
"""Name of the file in a baseline's folder."""

_NOT_OF_A_WORKLOAD = ("name", "policy", "seed", "replications", "sweep", "extends", "claim")
_LABEL = re.compile(r"[A-Za-z0-9_.+-]+")


class Tolerance(Section):
    """How far a metric may move between versions, and which way it gets better."""

    better: Literal["lower", "higher"] | None = Field(
        default=None, description="Which way is better; as `schedlab metrics` says if absent."
    )
    relative: NonNegative = Field(default=0.0, description="Share of the kept value.")
    absolute: NonNegative = Field(default=0.0, description="In the metric's own unit.")

    def allowed(self, kept: float) -> float:
        """Return how far a value may be from `kept`: the larger of the two bounds."""
        return max(self.absolute, self.relative * abs(kept))


class _File(Section):
    """The keys of a matrix file."""

    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    experiment: Data = Field(default_factory=dict)
    workloads: Annotated[dict[str, Data], Field(min_length=1)]
    registered: bool = True
    predictor: str | Data | None = None
    policies: dict[str, str | Data] = Field(default_factory=dict)
    metrics: Annotated[dict[str, Tolerance], Field(min_length=1)]


@dataclass(frozen=True)
class MatrixPoint:
    """One run of the matrix.

    Attributes
    ----------
    workload, policy : str
        Their labels in the matrix.
    seed : int
        Seed of the run.
    spec : ExperimentSpec
        What to run.
    question : str
        Hash of what the matrix says of this run, files by content. It does not change when
        schedlab's own defaults do.
    """

    workload: str
    policy: str
    seed: int
    spec: ExperimentSpec
    question: str

    @property
    def key(self) -> str:
        """Name of the point, e.g. ``chat/fcfs/0``."""
        return f"{self.workload}/{self.policy}/{self.seed}"


@dataclass(frozen=True)
class Matrix:
    """What a regression check runs and compares.

    Attributes
    ----------
    points : list of MatrixPoint
        Sorted by workload and policy as the file lists them, then by seed.
    metrics : dict of str to Tolerance
        What is compared.
    """

    points: list[MatrixPoint]
    metrics: dict[str, Tolerance]


def load_matrix(folder: Path) -> Matrix:
    """Read ``matrix.yaml`` of a baseline's folder.

    Parameters
    ----------
    folder : Path
        Relative paths in the file are relative to it.

    Returns
    -------
    Matrix
        Every point checked as any experiment is.

    Raises
    ------
    SpecError
        If the file is missing or anything in it is wrong; names file, line and key.
    """
    path = folder / MATRIX
    if not path.is_file():
        raise SpecError(
            f"{path}: no such file; a baseline's folder holds the matrix it is the baseline of"
        )
    located = read_yaml(path)

    def fail(where: KeyPath, message: str) -> NoReturn:
        place = located.place(where) or str(path)
        raise SpecError(": ".join(part for part in (place, dotted(where), message) if part))

    try:
        file = _File.model_validate(located.data)
    except ValidationError as error:
        fail(*describe_error(error, _File))
    if len(set(file.seeds)) < len(file.seeds):
        fail(("seeds",), "has the same seed twice")
    metrics = {}
    for name, tolerance in file.metrics.items():
        try:
            metric = metric_named(name)
        except SpecError as error:
            fail(("metrics", name), str(error))
        better = tolerance.better or metric.better
        if better == "neither":
            fail(
                ("metrics", name), "neither way is better by itself: say `better: lower` or higher"
            )
        metrics[name] = tolerance.model_copy(update={"better": better})
    for section, labels in (("workloads", file.workloads), ("policies", file.policies)):
        for label in labels:
            if not _LABEL.fullmatch(label):
                fail((section, label), "a label is made of letters, digits and . _ + -")
    found = []
    policies = _policies(file, fail)
    for workload, given_keys in file.workloads.items():
        keys = dict(given_keys)
        run_with = _labels(keys.pop("policies", list(policies)), policies, workload, fail)
        for section, given in (("experiment", file.experiment), ("workloads", keys)):
            for key in _NOT_OF_A_WORKLOAD:
                if key in given:
                    at = (section,) if section == "experiment" else (section, workload)
                    fail((*at, key), "is for the matrix to set, not for one of its workloads")
        for policy in run_with:
            written = {**file.experiment, **keys, "policy": policies[policy]}
            data = absolute_paths(written, folder.absolute())
            try:
                spec = make_spec(data)
            except SpecError as error:
                own = policy in file.policies and "policy" in str(error)
                at = ("policies", policy) if own else ("workloads", workload)
                fail(at, f"{workload} with {policy}: {error}")
            for seed in file.seeds:
                one = spec.model_copy(update={"name": "regress", "seed": seed})
                question = data_hash({**data, "seed": seed})
                found.append(MatrixPoint(workload, policy, seed, one, question))
    return Matrix(found, metrics)


def _labels(
    chosen: object,
    policies: dict[str, Any],
    workload: str,
    fail: Callable[[KeyPath, str], NoReturn],
) -> list[str]:
    """Return the policies that a workload is run with, as it says itself; all by default."""
    at = ("workloads", workload, "policies")
    if not isinstance(chosen, list) or not chosen:
        fail(at, f"a list of labels, got {chosen!r}")
    for label in chosen:
        if label not in policies:
            fail(at, f"there is no policy {label!r} here; {nearest(label, policies)}")
    return [label for label in policies if label in chosen]


def _policies(file: _File, fail: Any) -> dict[str, Any]:  # noqa: ANN401 - raises, as above
    """Return every policy to run by its label; the file's own come before the defaults."""
    from schedlab.policies import registry

    found: dict[str, Any] = {}
    for name in registry.names() if file.registered else ():
        if name in file.policies:
            continue
        try:
            needs_prediction = registry.make(name).needs_prediction
        except SpecError as error:
            fail(("registered",), f"{error}; give {name} its settings under policies")
        if needs_prediction and file.predictor is None:
            fail(("registered",), f"{name} needs predictions: give predictor, e.g. oracle")
        found[name] = {"name": name}
        if needs_prediction:
            found[name]["predictor"] = file.predictor
    return dict(sorted({**found, **file.policies}.items()))
