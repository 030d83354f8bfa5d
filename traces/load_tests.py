"""Load tests of real servers, told as rates and quantiles: what was sent, and what a client saw.

A file holds a JSON object, or a list of them, one a test; docs/benchmark.md has the keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
_EXACT = 1e-6
"""Farther than this from a whole number of tokens is between two of them."""
_ROUNDED = 0.01
"""A mean may lie beyond what the quantiles tell by this share: files round each of them."""
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
    num_failed : int
        Of these without an answer, and so in none of the distributions.
    prompt, output : Quantiles
        Tokens of prompts, and of answers as the client counted them.
    ttft_s, e2e_s : Quantiles
        Seconds until the first and the last token, as the client saw them.
    """

    rate: float
    num_requests: int
    num_failed: int
    prompt: Quantiles
    output: Quantiles
    ttft_s: Quantiles
    e2e_s: Quantiles

    def changes(self) -> list[int]:
        """Return after how many requests, in order of prompt tokens, quantiles show a change."""
        if self.num_failed:
            return []  # which prompts failed is not known
        places = zip(self.prompt.probabilities, self.prompt.values, strict=True)
        between = [p for p, tokens in places if abs(tokens - round(tokens)) > _EXACT]
        return [int(p * (self.num_requests - 1)) + 1 for p in between]


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts that are sent in turn, again and again, in groups with a system prompt in common.

    Attributes
    ----------
    system_prompt_tokens : int
        First tokens that a group has in common.
    num_groups, num_prompts : int
        How many there are.
    note : str
        What is to be said of it; empty if nothing.
    """

    system_prompt_tokens: int
    num_groups: int
    num_prompts: int
    note: str = ""

    def as_counted(self, stages: Iterable[Stage]) -> SharedPrompts:
        """Return them with as many prompts as the client's counts of prompt tokens tell of.

        Notes
        -----
        Of n requests every one of N prompts is n / N, so in order of their lengths the number of
        requests changes its length only after multiples of n / N. A quantile that lies between two
        whole numbers shows such a place: after ``floor(p (n - 1)) + 1`` requests. If these deny the
        number given, the smallest N that explains all of them was sent: inference-perf of 2025 took
        10 groups of 10 where its configuration used names that it learnt only later.
        """
        seen = [(stage.num_requests, after) for stage in stages for after in stage.changes()]
        if all(_in_turn(self.num_prompts, n, after) for n, after in seen):
            return self
        most = min(n for n, _ in seen)
        for num_prompts in range(self.num_groups, most):
            if all(n % num_prompts == 0 and after % (n // num_prompts) == 0 for n, after in seen):
                note = (
                    f"counts of prompt tokens tell of {num_prompts} prompts in turn, and deny the "
                    f"{self.num_prompts} of the file"
                )
                return replace(self, num_prompts=num_prompts, note=note)
        return self


def _in_turn(num_prompts: int, num_requests: int, after: int) -> bool:
    """Say whether a number of requests can be all those of some of the prompts."""
    each, more = divmod(num_requests, num_prompts)
    if not each:
        return True
    prompts = after // each
    return after - prompts * each <= min(prompts, more)


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
    counts_begin_token : bool
        Whether the client's counts of answers include the token that a tokenizer begins with.
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
    counts_begin_token: bool
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
_BEGIN = "counts_begin_token"
_SHARED = ("system_prompt_tokens", "num_system_prompts", "users_per_system_prompt")
_RUN_KEYS = (
    "id", "model", "hardware", *_COUNTS, *_SWITCHES, *_TEXTS, "gpu_memory_utilization", *_SHARED,
    _BEGIN, "load_type", "pp", "stages",
)  # fmt: skip
_LATENCIES = ("ttft_s", "e2e_s")
_DISTRIBUTIONS = ("prompt", "output", *_LATENCIES)
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

    def truth(self, key: str) -> bool:
        value = self.require(key)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

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
    engine |= {key: row.truth(key) for key in _SWITCHES if key in row.data}
    engine |= {key: row.text(key) for key in _TEXTS if key in row.data}
    if "gpu_memory_utilization" in row.data:
        engine["gpu_memory_utilization"] = row.positive("gpu_memory_utilization")
    stages = row.require("stages")
    if not isinstance(stages, list) or not stages:
        raise row.error("stages", "must be a list of at least one stage")
    parent = row.inside("stages", {})
    read = tuple(_stage(parent.inside(i, stage)) for i, stage in enumerate(stages))
    shared = _shared(row)
    return LoadTest(
        id=row.text("id"),
        model=row.text("model"),
        hardware=row.text("hardware") if "hardware" in row.data else None,
        engine=engine,
        counts_begin_token=row.truth(_BEGIN) if _BEGIN in row.data else True,
        shared=None if shared is None else shared.as_counted(read),
        stages=read,
        ignored=tuple(ignored),
    )


def _shared(row: _Object) -> SharedPrompts | None:
    if not any(key in row.data for key in _SHARED):
        return None
    tokens, groups = row.count(_SHARED[0], least=0), row.count(_SHARED[1])
    return SharedPrompts(tokens, groups, groups * row.count(_SHARED[2]))


def _stage(row: _Object) -> Stage:
    row.unknown(_STAGE_KEYS)
    failed = row.count("failed", least=0) if "failed" in row.data else 0
    if "succeeded" in row.data:
        num_requests = row.count("succeeded", least=0) + failed
    else:
        sent = row.positive("rate") * row.positive("duration_s")
        if not math.isfinite(sent):
            raise row.error("rate", "times duration_s is more requests than can be counted")
        num_requests = int(sent)
    if num_requests < 1:
        raise row.error("succeeded", "no request was sent")
    found = {
        key: _quantiles(row.child(key), must_be_positive=key in _LATENCIES)
        for key in _DISTRIBUTIONS
    }
    return Stage(row.positive("rate"), num_requests, failed, **found)


def _quantiles(row: _Object, *, must_be_positive: bool) -> Quantiles:
    number = row.positive if must_be_positive else row.number
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
        points[p] = number(key)
    if len(points) < 2:
        raise row.error("", "needs two quantiles at least, e.g. median and p90")
    ordered = sorted(points.items())
    for (low, a), (high, b) in pairwise(ordered):
        if b < a:
            raise row.error("", f"quantiles fall from {a:g} at {low:g} to {b:g} at {high:g}")
    mean = number("mean")
    # A share 1 - p of the values is at least the quantile at p, and none is negative.
    least, most = max((1 - p) * value for p, value in ordered), points.get(1.0, math.inf)
    if not least * (1 - _ROUNDED) <= mean <= most * (1 + _ROUNDED):
        raise row.error("mean", f"quantiles tell of {least:g} to {most:g}, got {mean:g}")
    return Quantiles(mean, *zip(*ordered, strict=True))
