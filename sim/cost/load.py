"""Cost models from profile folders, whatever kind of profile it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.cost.fitted import FittedCostModel
from sim.cost.table import TableCostModel
from sim.cost.table_profile import SCHEMA as TABLE_SCHEMA
from sim.errors import SpecError
from sim.files import read_json_object


def load_profile(
    folder: Path | str,
    profiling_overhead_s: float = 0.0,
    separate_prefills: bool | None = None,
    nearest_skew: bool = False,
    **wanted: Any,  # noqa: ANN401
) -> FittedCostModel | TableCostModel:
    """Return the cost model of a profile folder; its meta.json says which kind it is.

    Parameters
    ----------
    folder : Path or str
        Holds meta.json beside fit.json (calibrated here) or table.json (imported).
    profiling_overhead_s, separate_prefills, nearest_skew
        See `TableCostModel`; a calibration has no such things.
    **wanted
        What the run is about: see `FittedCostModel.load`.

    Raises
    ------
    SpecError
        If a file is missing or malformed, or the profile is of something else.
    """
    meta = read_json_object(Path(folder) / "meta.json")
    if meta.get("schema") == TABLE_SCHEMA:
        return TableCostModel.load(
            folder,
            profiling_overhead_s=profiling_overhead_s,
            separate_prefills=separate_prefills,
            nearest_skew=nearest_skew,
            **wanted,
        )
    for key, value in (
        ("profiling_overhead_s", profiling_overhead_s),
        ("separate_prefills", separate_prefills),
        ("nearest_skew", nearest_skew),
    ):
        if value:
            raise SpecError(f"{folder}: {key} belongs to tables of measured operators")
    return FittedCostModel.load(folder, **wanted)
