"""BurstGPT: CSV of a campus's calls to GPT-3.5 and GPT-4, whole seconds.

Source: README of HPMLL/BurstGPT. Two layouts, of six and of eight columns, so columns are found
by name. A response of 0 tokens is a failed call.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from schedlab.sim.errors import TraceError
from schedlab.traces.linking import by_session
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import nanoseconds, texts, whole_numbers
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, csv_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.trace import Trace

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def _sniff(peek: Peek) -> bool:
    return peek.kind == "csv" and set(COLUMNS) <= set(peek.names)


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    if not options.sessions:
        yield from _rows(path, options)
        return
    trace = Trace.concat(list(_rows(path, options)))
    if trace.session is None:
        raise TraceError(f"{path}: no column 'Session ID' (the layout of six columns has none)")
    yield by_session(trace)


def _rows(path: Path, options: ReadOptions) -> Iterator[Trace]:
    report = ReadReport(
        format="burstgpt",
        path=str(path),
        time_unit="s (whole seconds in the published files: many requests share one)",
        time_zero="the first request that did not fail",
        tokens="counted by the publisher",
        notes=("application is 'model/log type', e.g. 'GPT-4/Conversation log'",),
    )
    builder = TraceBuilder(report, rebase=True, empty_reason="failed call: 0 tokens")
    for names, records in csv_records(path, COLUMNS, options.chunk_rows):
        cells = dict(zip(names, zip(*records.values, strict=True), strict=True))
        labels = [cells[name] for name in ("Model", "Log Type") if name in cells]
        sessions = cells.get("Session ID")
        trace = builder.trace(
            records,
            arrival_ns=nanoseconds(cells["Timestamp"], 1_000_000_000, "Timestamp", records),
            prompt_tokens=whole_numbers(cells["Request tokens"], "Request tokens", records),
            output_tokens=whole_numbers(cells["Response tokens"], "Response tokens", records),
            application=texts(["/".join(row) for row in zip(*labels, strict=True)])
            if labels
            else None,
            session=None if sessions is None else texts(sessions),
        )
        if trace is not None:
            yield trace
    yield builder.finish()


READER = Reader("burstgpt", "BurstGPT CSV, six or eight columns", _sniff, _chunks, True)
