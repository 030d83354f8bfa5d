"""LLMServingSim workloads: JSON Lines with nanosecond times and token ids, or block ids for them.

Source: casys-kaist/LLMServingSim, workloads/README.md. Full rows carry `input_tok_ids`; lean rows
carry `hash_ids`, one a full 16-token block of prompt and output together. An agentic session is one
line: each of its `sub_requests` is sent when the answer before it is done and its tool has worked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schedlab.sim.errors import TraceError
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.agentic_sessions import (
    BLOCK_TOKENS,
    chained_hashes,
    sessions_in,
    token_ids,
)
from schedlab.traces.readers.cells import block_ids, nanoseconds, whole_numbers
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, Records, jsonl_records, open_text, readable
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.trace import Trace

COLUMNS = ("input_toks", "output_toks", "arrival_time_ns")


def _sniff(peek: Peek) -> bool:
    return peek.kind == "jsonl" and ("input_toks" in peek.names or "sub_requests" in peek.names)


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    with open_text(path) as text, readable(path, [0]):
        is_agentic = any('"sub_requests"' in line for line in text)
    return sessions_in(path, options) if is_agentic else _rows(path, options)


def _rows(path: Path, options: ReadOptions) -> Iterator[Trace]:
    """Yield requests that do not wait for others."""
    report = ReadReport(
        format="llmservingsim",
        path=str(path),
        time_unit="ns",
        time_zero="the publisher's",
        tokens="counted by the publisher",
    )
    builder = TraceBuilder(report, empty_reason=options.empty_reason)
    for records in jsonl_records(path, (), options.chunk_rows):
        for i, record in enumerate(records.values):
            _check(record, records.at(i))
        columns = {name: [r[name] for r in records.values] for name in COLUMNS}
        prompt_tokens = whole_numbers(columns["input_toks"], "input_toks", records)
        prefix = _prefix(records, prompt_tokens.tolist())
        if prefix is not None:
            builder.note(f"prefix hashes: full {BLOCK_TOKENS}-token blocks of the prompt")
        trace = builder.trace(
            records,
            arrival_ns=nanoseconds(columns["arrival_time_ns"], 1, "arrival_time_ns", records),
            prompt_tokens=prompt_tokens,
            output_tokens=whole_numbers(columns["output_toks"], "output_toks", records),
            prefix=prefix,
        )
        if trace is not None:
            yield trace
    yield builder.finish()


def _check(record: dict[str, Any], place: str) -> None:
    """Raise for a missing field, or ids that are no list."""
    for name in COLUMNS:
        if name not in record:
            raise TraceError(f"{place}: no field {name!r} (there are: {', '.join(record)})")
    for name in ("input_tok_ids", "hash_ids"):
        if not isinstance(record.get(name, []), list):
            raise TraceError(f"{place}: {name} must be a list of integers")


def _prefix(records: Records, prompt_tokens: list[int]) -> PrefixHashes | None:
    """Return the ids of the full prompt blocks, given or computed from the token ids."""
    rows: list[list[int]] = []
    for i, (record, length) in enumerate(zip(records.values, prompt_tokens, strict=True)):
        if "input_tok_ids" in record:
            tokens = token_ids(record["input_tok_ids"], records.at(i))
            if len(tokens) != length:
                raise TraceError(
                    f"{records.at(i)}: {len(tokens)} input_tok_ids but input_toks is {length}"
                )
            rows.append(chained_hashes(tokens))
        elif "hash_ids" in record:
            if len(record["hash_ids"]) < length // BLOCK_TOKENS:
                raise TraceError(
                    f"{records.at(i)}: {len(record['hash_ids'])} hash_ids cannot cover the "
                    f"{length}-token prompt in blocks of {BLOCK_TOKENS}"
                )
            rows.append(record["hash_ids"][: length // BLOCK_TOKENS])
        else:
            rows.append([])
    return block_ids(rows, BLOCK_TOKENS, records) if any(rows) else None


READER = Reader("llmservingsim", "LLMServingSim JSON Lines, full or lean", _sniff, _chunks)
