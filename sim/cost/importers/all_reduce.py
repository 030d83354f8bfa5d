"""The time of all-reduces by tokens, from a table of measured ones by size."""

from __future__ import annotations

from pathlib import Path

from schedlab.sim.cost.importers.csv_table import CsvTable, medians, read_csv
from schedlab.sim.cost.table_profile import Curve
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.model_shape import ModelShape

_BYTES = 2.0  # activations are 16 bits wide


def all_reduce_curve(
    path: Path, shape: ModelShape, workers: int, calls: float
) -> tuple[Curve, str]:
    """Return the all-reduces of a step by its tokens.

    Parameters
    ----------
    path : Path
        Columns num_workers, size_bytes and time_us; or Vidur's all_reduce.csv: num_workers, size
        (bytes), devices_per_node and time_stats.all_reduce.median (milliseconds), of which only
        rows inside one machine count.
    shape : ModelShape
        How wide a token's activations are.
    workers : int
        Devices that take part.
    calls : float
        All-reduces in a step.

    Returns
    -------
    curve : Curve
        By tokens, the median of equal sizes.
    assumption : str
        What there is to say of it.

    Raises
    ------
    SpecError
        If the file is missing or malformed, or has no rows of so many workers.
    """
    table = read_csv(path, ("num_workers",))
    sizes, times_us, is_inside = _columns(table, workers)
    rows = [
        (size, us)
        for n, size, us, inside in zip(
            table.whole("num_workers"), sizes, times_us, is_inside, strict=True
        )
        if n == workers and inside
    ]
    if not rows:
        raise SpecError(f"{path}: no all-reduce of {workers} workers inside one machine")
    per_token = shape.hidden_size * _BYTES
    at, us = medians((size / per_token, us) for size, us in rows)
    curve = Curve("all_reduce", calls, at, us)
    return curve, f"all-reduces as measured for {workers} workers inside one machine"


def _columns(table: CsvTable, workers: int) -> tuple[list[int], list[float], list[bool]]:
    """Return bytes, microseconds, and whether one machine held all of them."""
    if "time_stats.all_reduce.median" in table.columns:
        per_node = table.whole("devices_per_node")
        times_us = [ms * 1e3 for ms in table.numbers("time_stats.all_reduce.median", least=0)]
        return table.whole("size", least=1), times_us, [n >= workers for n in per_node]
    sizes = table.whole("size_bytes", least=1)
    return sizes, table.numbers("time_us", least=0), [True] * len(sizes)
