"""Azure LLM inference traces of 2023 and 2024: CSV with wall-clock times.

Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and ...2024.md. The 2023 files
write ``2023-11-16 18:15:46.6805900`` (100 ns ticks), the 2024 files
``2024-05-10 00:00:00.009930+00:00``, some rows without a fraction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from schedlab.sim.errors import TraceError
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import Int64, whole_numbers
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, Records, csv_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.trace import Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?)(Z|([+-])(\d\d):?(\d\d))?\s*", re.ASCII
)

_FIRST_YEAR, _LAST_YEAR = "1678", "2262"
"""Of 64-bit nanoseconds around 1970, but for parts of a year at both ends."""


def _sniff(peek: Peek) -> bool:
    return peek.kind == "csv" and set(COLUMNS) <= set(peek.names)


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    report = ReadReport(
        format="azure",
        path=str(path),
        time_unit="wall-clock time",
        time_zero="the first request",
        tokens="counted by the publisher",
    )
    builder = TraceBuilder(report, rebase=True, empty_reason=options.empty_reason)
    for names, records in csv_records(path, COLUMNS, options.chunk_rows):
        cells = dict(zip(names, zip(*records.values, strict=True), strict=True))
        trace = builder.trace(
            records,
            arrival_ns=_epoch_ns(cells["TIMESTAMP"], records),
            prompt_tokens=whole_numbers(cells["ContextTokens"], "ContextTokens", records),
            output_tokens=whole_numbers(cells["GeneratedTokens"], "GeneratedTokens", records),
        )
        if trace is not None:
            yield trace
    yield builder.finish()


def _epoch_ns(stamps: tuple[str, ...], records: Records) -> Int64:
    """Return nanoseconds since 1970, UTC; a stamp without a zone is taken as UTC."""
    matches = [_STAMP.fullmatch(stamp) for stamp in stamps]
    local, offset_s = [], []
    for i, match in enumerate(matches):
        if match is None:
            raise TraceError(
                f"{records.at(i)}: TIMESTAMP is {stamps[i]!r}, expected "
                "'YYYY-MM-DD hh:mm:ss.fffffff' (up to 9 decimals, optional zone)"
            )
        local.append(match[1])
        if not _FIRST_YEAR <= match[1][:4] < _LAST_YEAR:
            raise TraceError(
                f"{records.at(i)}: TIMESTAMP is {stamps[i]!r}, and times are counted in "
                f"nanoseconds from {_FIRST_YEAR} to before {_LAST_YEAR}"
            )
        sign = match[3]
        offset_s.append(
            0 if sign is None else int(f"{sign}1") * (int(match[4]) * 3600 + int(match[5]) * 60)
        )
    try:
        instants = np.array(local, dtype="datetime64[ns]").astype(np.int64)
    except ValueError as error:
        raise TraceError(f"{records.at(_impossible(local))}: TIMESTAMP: {error}") from None
    return instants - np.array(offset_s, dtype=np.int64) * 1_000_000_000


def _impossible(stamps: list[str]) -> int:
    """Return the index of the first stamp that is no date, such as a 31st of June."""
    for i, stamp in enumerate(stamps):
        try:
            np.datetime64(stamp, "ns")
        except ValueError:
            return i
    return 0


READER = Reader("azure", "Azure LLM inference traces 2023/2024, CSV", _sniff, _chunks)
