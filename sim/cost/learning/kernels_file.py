"""A file of learnt kernels: what was learnt, on which tables, and how near it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schedlab.sim.cost.efficiency import SCHEMA
from schedlab.sim.cost.learning.errors import TableError
from schedlab.sim.files import write_text
from schedlab.sim.text import json_text


def write_kernels(
    path: Path,
    learnt: Mapping[str, Mapping[str, Any]],
    errors: Sequence[TableError],
    layers: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> None:
    """Write what was learnt as `schedlab.sim.cost.efficiency.efficiency_of` reads it.

    Parameters
    ----------
    path : Path
        The file.
    learnt : mapping
        Kernels by GPU.
    errors : sequence of TableError
        Of the tables that taught them.
    layers : mapping
        Of whole layers in tables that did not; see `layer_errors`.
    """
    gpus = {
        name: {
            kind: {key: _numbers(each) for key, each in kernel.items()}
            if kind == "gemm"
            else _numbers(kernel)
            for kind, kernel in kernels.items()
        }
        for name, kernels in learnt.items()
    }
    tables = [
        {key: _short(value) for key, value in asdict(error).items() if value is not None}
        for error in errors
    ]
    data = {
        "schema": SCHEMA,
        "learnt_by": "schedlab profile learn",
        "gpus": gpus,
        "tables": tables,
        "layers_that_did_not_teach": {
            name: {m: {key: _short(e) for key, e in each.items()} for m, each in models.items()}
            for name, models in layers.items()
        },
    }
    write_text(path, json_text(data))


def _numbers(kernel: Any) -> dict[str, float]:  # noqa: ANN401 - a kernel of any kind
    values = asdict(kernel).items()
    return {
        key: value if isinstance(value, int) else float(f"{value:.4g}") for key, value in values
    }


def _short(value: object) -> object:
    return float(f"{value:.3g}") if isinstance(value, float) else value
