"""Agentic sessions of LLMServingSim: a line a session, its calls in `sub_requests`.

Source: casys-kaist/LLMServingSim, workloads/README.md, "Agentic sessions". Where calls carry token
ids, the blocks of prompts and answers are named by them. Where they do not, a prompt that is long
enough is taken to begin with the call before it and its answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.sim.errors import TraceError
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import Int64, block_ids, nanoseconds, whole_numbers
from schedlab.traces.readers.reader import ReadOptions
from schedlab.traces.readers.source import Records, jsonl_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.trace import Trace
from schedlab.traces.turns import Turns

BLOCK_TOKENS = 16
# 56 bits: room to split a block 64-fold in an int64, and a collision chance of 1e-5 in 1M blocks.
_HASH_MASK = (1 << 56) - 1
TOOL = "tool"
"""What calls whose tool takes time are said to call: the format names no tools."""


def sessions_in(path: Path, options: ReadOptions) -> Iterator[Trace]:
    """Yield the sessions of a file; a line without `sub_requests` is one of a single call."""
    report = ReadReport(
        format="llmservingsim",
        path=str(path),
        time_unit="ns",
        time_zero="the publisher's",
        tokens="counted by the publisher",
        notes=("requests wait for the answer before them and its tool",),
    )
    builder = TraceBuilder(report, empty_reason=options.empty_reason)
    for lines in jsonl_records(path, ("arrival_time_ns",), options.chunk_rows):
        calls = Records(path)
        sessions: list[str] = []
        starts: list[Any] = []
        needs: list[list[int]] = []
        delays: list[Any] = []
        for i, record in enumerate(lines.values):
            place = lines.at(i)
            told = record.get("sub_requests", [record])
            if not isinstance(told, list) or not all(isinstance(call, dict) for call in told):
                raise TraceError(f"{place}: sub_requests must be a list of objects")
            delay: Any = 0
            for k, call in enumerate(told):
                for name in ("input_toks", "output_toks"):
                    if name not in call:
                        raise TraceError(f"{place}: sub_request {k + 1} has no field {name!r}")
                needs.append([len(calls.lines) - 1] if k else [])
                calls.lines.append(lines.lines[i])
                calls.values.append(call)
                sessions.append(f"{record.get('session_id', '')}@{lines.lines[i]}")
                starts.append(record["arrival_time_ns"])
                delays.append(delay)
                delay = call.get("tool_duration_ns", 0)
        if not calls.lines:
            continue
        delay_ns = whole_numbers(delays, "tool_duration_ns", calls)
        waits_behind = np.append(delay_ns[1:] > 0, False)
        tool = np.array([TOOL if waits else None for waits in waits_behind], dtype=object)
        named = all("input_tok_ids" in call for call in calls.values)
        names = _names(calls) if named else None
        trace = builder.trace(
            calls,
            arrival_ns=nanoseconds(starts, 1, "arrival_time_ns", calls),
            prompt_tokens=whole_numbers(
                [c["input_toks"] for c in calls.values], "input_toks", calls
            ),
            output_tokens=whole_numbers(
                [c["output_toks"] for c in calls.values], "output_toks", calls
            ),
            session=np.array(sessions, dtype=object),
            prefix=None if names is None else block_ids(names[0], BLOCK_TOKENS, calls),
            turns=Turns.from_rows(
                needs,
                delay_ns,
                tool,
                answers=None if names is None else block_ids(names[1], BLOCK_TOKENS, calls),
            ),
        )
        if trace is not None:
            yield trace
    yield builder.finish()


def _names(calls: Records) -> tuple[list[list[int]], list[list[int]]]:
    """Return the names of the blocks of prompts, and of those that answers fill."""
    prompts, answers = [], []
    for i, call in enumerate(calls.values):
        asked = call["input_tok_ids"]
        said = call.get("output_tok_ids", [])
        for name, ids in (("input", asked), ("output", said)):
            if not isinstance(ids, list):
                raise TraceError(f"{calls.at(i)}: {name}_tok_ids must be a list of integers")
            if ids and len(ids) != call[f"{name}_toks"]:
                raise TraceError(
                    f"{calls.at(i)}: {len(ids)} {name}_tok_ids but {name}_toks is "
                    f"{call[f'{name}_toks']}"
                )
        blocks = chained_hashes(token_ids([*asked, *said], calls.at(i)))
        full = len(asked) // BLOCK_TOKENS
        prompts.append(blocks[:full])
        answers.append(blocks[full:])
    return prompts, answers


def token_ids(values: list[Any], place: str) -> Int64:
    """Return token ids as an array."""
    if not all(type(value) is int for value in values):
        raise TraceError(f"{place}: input_tok_ids must be a list of integers")
    return np.array(values, dtype=np.int64)


def chained_hashes(tokens: Int64) -> list[int]:
    """Return one id a full block; each depends on all tokens before it, as in vLLM's cache."""
    blocks: list[int] = []
    digest = b""
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        content = digest + tokens[end - BLOCK_TOKENS : end].tobytes()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        blocks.append(int.from_bytes(digest, "little") & _HASH_MASK)
    return blocks
