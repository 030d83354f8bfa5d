"""Mooncake: JSON Lines with millisecond times and 512-token block ids.

Source: kvcache-ai/Mooncake, FAST25-release/traces. Other tools write the layout with blocks of 16
tokens; the size is inferred from the first row whose number of ids decides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from schedlab.sim.errors import TraceError
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import block_ids, given_ids, nanoseconds, texts, whole_numbers
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, Records, jsonl_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.trace import Trace

COLUMNS = ("timestamp", "input_length", "output_length")
BLOCK_SIZES = (512, 16)


def _sniff(peek: Peek) -> bool:
    wanted = set(COLUMNS) <= set(peek.names) and "chat_id" not in peek.names
    return peek.kind == "jsonl" and wanted


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    report = ReadReport(
        format="mooncake",
        path=str(path),
        time_unit="ms",
        time_zero="the publisher's",
        tokens="counted by the publisher",
    )
    builder = TraceBuilder(report, empty_reason=options.empty_reason)
    block_tokens: int | None = None
    for records in jsonl_records(path, COLUMNS, options.chunk_rows):
        columns = {name: [r[name] for r in records.values] for name in COLUMNS}
        hashes = given_ids([r.get("hash_ids") for r in records.values])
        sessions = [r.get("session_id") for r in records.values]
        prefix = None
        if hashes is not None:
            block_tokens = block_tokens or _block_tokens(columns["input_length"], hashes, records)
            builder.note(f"hash_ids: one a {block_tokens}-token prompt block, the last one partial")
            prefix = block_ids(hashes, block_tokens, records)
        trace = builder.trace(
            records,
            arrival_ns=nanoseconds(columns["timestamp"], 1_000_000, "timestamp", records),
            prompt_tokens=whole_numbers(columns["input_length"], "input_length", records),
            output_tokens=whole_numbers(columns["output_length"], "output_length", records),
            prefix=prefix,
            session=texts(sessions) if any(s is not None for s in sessions) else None,
        )
        if trace is not None:
            yield trace
    yield builder.finish()


def _block_tokens(lengths: list[int], hashes: list[list[int]], records: Records) -> int:
    """Return the block size that explains the number of ids of the first row that tells."""
    for i, (length, ids) in enumerate(zip(lengths, hashes, strict=True)):
        if not isinstance(ids, list) or not isinstance(length, int) or not ids:
            continue
        fits = [size for size in BLOCK_SIZES if len(ids) in (-(-length // size), length // size)]
        if len(fits) == 1:
            return fits[0]
        if not fits:
            raise TraceError(
                f"{records.at(i)}: {len(ids)} hash_ids for {length} tokens fit neither blocks of "
                f"{BLOCK_SIZES[0]} nor of {BLOCK_SIZES[1]} tokens"
            )
    return BLOCK_SIZES[0]


READER = Reader("mooncake", "Mooncake JSON Lines, times in milliseconds", _sniff, _chunks)
