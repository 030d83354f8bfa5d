"""Read a trace of any known format, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from schedlab.sim.construct import with_file
from schedlab.sim.errors import SchedlabError, TraceError, nearest
from schedlab.sim.own_code import FAULTS, raised
from schedlab.sim.user_modules import import_own
from schedlab.traces.readers import (
    azure,
    bailian,
    burstgpt,
    client_results,
    llmservingsim,
    mooncake,
    schedlab,
    sessions,
    sharegpt,
    vidur,
    vllm_custom,
)
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, existing, peek
from schedlab.traces.trace import Trace

READERS: dict[str, Reader] = {
    module.READER.name: module.READER
    for module in (
        azure,
        burstgpt,
        bailian,
        mooncake,
        vidur,
        llmservingsim,
        sharegpt,
        vllm_custom,
        client_results,
        schedlab,
        sessions,
    )
}

# No public trace with times finer than a second comes near it.
COARSE_TIMES_SHARE = 0.3

__all__ = ["READERS", "Reader", "detect_format", "read", "reader_of", "stream"]


def stream(
    path: str | Path,
    format: str = "auto",
    *,
    chunk_rows: int = 65536,
    tokenizer: str = "auto",
    default_output_tokens: int | None = None,
    drop_empty: bool = False,
    sessions: bool = False,
) -> Iterator[Trace]:
    """Yield a trace file in chunks, in file order.

    Memory is bounded by the chunk, but for ShareGPT, a JSON array that has to be loaded whole.
    Times run on from chunk to chunk: they all count from the same instant.

    Parameters
    ----------
    path : str or Path
        The file, plain or gzip.
    format : str
        A name in `READERS`, ``module:NAME`` of a `Reader` of your own, or ``"auto"`` to recognise
        it by its header or first record.
    chunk_rows : int
        Rows a chunk, >= 1.
    tokenizer : str
        For formats of text: ``"auto"``, ``"estimate"`` or the name of a tokenizer
        (see `schedlab.traces.tokenizer.token_counter`).
    default_output_tokens : int, optional
        For prompts without a known output length.
    drop_empty : bool
        Leave rows with 0 prompt or output tokens out and count them; by default they are an
        error, but for BurstGPT and ShareGPT, where they are failed calls and empty turns.
    sessions : bool
        Let requests wait for the answers before them in their session (`Trace.turns`), where the
        format names sessions; files that say what requests wait for need no asking.

    Yields
    ------
    Trace
        Each with a report of its own rows.

    Raises
    ------
    TraceError
        At the first row that is not what it should be, naming file and line.
    """
    if chunk_rows < 1:
        raise TraceError(f"chunk_rows must be >= 1, got {chunk_rows}")
    path = existing(path)
    reader = reader_of(detect_format(path) if format == "auto" else format)
    if sessions and not reader.follows_sessions:
        known = ", ".join(sorted(n for n, one in READERS.items() if one.follows_sessions))
        raise TraceError(f"{path}: format {reader.name} names no sessions; those that do: {known}")
    options = ReadOptions(chunk_rows, tokenizer, default_output_tokens, drop_empty, sessions)
    if ":" in format:
        return _looked_at(reader, path, options, format)
    return reader.chunks(path, options)


def _looked_at(reader: Reader, path: Path, options: ReadOptions, format: str) -> Iterator[Trace]:
    """Yield what a reader of somebody else's module gives, and tell of it what it does wrong."""
    try:
        chunks: Iterable[object] = reader.chunks(path, options)
        for chunk in chunks:
            if not isinstance(chunk, Trace):
                raise TraceError(
                    f"trace format {format}: yields a {type(chunk).__name__}, not a Trace"
                )
            yield chunk
    except SchedlabError:
        raise
    except FAULTS as error:
        raise TraceError(f"trace format {format}: {raised(error, reader.chunks)}") from error


def read(
    path: str | Path,
    format: str = "auto",
    *,
    tokenizer: str = "auto",
    default_output_tokens: int | None = None,
    drop_empty: bool = False,
    sessions: bool = False,
) -> Trace:
    """Return a whole trace file; ``trace.report`` says what was done to it.

    Parameters and errors are those of `stream`.
    """
    chunks = stream(
        path,
        format,
        tokenizer=tokenizer,
        default_output_tokens=default_output_tokens,
        drop_empty=drop_empty,
        sessions=sessions,
    )
    trace = Trace.concat(list(chunks))
    report = trace.report
    for note in _warnings(trace):
        report = report.noted(note)
    return replace(trace, report=report)


def detect_format(path: str | Path) -> str:
    """Return the name of the format of a file.

    Raises
    ------
    TraceError
        If no reader recognises it; the message lists the formats and what was seen.
    """
    path = existing(path)
    seen = peek(path)
    for name, reader in READERS.items():
        if reader.sniff(seen):
            return name
    raise TraceError(
        f"{path}: unknown trace format: it looks like {_described(seen)}; if it is one of "
        f"{', '.join(READERS)}, say so by format (schedlab trace formats tells them apart)"
    )


def reader_of(format: str) -> Reader:
    """Return the reader of a format.

    Parameters
    ----------
    format : str
        A name in `READERS`, or ``module:NAME`` of a `Reader` in a module that can be imported.

    Returns
    -------
    Reader
        Who reads files of that format.

    Raises
    ------
    TraceError
        If there is none; says the nearest name, or what is wrong with the module.
    """
    if ":" not in format:
        if format not in READERS:
            hint = nearest(format, ["auto", *READERS])
            raise TraceError(
                f"unknown trace format {format!r}; {hint} (or a reader like my_module:READER)"
            )
        return READERS[format]
    module_name, _, name = format.partition(":")
    try:
        module = import_own(module_name)
        reader = getattr(module, name, None)
    except Exception as error:  # a module of the user's may raise anything
        raise TraceError(
            f"trace format {format!r}: cannot import {module_name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(reader, Reader):
        raise TraceError(
            f"trace format {format!r}: {with_file(module)} has no {name!r} that is a "
            "schedlab.traces.Reader"
        )
    return reader


def _warnings(trace: Trace) -> Iterator[str]:
    """Yield what a user should know of the times before replaying them."""
    if trace.arrival_ns is None or trace.turns is not None:
        return
    if trace.arrival_ns[0] > 0:
        yield f"first request arrives at {trace.arrival_ns[0] / 1e9:g} s"
    together = float((np.diff(trace.arrival_ns) == 0).mean()) if len(trace) > 1 else 0.0
    if trace.duration_s > 0 and together > COARSE_TIMES_SHARE:
        yield (
            f"{together:.0%} of the requests arrive at the same instant as the one before: "
            "times are rounded, so bursts are sharper than they were"
        )


def _described(seen: Peek) -> str:
    """Return what the beginning of a file looks like."""
    kinds = {"csv": "CSV with columns", "jsonl": "JSON Lines with keys", "json": "a JSON array of"}
    return f"{kinds.get(seen.kind, 'Parquet with columns')} {', '.join(seen.names)[:200]!r}"
