"""Alibaba's Qwen-Bailian traces: JSON Lines with times in seconds and 16-token block ids.

Source: README of alibaba-edu/qwen-bailian-usagetraces-anon (Wang et al., "KVCache Cache in the
Wild", USENIX ATC 2025). The rows look like Mooncake's, whose times are milliseconds: `chat_id`
tells them apart. The ids hash each block by itself, as far as the README says, so they are chained
here; that changes nothing should they be chained already.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.sim.errors import TraceError
from schedlab.traces.linking import NOBODY, linked
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import block_ids, given_ids, nanoseconds, texts, whole_numbers
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, Records, jsonl_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.trace import Trace

COLUMNS = ("chat_id", "timestamp", "input_length", "output_length")
BLOCK_TOKENS = 16
NO_PARENT = -1
_MASK = (1 << 64) - 1


def _sniff(peek: Peek) -> bool:
    return peek.kind == "jsonl" and set(COLUMNS) <= set(peek.names)


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    if not options.sessions:
        return _rows(path, options, [])
    return _sessions_of(path, options)


def _sessions_of(path: Path, options: ReadOptions) -> Iterator[Trace]:
    """Yield the whole file as conversations."""
    if options.drop_empty:
        raise TraceError(f"{path}: drop_empty would leave turns of sessions out")
    chats: list[tuple[int, int]] = []
    trace = Trace.concat(list(_rows(path, options, chats)))
    row_of = {chat: row for row, (chat, _) in enumerate(chats)}
    parents = [row_of.get(parent, NOBODY) for _, parent in chats]
    for row, parent in enumerate(parents):
        if parent >= row:
            what = "itself" if parent == row else "a later chat"
            raise TraceError(f"{path}: chat {chats[row][0]} has {what} as its parent")
    yield linked(trace, np.array(parents, dtype=np.int64))


def _rows(path: Path, options: ReadOptions, chats: list[tuple[int, int]]) -> Iterator[Trace]:
    """Yield the rows at their times, and note chat and parent of each in `chats`."""
    report = ReadReport(
        format="bailian",
        path=str(path),
        time_unit="s",
        time_zero="the publisher's",
        tokens="counted by the publisher",
        notes=("session is the first chat_id of a conversation, application is its type",),
    )
    builder = TraceBuilder(report, empty_reason=options.empty_reason)
    # The only state that grows with the file: one entry a request, to find its conversation.
    root_of: dict[int, int] = {}
    for records in jsonl_records(path, COLUMNS, options.chunk_rows):
        columns = {name: [r[name] for r in records.values] for name in COLUMNS}
        hashes = given_ids([r.get("hash_ids") for r in records.values])
        prefix = None
        if hashes is not None:
            builder.note(f"hash_ids: {BLOCK_TOKENS}-token prompt blocks, chained by the reader")
            block_ids(hashes, BLOCK_TOKENS, records)
            prefix = block_ids([_chained(ids) for ids in hashes], BLOCK_TOKENS, records)
        trace = builder.trace(
            records,
            arrival_ns=nanoseconds(columns["timestamp"], 1_000_000_000, "timestamp", records),
            prompt_tokens=whole_numbers(columns["input_length"], "input_length", records),
            output_tokens=whole_numbers(columns["output_length"], "output_length", records),
            prefix=prefix,
            session=texts(_sessions(records, root_of, chats)),
            application=texts([r.get("type") for r in records.values]),
        )
        if trace is not None:
            yield trace
    yield builder.finish()


def _sessions(records: Records, root_of: dict[int, int], chats: list[tuple[int, int]]) -> list[int]:
    """Return the first chat of each row's conversation, or the earliest the trace knows of."""
    roots = []
    for i, record in enumerate(records.values):
        chat: Any = record["chat_id"]
        parent: Any = record.get("parent_chat_id", NO_PARENT)
        if type(chat) is not int or type(parent) is not int:
            raise TraceError(f"{records.at(i)}: chat_id and parent_chat_id must be integers")
        root_of[chat] = chat if parent == NO_PARENT else root_of.get(parent, parent)
        roots.append(root_of[chat])
        chats.append((chat, parent))
    return roots


def _chained(ids: list[int]) -> list[int]:
    """Return ids that depend on all blocks before them: a 64-bit multiplicative mix, 56 bits kept.

    Two different prefixes of a trace with n blocks collide with a chance of about n**2 / 2**57.
    """
    state = 0
    chained = []
    for block in ids:
        state = ((state ^ block) * 0x9E3779B97F4A7C15) & _MASK
        state ^= state >> 29
        chained.append(state >> 8)
    return chained


READER = Reader(
    "bailian", "Alibaba Qwen-Bailian JSON Lines, times in seconds", _sniff, _chunks, True
)
