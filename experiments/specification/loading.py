"""From YAML and overrides to a checked ExperimentSpec; every error names file, line and key."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from schedlab.experiments.specification.checks import Fail, check_names
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.fields import Data, shorthand_of
from schedlab.experiments.specification.key_errors import describe_error, section_at, sentence
from schedlab.experiments.specification.named_files import found_files
from schedlab.experiments.specification.paths import absolute_paths
from schedlab.experiments.specification.search import check_measure, check_search, is_key
from schedlab.experiments.specification.shipped import experiment_file
from schedlab.experiments.specification.swept import swept_keys, swept_values
from schedlab.experiments.specification.targets import check_targets, may_have_targets
from schedlab.sim.errors import SpecError
from schedlab.sim.yaml_lines import (
    KeyPath,
    Located,
    Value,
    dotted,
    parse_yaml,
    read_yaml,
)

_MERGED_SECTIONS = ("engine", "workload", "cluster", "slo", "sweep")
_MOST_SWEPT = 2000
_NO_NUMBER = ("string_type", "literal_error", "bool_type", "model_type", "dict_type", "list_type")
"""Errors of a key that is set to a number."""
_NEVER_SWEPT = ("name", "sweep", "replications", "extends", "files", "claim", "find", "tune")


Overrides = Sequence[str] | Mapping[str, Any]
"""Changes of an experiment: ``["engine.block_size=32"]``, or ``{"engine.block_size": 32}``."""


def load_spec(path: str | Path, overrides: Overrides = ()) -> ExperimentSpec:
    """Load an experiment from a YAML file.

    Parameters
    ----------
    path : str or Path
        The file, or the name of an experiment that comes with the program, such as
        ``quickstart``. Relative paths in it are relative to its folder.
    overrides : sequence of str, or mapping
        Changes as ``dotted.key=value``, the value in YAML, or of dotted key to value; relative
        paths in them are relative to the working directory. An override of a swept key ends the
        sweep over that key.

    Returns
    -------
    ExperimentSpec
        Checked against the schema, the registries and the tables of models and hardware, for
        every value of its sweep. Keys that are swept hold their first value.

    Raises
    ------
    SpecError
        If anything is wrong; the message names file and line or override, key, and the
        nearest valid choice.
    """
    path = experiment_file(path)
    located = _read(path)
    if "extends" in located.data:
        located = _extend(located, path)
    located.data.setdefault("name", path.stem)
    return _finish(located, overrides)


def make_spec(data: Mapping[str, Any], overrides: Overrides = ()) -> ExperimentSpec:
    """Make an experiment from plain data, with the checks of `load_spec`.

    Parameters
    ----------
    data : mapping
        What the YAML would hold, without `extends`. Relative paths are relative to the working
        directory; the name is ``experiment`` unless given.
    overrides : sequence of str, or mapping
        As for `load_spec`.

    Returns
    -------
    ExperimentSpec
        The checked experiment.

    Raises
    ------
    SpecError
        If anything is wrong; the message names the key.

    Examples
    --------
    >>> workload = {"trace": "azure-conv", "num_requests": 10, "request_rate": 2}
    >>> make_spec({"workload": workload}, ["engine.block_size=32"]).engine.block_size
    32
    """
    located = Located(absolute_paths(copy.deepcopy(dict(data)), Path.cwd()), {})
    located.data.setdefault("name", "experiment")
    return _finish(located, overrides)


def set_key(data: Data, key: str, value: Value) -> None:
    """Set a dotted key in place, writing out shorthands such as ``policy: fcfs`` on the way.

    Parameters
    ----------
    data : dict
        Changed in place.
    key : str
        Dotted key; missing mappings are made.
    value : Value
        A copy of it is stored.

    Raises
    ------
    SpecError
        If something on the way is neither a mapping nor a shorthand for one.
    """
    parts = key.split(".")
    for depth, part in enumerate(parts[:-1], start=1):
        outer = ".".join(parts[:depth])
        inside = data.get(part)
        if inside is None:
            inside = {}
        elif not isinstance(inside, dict):
            field = section_at(parts[: depth - 1], ExperimentSpec).model_fields.get(part)
            short = shorthand_of(field) if field else None
            try:
                inside = short.expand(inside) if short else None
            except ValueError as error:
                raise SpecError(f"{outer}: {error}") from None
            if not isinstance(inside, dict):
                raise SpecError(f"{key}: {outer} has no keys inside it")
        data[part] = inside
        data = inside
    data[parts[-1]] = copy.deepcopy(value)


def _read(path: Path) -> Located:
    located = read_yaml(path)
    if not isinstance(located.data, dict):
        raise SpecError(f"{path}: an experiment is a mapping of keys to values")
    if "files" in located.data:
        located.data = found_files(
            located.data, path.parent, located.place(("files",)) or str(path)
        )
    located.data = absolute_paths(located.data, path.parent)
    return located


def _extend(child: Located, path: Path) -> Located:
    place = child.place(("extends",))
    extended = child.data.pop("extends")
    if not isinstance(extended, str):
        raise SpecError(f"{place}: extends: must be the path of a YAML file")
    try:
        parent = _read(path.parent / extended)
    except SpecError as error:
        raise SpecError(f"{place}: extends: {error}") from None
    if "extends" in parent.data:
        raise SpecError(f"{place}: extends: {extended} extends a file itself; one level is allowed")
    parent.data.pop("name", None)
    for section, value in child.data.items():
        merge = section in _MERGED_SECTIONS and isinstance(parent.data.get(section), dict)
        keys = (
            [(section, key) for key in value] if merge and isinstance(value, dict) else [(section,)]
        )
        for key in keys:
            item = value[key[1]] if len(key) == 2 else value
            written = {p: where for p, where in child.places.items() if p[: len(key)] == key}
            _replace(parent, key, item, written, child.place(key))
    parent.places[()] = child.places[()]
    return parent


def _written(text: str) -> tuple[str, Value]:
    """Return key and value of an override that is written as text."""
    place = f"override {text!r}"
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise SpecError(f"{place}: write it as dotted.key=value")
    return key, parse_yaml(value, place).data if value.strip() else None


def _override(located: Located, key: str, value: Value, place: str) -> None:
    parts = key.split(".")
    if parts[0] in ("extends", "files"):
        raise SpecError(f"{place}: {parts[0]} cannot be overridden")
    path: KeyPath = tuple(parts)
    if parts[0] == "sweep" and len(parts) > 1:
        swept = ".".join(parts[1:])
        path = ("sweep", swept)
        value = absolute_paths({"sweep": {swept: value}}, Path.cwd())["sweep"][swept]
    else:
        value = absolute_paths(value, Path.cwd(), key)
    _replace(located, path, value, {path: place}, place)


def _replace(
    located: Located, path: KeyPath, value: Value, written: dict[KeyPath, str], place: str | None
) -> None:
    """Set a key and where it was written; a key that is set is no longer swept."""
    data, key = located.data, ".".join(str(part) for part in path)
    if path[0] == "sweep" and len(path) == 2:
        if not isinstance(data.get("sweep"), dict):
            data["sweep"] = {}
        data["sweep"][path[1]] = value
        if value is None:  # as an override or in a file that extends another: swept no more
            del data["sweep"][path[1]]
    else:
        if path[0] != "sweep" and isinstance(data.get("sweep"), dict):
            data["sweep"].pop(key, None)
            swept_all = [(entry, k) for entry in data["sweep"] for k in swept_keys(entry)]
            linked = [entry for entry, swept in swept_all if key == swept]
            if linked:
                raise SpecError(
                    f"{place}: {key} is swept together with others; set 'sweep.{linked[0]}' instead"
                )
            outer = [swept for _, swept in swept_all if key.startswith(f"{swept}.")]
            if outer:
                raise SpecError(
                    f"{place}: {key} would have no effect: {outer[0]} is swept; "
                    f"set {outer[0]} or sweep.{outer[0]} instead"
                )
        try:
            set_key(data, key, value)
        except SpecError as error:
            raise SpecError(f"{place}: {error}") from None
    located.places = {p: w for p, w in located.places.items() if p[: len(path)] != path} | written


def _finish(located: Located, overrides: Overrides) -> ExperimentSpec:
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _override(located, key, copy.deepcopy(value), f"override {key!r}")
    else:
        for text in overrides:
            _override(located, *_written(text), f"override {text!r}")
    sweep = _checked_sweep(located)
    indices = dict.fromkeys(sweep, 0)
    spec = _build_point(located, sweep, indices, keep_sweep=True)
    for key, values in sweep.items():
        for index in range(1, len(values)):
            _build_point(located, sweep, indices | {key: index})

    def fail(path: KeyPath, message: str) -> NoReturn:
        raise SpecError(_message(located, path, message))

    check_search(spec.find, spec.tune, [k for entry in sweep for k in swept_keys(entry)], fail)
    _check_searched_keys(spec, fail)
    if spec.claim is not None:
        from schedlab.experiments.specification.claim_settings import check_claim

        check_claim(spec, fail)
    return spec


def _check_searched_keys(spec: ExperimentSpec, fail: Fail) -> None:
    """Refuse to search the largest or least value of what is no key, or takes no number."""
    for name, asked in (("find", spec.find), ("tune", spec.tune)):
        if asked is None:
            continue
        side = "maximize" if asked.minimize is None else "minimize"
        key: str = getattr(asked, side)
        if name == "find" or is_key(key):  # and no metric
            _check_searched_key(spec, (name, side), key, 1, fail)
    for key, axis in ({} if spec.tune is None else spec.tune.over).items():
        _check_searched_key(spec, ("tune", "over", key), key, axis[0], fail)


def _check_searched_key(
    spec: ExperimentSpec, path: KeyPath, key: str, value: float | str, fail: Fail
) -> None:
    parts, data = tuple(key.split(".")), spec.to_data()
    try:
        set_key(data, key, value)
        ExperimentSpec.model_validate(data)
    except SpecError as error:
        fail(path, str(error))
    except ValidationError as error:
        told = "" if key in path else f"{key}: "
        for one in error.errors():
            if one["loc"][: len(parts)] == parts and one["type"] == "extra_forbidden":
                fail(path, f"{told}{sentence(one, ExperimentSpec)}")
            if one["loc"][: len(parts)] == parts and one["type"] in _NO_NUMBER:
                fail(path, f"{key} takes no number")


def _checked_sweep(located: Located) -> dict[str, list[Any]]:
    sweep = located.data.get("sweep") or {}

    def fail(path: KeyPath, message: str) -> NoReturn:
        raise SpecError(_message(located, path, message))

    if not isinstance(sweep, dict):
        fail(("sweep",), "must map dotted keys to lists of values")
    earlier: list[str] = []
    for entry, items in sweep.items():
        path = ("sweep", entry)
        keys = swept_keys(entry)
        for key in keys:
            if not all(key.split(".")) or key.split(".")[0] in _NEVER_SWEPT:
                fail(path, "cannot be swept" if len(keys) == 1 else f"{key!r} cannot be swept")
            if key in earlier:
                fail(path, f"{key} is swept twice")
            inner = [other for other in earlier if other.startswith(f"{key}.")]
            if inner:
                fail(path, f"must come before {inner[0]}, which is inside it")
            earlier.append(key)
        if not isinstance(items, list):
            fail(path, f"must be a list of values, got {items!r}")
        if not items:
            fail(path, "must have one value at least; leave the key out to sweep nothing")
        if len(items) > _MOST_SWEPT:
            fail(path, f"at most {_MOST_SWEPT:,} values of a key are swept, got {len(items):,}")
        if any(item in items[:j] for j, item in enumerate(items)):
            fail(path, "has the same value twice")
        for j, item in enumerate(items):
            try:
                swept_values(entry, item)
            except ValueError as error:
                fail((*path, j), str(error))
    return dict(sweep)


def _build_point(
    located: Located, sweep: dict[str, list[Any]], indices: dict[str, int], keep_sweep: bool = False
) -> ExperimentSpec:
    """Validate one choice of swept values, with errors told where those were written."""
    data = copy.deepcopy({key: value for key, value in located.data.items() if key != "sweep"})
    point = Located(data, dict(located.places))
    for entry, index in indices.items():
        keys = swept_keys(entry)
        for j, (key, value) in enumerate(
            zip(keys, swept_values(entry, sweep[entry][index]), strict=True)
        ):
            written: KeyPath = ("sweep", entry, index) + ((j,) if len(keys) > 1 else ())
            try:
                set_key(data, key, value)
            except SpecError as error:
                raise SpecError(_message(located, written, str(error))) from None
            _move_places(located, point, written, tuple(key.split(".")))
    return _build({**data, "sweep": sweep} if keep_sweep else data, point)


def _move_places(located: Located, point: Located, written: KeyPath, path: KeyPath) -> None:
    """Note that what stands at `path` of a point was written at `written` of the sweep."""
    moved = {
        path + p[len(written) :]: where
        for p, where in located.places.items()
        if p[: len(written)] == written
    }
    place = located.place(written)
    kept = {p: w for p, w in point.places.items() if p[: len(path)] != path}
    point.places = kept | ({path: place} if place else {}) | moved


def _build(data: Data, located: Located) -> ExperimentSpec:
    def fail(path: KeyPath, message: str) -> NoReturn:
        raise SpecError(_message(located, path, message))

    try:
        spec = ExperimentSpec.model_validate(data)
    except ValidationError as error:
        fail(*describe_error(error, ExperimentSpec))
    check_names(spec, fail)
    check_measure(spec.measure, spec.workload, fail)
    if not spec.sweep:  # which may give targets; its points are looked at one by one
        check_targets(spec, may_have_targets(spec), fail)
    return spec


def _message(located: Located, path: KeyPath, message: str) -> str:
    place = located.place(path)
    return ": ".join(part for part in (place, dotted(path), message) if part)
