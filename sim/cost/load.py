"""Cost models from profile folders, whatever kind of profile it is."""

from __future__ import annotations

from pathlib import Path

from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.profile import read_fit, read_meta
from schedlab.sim.cost.table import TableCostModel, TableReading
from schedlab.sim.cost.table_profile import SCHEMA as TABLE_SCHEMA
from schedlab.sim.cost.table_profile import read_table
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.dtypes import dtype_name
from schedlab.sim.hardware.gpus import canonical_gpu
from schedlab.sim.hardware.models import canonical_model


def load_profile(
    folder: Path | str,
    *,
    model: str | None = None,
    hardware: str | None = None,
    dtype: str | None = None,
    tensor_parallel_size: int | None = None,
    allow_mismatch: bool = False,
    reading: TableReading | None = None,
) -> FittedCostModel | TableCostModel:
    """Return the cost model of a profile folder; its meta.json says which kind it is.

    Parameters
    ----------
    folder : Path or str
        Holds meta.json beside fit.json (calibrated here) or table.json (imported);
        docs/cost-models.md has the formats.
    model, hardware, dtype, tensor_parallel_size : optional
        What the run is about; `None` is not compared.
    allow_mismatch : bool
        Go on although they differ; `describe` then says so.
    reading : TableReading, optional
        How to read tables; a calibration is read in one way only.

    Raises
    ------
    SpecError
        If a file is missing or malformed, or the profile is of something else.
    """
    folder = Path(folder)
    wanted = {
        "model": model,
        "hardware": hardware,
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel_size,
    }
    meta = read_meta(folder)
    is_table = meta.get("schema") == TABLE_SCHEMA
    if reading is not None and not is_table:
        for key in TableReading.__slots__:
            if getattr(reading, key):
                raise SpecError(f"{folder}: {key} belongs to tables of measured operators")
    mismatches = [
        f"{key} is {meta[key]!r} in the profile, {value!r} in the run"
        for key, value in wanted.items()
        if value is not None and _canonical(key, meta[key]) != _canonical(key, value)
    ]
    if mismatches and not allow_mismatch:
        raise SpecError(
            f"{folder}: {'; '.join(mismatches)} (allow_mismatch uses the profile all the same)"
        )
    if is_table:
        return TableCostModel(
            read_table(folder), meta, str(folder), mismatches, reading or TableReading()
        )
    return FittedCostModel(read_fit(folder), meta, str(folder), mismatches)


def _canonical(key: str, value: object) -> object:
    if key == "model":
        return canonical_model(str(value))
    if key == "hardware":
        return canonical_gpu(str(value))
    if key == "dtype":
        return dtype_name(str(value))
    return value
