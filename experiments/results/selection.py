"""Some of the results of one or several folders, under the names that a figure is to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.results.saved_results import SavedResults, missing_points
from schedlab.experiments.results.tables import Row
from schedlab.experiments.specification.sweep import shown
from schedlab.sim.errors import SchedlabError, SpecError, nearest

FOLDER = "folder"
"""The key that tells the settings of several folders apart."""


def merged(several: Sequence[SavedResults]) -> SavedResults:
    """Return the results of several folders as one sweep.

    Parameters
    ----------
    several : sequence of SavedResults
        One is returned as it is.

    Returns
    -------
    SavedResults
        Each setting has the key `FOLDER` and all keys that any of the folders sweeps; what a folder
        does not sweep is read from the experiments of its points.

    Raises
    ------
    SchedlabError
        If no setting of any has all its replications.
    """
    if not any(one.rows for one in several):
        missing = _once(filter(None, (missing_points(one.folder) for one in several)))
        raise SchedlabError(f"no setting is complete: {'; '.join(missing)}")
    if len(several) == 1:
        return several[0]
    keys = list(dict.fromkeys(key for one in several for row in one.rows for key in row.settings))
    rows: list[Row] = []
    runs: list[PointMetrics] = []
    for one, folder in zip(several, _short_names(several), strict=True):
        for row in one.rows:
            spec = one.of(row)[0].spec()
            settings = {FOLDER: folder}
            settings |= {key: row.settings.get(key) or _in(spec, key) for key in keys}
            label = f"{folder}: {row.label}"
            rows.append(replace(row, label=label, settings=settings))
            runs += [replace(run, label=label, settings=settings) for run in one.of(row)]
    described = [model for one in several for model in one.cost_models]
    return SavedResults(
        folder=several[0].folder,
        name=" and ".join(dict.fromkeys(one.name for one in several)),
        rows=rows,
        runs=runs,
        cost_models=[model for i, model in enumerate(described) if model not in described[:i]],
        predictors=_once(line for one in several for line in one.predictors),
        warnings=_once(line for one in several for line in one.warnings),
    )


def filtered(results: SavedResults, wanted: Mapping[str, Sequence[str]]) -> SavedResults:
    """Return the settings that have one of the values wanted of each key.

    Parameters
    ----------
    results : SavedResults
        Finished runs.
    wanted : mapping of str to sequence of str
        Swept key, or so much of its end that tells it from others, to values as tables show them.

    Raises
    ------
    SpecError
        If no such key is swept, or it has no such value.
    """
    for name, values in wanted.items():
        key = swept_key(results.rows, name)
        there = [row.settings[key] if key != "policy" else row.policy for row in results.rows]
        for value in values:
            if value not in there:
                raise SpecError(f"no setting has {name}={value}; {nearest(value, set(there))}")
        kept = [row for row, value in zip(results.rows, there, strict=True) if value in values]
        labels = {row.label for row in kept}
        runs = [run for run in results.runs if run.label in labels]
        results = replace(results, rows=kept, runs=runs)
    return results


def relabelled(results: SavedResults, names: Mapping[str, str]) -> SavedResults:
    """Return results in which policies, and other values that are swept, have other names.

    Parameters
    ----------
    results : SavedResults
        Finished runs.
    names : mapping of str to str
        A policy, or a value of a swept key, as tables show it, to what to show instead.

    Raises
    ------
    SpecError
        If nothing has such a name.
    """
    known = {value for row in results.rows for value in (row.policy, *row.settings.values())}
    for name in names:
        if name not in known:
            raise SpecError(f"nothing here is called {name!r}; {nearest(name, known)}")

    def named(row: Row) -> Row:
        settings = {key: names.get(value, value) for key, value in row.settings.items()}
        return replace(row, policy=names.get(row.policy, row.policy), settings=settings)

    return replace(results, rows=[named(row) for row in results.rows])


def swept_key(rows: Sequence[Row], name: str) -> str:
    """Return the swept key that is called by its whole name, or by the end of it.

    Raises
    ------
    SpecError
        If there is none, or several end so.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    if name in keys or name == "policy":
        return name
    ending = [key for key in keys if key.endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise SpecError(f"{name} may be {' or '.join(ending)}: write the whole key")
    raise SpecError(f"no key {name!r} is swept here; {nearest(name, {'policy', *keys})}")


_PARALLEL = ("tensor", "pipeline", "data")
"""Whose sizes multiply to the GPUs of an engine."""


def num_gpus(run: PointMetrics) -> int:
    """Return how many GPUs a point ran on, over all its engines.

    Raises
    ------
    SchedlabError
        If its result does not say.
    """
    spec = run.spec()
    try:
        return _num_gpus(spec["engine"], spec.get("cluster"))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        where = f"{run.folder / 'result.json'}: schedlab.provenance.spec"
        raise SchedlabError(f"{where} does not say on how many GPUs: {error!r}"[:300]) from error


def _num_gpus(engine: Mapping[str, Any], cluster: Any) -> int:  # noqa: ANN401 - as it was written
    def of(own: Mapping[str, Any]) -> int:
        both = {**engine, **own}
        return prod(int(both.get(f"{kind}_parallel_size") or 1) for kind in _PARALLEL)

    if not cluster:
        return of({})
    if isinstance(cluster, int):
        return cluster * of({})
    pools: Iterable[Any] = (cluster.get("pools") or {}).values()
    found = sum(int(pool.get("count") or 1) * of(pool.get("engine") or {}) for pool in pools)
    return found or int(cluster["count"]) * of({})


def _in(spec: Mapping[str, Any], key: str) -> str:
    """Return a dotted key of an experiment as short text; a dash where it is not given."""
    value: object = spec
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "-" if value is None else shown(value)


def _short_names(several: Sequence[SavedResults]) -> list[str]:
    """Name each folder by so much of its path as tells it from the others."""
    paths = [one.folder.resolve().parts for one in several]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise SpecError(f"{several[0].folder} is named twice")


def _once(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
