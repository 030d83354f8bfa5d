"""A profile of measured operators on disk: meta.json (of what) and table.json (the times)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from schedlab.sim.cost import registry
from schedlab.sim.cost.attention import AttentionGrid, AttentionTime, RooflineAttention, Skew
from schedlab.sim.cost.profile import check_number, number, require_meta
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.files import read_json_object, write_texts

SCHEMA = "schedlab-table-1"
TABLE_FILE = "table.json"
"""By which a folder with such a profile is known."""

GRID_COLUMNS = ("prefill_chunk", "kv_prefill", "num_decodes", "kv_decode", "us")
_KEY_COLUMNS = ("prefill_chunk", "prefill_key", "num_decodes", "kv_decode", "us")
_SECTIONS = (
    "schema", "by_tokens", "by_requests", "attention", "attention_calls", "skew", "all_reduce",
)  # fmt: skip
_MOST_CALLS = 1_000_000
_SKEW_BINS = ("decode_bins", "rate_bins", "context_bins", "kv_bins")


@dataclass(frozen=True, slots=True)
class Curve:
    """The time of one operator by the tokens, or by the requests, of a step.

    Attributes
    ----------
    name : str
        The operator.
    calls : float
        Calls in a step.
    at : tuple of float
        Tokens or requests, strictly increasing.
    us : tuple of float
        Microseconds of one call there, >= 0: linear between, the first value below, the line
        through the last two above.
    shared : bool
        Whether the tokens of all engines meet here (experts under data parallelism).
    """

    name: str
    calls: float
    at: tuple[float, ...]
    us: tuple[float, ...]
    shared: bool = False

    def __post_init__(self) -> None:
        if not self.at or len(self.at) != len(self.us):
            raise SpecError(f"{self.name}: at and us must have the same length, at least 1")
        if any(a >= b for a, b in pairwise(self.at)):
            raise SpecError(f"{self.name}: at must be strictly increasing")
        for key, values in (("calls", (self.calls,)), ("at", self.at), ("us", self.us)):
            for value in values:
                check_number(f"{self.name}: {key}", value)


@dataclass(frozen=True, slots=True)
class RingAllReduce:
    """Communication of tensor parallelism, as latency plus bandwidth of a ring.

    Attributes
    ----------
    calls : int
        In a step.
    num_workers : int
        Devices.
    bytes_per_token : float
        Size of a token's activations.
    latency_s : float
        Start-up of one call.
    bytes_per_s : float
        Bandwidth of one device's link in one direction.

    Notes
    -----
    ``latency + 2*(N-1)/N * tokens * bytes_per_token / bytes_per_s`` a call.
    """

    calls: int
    num_workers: int
    bytes_per_token: float
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        values = (self.calls, self.num_workers, self.bytes_per_token, self.bytes_per_s)
        if not all(math.isfinite(v) and v > 0 for v in values) or not self.latency_s >= 0:
            raise SpecError("all_reduce: every number must be positive (latency_s may be 0)")

    def ns(self, tokens: int) -> float:
        """Return the nanoseconds of all calls of a step."""
        share = 2 * (self.num_workers - 1) / self.num_workers
        seconds = self.latency_s + share * tokens * self.bytes_per_token / self.bytes_per_s
        return self.calls * seconds * 1e9


@dataclass(frozen=True, slots=True)
class TableProfile:
    """All that table.json holds.

    Attributes
    ----------
    by_tokens, by_requests : tuple of Curve
        Operators whose time depends on the tokens, and on the requests, of a step.
    attention : dict
        Columns of an attention grid (`GRID_COLUMNS`, or ``prefill_key`` in place of
        ``kv_prefill``: see `AttentionGrid`), or the three rates of `RooflineAttention`.
    attention_calls : int
        Attention calls in a step.
    skew : Skew or None
        Correction for unequal contexts, where the source measured one.
    all_reduce : RingAllReduce or None
        Communication of tensor parallelism.
    """

    by_tokens: tuple[Curve, ...]
    by_requests: tuple[Curve, ...]
    attention: Mapping[str, Any]
    attention_calls: int
    skew: Skew | None = None
    all_reduce: RingAllReduce | None = None

    def make_attention(self, separate_prefills: bool | None = None) -> AttentionTime:
        """Return what prices attention.

        Parameters
        ----------
        separate_prefills : bool, optional
            See `AttentionGrid`; rates price every prefill by itself anyway.

        Raises
        ------
        SpecError
            If the columns are neither a grid nor rates, or prefills are to be pooled by rates.
        """
        by_key = "prefill_key" in self.attention
        grid = _KEY_COLUMNS if by_key else GRID_COLUMNS
        known = grid if "us" in self.attention else RooflineAttention.__slots__
        for key in self.attention:
            if key not in known:
                raise SpecError(f"attention: unknown key {key!r}; {nearest(key, known)}")
        try:
            if "us" in self.attention:
                columns = {
                    key.replace("prefill_key", "kv_prefill"): self.attention[key] for key in grid
                }
                return AttentionGrid(
                    **columns, separate_prefills=bool(separate_prefills), by_key=by_key
                )
            if separate_prefills is False:
                raise SpecError("attention by rates prices every prefill alone; none are pooled")
            return RooflineAttention(**self.attention)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"attention: {error}") from error


def write_table(folder: Path, meta: Mapping[str, object], profile: TableProfile) -> None:
    """Write meta.json and table.json into a profile folder, both whole or none.

    Parameters
    ----------
    folder : Path
        Made if need be.
    meta : mapping
        ``model``, ``hardware``, ``dtype``, ``tensor_parallel_size`` and whatever else describes the
        source: `assumptions` and `published_error` are shown with results.
    profile : TableProfile
        The times.

    Raises
    ------
    SpecError
        If `meta` lacks a required key, attention has a time or a size that no run can take, or the
        folder holds a profile of another kind.
    """
    registry.refuse_other_kind(folder, TABLE_FILE)
    require_meta(meta)
    profile.make_attention()
    skew = profile.skew
    attention = {
        key: list(value) if isinstance(value, Sequence) else value
        for key, value in profile.attention.items()
    }
    data: dict[str, object] = {
        "schema": SCHEMA,
        "by_tokens": [asdict(curve) for curve in profile.by_tokens],
        "by_requests": [asdict(curve) for curve in profile.by_requests],
        "attention_calls": profile.attention_calls,
        "attention": _attention(attention),
    }
    if skew is not None:
        data["skew"] = {
            **{key: list(getattr(skew, key)) for key in _SKEW_BINS},
            "default": skew.default,
            "cells": [[*cell, alpha] for cell, alpha in skew.cells.items()],
        }
    if profile.all_reduce is not None:
        data["all_reduce"] = asdict(profile.all_reduce)
    texts = {
        "meta.json": json.dumps({**meta, "schema": SCHEMA}, indent=2, allow_nan=False) + "\n",
        TABLE_FILE: json.dumps(data, allow_nan=False) + "\n",
    }
    write_texts(Path(folder), texts)


def read_table(folder: Path) -> TableProfile:
    """Return table.json of a profile folder.

    Raises
    ------
    SpecError
        If it cannot be read, or a key is missing, unknown or of the wrong type.
    """
    path = Path(folder) / TABLE_FILE
    data = read_json_object(path)
    if data.get("schema") != SCHEMA:
        raise SpecError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA!r}")
    for key in data:
        if key not in _SECTIONS:
            raise SpecError(f"{path}: unknown key {key!r}; {nearest(key, _SECTIONS)}")
    try:
        return TableProfile(
            by_tokens=_curves(data["by_tokens"]),
            by_requests=_curves(data["by_requests"]),
            attention=_attention(data["attention"]),
            attention_calls=_calls(data["attention_calls"]),
            skew=_skew(data["skew"]) if "skew" in data else None,
            all_reduce=RingAllReduce(**data["all_reduce"]) if "all_reduce" in data else None,
        )
    except KeyError as error:
        raise SpecError(f"{path}: key {error} is missing") from error
    except (SpecError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise SpecError(f"{path}: {error}") from error


def _curves(rows: Sequence[Mapping[str, Any]]) -> tuple[Curve, ...]:
    return tuple(
        Curve(
            row["name"],
            float(row["calls"]),
            tuple(row["at"]),
            tuple(row["us"]),
            bool(row.get("shared", False)),
        )
        for row in rows
    )


def _calls(value: object) -> int:
    """Return how often attention is called in a step."""
    calls = number("attention_calls", value)
    if not 0 <= calls <= _MOST_CALLS or calls != int(calls):
        raise SpecError(f"attention_calls must be a whole number up to {_MOST_CALLS}, got {value}")
    return int(calls)


def _attention(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns of a grid, or the rates, once every number in them is one."""
    for name, values in columns.items():
        is_rate = name in RooflineAttention.__slots__
        for value in values if isinstance(values, list) and not is_rate else (values,):
            check_number(f"attention: {name}", number(f"attention: {name}", value))
    return columns


def _skew(data: Mapping[str, Any]) -> Skew:
    decodes, rates, contexts, kvs = (
        tuple(float(value) for value in data[key]) for key in _SKEW_BINS
    )
    cells = {tuple(int(v) for v in row[:5]): float(row[5]) for row in data["cells"]}
    if len(cells) < len(data["cells"]):
        raise SpecError("skew: cells has a bucket twice")
    return Skew(decodes, rates, contexts, kvs, cells, float(data["default"]))
