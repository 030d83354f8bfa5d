"""From the figures of a claim to the runs that they need."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NoReturn

from schedlab.experiments.specification.claim import Figure, Measure
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec, set_key
from schedlab.experiments.specification.search import check_bound
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.yaml_lines import KeyPath

Fail = Callable[[KeyPath, str], NoReturn]
Setting = tuple[int, ...]
"""Which value each swept key has, by its index in the list, in the order of the sweep."""


def check_claim(spec: ExperimentSpec, fail: Fail) -> None:
    """Check that a claim names metrics that exist and settings that its sweep contains.

    Parameters
    ----------
    spec : ExperimentSpec
        An experiment with a claim.
    fail : callable
        Called with the key at fault and what is wrong with it; must raise.
    """
    assert spec.claim is not None
    if spec.replications < 2:
        fail(("replications",), "a claim needs at least 2: an interval comes from several seeds")
    seen: set[str] = set()
    for i, figure in enumerate(spec.claim.figures):
        path: KeyPath = ("claim", "figures", i)
        if figure.name in seen:
            fail((*path, "name"), f"two figures are called {figure.name!r}")
        seen.add(figure.name)
        _check_figure(spec, figure, path, fail)
        for j, variation in enumerate(figure.why.shown_by if figure.why else ()):
            place: KeyPath = (*path, "why", "shown_by", j)
            try:
                changed = varied_spec(spec, variation.change)
                again = figure.varied(variation)
            except (SpecError, ValueError) as error:
                fail(place, str(error))
            _check_figure(changed, again, place, fail)


def varied_spec(spec: ExperimentSpec, change: Mapping[str, Any]) -> ExperimentSpec:
    """Return an experiment with some keys changed, and without its claim.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    change : mapping
        Dotted key to its value; a key that is given is no longer swept, ``sweep.KEY`` replaces the
        values of a swept key.

    Raises
    ------
    SpecError
        If a key or a value is wrong.
    """
    data = spec.to_data()
    data.pop("claim", None)
    for key, value in change.items():
        if key.startswith("sweep."):
            data.setdefault("sweep", {})[key.removeprefix("sweep.")] = value
        else:
            data.get("sweep", {}).pop(key, None)
            set_key(data, key, value)
    return make_spec(data)


def _check_figure(spec: ExperimentSpec, figure: Figure, path: KeyPath, fail: Fail) -> None:
    for key, measure in _measures(figure):
        _check_measure(measure, (*path, *key), fail)
    for side in ("at_most", "at_least") if figure.capacity is not None else ():
        for name, bound in getattr(figure.capacity, side).items():
            check_bound(name, bound, (*path, "capacity", side, name), fail)
    sides = [side for side in ("of", "against") if getattr(figure, side) is not None]
    settings = [_resolve(spec, figure, side, path, fail) for side in sides]
    if len(settings) == 2 and settings[0] == settings[1]:
        fail((*path, "against"), "is the setting that `of` is: it would be held against itself")


def settings_of(spec: ExperimentSpec, figure: Figure, side: str) -> list[Setting]:
    """Return where a figure is measured: one setting, or several along a capacity's key.

    Parameters
    ----------
    spec : ExperimentSpec
        An experiment whose claim `check_claim` has passed.
    figure : Figure
        One of its figures.
    side : {"of", "against"}
        Which of the two things compared.

    Returns
    -------
    list of Setting
        In the order of the sweep.
    """

    def fail(path: KeyPath, message: str) -> NoReturn:
        raise AssertionError(f"{path}: {message}")

    return _resolve(spec, figure, side, ("claim",), fail)


def measures_of(figure: Figure) -> list[Measure]:
    """Return everything that has to be measured in a run for a figure."""
    return [measure for _, measure in _measures(figure)]


def setting_index(spec: ExperimentSpec, setting: Setting) -> int:
    """Return the place of a setting among those of the sweep, the last key varying fastest."""
    index = 0
    for values, i in zip(spec.sweep.values(), setting, strict=True):
        index = index * len(values) + i
    return index


def _measures(figure: Figure) -> list[tuple[KeyPath, Measure]]:
    if figure.metric is not None:
        return [(("metric",), figure.metric)]
    assert figure.capacity is not None
    return [
        (("capacity", constraint, name), Measure(name=name))
        for constraint in ("at_most", "at_least")
        for name in getattr(figure.capacity, constraint)
    ]


def _check_measure(measure: Measure, path: KeyPath, fail: Fail) -> None:
    try:
        metric_named(measure.name, **measure.knobs)
    except SpecError as error:
        fail(path, str(error))


def _resolve(
    spec: ExperimentSpec, figure: Figure, side: str, path: KeyPath, fail: Fail
) -> list[Setting]:
    own = getattr(figure, side) or {}
    both = [key for key in own if key in figure.at]
    if both:
        fail((*path, side, both[0]), "is given in `at` as well")
    over = figure.capacity.over if figure.capacity else None
    for where, keys in ((side, own), ("at", figure.at)):
        for key in keys:
            if key not in spec.sweep:
                fail((*path, where, key), f"is not swept; {nearest(key, spec.sweep)}")
    if over is not None and over not in spec.sweep:
        fail((*path, "capacity", "over"), f"{over} is not swept; {nearest(over, spec.sweep)}")
    chosen: list[list[int]] = []
    for key, values in spec.sweep.items():
        where = side if key in own else "at"
        given = {**own, **figure.at}
        if key == over:
            if key in given:
                fail((*path, where, key), "is what the capacity is taken over")
            if not _rise(values):
                fail((*path, "capacity", "over"), f"the values of {key} must be rising numbers")
            chosen.append(list(range(len(values))))
        elif key in given:
            fits = [i for i, value in enumerate(values) if _fits(given[key], value)]
            if len(fits) != 1:
                many = "several values" if fits else "no value"
                fail((*path, where, key), f"{many} of the sweep fit {_text(given[key])}")
            chosen.append(fits)
        elif len(values) == 1:
            chosen.append([0])
        else:
            fail((*path, side), f"must say which {key}, which is swept, or `at` must")
    return list(product(*chosen))


def _rise(values: list[Any]) -> bool:
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return numbers and all(a < b for a, b in pairwise(values))


def _fits(given: object, value: object) -> bool:
    """Say whether a value of the sweep is the one given, or has all parts of it."""
    if given == value:
        return True
    if isinstance(value, dict):
        if isinstance(given, str):
            return bool(given == value.get("name"))
        if isinstance(given, dict):
            return all(key in value and _fits(item, value[key]) for key, item in given.items())
    if isinstance(given, str) and isinstance(value, str) and Path(value).is_absolute():
        return given == Path(value).name
    return isinstance(given, dict) and given == {"name": value}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
