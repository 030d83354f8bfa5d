"""Vidur: CSV of prefill and decode lengths, with or without arrival times.

Source: microsoft/vidur, data/processed_traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import nanoseconds, whole_numbers
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, csv_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.trace import Trace

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def _sniff(peek: Peek) -> bool:
    return peek.kind == "csv" and set(COLUMNS) <= set(peek.names)


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    report = ReadReport(format="vidur", path=str(path), tokens="counted by the publisher")
    timed = ReadReport(
        format="vidur",
        path=str(path),
        time_unit="s",
        time_zero="the publisher's",
        tokens=report.tokens,
    )
    builder: TraceBuilder | None = None
    for names, records in csv_records(path, COLUMNS, options.chunk_rows):
        has_times = "arrived_at" in names
        if builder is None:
            builder = TraceBuilder(
                timed if has_times else report, empty_reason=options.empty_reason
            )
        cells = dict(zip(names, zip(*records.values, strict=True), strict=True))
        trace = builder.trace(
            records,
            arrival_ns=nanoseconds(cells["arrived_at"], 1_000_000_000, "arrived_at", records)
            if has_times
            else None,
            prompt_tokens=whole_numbers(cells[COLUMNS[0]], COLUMNS[0], records),
            output_tokens=whole_numbers(cells[COLUMNS[1]], COLUMNS[1], records),
        )
        if trace is not None:
            yield trace
    yield (builder or TraceBuilder(report)).finish()


READER = Reader("vidur", "Vidur CSV, with or without arrived_at", _sniff, _chunks)
