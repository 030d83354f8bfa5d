"""Load tests of real servers, told as rates and quantiles: what was sent, and what a client saw.

A file holds a JSON object, or a list of them, one a test; docs/benchmark.md has the keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError, look_alike, nearest
from schedlab.sim.yaml_lines import KeyPath, Located, dotted, read_yaml

Float64 = npt.NDArray[np.float64]

_QUANTILE = re.compile(r"p(\d+(?:\.\d+)?)")
_NAMED = {"min": 0.0, "median": 0.5, "max": 1.0}
_LIKENESS = 0.85
"""A key so much like one that is known is taken for a slip of the pen, not for another key."""


@dataclass(frozen=True)
class Quantiles:
    """A distribution as a load generator reports it.

    Attributes
    ----------
    mean : float
        Its mean.
    probabilities, values : tuple of float
        Rising probabilities in [0, 1], and the quantile at each.
    """

    mean: float
    probabilities: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, probabilities: npt.ArrayLike) -> Float64:
        """Return quantiles, linear between those that are known and flat beyond them."""
        wanted = np.asarray(probabilities, dtype=np.float64)
        return np.asarray(np.interp(wanted, self.probabilities, self.values))


@dataclass(frozen=True)
class Stage:
    """A part of a load test with one rate.

    Attributes
    ----------
    rate : float
        Requests sent a second.
    num_requests : int
        Sent, failed ones included.
    prompt, output : Quantiles
        Tokens of prompts, and of answers as the client counted them.
    ttft_s, e2e_s : Quantiles
        Seconds until the first and the last token, as the client saw them.
    """

    rate: float
    num_requests: int
    prompt: Quantiles
    output: Quantiles
    ttft_s: Quantiles
    e2e_s: Quantiles


@dataclass(frozen=True)
class SharedPrompts:
    """Users whose prompts never change, in groups with a system prompt in common.

    Attributes
    ----------
    system_prompt_tokens : int
        First tokens that a group has in common.
    num_groups, users_per_group : int
        How many there are.
    """

    system_prompt_tokens: int
    num_groups: int
    users_per_group: int


@dataclass(frozen=True)
class LoadTest:
    """A load test of one server.

    Attributes
    ----------
    id : str
        Its name.
    model : str
        The model, as the file names it.
    hardware : str or None
        The GPU, if the file says so.
    engine : dict
        Settings of the server under the names that `engine` of an experiment has.
    shared : SharedPrompts or None
        Which prompts have what in common; nothing if None.
    stages : tuple of Stage
        In order.
    ignored : tuple of str
        Keys of the file that mean nothing here.
    """

    id: str
    model: str
    hardware: str | None
    engine: dict[str, Any]
    shared: SharedPrompts | None
    stages: tuple[Stage, ...]
    ignored: tuple[str, ...] = ()


_COUNTS = {
    "tp": "tensor_parallel_size",
    "dp": "data_parallel_size",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
}
_SWITCHES = ("enable_expert_parallel", "enable_prefix_caching")
_TEXTS = ("dtype", "kv_cache_dtype")
_SHARED = ("system_prompt_tokens", "num_system_prompts", "users_per_system_prompt")
_RUN_KEYS = (
    "id", "model", "hardware", *_COUNTS, *_SWITCHES, *_TEXTS, "gpu_memory_utilization", *_SHARED,
    "load_type", "pp", "stages",
)  # fmt: skip
_DISTRIBUTIONS = ("prompt", "output", "ttft_s", "e2e_s")
_STAGE_KEYS = (
    "rate", "duration_s", "succeeded", "failed", *_DISTRIBUTIONS, "requests_per_s",
    "output_tokens_per_s",
)  # fmt: skip


def read_load_tests(path: Path | str) -> dict[str, LoadTest]:
    """Read the load tests of a file.

    Parameters
    ----------
    path : Path or str
        JSON: an object, or a list of objects.

    Returns
    -------
    dict of str to LoadTest
        By id, in the order of the file.

    Raises
    ------
    SpecError
        If the file cannot be read.
    TraceError
        If a key is missing, misspelt or impossible; names file, line and key.
    """
    located = read_yaml(Path(path))
    rows = located.data if isinstance(located.data, list) else [located.data]
    single = not isinstance(located.data, list)
    if not rows:
        raise TraceError(f"{path}: holds no load test")
    tests: dict[str, LoadTest] = {}
    for i, row in enumerate(rows):
        test = _test(_Object(located, () if single else (i,), row, str(path)))
        if test.id in tests:
            raise TraceError(f"{path}: two load tests have the id {test.id!r}")
        tests[test.id] = test
    return tests


def load_test(path: Path | str, run: str | None = None) -> LoadTest:
    """Return one load test of a file.

    Parameters
    ----------
    path : Path or str
        The file.
    run : str, optional
        Its id; may be left out where the file holds one test only.

    Raises
    ------
    SpecError, TraceError
        As `read_load_tests`, or if there is no such test.
    """
    tests = read_load_tests(path)
    if run is None:
        if len(tests) > 1:
            raise TraceError(f"{path} holds {len(tests)} load tests; {nearest('', tests)}")
        return next(iter(tests.values()))
    if run not in tests:
        raise TraceError(f"{path}: no load test {run!r}; {nearest(run, tests)}")
    return tests[run]


class _Object:
    """A JSON object whose errors name file, line and key."""

    def __init__(self, located: Located, path: KeyPath, data: object, source: str) -> None:
        self._located, self._path, self._source = located, path, source
        if not isinstance(data, dict):
            raise self.error("", "must be an object, {...}")
        self.data: dict[str, Any] = data

    def error(self, key: str, what: str) -> TraceError:
        path = (*self._path, key) if key else self._path
        place = self._located.place(path) or self._source
        return TraceError(f"{place}: {dotted(path)}: {what}" if path else f"{place}: {what}")

    def unknown(self, known: Iterable[str]) -> list[str]:
        """Return the keys that mean nothing here; one that looks like a known one is an error."""
        known = tuple(known)
        others = [key for key in self.data if key not in known]
        for key in others:
            near = look_alike(key, known, cutoff=_LIKENESS)
            if near is not None:
                raise self.error(key, f"unknown key; did you mean {near}?")
        return others

    def require(self, key: str) -> Any:  # noqa: ANN401 - what JSON holds
        if key not in self.data:
            near = look_alike(key, self.data)
            raise self.error(
                "", f"key {key!r} is missing" + (f" (there is {near!r})" if near else "")
            )
        return self.data[key]

    def text(self, key: str) -> str:
        value = self.require(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, f"must be a text, got {value!r}")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        value = self.require(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value < least
        ):
            raise self.error(key, f"must be a number >= {least:g}, got {value!r}")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value == 0:
            raise self.error(key, "must be > 0")
        return value

    def count(self, key: str, least: int = 1) -> int:
        value = self.number(key, least)
        if value != int(value):
            raise self.error(key, f"must be a whole number, got {value!r}")
        return int(value)

    def inside(self, key: str | int, data: object) -> _Object:
        return _Object(self._located, (*self._path, key), data, self._source)

    def child(self, key: str) -> _Object:
        return self.inside(key, self.require(key))


def _test(row: _Object) -> LoadTest:
    ignored = row.unknown(_RUN_KEYS)
    if row.data.get("pp", 1) != 1:
        raise row.error("pp", "pipeline parallelism is not simulated")
    if row.data.get("load_type", "constant") != "constant":
        raise row.error(
            "load_type", f"{row.data['load_type']!r} is not known; choose from constant"
        )
    engine: dict[str, Any] = {_COUNTS[key]: row.count(key) for key in _COUNTS if key in row.data}
    for key in _SWITCHES:
        if key in row.data:
            if not isinstance(row.data[key], bool):
                raise row.error(key, f"must be true or false, got {row.data[key]!r}")
            engine[key] = row.data[key]
    engine |= {key: row.text(key) for key in _TEXTS if key in row.data}
    if "gpu_memory_utilization" in row.data:
        engine["gpu_memory_utilization"] = row.positive("gpu_memory_utilization")
    stages = row.require("stages")
    if not isinstance(stages, list) or not stages:
        raise row.error("stages", "must be a list of at least one stage")
    parent = row.inside("stages", {})
    return LoadTest(
        id=row.text("id"),
        model=row.text("model"),
        hardware=row.text("hardware") if "hardware" in row.data else None,
        engine=engine,
        shared=_shared(row),
        stages=tuple(_stage(parent.inside(i, stage)) for i, stage in enumerate(stages)),
        ignored=tuple(ignored),
    )


def _shared(row: _Object) -> SharedPrompts | None:
    if not any(key in row.data for key in _SHARED):
        return None
    return SharedPrompts(
        row.count(_SHARED[0], least=0), row.count(_SHARED[1]), row.count(_SHARED[2])
    )


def _stage(row: _Object) -> Stage:
    row.unknown(_STAGE_KEYS)
    failed = row.count("failed", least=0) if "failed" in row.data else 0
    if "succeeded" in row.data:
        num_requests = row.count("succeeded", least=0) + failed
    else:
        num_requests = int(row.positive("rate") * row.positive("duration_s"))
    if num_requests < 1:
        raise row.error("succeeded", "no request was sent")
    found = {key: _quantiles(row.child(key)) for key in _DISTRIBUTIONS}
    return Stage(rate=row.positive("rate"), num_requests=num_requests, **found)


def _quantiles(row: _Object) -> Quantiles:
    points: dict[float, float] = {}
    for key in row.data:
        if key == "mean":
            continue
        match = _QUANTILE.fullmatch(key)
        if match is None and key not in _NAMED:
            raise row.error(key, f"no quantile; {nearest(key, ['mean', *_NAMED, 'p90', 'p99'])}")
        p = _NAMED[key] if match is None else float(match[1]) / 100
        if not 0 <= p <= 1:
            raise row.error(key, "a quantile is between p0 and p100")
        if p in points:
            raise row.error(key, "is there twice")
        points[p] = row.number(key)
    if len(points) < 2:
        raise row.error("", "needs two quantiles at least, e.g. median and p90")
    ordered = sorted(points.items())
    for (low, a), (high, b) in pairwise(ordered):
        if b < a:
            raise row.error("", f"quantiles fall from {a:g} at {low:g} to {b:g} at {high:g}")
    return Quantiles(row.number("mean"), *zip(*ordered, strict=True))
