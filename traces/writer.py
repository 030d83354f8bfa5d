"""Write a trace as schedlab's own table, or as load generators read it, all or nothing."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from schedlab.sim.errors import TraceError, nearest
from schedlab.sim.files import replacing
from schedlab.traces.trace import Trace

SUFFIXES = (".csv", ".csv.gz", ".parquet")
LAYOUTS = ("schedlab", "burstgpt")
# Names in the file for columns of `Trace` that are called otherwise in memory.
_FILE_NAMES = {"session": "session_id"}


def write(trace: Trace, path: str | Path, layout: str = "schedlab") -> Path:
    """Write `trace` to `path` in the format its suffix names.

    The file appears only when it is complete: it is written under a temporary name in the same
    folder and then renamed.

    Parameters
    ----------
    trace : Trace
        What to write; columns it does not have are left out of the file.
    path : str or Path
        Ends in ``.csv``, ``.csv.gz`` or ``.parquet``.
    layout : {"schedlab", "burstgpt"}
        Our own table, or BurstGPT's, which `vllm bench serve --dataset-name burstgpt` (lengths)
        and AIPerf (lengths and times) read; that is CSV.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    TraceError
        If suffix or layout is unknown, the folder does not exist, the requests are those of
        sessions, or the layout lacks what they have.
    OSError
        If it cannot be written; names the file.

    Notes
    -----
    CSV holds times exactly (nine decimals of a second). Parquet holds `arrival_s` as float64,
    exact to the nanosecond in the first 52 days of a trace.
    """
    path = Path(path)
    if trace.turns is not None:
        raise TraceError(f"{path}: a table has no place for what the requests of sessions wait for")
    if layout not in LAYOUTS:
        raise TraceError(f"no layout {layout!r} can be written; {nearest(layout, LAYOUTS)}")
    writers: dict[str, Callable[[Trace, IO[bytes]], None]] = {
        ".csv": _write_csv,
        ".csv.gz": _write_csv_gz,
        ".parquet": _write_parquet,
    }
    suffix = next((s for s in SUFFIXES if path.name.endswith(s)), None)
    if suffix is None:
        raise TraceError(f"cannot tell the format of {path}: use one of {', '.join(SUFFIXES)}")
    if layout == "burstgpt":
        if suffix != ".csv":
            raise TraceError(f"{path}: the layout of BurstGPT is CSV; let the name end in .csv")
        trace.require_arrivals()
        writers[suffix] = _write_burstgpt
    if not path.parent.is_dir():
        raise TraceError(f"no such folder: {path.parent}")
    with replacing(path) as temporary, temporary.open("wb") as file:
        writers[suffix](trace, file)
    return path


def _write_csv(trace: Trace, file: IO[bytes]) -> None:
    """Write comma-separated text, one row a request."""
    columns = _columns(trace)
    if "arrival_s" in columns:
        columns["arrival_s"] = [_seconds(ns) for ns in trace.require_arrivals().tolist()]
    if "prefix_hash_ids" in columns:
        columns["prefix_hash_ids"] = [" ".join(map(str, r)) for r in columns["prefix_hash_ids"]]
    text = _Text(file)
    # The default CRLF line end also makes the writer quote a lone carriage return in a text.
    writer = csv.writer(cast(Any, text))
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))


def _write_burstgpt(trace: Trace, file: IO[bytes]) -> None:
    """Write BurstGPT's six columns; `vllm bench serve` takes the rows of GPT-4 and no others."""
    writer = csv.writer(cast(Any, _Text(file)), lineterminator="\n")
    writer.writerow(
        ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
    )
    columns = (trace.require_arrivals(), trace.prompt_tokens, trace.output_tokens)
    for ns, prompt, output in zip(*(column.tolist() for column in columns), strict=True):
        writer.writerow((_seconds(ns), "GPT-4", prompt, output, prompt + output, "API log"))


def _write_csv_gz(trace: Trace, file: IO[bytes]) -> None:
    """Write gzip-compressed CSV; without a time stamp, so that equal traces give equal files."""
    with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
        _write_csv(trace, cast(IO[bytes], packed))


def _write_parquet(trace: Trace, file: IO[bytes]) -> None:
    """Write a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = _columns(trace)
    if "arrival_s" in columns:
        columns["arrival_s"] = trace.require_arrivals() / 1e9
    pq.write_table(pa.table(columns), file)


class _Text:
    """The `write` method that `csv.writer` needs, on a binary file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write UTF-8."""
        return self._file.write(text.encode())


def _columns(trace: Trace) -> dict[str, Any]:
    """Return the columns of the file, in its order, as Python lists; absent numbers are `None`."""
    present = trace.columns()
    columns: dict[str, Any] = {}
    if present.pop("arrival_ns", None) is not None:
        columns["arrival_s"] = []
    prefix = present.pop("prefix", None)
    for name, values in present.items():
        listed = values.tolist()
        if values.dtype == np.float64:
            listed = [None if value != value else value for value in listed]
        columns[_FILE_NAMES.get(name, name)] = listed
    if prefix is not None:
        columns["prefix_hash_ids"] = prefix.rows()
        columns["hash_block_tokens"] = [prefix.block_tokens] * len(trace)
    return columns


def _seconds(ns: int) -> str:
    """Return exact decimal seconds without trailing zeros."""
    whole, part = divmod(ns, 1_000_000_000)
    return f"{whole}.{part:09d}".rstrip("0").rstrip(".") if part else str(whole)
