"""How far learnt kernels are from tables: those that taught them, and those that did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedlab.sim.cost.efficiency import Efficiency, composed
from schedlab.sim.cost.learning.fit import fit_gemm, taught
from schedlab.sim.cost.learning.predict import PREDICT, Floats, gemm_us
from schedlab.sim.cost.learning.tables import Columns, Table
from schedlab.sim.hardware.gpus import Gpu, gpu

_SECTIONS = {"decode": "attention", "prefill": "attention", "mixed": "attention", "launch": "host"}


@dataclass(frozen=True, slots=True)
class TableError:
    """How far predictions of one table are from it.

    Attributes
    ----------
    gpu, kind, source : str
        The table.
    num_rows : int
        Rows compared.
    error : float
        Mean absolute relative error of the kernels learnt on it.
    without_gpu : float or None
        The same of kernels that no table of this GPU taught; None where no other GPU has the kind.
    """

    gpu: str
    kind: str
    source: str
    num_rows: int
    error: float
    without_gpu: float | None


def table_errors(
    tables: Sequence[Table], learnt: Mapping[str, Mapping[str, Any]]
) -> list[TableError]:
    """Return the errors on every table, with and without its GPU."""
    found = []
    for table in tables:
        device = gpu(table.gpu)
        rows = taught(table, device)
        others = {name: kernels for name, kernels in learnt.items() if name != table.gpu}
        known = any(_has(kernels, table.kind) for kernels in others.values())
        without = _error(table, composed(device, _filled(others, learnt)), rows) if known else None
        own = _error(table, composed(device, learnt), rows)
        num_rows = len(rows["us"])
        found.append(TableError(table.gpu, table.kind, table.source, num_rows, own, without))
    return found


def layer_errors(
    models: Sequence[tuple[str, Table]], learnt: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return errors of the time of a layer's products, by GPU and model.

    Parameters
    ----------
    models : sequence of (str, Table)
        Products of the layers of a model, which taught nothing of `learnt`.
    learnt : mapping
        As `composed` takes it.

    Returns
    -------
    dict
        GPU -> model -> mean absolute relative error over numbers of tokens and of devices:
        ``learnt`` of these kernels; ``other_models`` of products learnt on all other models of that
        GPU, where there are several.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, table in models:
        device = gpu(table.gpu)
        errors = {"learnt": _layer_error(table, composed(device, learnt).gemm["bf16"], device)}
        others = [t for other, t in models if t.gpu == table.gpu and other != name]
        if others:
            kernel = fit_gemm(others, device, "bf16")
            errors["other_models"] = _layer_error(table, kernel, device)
        found.setdefault(table.gpu, {})[name] = errors
    return found


def _layer_error(table: Table, kernel: Any, device: Gpu) -> float:  # noqa: ANN401 - a Gemm
    columns = table.columns
    predicted = gemm_us(kernel, columns, device, "bf16")
    keys = np.stack([columns["m"], columns["workers"]])
    _, at = np.unique(keys, axis=1, return_inverse=True)
    sums = [np.bincount(at.ravel(), values) for values in (predicted, columns["us"])]
    return float(np.mean(np.abs(sums[0] / sums[1] - 1)))


def _has(kernels: Mapping[str, Any], kind: str) -> bool:
    if kind.startswith("gemm "):
        return kind.removeprefix("gemm ") in kernels.get("gemm", {})
    return _SECTIONS.get(kind, kind) in kernels


def _filled(
    others: Mapping[str, Mapping[str, Any]], learnt: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Keep kinds that only the left out GPU has, so that the rest can be composed."""
    filled: dict[str, Mapping[str, Any]] = dict(others)
    for name, kernels in learnt.items():
        if name not in others:
            lone = {
                kind: value
                for kind, value in kernels.items()
                if kind != "gemm" and not any(kind in other for other in others.values())
            }
            filled |= {name: lone} if lone else {}
    return filled


def _error(table: Table, kernels: Efficiency, rows: Columns) -> float:
    device = gpu(table.gpu)
    predicted: Floats
    if table.kind.startswith("gemm "):
        formats = table.kind.removeprefix("gemm ")
        predicted = gemm_us(kernels.gemm[formats], rows, device, formats)
    else:
        section = _SECTIONS.get(table.kind, table.kind)
        predicted = PREDICT[table.kind](getattr(kernels, section), rows, device)
    return float(np.mean(np.abs(predicted / rows["us"] - 1)))
