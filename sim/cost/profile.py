"""A calibration profile on disk: meta.json (what was measured) and fit.json (what it gave)."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from schedlab.sim.cost import registry
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.step_spread import StepSpread
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.files import read_json_object, write_texts
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.dtypes import dtype_name
from schedlab.sim.hardware.gpus import canonical_gpu
from schedlab.sim.hardware.models import canonical_model

SCHEMA = "schedlab-fit-1"
FIT_FILE = "fit.json"
"""By which a folder with a calibration is known."""

FEATURES = (
    "decode_context_sum_tokens",
    "decode_context_max_tokens",
    "prefill_attention_pairs",
    "prefill_context_tokens",
    "num_decodes",
    "num_prefills",
    "swapped_bytes",
)
"""What a step costs by, beside its new tokens; a fit has one coefficient for each."""

_LARGEST = 1e100
"""Of any number of a fit: what is made of it by products stays finite, and is refused as a time."""

_SPREAD = ("decode_steps", "prompt_steps", "num_alike")
META_KEYS = ("model", "hardware", "dtype", "tensor_parallel_size")
"""What meta.json must say; the loader compares it with the run. It may also say
``data_parallel_size``, the engines that share experts (1 if absent), and ``expert_parallel``,
whether they spread whole ones (False if absent), which are compared as well."""


def step_features(shape: BatchShape) -> dict[str, int]:
    """Return the features of a step, ``new_tokens`` and those of `FEATURES`.

    Notes
    -----
    ``new_tokens = num_decodes + padding_tokens + sum of chunks``. Rows of finished requests count
    as decodes, with what is read for them. A chunk of q tokens after c has ``q*c + q*(q+1)/2``
    causal pairs, and c context tokens: each of its rows reads them one after the other, however few
    rows there are.
    """
    return {
        "new_tokens": shape.num_decodes + shape.padding_tokens + sum(q for q, _ in shape.chunks),
        "decode_context_sum_tokens": shape.decode_context_sum_tokens + shape.padding_context_tokens,
        "decode_context_max_tokens": shape.decode_context_max_tokens,
        "prefill_attention_pairs": sum(q * (2 * c + q + 1) // 2 for q, c in shape.chunks),
        "prefill_context_tokens": sum(c for _, c in shape.chunks),
        "num_decodes": shape.num_decodes + shape.padding_rows,
        "num_prefills": len(shape.chunks),
        "swapped_bytes": shape.swapped_bytes,
    }


def computed_tokens(tokens: int, buckets: tuple[int, ...] = (), tile_tokens: int = 1) -> int:
    """Return for how many tokens the products of a step are computed.

    Parameters
    ----------
    tokens : int
        New tokens of the step.
    buckets : tuple of int
        Batch sizes of CUDA graphs: the next one, if there are any. None may be exceeded.
    tile_tokens : int
        Rows of a tile, of which the last is computed whole: beyond one they are rounded up to that.
    """
    if buckets:
        return buckets[bisect_left(buckets, tokens)]
    return tokens if tokens <= tile_tokens else -(-tokens // tile_tokens) * tile_tokens


@dataclass(frozen=True, slots=True)
class Regime:
    """Step time in one mode of launching kernels.

    Attributes
    ----------
    knots_tokens : tuple of int
        New tokens at the knots, increasing.
    knots_s : tuple of float
        Seconds there; linear between, constant below the first; beyond the last the mean slope of
        the upper half, if it rises. They may fall: kernels waste part of a tile on odd counts.
    coefficients_s : mapping of str to float
        Seconds per unit of each feature, >= 0; a feature left out costs nothing, but for
        ``swapped_bytes``, which then cannot be priced.
    buckets : tuple of int
        CUDA-graph batch sizes: new tokens are rounded up to the next. Empty without graphs.
    tile_tokens : int
        Rows of a tile of a matrix product: more new tokens than one holds are rounded up to whole
        tiles, since the last takes as long as a full one. 1 rounds nothing.
    """

    knots_tokens: tuple[int, ...]
    knots_s: tuple[float, ...]
    coefficients_s: Mapping[str, float]
    buckets: tuple[int, ...] = ()
    tile_tokens: int = 1

    def __post_init__(self) -> None:
        if len(self.knots_tokens) < 2 or len(self.knots_tokens) != len(self.knots_s):
            raise SpecError("knots_tokens and knots_s must have the same length, at least 2")
        if self.knots_tokens[0] < 1 or not _increasing(self.knots_tokens):
            raise SpecError("knots_tokens must be >= 1 and strictly increasing")
        for value in self.knots_s:
            check_number("knots_s", value)
        for key, value in self.coefficients_s.items():
            _check_key(key, FEATURES, "coefficients_s")
            check_number(f"coefficients_s.{key}", value)
        if self.buckets and (self.buckets[0] < 1 or not _increasing(self.buckets)):
            raise SpecError("buckets must be >= 1 and strictly increasing")
        if self.tile_tokens < 1:
            raise SpecError(f"tile_tokens must be >= 1, got {self.tile_tokens}")
        if self.buckets and self.tile_tokens > 1:
            raise SpecError("tile_tokens: a regime with buckets rounds up to those")


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a fit is from measured steps, as fractions (0.03 = 3 %).

    Attributes
    ----------
    mape, p90, max : float
        Mean, 90th percentile and largest absolute relative error.
    bias : float
        Mean signed relative error; positive = the fit is too slow.
    num_points : int
        Measured steps.
    """

    mape: float
    p90: float
    max: float
    bias: float
    num_points: int

    def __post_init__(self) -> None:
        for key in ("mape", "p90", "max"):
            check_number(key, getattr(self, key))
        if not math.isfinite(self.bias):
            raise SpecError(f"bias must be finite, got {self.bias!r}")


@dataclass(frozen=True, slots=True)
class RunLevel:
    """How many times as long a step takes in a run as a batch of its shape timed by itself.

    Between the steps of a run come requests, answers and plans, so caches hold less of what a step
    needs than where one batch follows another.

    Attributes
    ----------
    decode_steps : float
        Of steps without prompt tokens.
    prompt_steps : float
        Of the others.
    decode_row_s : float
        Seconds that each request which decodes adds to that, in steps of both kinds: what is done
        request by request is what a run finds in no cache.
    prompt_step_s : float
        Seconds that a step with prompt tokens takes longer beside that, however many they are: what
        is done once in a step is as much for a short prompt as for a long one. Negative where only
        the part of a step beyond its shortest is slower in a run.
    lone_row_s : float
        Seconds that each request which decodes adds beside `decode_row_s` in steps without prompt
        tokens. Negative where more requests slow such a step down less than they did before.
    """

    decode_steps: float = 1.0
    prompt_steps: float = 1.0
    decode_row_s: float = 0.0
    prompt_step_s: float = 0.0
    lone_row_s: float = 0.0

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            size = abs(value) if key in ("prompt_step_s", "lone_row_s") else value
            check_number(f"run_level.{key}", size)


@dataclass(frozen=True, slots=True)
class Fit:
    """All that fit.json holds.

    Attributes
    ----------
    eager : Regime
        Steps with prefills, and all steps larger than the largest graph.
    graph : Regime or None
        Decode-only steps that replay a CUDA graph; has buckets.
    validity : mapping of str to (float, float)
        Least and largest measured value of ``new_tokens`` and of each feature. Zero (the
        component is absent) is always inside.
    train, held_out : FitError
        Errors on the measured points the fit has seen, and on those it has not.
    run_level : RunLevel
        By how much steps of a run differ from these points; swapping is left as it is.
    step_spread : StepSpread or None
        How far they scatter about that; None if it was not measured.
    """

    eager: Regime
    graph: Regime | None
    validity: Mapping[str, tuple[float, float]]
    train: FitError
    held_out: FitError
    run_level: RunLevel = field(default_factory=RunLevel)
    step_spread: StepSpread | None = None

    def __post_init__(self) -> None:
        if self.eager.buckets:
            raise SpecError("eager: buckets belong to the graph regime")
        if self.graph is not None and not self.graph.buckets:
            raise SpecError("graph: buckets are missing")
        if "new_tokens" not in self.validity:
            raise SpecError("validity: new_tokens is missing")
        for key, (low, high) in self.validity.items():
            _check_key(key, ("new_tokens", *FEATURES), "validity")
            check_number(f"validity.{key}", low)
            check_number(f"validity.{key}", high)
            if low > high:
                raise SpecError(f"validity.{key}: {low} > {high}")
        level = self.run_level
        shortest_s = level.prompt_steps * min(self.eager.knots_s)
        if level.prompt_step_s < 0 and shortest_s + level.prompt_step_s <= 0:
            raise SpecError(
                f"run_level.prompt_step_s: {level.prompt_step_s!r} takes more than all of the "
                f"shortest step with prompts, {shortest_s!r} s"
            )


def write_fit(folder: Path, meta: Mapping[str, object], fit: Fit) -> None:
    """Write `fit_texts` into a profile folder, both whole or none.

    Raises
    ------
    SpecError
        If `meta` lacks a required key, or the folder holds a profile of another kind.
    """
    registry.refuse_other_kind(folder, FIT_FILE)
    write_texts(Path(folder), fit_texts(meta, fit))


def fit_texts(meta: Mapping[str, object], fit: Fit) -> dict[str, str]:
    """Return what meta.json and fit.json of a profile folder hold.

    Parameters
    ----------
    meta : mapping
        ``model``, ``hardware``, ``dtype``, ``tensor_parallel_size`` and whatever else describes the
        measurement (driver, versions, clocks, date, seed).
    fit : Fit
        The result.

    Raises
    ------
    SpecError
        If `meta` lacks a required key.
    """
    require_meta(meta)
    graph = fit.graph
    run_level = asdict(fit.run_level)
    if not fit.run_level.lone_row_s:  # which comparisons tell, not calibrations
        del run_level["lone_row_s"]
    data = {
        "schema": SCHEMA,
        "regimes": {
            "eager": _regime_json(fit.eager),
            **({"graph": _regime_json(graph)} if graph else {}),
        },
        "validity": {key: list(bounds) for key, bounds in fit.validity.items()},
        "error": {"train": asdict(fit.train), "held_out": asdict(fit.held_out)},
        **({"run_level": run_level} if fit.run_level != RunLevel() else {}),
        **({"step_spread": asdict(fit.step_spread)} if fit.step_spread else {}),
    }
    return {
        name: json.dumps(content, indent=2, allow_nan=False) + "\n"
        for name, content in (("meta.json", dict(meta)), (FIT_FILE, data))
    }


def require_meta(meta: Mapping[str, object]) -> None:
    """Raise `SpecError` if a profile does not say what it was measured on."""
    for key in META_KEYS:
        if key not in meta:
            raise SpecError(f"profile meta: key {key!r} is missing")


def read_meta(folder: Path) -> dict[str, Any]:
    """Return meta.json of a profile folder; raises `SpecError` if a required key is missing."""
    path = Path(folder) / "meta.json"
    meta = read_json_object(path)
    for key in META_KEYS:
        if key not in meta:
            raise SpecError(f"{path}: key {key!r} is missing")
    return meta


def measured_overhead(meta: Mapping[str, object]) -> SchedulingOverhead | None:
    """Return the scheduling overhead that a profile's meta.json states, if it does.

    Raises
    ------
    SpecError
        If it is no mapping of the terms of `SchedulingOverhead` to numbers.
    """
    stated = meta.get("scheduling_overhead")
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise SpecError(f"profile meta: scheduling_overhead is no mapping: {stated!r}")
    known = tuple(term.name for term in fields(SchedulingOverhead))
    for key in stated:
        _check_key(key, known, "profile meta: scheduling_overhead")
    return SchedulingOverhead(**{key: number(key, value) for key, value in stated.items()})


def profile_of(
    folder: Path | str, deployment: Deployment | None, allow_mismatch: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return meta.json of a profile folder, and in what it differs from what is to be priced.

    Parameters
    ----------
    folder : Path or str
        The profile.
    deployment : Deployment or None
        What is to be priced; with None nothing is compared.
    allow_mismatch : bool
        Go on although they differ.

    Raises
    ------
    SpecError
        If they differ and may not, meta.json cannot be read, or the folder holds several kinds of
        profile.
    """
    registry.refuse_two_kinds(folder)
    meta = read_meta(Path(folder))
    if deployment is None:
        return meta, []
    wanted: dict[str, tuple[object, Callable[[Any], object]]] = {
        "model": (deployment.model.name, canonical_model),
        "hardware": (deployment.gpu.name, canonical_gpu),
        "dtype": (deployment.dtype, dtype_name),
        "weight_dtype": (deployment.stored_dtype, dtype_name),
        "tensor_parallel_size": (deployment.tensor_parallel_size, int),
    }
    stated = dict(meta) | {
        "weight_dtype": meta.get("weight_dtype", meta["dtype"]),
        "data_parallel_size": meta.get("data_parallel_size", 1),
        "expert_parallel": meta.get("expert_parallel", False),
    }
    wanted["data_parallel_size"] = (deployment.data_parallel_size, int)
    if deployment.enable_expert_parallel is not None:
        wanted["expert_parallel"] = (deployment.enable_expert_parallel, bool)
    mismatches = [
        f"{key} is {stated[key]!r} in the profile, {value!r} in the run"
        for key, (value, canonical) in wanted.items()
        if canonical(stated[key]) != canonical(value)
    ]
    if mismatches and not allow_mismatch:
        raise SpecError(
            f"{folder}: {'; '.join(mismatches)} (allow_mismatch uses the profile all the same)"
        )
    return meta, mismatches


def read_fit(folder: Path) -> Fit:
    """Return fit.json of a profile folder.

    Raises
    ------
    SpecError
        If it cannot be read, a key is missing, unknown or of the wrong type, or a coefficient is
        negative.
    """
    path = Path(folder) / FIT_FILE
    data = read_json_object(path)
    if data.get("schema") != SCHEMA:
        raise SpecError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA!r}")
    try:
        regimes = _section(data, "regimes", ("eager", "graph"))
        error = _section(data, "error", ("train", "held_out"))
        bounds = _section(data, "validity", ("new_tokens", *FEATURES))
        known = tuple(level.name for level in fields(RunLevel))
        levels = _section(data, "run_level", known) if "run_level" in data else {}
        spread = _section(data, "step_spread", _SPREAD) if "step_spread" in data else None
        return Fit(
            eager=_regime("eager", regimes),
            graph=_regime("graph", regimes) if "graph" in regimes else None,
            validity={key: _pair(f"validity.{key}", value) for key, value in bounds.items()},
            train=_fit_error("train", error),
            held_out=_fit_error("held_out", error),
            run_level=RunLevel(
                **{key: number(f"run_level.{key}", value) for key, value in levels.items()}
            ),
            step_spread=None if spread is None else _step_spread(spread),
        )
    except SpecError as problem:
        raise SpecError(f"{path}: {problem}") from problem


def _step_spread(data: Mapping[str, object]) -> StepSpread:
    factors = {}
    for key in _SPREAD[:2]:
        values = data.get(key)
        if not isinstance(values, list):
            raise SpecError(f"step_spread.{key}: a list of numbers is needed, got {values!r}")
        factors[key] = tuple(number(f"step_spread.{key}", value) for value in values)
    num_alike = _whole_number("step_spread.num_alike", data.get("num_alike"))
    return StepSpread(**factors, num_alike=num_alike)


def _regime_json(regime: Regime) -> dict[str, object]:
    data: dict[str, object] = {
        "knots_tokens": list(regime.knots_tokens),
        "knots_s": list(regime.knots_s),
        "coefficients_s": dict(regime.coefficients_s),
    }
    if regime.buckets:
        data["buckets"] = list(regime.buckets)
    if regime.tile_tokens > 1:
        data["tile_tokens"] = regime.tile_tokens
    return data


def _regime(name: str, regimes: Mapping[str, Any]) -> Regime:
    keys = ("knots_tokens", "knots_s", "coefficients_s", "buckets", "tile_tokens")
    data = _section(regimes, name, keys)
    for key in keys[:3]:
        if key not in data:
            raise SpecError(f"regimes.{name}: key {key!r} is missing")
    coefficients = _section(data, "coefficients_s", FEATURES)
    try:
        return Regime(
            knots_tokens=_whole(data, "knots_tokens"),
            knots_s=tuple(
                number(f"knots_s[{i}]", x) for i, x in enumerate(_array(data, "knots_s"))
            ),
            coefficients_s={key: number(key, value) for key, value in coefficients.items()},
            buckets=_whole(data, "buckets") if "buckets" in data else (),
            tile_tokens=_whole_number("tile_tokens", data.get("tile_tokens", 1)),
        )
    except SpecError as problem:
        raise SpecError(f"regimes.{name}: {problem}") from problem


def check_number(name: str, value: float) -> None:
    """Raise `SpecError` unless a time or a rate is finite, not negative and no absurdity."""
    if not 0 <= value <= _LARGEST:
        raise SpecError(f"{name} must be finite and >= 0 (and at most {_LARGEST:g}), got {value!r}")


def number(name: str, value: object) -> float:
    """Return a number of a profile; raises `SpecError` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name} must be a number, got {value!r}")
    return float(value)


def _fit_error(name: str, errors: Mapping[str, Any]) -> FitError:
    keys = ("mape", "p90", "max", "bias", "num_points")
    data = _section(errors, name, keys)
    for key in keys:
        if key not in data:
            raise SpecError(f"error.{name}: key {key!r} is missing")
    values = {key: number(f"error.{name}.{key}", data[key]) for key in keys[:4]}
    return FitError(**values, num_points=int(number("num_points", data["num_points"])))


def _section(data: Mapping[str, Any], key: str, known: Iterable[str]) -> dict[str, Any]:
    """Return a sub-object whose keys are all known."""
    section = data.get(key)
    if not isinstance(section, dict):
        raise SpecError(f"key {key!r} is missing or is no object")
    for name in section:
        _check_key(name, tuple(known), key)
    return section


def _check_key(key: str, known: tuple[str, ...], where: str) -> None:
    if key not in known:
        raise SpecError(f"{where}: unknown key {key!r}; {nearest(key, known)}")


def _array(data: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(data[key], list):
        raise SpecError(f"{key} must be an array, got {data[key]!r}")
    return list(data[key])


def _whole(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    values = [number(f"{key}[{i}]", value) for i, value in enumerate(_array(data, key))]
    if any(value != int(value) for value in values):
        raise SpecError(f"{key} must hold whole numbers")
    return tuple(int(value) for value in values)


def _whole_number(name: str, value: object) -> int:
    """Return a whole number of a profile; raises `SpecError` if it is none."""
    found = number(name, value)
    if found != int(found):
        raise SpecError(f"{name}: a whole number is needed, got {value!r}")
    return int(found)


def _pair(name: str, value: object) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise SpecError(f"{name} must be [least, largest], got {value!r}")
    return number(name, value[0]), number(name, value[1])


def _increasing(values: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(values))
