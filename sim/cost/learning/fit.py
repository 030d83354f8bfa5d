"""The few numbers of each kernel that are nearest to its tables, within what devices can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from schedlab.sim.cost.efficiency import (
    AllReduce,
    Attention,
    Elementwise,
    Experts,
    Gemm,
    Host,
    Kernel,
    Sampler,
)
from schedlab.sim.cost.learning.predict import (
    PREDICT,
    Floats,
    gemm_us,
    mixed_us,
    prefill_us,
)
from schedlab.sim.cost.learning.tables import Columns, Table
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import L2_BYTES, Gpu, gpu

MOST_ROWS = 4000
"""Rows of a table that are fitted, drawn with a fixed seed where there are more."""

_SCALE_US = 1e-6
Bounds = Sequence[tuple[float, float, float]]
"""Of each number: least, first guess, most."""


def learn(tables: Sequence[Table]) -> dict[str, dict[str, Any]]:
    """Return the kernels of every GPU that tables were read of.

    Parameters
    ----------
    tables : sequence of Table
        Tables of one kind and GPU weigh as much as each other, however long they are.

    Returns
    -------
    dict
        As `schedlab.sim.cost.efficiency.composed` takes it.

    Raises
    ------
    SpecError
        If no table tells how decodes are computed beside prompts.
    """
    mixed = {t.gpu: t for t in tables if t.kind == "mixed"}
    learnt: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(t.gpu for t in tables):
        own = [t for t in tables if t.gpu == name]
        device = gpu(name)
        sections: dict[str, Any] = {}
        formats = dict.fromkeys(t.kind for t in own if t.kind.startswith("gemm "))
        sections["gemm"] = {
            kind.removeprefix("gemm "): fit_gemm(of(own, kind), device, kind.removeprefix("gemm "))
            for kind in formats
        }
        if of(own, "decode"):
            sections["attention"] = fit_attention(own, device)
        for kind, fit in _PLAIN.items():
            if of(own, kind):
                sections["host" if kind == "launch" else kind] = fit(of(own, kind), device)
        learnt[name] = sections
    _spread_mixed_rows(learnt, tables, mixed)
    return learnt


def of(tables: Sequence[Table], kind: str) -> list[Table]:
    """Return the tables of a kind."""
    return [table for table in tables if table.kind == kind]


def fit_gemm(tables: Sequence[Table], device: Gpu, formats: str) -> Gemm:
    """Return the products of one pair of formats.

    Products of the widths of layers, and of rows as steps have them. Their start is at most what
    the smallest products take.
    """
    parts = [taught(table, device) for table in tables]
    smallest_us = min(float(np.quantile(t.columns["us"], 0.01)) for t in tables)
    bounds = ((0.5, 3.0, max(1.5 * smallest_us, 6.0)), _SHARE, _SHARE, (0.0, 0.3, 0.75),
              (0.0, 0.05, 0.25))  # fmt: skip

    def made(x: Floats) -> Gemm:
        return Gemm(x[0] * _SCALE_US, *x[1:])

    return made(_nearest(parts, bounds, lambda x, rows: gemm_us(made(x), rows, device, formats)))


def taught(table: Table, device: Gpu) -> Columns:
    """Return the rows of a table that kernels are learnt from.

    A kernel that is timed again and again finds in the cache what a step of a whole model has to
    read from memory, so such rows are left out.
    """
    columns = table.columns
    if table.kind.startswith("gemm "):
        m, n, k = columns["m"], columns["n"], columns["k"]
        is_layer = (n >= 1024) & (k >= 1024) & (k <= 32768) & (m <= 8192)
        arithmetic_us = 2e6 * m * n * k / device.peak_flops_per_s("bf16")
        is_cold = (2 * n * k > 1.2 * L2_BYTES[device.name]) | (arithmetic_us > 20)
        return _sample(columns, is_layer & (is_cold | _is_in_turn(table)))
    if table.kind == "decode":
        rows = columns["rows"] * columns["kv_heads"]
        moved = 512 * rows * (columns["context"] + 1)
        is_small = 1e6 * moved / device.memory_bytes_per_s < 3
        is_cold = moved > 1.2 * L2_BYTES[device.name]
        return _sample(columns, (is_small | is_cold) & (rows <= 8192) & _usual(columns))
    if table.kind == "prefill":
        new = columns["new"] * columns["rows"]
        return _sample(columns, (columns["new"] > 1) & (new <= 16384) & _usual(columns))
    if table.kind == "mixed":
        held = columns["rows"] * columns["context"]
        return _sample(columns, (held < 200_000) & (columns["cached"] <= 8192))
    if table.kind == "experts":
        is_used = (columns["tokens"] <= 8192) & (columns["slices"] <= 8) & (columns["shares"] <= 8)
        return _sample(columns, is_used)
    if table.kind == "all_reduce":
        return _sample(columns, (columns["bytes"] >= 8192) & (columns["bytes"] <= 2**27))
    if table.kind == "elementwise":
        is_small = 1e6 * columns["bytes"] / device.memory_bytes_per_s < 3
        return _sample(columns, is_small | (columns["bytes"] > 1.2 * L2_BYTES[device.name]))
    return dict(columns)


def _is_in_turn(table: Table) -> bool:
    """Say whether kernels were timed in turn, as in a model, so that none finds its weights."""
    return table.source.startswith("LLMServingSim")


def _usual(columns: Columns) -> npt.NDArray[np.bool_]:
    groups = columns["heads"] / columns["kv_heads"]
    return (groups <= 16) & (columns["heads"] >= 4)


def fit_attention(tables: Sequence[Table], device: Gpu) -> Attention:
    """Return attention: decodes first, then prompts, then decodes beside prompts."""
    decode = [taught(table, device) for table in of(tables, "decode")]
    bounds: Bounds = (
        (1.0, 9.0, 30.0), (0.0, 3.0, 30.0), (0.0, 0.5, 1.0), _SHARE, (0.0, 8.0, 60.0)
    )  # fmt: skip

    def decodes(x: Floats) -> Attention:
        latency_s, row_s, ramp_s = (_SCALE_US * float(x[i]) for i in (0, 1, 4))
        return Attention(latency_s, row_s, x[2], x[3], ramp_s, 1, 0.0, 1.0, 0.0, 0.0)

    def decode_us(x: Floats, rows: Columns) -> Floats:
        return PREDICT["decode"](decodes(x), rows, device)

    base = _nearest(decode, bounds, decode_us)
    prompts = [taught(table, device) for table in of(tables, "prefill")]
    bounds = ((0.0, 8.0, 40.0), _SHARE, (0.0, 20.0, 200.0))
    best: tuple[float, Attention] | None = None
    for block in (1, 64, 128):

        def prompt(x: Floats, block: int = block) -> Attention:
            return replace(
                decodes(base), query_block=block, block_s=x[0] * _SCALE_US, flops_share=x[1],
                key_s=x[2] * 1e-9,
            )  # fmt: skip

        def prompt_us(
            x: Floats, rows: Columns, prompt: Callable[[Floats], Attention] = prompt
        ) -> Floats:
            return prefill_us(prompt(x), rows, device)

        found = prompt(_nearest(prompts, bounds, prompt_us))
        error = sum(mean_error(prefill_us(found, rows, device), rows) for rows in prompts)
        if best is None or error < best[0]:
            best = error, found
    assert best is not None
    return best[1]


def fit_mixed_rows(attention: Attention, table: Table, device: Gpu) -> float:
    """Return the queries that a decode row is computed as beside a prompt."""

    def row_us(x: Floats, rows: Columns) -> Floats:
        return mixed_us(replace(attention, mixed_rows=x[0]), rows, device)

    return float(_nearest([taught(table, device)], ((0.0, 32.0, 128.0),), row_us)[0])


def _spread_mixed_rows(
    learnt: dict[str, dict[str, Any]], tables: Sequence[Table], mixed: Mapping[str, Table]
) -> None:
    """Give every GPU the rows that its kernel computes: the mean of those measured, or none."""
    found = {
        name: fit_mixed_rows(learnt[name]["attention"], table, gpu(name))
        for name, table in mixed.items()
    }
    if not found:
        raise SpecError("no table of decodes beside prompts: LLMServingSim's attention.csv is one")
    mean = sum(found.values()) / len(found)
    packs = {t.gpu for t in of(tables, "decode") if t.columns.get("packs", np.zeros(1)).any()}
    for name, sections in learnt.items():
        if "attention" in sections:
            rows = 0.0 if name in packs else found.get(name, mean)
            sections["attention"] = replace(sections["attention"], mixed_rows=rows)


def _fit_elementwise(tables: Sequence[Table], device: Gpu) -> Elementwise:
    return _fit_plain(Elementwise, "elementwise", ((0.5, 2.0, 10.0), _SHARE), tables, device)


def _fit_sampler(tables: Sequence[Table], device: Gpu) -> Sampler:
    return _fit_plain(Sampler, "sampler", ((0.0, 25.0, 200.0), (1.0, 6.0, 40.0)), tables, device)


def _fit_experts(tables: Sequence[Table], device: Gpu) -> Experts:
    return _fit_plain(Experts, "experts", ((1.0, 20.0, 100.0), _SHARE, _SHARE), tables, device)


def _fit_all_reduce(tables: Sequence[Table], device: Gpu) -> AllReduce:
    def made(x: Floats) -> AllReduce:
        return AllReduce(x[0] * _SCALE_US, x[1] * _SCALE_US, x[2], x[3])

    bounds = ((1.0, 5.0, 60.0), (0.0, 0.5, 60.0), _SHARE, (0.0, 0.05, 5.0))
    parts = [taught(table, device) for table in tables]
    return made(
        _nearest(parts, bounds, lambda x, rows: PREDICT["all_reduce"](made(x), rows, device))
    )


def _fit_host(tables: Sequence[Table], device: Gpu) -> Host:
    return Host(float(np.median(np.concatenate([t.columns["us"] for t in tables]))) * _SCALE_US)


def _fit_plain(
    kind: Callable[..., Kernel],
    name: str,
    bounds: Bounds,
    tables: Sequence[Table],
    device: Gpu,
) -> Kernel:
    """Fit a kernel of which only the first number is a time."""

    def made(x: Floats) -> Kernel:
        return kind(x[0] * _SCALE_US, *x[1:])

    parts = [taught(table, device) for table in tables]
    return made(_nearest(parts, bounds, lambda x, rows: PREDICT[name](made(x), rows, device)))


_SHARE = (0.05, 0.8, 1.0)
_PLAIN: dict[str, Callable[[Sequence[Table], Gpu], Any]] = {
    "elementwise": _fit_elementwise, "sampler": _fit_sampler, "experts": _fit_experts,
    "all_reduce": _fit_all_reduce, "launch": _fit_host,
}  # fmt: skip


def mean_error(predicted_us: Floats, rows: Columns) -> float:
    """Return the mean absolute relative error of predicted times."""
    return float(np.mean(np.abs(predicted_us / rows["us"] - 1)))


def _nearest(
    parts: Sequence[Columns], bounds: Bounds, predict: Callable[[Floats, Columns], Floats]
) -> Floats:
    """Return the numbers with the least error of logarithms, outliers counting less.

    A row weighs by the root of its time: long kernels are what a step consists of.
    """
    low, start, high = (np.array(values) for values in zip(*bounds, strict=True))
    weights = [np.sqrt(rows["us"]) / np.sum(np.sqrt(rows["us"])) for rows in parts]
    most = max(len(rows["us"]) for rows in parts)

    def error(x: Floats) -> Floats:
        return np.concatenate(
            [
                np.sqrt(most * weight) * np.log(predict(x, rows) / rows["us"])
                for rows, weight in zip(parts, weights, strict=True)
            ]
        )

    found = least_squares(error, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return np.array([float(f"{value:.4g}") if value > 1e-6 else 0.0 for value in found.x])


def _sample(columns: Columns, rows: npt.NDArray[np.bool_]) -> Columns:
    at = np.flatnonzero(rows)
    if len(at) > MOST_ROWS:
        at = np.sort(np.random.default_rng(0).choice(at, MOST_ROWS, replace=False))
    return {key: values[at] for key, values in columns.items()}
