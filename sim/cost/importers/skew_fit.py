"""LLMServingSim's correction of attention for unequal contexts: meta.yaml and skew_fit.csv."""

from __future__ import annotations

import math
from pathlib import Path

from schedlab.sim.cost.attention import Skew
from schedlab.sim.cost.importers.csv_table import read_csv
from schedlab.sim.cost.importers.yaml_section import YamlSection
from schedlab.sim.errors import SpecError

_AXES = ("n", "skew_rate", "kv_big", "kp")


def read_skew(folder: Path, fit: YamlSection, tensor_parallel_size: int) -> Skew:
    """Return the correction that a bundle has.

    Parameters
    ----------
    folder : Path
        ``tp<N>``, with skew_fit.csv.
    fit : YamlSection
        ``skew_fit`` of meta.yaml.
    tensor_parallel_size : int
        Whose alpha is that of steps which were not fitted.

    Raises
    ------
    SpecError
        If a file is malformed, or of a version that is not supported.
    """
    axes = fit.section("bucket_axes")
    missing = [axis for axis in _AXES if f"{axis}_bins" not in axes.data]
    if missing:
        raise SpecError(
            f"{fit.file}: skew_fit.bucket_axes has no {missing[0]}_bins: a "
            "version of the correction that is not supported; --no-skew leaves it out"
        )
    bins = [axes.rising(f"{axis}_bins") for axis in _AXES]
    labels = [
        _labels(axes, f"{axis}_labels", len(edges) - 1)
        for axis, edges in zip(_AXES, bins, strict=True)
    ]
    default = fit.section("per_tp").section(str(tensor_parallel_size)).number("alpha_default", 0.0)
    decodes, rates, contexts, kvs = (tuple(edges[1:]) for edges in bins)
    return Skew(decodes, rates, contexts, kvs, _cells(folder, labels), default)


def _labels(axes: YamlSection, key: str, num_buckets: int) -> dict[str, int]:
    names = axes.names(key)
    if len(names) != num_buckets or len(set(names)) < num_buckets:
        raise axes.error(key, f"must be {num_buckets} names, one a bucket, got {names!r}")
    return {name: i for i, name in enumerate(names)}


def _cells(folder: Path, labels: list[dict[str, int]]) -> dict[tuple[int, ...], float]:
    """Return alpha by chunk and buckets."""
    table = read_csv(folder / "skew_fit.csv", ("pc", "alpha"))
    columns = [table.text(f"{axis}_label") for axis in _AXES]
    alphas = table.numbers("alpha", allow_nan=True)
    found: dict[tuple[int, ...], float] = {}
    for line, (pc, alpha, *names) in enumerate(
        zip(table.whole("pc", least=0), alphas, *columns, strict=True), start=2
    ):
        buckets = [known.get(name, -1) for known, name in zip(labels, names, strict=True)]
        if -1 in buckets:
            unknown = names[buckets.index(-1)]
            raise SpecError(f"{table.path}:{line}: label {unknown!r} is not in meta.yaml")
        if (pc, *buckets) in found:
            raise SpecError(f"{table.path}:{line}: pc {pc} with {', '.join(names)} is there twice")
        found[pc, *buckets] = alpha
    return {cell: alpha for cell, alpha in found.items() if not math.isnan(alpha)}
