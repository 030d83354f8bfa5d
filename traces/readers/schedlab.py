"""Our own table, as CSV or Parquet: one row a request, units in the column names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schedlab.sim.errors import TraceError, look_alike, nearest
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import (
    absent,
    block_ids,
    nanoseconds,
    optional_numbers,
    optional_whole_numbers,
    texts,
    whole_numbers,
)
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, Records, csv_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.trace import Trace

REQUIRED = ("prompt_tokens", "output_tokens")
OPTIONAL = (
    "arrival_s",
    "max_tokens",
    "priority",
    "deadline_s",
    "slo_ttft_ms",
    "slo_tpot_ms",
    "application",
    "tenant",
    "session_id",
    "prefix_hash_ids",
    "hash_block_tokens",
    "prompt",
)
DEFAULT_BLOCK_TOKENS = 16


def _sniff(peek: Peek) -> bool:
    return peek.kind in ("csv", "parquet") and (
        set(REQUIRED) <= set(peek.names) or "arrival_s" in peek.names
    )


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    with path.open("rb") as raw:
        parquet = raw.read(4) == b"PAR1"
    rows = _parquet_records if parquet else _csv_cells
    builder: TraceBuilder | None = None
    block_tokens: int | None = None
    for cells, records in rows(path, options.chunk_rows):
        if builder is None:
            builder = _builder(path, tuple(cells), options)
        if "prefix_hash_ids" in cells:
            block_tokens = _block_tokens(cells, records, builder, block_tokens)
        trace = builder.trace(records, **_columns(cells, records, block_tokens))
        if trace is not None:
            yield trace
    yield (builder or TraceBuilder(ReadReport(format="schedlab", path=str(path)))).finish()


def _builder(path: Path, names: tuple[str, ...], options: ReadOptions) -> TraceBuilder:
    """Return the gate for a file with these columns; a misspelt column is an error."""
    known = REQUIRED + OPTIONAL
    ignored = [name for name in names if name not in known]
    for name in ignored:
        if look_alike(name, known, cutoff=0.75):
            raise TraceError(f"{path}:1: unknown column {name!r}; {nearest(name, known)}")
    timed = "arrival_s" in names
    report = ReadReport(
        format="schedlab",
        path=str(path),
        time_unit="s" if timed else "",
        time_zero="the file's" if timed else "",
        notes=(f"columns ignored: {', '.join(ignored)}",) if ignored else (),
    )
    return TraceBuilder(report, empty_reason=options.empty_reason)


def _columns(cells: dict[str, Any], records: Records, block_tokens: int | None) -> dict[str, Any]:
    """Return the columns of a trace, by the names `Trace` gives them."""
    columns: dict[str, Any] = {name: whole_numbers(cells[name], name, records) for name in REQUIRED}
    if "arrival_s" in cells:
        columns["arrival_ns"] = nanoseconds(cells["arrival_s"], 1_000_000_000, "arrival_s", records)
    for name in ("max_tokens", "priority"):
        if name in cells:
            columns[name] = optional_whole_numbers(cells[name], name, records, default=0)
    for name in ("deadline_s", "slo_ttft_ms", "slo_tpot_ms"):
        if name in cells:
            columns[name] = optional_numbers(cells[name], name, records)
    for name in ("application", "tenant", "session_id", "prompt"):
        if name in cells:
            columns[name.removesuffix("_id")] = texts(cells[name])
    if block_tokens is not None:
        rows = [_ids(cell, records, i) for i, cell in enumerate(cells["prefix_hash_ids"])]
        columns["prefix"] = block_ids(rows, block_tokens, records)
    return columns


def _ids(cell: object, records: Records, index: int) -> list[int]:
    """Return the block ids of a cell: a list, or integers separated by spaces."""
    if absent(cell):
        return []
    if isinstance(cell, list):
        return cell
    try:
        return [int(block) for block in str(cell).split()]
    except ValueError:
        raise TraceError(
            f"{records.at(index)}: prefix_hash_ids is {cell!r:.40}, expected integers separated by "
            "spaces"
        ) from None


def _block_tokens(
    cells: dict[str, Any], records: Records, builder: TraceBuilder, before: int | None
) -> int:
    """Return the block size of the file, which must be the same in every row, also those before."""
    if "hash_block_tokens" not in cells:
        builder.note(
            f"no column hash_block_tokens: blocks of {DEFAULT_BLOCK_TOKENS} tokens assumed"
        )
        return DEFAULT_BLOCK_TOKENS
    sizes = whole_numbers(cells["hash_block_tokens"], "hash_block_tokens", records)
    size = int(sizes[0]) if before is None else before
    if (sizes != size).any():
        row = int((sizes != size).argmax())
        raise TraceError(f"{records.at(row)}: hash_block_tokens changes to {sizes[row]}")
    if size < 1:
        raise TraceError(f"{records.at(0)}: hash_block_tokens must be >= 1, got {size}")
    return size


def _csv_cells(path: Path, chunk_rows: int) -> Iterator[tuple[dict[str, Any], Records]]:
    """Yield the columns of a CSV file."""
    for names, records in csv_records(path, REQUIRED, chunk_rows):
        yield dict(zip(names, zip(*records.values, strict=True), strict=True)), records


def _parquet_records(path: Path, chunk_rows: int) -> Iterator[tuple[dict[str, Any], Records]]:
    """Yield the columns of a Parquet file; records are numbered as rows, from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        for name in REQUIRED:
            if name not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise TraceError(f"{path}: no column {name!r} (there are: {names})")
        first = 1
        for batch in file.iter_batches(batch_size=chunk_rows):
            numbers = list(range(first, first + len(batch)))
            first += len(batch)
            yield batch.to_pydict(), Records(path, numbers, separator=": row ")
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path}: not readable as Parquet ({error!s:.200})") from None


READER = Reader("schedlab", "schedlab's own table, CSV or Parquet", _sniff, _chunks)
