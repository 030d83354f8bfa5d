"""A sweep and its replications, written out as single experiments."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec, set_key
from schedlab.experiments.specification.swept import swept_keys, swept_values
from schedlab.sim.errors import SpecError


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes
    ----------
    spec : ExperimentSpec
        What to run: no sweep, one replication.
    settings : dict of str to str
        Swept key to the value it has here, as short text; empty without a sweep.
    replication : int
        0-based; the seed is the experiment's seed plus this.
    label : str
        The settings in one line, e.g. ``"sjf, request_rate=4"``; the experiment's name if
        nothing is swept. Replications of a setting share it.
    """

    spec: ExperimentSpec
    settings: dict[str, str]
    replication: int
    label: str

    @property
    def policy(self) -> str:
        """What to call the policy: its label, or its name."""
        return self.spec.policy.label or self.spec.policy.name


def points(spec: ExperimentSpec) -> list[Point]:
    """Expand the sweep and the replications of an experiment.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.

    Returns
    -------
    list of Point
        The Cartesian product of the swept values, the last key varying fastest (linked keys vary
        as one), each with all its replications. Replication r has seed ``spec.seed + r`` at every
        setting, so that all settings meet the same random numbers and their differences can be
        paired.

    Raises
    ------
    SpecError
        If a combination of values is invalid although each value is valid alone.
    """
    # Claims and searches are about the sweep, not about any one of its points.
    about_all = ("sweep", "claim", "find", "tune")
    base = {key: value for key, value in spec.to_data().items() if key not in about_all}
    base["replications"] = 1
    axes = [_axis(key, items) for key, items in spec.sweep.items()]
    names = short_names([key for axis in axes for key in axis])
    texts = {key: _texts(values) for axis in axes for key, values in axis.items()}
    found: list[Point] = []
    for choice in itertools.product(*(range(len(items)) for items in spec.sweep.values())):
        chosen = {key: i for axis, i in zip(axes, choice, strict=True) for key in axis}
        settings = {key: texts[key][i] for key, i in chosen.items()}
        label = ", ".join(
            text if key == "policy" else f"{names[key]}={text}" for key, text in settings.items()
        )
        data = copy.deepcopy(base)
        try:
            for axis, i in zip(axes, choice, strict=True):
                for key, values in axis.items():
                    set_key(data, key, values[i])
            concrete = make_spec(data)
        except SpecError as error:
            raise SpecError(f"sweep point {label!r}: {error}") from None
        for replication in range(spec.replications):
            seed = concrete.seed + replication
            found.append(
                Point(
                    spec=concrete.model_copy(update={"seed": seed}),
                    settings=settings,
                    replication=replication,
                    label=label or spec.name,
                )
            )
    return found


def _axis(key: str, items: Sequence[object]) -> dict[str, list[object]]:
    """Return the values of each key of an entry of the sweep; linked keys move together."""
    columns = zip(*(swept_values(key, item) for item in items), strict=True)
    return {k: list(column) for k, column in zip(swept_keys(key), columns, strict=True)}


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Name each key by as few of its last parts as tell it from the others."""
    names = {}
    for key in keys:
        parts = key.split(".")
        for taken in range(1, len(parts) + 1):
            names[key] = ".".join(parts[-taken:])
            if not any(other.endswith(f".{names[key]}") for other in keys if other != key):
                break
    return names


def _texts(values: Sequence[object]) -> list[str]:
    """Return the shortest texts that tell the values of one key apart."""
    short = [_text(value, full=False) for value in values]
    full = [_text(value, full=True) for value in values]
    return [s if short.count(s) == 1 else f for s, f in zip(short, full, strict=True)]


def shown(value: object) -> str:
    """Return a value of a sweep as short text, with all that a mapping holds."""
    return _text(value, full=True)


def _text(value: object, full: bool) -> str:
    if isinstance(value, dict):
        if isinstance(value.get("label"), str):
            return str(value["label"])
        rest = {key: _text(item, full) for key, item in value.items()}
        # What a mapping chooses comes first, as in policy: {name: sjf, ...}.
        head = next(
            (rest.pop(k) for k in ("name", "process", "distribution", "profile") if k in rest), ""
        )
        inside = ", ".join(f"{key}={text}" for key, text in rest.items())
        return head if head and (not full or not inside) else f"{head}({inside})"
    if isinstance(value, list):
        return "[" + ", ".join(_text(item, full) for item in value) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return str(int(value)) if math.isfinite(value) and value.is_integer() else str(value)
    text = str(value)
    return PurePath(text).name if "/" in text and not full else text


def slug(label: str) -> str:
    """Return a label with only what every file system takes in a name.

    Examples
    --------
    >>> slug("sjf(predictor=oracle), request_rate=4")
    'sjf_predictor=oracle_request_rate=4'
    """
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", label).strip("_.")[:80]
