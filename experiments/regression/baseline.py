"""What a matrix gave when it was kept: ``baseline.json``, read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedlab.experiments.running.point_hash import code_version
from schedlab.experiments.running.provenance import versions
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object, write_text

BASELINE = "baseline.json"
"""Name of the file in a baseline's folder."""

SHOWN_HASH = 16
"""Digits of each hash that are kept."""

_SCHEMA = 1


@dataclass(frozen=True)
class MeasuredPoint:
    """What one point of the matrix gave.

    Attributes
    ----------
    question : str
        `MatrixPoint.question`.
    version : str
        Hash of everything that can change the result: specification with defaults, sources of the
        simulator and of the policy, versions of Python and packages.
    metrics : dict of str to float
        The compared ones; NaN where there was nothing to measure.
    requests_sha256 : str
        Hash of the table of requests: when each was scheduled, answered and finished.
    """

    question: str
    version: str
    metrics: dict[str, float]
    requests_sha256: str


@dataclass(frozen=True)
class Baseline:
    """What a matrix gave when it was kept.

    Attributes
    ----------
    code : str
        Version of the simulator's sources then.
    versions : dict of str to str
        Python and packages then.
    points : dict of str to Measured
        By `MatrixPoint.key`.
    """

    code: str
    versions: dict[str, str]
    points: dict[str, MeasuredPoint]


def kept_baseline(folder: Path) -> Baseline:
    """Read ``baseline.json`` of a folder.

    Raises
    ------
    SpecError
        If there is none, or it is not one this version can read.
    """
    path = folder / BASELINE
    if not path.is_file():
        raise SpecError(
            f"{path}: no such file; schedlab regress update --baseline {folder} makes it"
        )
    data = read_json_object(path)
    if data.get("schema") != _SCHEMA:
        raise SpecError(
            f"{path}: schema {data.get('schema')!r}, this version reads {_SCHEMA}; delete the file "
            f"and make it anew: schedlab regress update --baseline {folder}"
        )
    try:
        points = {key: _point(value) for key, value in data["points"].items()}
        if any(key.count("/") != 2 for key in points):
            raise ValueError("a point is named workload/policy/seed")
        return Baseline(str(data["code"]), dict(data["versions"]), points)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(
            f"{path}: damaged: {type(error).__name__}: {error}; delete the file and make it anew: "
            f"schedlab regress update --baseline {folder}"
        ) from error


def write_baseline(folder: Path, points: Mapping[str, MeasuredPoint]) -> None:
    """Write ``baseline.json`` of a folder: sorted, a line a point.

    Parameters
    ----------
    folder : Path
        Where the matrix is.
    points : mapping of str to Measured
        By `MatrixPoint.key`.
    """
    lines = [f"{_json(key)}: {_json(_data(points[key]))}" for key in sorted(points)]
    head = {"code": code_version()[:SHOWN_HASH], "schema": _SCHEMA, "versions": versions()}
    top = {key: _json(value) for key, value in head.items()}
    top["points"] = "{\n" + ",\n".join(lines) + "\n}"
    text = ",\n".join(f"{_json(key)}: {top[key]}" for key in sorted(top))
    write_text(folder / BASELINE, "{\n" + text + "\n}\n")


def version_change(baseline: Baseline) -> str:
    """Return what differs between the versions a baseline was kept by and those of now."""
    parts = []
    if baseline.code != code_version()[:SHOWN_HASH]:
        parts.append("the simulator's sources")
    now = versions()
    parts += [
        f"{name} {baseline.versions.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted({*now, *baseline.versions})
        if baseline.versions.get(name) != now.get(name)
    ]
    return ", ".join(parts) or "defaults of keys, or modules of policies of your own"


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _data(point: MeasuredPoint) -> dict[str, Any]:
    metrics = {k: None if math.isnan(v) else v for k, v in point.metrics.items()}
    return {
        "metrics": metrics,
        "question": point.question,
        "requests": point.requests_sha256,
        "version": point.version,
    }


def _point(data: Mapping[str, Any]) -> MeasuredPoint:
    metrics = {
        str(k): math.nan if v is None else _number(v) for k, v in dict(data["metrics"]).items()
    }
    return MeasuredPoint(
        str(data["question"]), str(data["version"]), metrics, str(data["requests"])
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
