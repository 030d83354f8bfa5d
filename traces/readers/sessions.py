"""Our own sessions, as JSON Lines: one line a request, those of a session one behind the other.

A line says what its prompt adds to what was said before, and what the request waits for. Docs:
docs/sessions.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.sim.errors import TraceError, look_alike, nearest
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import Int64, nanoseconds, texts, whole_numbers
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, Records, jsonl_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.session_generator import prompt_tokens
from schedlab.traces.trace import Trace
from schedlab.traces.turns import Shared, Turns

REQUIRED = ("session", "new_tokens", "output_tokens")
KEYS = (*REQUIRED, "turn", "parents", "arrival_s", "think_s", "tool_s", "tool", "shared", "tenant",
        "application", "priority")  # fmt: skip
MOST_TOKENS = 2**26
"""Of a prompt with its answer: the blocks of sessions are named one by one."""


def _sniff(peek: Peek) -> bool:
    return peek.kind == "jsonl" and set(REQUIRED) <= set(peek.names)


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    report = ReadReport(
        format="sessions",
        path=str(path),
        time_unit="s",
        time_zero="the file's",
        tokens="as given: those that a prompt adds",
        notes=("arrival times are those of a session's start",),
    )
    builder = TraceBuilder(report, empty_reason=options.empty_reason)
    timed: bool | None = None
    for records in _whole_sessions(path, options.chunk_rows):
        for i, record in enumerate(records.values):
            _check_keys(record, records.at(i))
        first = "arrival_s" in records.values[0]
        timed = first if timed is None else timed
        trace = builder.trace(records, **_columns(records, timed))
        if trace is not None:
            yield trace
    yield builder.finish()


def _whole_sessions(path: Path, chunk_rows: int) -> Iterator[Records]:
    """Yield the lines of whole sessions, at least so many at a time."""
    pending = Records(path)
    for records in jsonl_records(path, REQUIRED, chunk_rows):
        for line, record in zip(records.lines, records.values, strict=True):
            if (
                len(pending.lines) >= chunk_rows
                and record["session"] != pending.values[-1]["session"]
            ):
                yield pending
                pending = Records(path)
            pending.lines.append(line)
            pending.values.append(record)
    if pending.lines:
        yield pending


def _check_keys(record: dict[str, Any], place: str) -> None:
    for key in record:
        if key not in KEYS and look_alike(key, KEYS, cutoff=0.75):
            raise TraceError(f"{place}: unknown key {key!r}; {nearest(key, KEYS)}")
    if "think_s" in record and "tool_s" in record:
        raise TraceError(f"{place}: give think_s or tool_s: a request waits for a user or a tool")
    if not isinstance(record["session"], str | int) or isinstance(record["session"], bool):
        raise TraceError(f"{place}: session must be text or a whole number")


def _columns(records: Records, timed: bool) -> dict[str, Any]:
    """Return the columns of a trace, by the names `Trace` gives them."""
    rows = records.values
    new = whole_numbers([row["new_tokens"] for row in rows], "new_tokens", records)
    output = whole_numbers([row["output_tokens"] for row in rows], "output_tokens", records)
    for name, column in (("new_tokens", new), ("output_tokens", output)):
        if (column > MOST_TOKENS).any():
            i = int(np.argmax(column > MOST_TOKENS))
            raise TraceError(
                f"{records.at(i)}: {name} must be <= {MOST_TOKENS} in sessions, got {column[i]}"
            )
    delays = [row.get("think_s", row.get("tool_s", 0)) for row in rows]
    delay_ns = nanoseconds(delays, 1_000_000_000, "think_s or tool_s", records)
    if (delay_ns < 0).any():
        i = int(np.argmax(delay_ns < 0))
        raise TraceError(f"{records.at(i)}: think_s and tool_s must be >= 0, got {delays[i]}")
    needs = _needs(records)
    shared = [_shared(row.get("shared"), needs[i], records.at(i)) for i, row in enumerate(rows)]
    begun = np.array([sum(tokens for _, tokens in parts or ()) for parts in shared])
    shared_column = np.empty(len(rows), dtype=object)
    shared_column[:] = shared
    prompts = _prompts(records, new + begun, output, needs)
    sessions = texts([row["session"] for row in rows])
    columns: dict[str, Any] = {
        "prompt_tokens": np.where(new > 0, prompts, new),
        "output_tokens": output,
        "session": sessions,
        "turns": Turns.from_rows(
            needs,
            delay_ns,
            tool=texts([row.get("tool") for row in rows]),
            shared=shared_column if any(shared) else None,
        ),
    }
    for name in ("tenant", "application"):
        columns[name] = texts([row.get(name) for row in rows])
    columns["priority"] = whole_numbers(
        [row.get("priority", 0) for row in rows], "priority", records
    )
    if timed:
        columns["arrival_ns"] = _starts_ns(records)
    return columns


def _prompts(records: Records, own: Int64, output: Int64, needs: list[list[int]]) -> Int64:
    """Return the lengths of prompts with what was said before; none may be too long to name."""
    prompts = prompt_tokens(own, output, needs)
    over = prompts + output > MOST_TOKENS
    if over.any():
        i = int(np.argmax(over))
        raise TraceError(
            f"{records.at(i)}: a prompt of {prompts[i]} tokens, with all that was said before it, "
            f"and its answer of {output[i]}: more than {MOST_TOKENS} together in sessions"
        )
    return prompts


def _starts_ns(records: Records) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the start of each row's session, which its first line says."""
    starts: list[Any] = []
    for i, row in enumerate(records.values):
        if i and row["session"] == records.values[i - 1]["session"]:
            if row.get("arrival_s", starts[-1]) != starts[-1]:
                raise TraceError(
                    f"{records.at(i)}: arrival_s is when a session starts; a later request says "
                    "think_s or tool_s"
                )
            starts.append(starts[-1])
        elif "arrival_s" not in row:
            raise TraceError(f"{records.at(i)}: no arrival_s, which the first session has")
        else:
            starts.append(row["arrival_s"])
    return nanoseconds(starts, 1_000_000_000, "arrival_s", records)


def _needs(records: Records) -> list[list[int]]:
    """Return the rows that each row needs: those of its parents, or else the one before it."""
    needs: list[list[int]] = []
    row_of: dict[Any, int] = {}
    before = None
    for i, row in enumerate(records.values):
        if row["session"] != before:
            row_of, before, first = {}, row["session"], i
        turn = row.get("turn", i - first + 1)
        if isinstance(turn, bool) or not isinstance(turn, int | str):
            raise TraceError(f"{records.at(i)}: turn must be a whole number or text, got {turn!r}")
        if turn in row_of:
            raise TraceError(f"{records.at(i)}: session {before} has a turn {turn} already")
        parents = row.get("parents", [] if i == first else None)
        if parents is None:
            needs.append([i - 1])
        elif not isinstance(parents, list):
            raise TraceError(f"{records.at(i)}: parents must be a list of turns")
        else:
            needs.append([_row(p, turn, row_of, records, i) for p in parents])
        row_of[turn] = i
    return needs


def _row(parent: object, turn: object, row_of: dict[Any, int], records: Records, i: int) -> int:
    here = records.at(i)
    if isinstance(parent, list | dict):
        raise TraceError(f"{here}: parents must be a list of turns, got {parent!r:.40}")
    if parent in row_of:
        return row_of[parent]
    session = records.values[i]["session"]
    if parent == turn:
        raise TraceError(f"{here}: turn {turn!r} of session {session} needs its own answer")
    for later in records.values[i + 1 :]:
        if later["session"] != session:
            break
        if later.get("turn") == parent:
            raise TraceError(
                f"{here}: turn {turn!r} needs turn {parent!r}, which stands behind it: parents "
                "come first, and no cycle can be served"
            )
    known = [str(key) for key in row_of]
    hint = nearest(str(parent), known) if known else "it is the first"
    raise TraceError(f"{here}: session {session} has no turn {parent!r}; {hint}")


def _shared(value: object, needs: list[int], place: str) -> Shared | None:
    """Return what a prompt begins with, as names and tokens."""
    if value is None:
        return None
    if needs:
        raise TraceError(
            f"{place}: shared is how a session begins; this prompt goes on from another"
        )
    parts = []
    for part in value if isinstance(value, list) else [None]:
        if not (
            isinstance(part, list)
            and len(part) == 2
            and isinstance(part[0], str)
            and type(part[1]) is int
            and 0 < part[1] < 2**40
        ):
            raise TraceError(f"{place}: shared must be a list of [name, tokens], got {value!r:.60}")
        parts.append((part[0], part[1]))
    return tuple(parts) or None


READER = Reader(
    "sessions", "schedlab's own sessions, JSON Lines: turns, tools, fan-out", _sniff, _chunks, True
)
