"""Turn a trace into the requests that a server would see, one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError
from schedlab.sim.request import Arrival, Slo, Turn
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.rows import arrivals_of
from schedlab.traces.session_blocks import SessionBlocks
from schedlab.traces.trace import Trace

CHUNK_ROWS = 8192
"""Rows of which requests are made at once."""
CHUNK_ROWS_WITH_PREFIXES = 256
"""The same where prompts have blocks, perhaps a thousand a row: all their names are made at once,
and for so few they lie in memory that those before have left."""


def workload(
    trace: Trace | Iterable[Trace],
    *,
    max_model_len: int,
    arrival_ns: npt.NDArray[np.int64] | None = None,
    predicted_tokens: npt.NDArray[np.float64] | None = None,
    predictor_latency_s: float | npt.NDArray[np.float64] = 0.0,
    refinements: npt.NDArray[np.object_] | None = None,
    predicted_session_tokens: npt.NDArray[np.float64] | None = None,
    slo: Slo | None = None,
    hash_block_tokens: int | None = None,
    first_id: int = 0,
) -> Iterator[Arrival]:
    """Return the requests of `trace` in order of arrival, made as they are asked for.

    Parameters
    ----------
    trace : Trace or iterable of Trace
        A whole trace, or the chunks of a stream (see `traces.stream`).
    max_model_len : int
        Longest sequence of the model. A request that declares no `max_tokens` gets
        ``max(1, max_model_len - prompt_tokens)``. Rows too long for it are passed on: to reject
        them is the engine's business (or see `Trace.fit`).
    arrival_ns : ndarray of int64, shape (num_requests,), optional
        Arrival times in place of the trace's own.
    predicted_tokens : ndarray of float64, shape (num_requests,), optional
        What a predictor says; NaN where it says nothing.
    predictor_latency_s : float or ndarray of float64, shape (num_requests,)
        Time the prediction takes: ``ready_ns = arrival_ns + latency``.
    refinements : ndarray of Refinement, shape (num_requests,), optional
        What the predictor says of each answer while it is generated.
    predicted_session_tokens : ndarray of float64, shape (num_requests,), optional
        What it says of the outputs of each request's session together.
    slo : Slo, optional
        Targets of every request; those the trace itself gives take precedence, one by one.
    hash_block_tokens : int, optional
        Convert prefix hashes to blocks of this size (the engine's `block_size`); by default they
        are passed on as the trace has them.
    first_id : int
        Id of the first request; the others count on from it.

    Returns
    -------
    iterator of Arrival
        The request, its true output length (which `Request` does not hold), and when the
        scheduler sees it. The true length is the trace's: an engine ends a request at `max_tokens`
        if that comes first.

    Raises
    ------
    TraceError
        If there are no arrival times, an array has the wrong length, or times run backwards. An
        array that is too short or too long for a stream is found at the stream's end.
    """
    if max_model_len < 2:
        raise TraceError(f"max_model_len must be >= 2, got {max_model_len}")
    times = None if arrival_ns is None else _checked_times(arrival_ns)
    latency = np.asarray(predictor_latency_s, dtype=np.float64)
    if not (np.isfinite(latency).all() and (latency >= 0).all()):
        raise TraceError("predictor_latency_s must be >= 0 and finite")
    extras: dict[str, npt.NDArray[Any] | None] = {
        "arrival_ns": times,
        "predicted_tokens": predicted_tokens,
        "refinements": refinements,
        "predicted_session_tokens": predicted_session_tokens,
        "predictor_latency_s": latency if latency.ndim else None,
    }
    if isinstance(trace, Trace):
        _check_lengths(extras, len(trace))
        if times is None:
            trace.require_arrivals()
    chunks = (trace,) if isinstance(trace, Trace) else trace
    return _stream(chunks, extras, latency, max_model_len, slo, hash_block_tokens, first_id)


def _stream(
    chunks: Iterable[Trace],
    extras: dict[str, npt.NDArray[Any] | None],
    latency: npt.NDArray[np.float64],
    max_model_len: int,
    slo: Slo | None,
    hash_block_tokens: int | None,
    first_id: int,
) -> Iterator[Arrival]:
    """Yield the arrivals of all chunks, a few thousand rows at a time."""
    start = 0
    blocks = SessionBlocks(hash_block_tokens or _TURN_BLOCK_TOKENS)
    for whole in chunks:
        first_row = first_id + start
        has_blocks = whole.prefix is not None or whole.turns is not None
        size = CHUNK_ROWS_WITH_PREFIXES if has_blocks else CHUNK_ROWS
        for low in range(0, len(whole), size):
            rows = slice(low, min(low + size, len(whole)))
            stop = start + rows.stop - low
            own = {name: _cut(column, start, stop, name) for name, column in extras.items()}
            turns = None
            if whole.turns is not None:
                turns = _turns(whole, rows, first_row, blocks, hash_block_tokens)
            yield from _arrivals(
                whole, rows, own, latency, max_model_len, slo, hash_block_tokens, first_id + start,
                turns,
            )  # fmt: skip
            start = stop
    _check_lengths(extras, start)


_TURN_BLOCK_TOKENS = 16
"""Tokens of the blocks of sessions where nobody asks for others."""


def _turns(
    trace: Trace,
    rows: slice,
    first_row: int,
    blocks: SessionBlocks,
    block_tokens: int | None,
) -> tuple[list[tuple[int, ...]], list[Turn]]:
    """Return the names of the prompts' blocks, and each request's place in its session.

    `first_row` is what the rows of the trace are numbered from in the ids of requests.
    """
    turns, session = trace.turns, trace.session
    assert turns is not None
    assert session is not None
    size = block_tokens or _TURN_BLOCK_TOKENS
    sequences = None
    if trace.prefix is not None and turns.answers is not None:
        sequences = _named_by_the_trace(trace, rows, block_tokens)
        size = block_tokens or trace.prefix.block_tokens
    prompts: list[tuple[int, ...]] = []
    places: list[Turn] = []
    names = zip(
        range(rows.start, rows.stop),
        session[rows].tolist(),
        trace.prompt_tokens[rows].tolist(),
        trace.output_tokens[rows].tolist(),
        turns.delay_ns[rows].tolist(),
        _listed(turns.tool, rows, None),
        _listed(turns.shared, rows, None),
        strict=False,
    )
    for row, of, prompt, output, delay_ns, tool, shared in names:
        needs = turns.needs(row)
        if sequences is None:
            parent = first_row + needs[0] if needs else None
            ids = blocks.name(first_row + row, of, parent, (prompt, output), shared)
        else:
            ids = sequences[row - rows.start]
        full = prompt // size
        prompts.append(ids[:full])
        parents = tuple([first_row + parent for parent in needs])
        places.append(Turn(parents, delay_ns, ids[full:], tool))
    return prompts, places


def _named_by_the_trace(
    trace: Trace, rows: slice, block_tokens: int | None
) -> list[tuple[int, ...]]:
    """Return the names of prompt and answer together that the trace gives."""
    assert trace.prefix is not None
    assert trace.turns is not None
    answers = trace.turns.answers
    assert answers is not None
    some = np.arange(rows.start, rows.stop)
    size = trace.prefix.block_tokens
    prompt, output = trace.prompt_tokens[rows], trace.output_tokens[rows]
    heads = trace.prefix.take(some).rows()
    whole = [
        (*head[: tokens // size], *tail) if len(head) >= tokens // size else head
        for head, tail, tokens in zip(
            heads, answers.take(some).rows(), prompt.tolist(), strict=True
        )
    ]
    if block_tokens is None or block_tokens == size:
        return whole
    found = PrefixHashes.from_rows(whole, size)
    return found.with_block_tokens(block_tokens, prompt + output).rows()


def _arrivals(
    trace: Trace,
    rows: slice,
    own: dict[str, npt.NDArray[Any] | None],
    latency: npt.NDArray[np.float64],
    max_model_len: int,
    slo: Slo | None,
    hash_block_tokens: int | None,
    first_id: int,
    turns: tuple[list[tuple[int, ...]], list[Turn]] | None,
) -> list[Arrival]:
    """Return the arrivals of a few rows; columns become lists once, which is what makes it fast."""
    num_rows = rows.stop - rows.start
    override = own["arrival_ns"]
    arrival_ns = trace.require_arrivals()[rows] if override is None else override
    per_row = own["predictor_latency_s"]
    delay_s = latency if per_row is None else per_row
    ready_ns = arrival_ns + np.rint(delay_s * 1e9).astype(np.int64)
    prompt_tokens = trace.prompt_tokens[rows]
    max_tokens = np.maximum(1, max_model_len - prompt_tokens)
    if trace.max_tokens is not None:
        declared = trace.max_tokens[rows]
        max_tokens = np.where(declared > 0, declared, max_tokens)
    return arrivals_of(
        range(first_id, first_id + num_rows),
        arrival_ns.tolist(),
        prompt_tokens.tolist(),
        max_tokens.tolist(),
        _listed(trace.priority, rows, 0),
        _slos(trace, rows, slo),
        _listed(trace.application, rows, None),
        _listed(trace.session, rows, None),
        _listed(trace.tenant, rows, None),
        _predictions(own["predicted_tokens"]),
        _prefixes(trace, rows, hash_block_tokens) if turns is None else turns[0],
        _listed(trace.prompt, rows, None),
        _listed(own["refinements"], slice(None), None),
        _predictions(own["predicted_session_tokens"]),
        trace.output_tokens[rows].tolist(),
        ready_ns.tolist(),
        repeat(None) if turns is None else turns[1],
    )


def _listed(column: npt.NDArray[Any] | None, rows: slice, absent: int | None) -> Iterable[Any]:
    """Return the rows of a column as Python values, or the same absent value for ever."""
    values: Iterable[Any] = repeat(absent) if column is None else column[rows].tolist()
    return values


def _predictions(predicted: npt.NDArray[np.float64] | None) -> Iterable[float | None]:
    """Return predictions with `None` for NaN."""
    if predicted is None:
        return repeat(None)
    return [None if math.isnan(value) else value for value in predicted.tolist()]


def _prefixes(trace: Trace, rows: slice, block_tokens: int | None) -> Iterable[tuple[int, ...]]:
    """Return the block ids of the rows, in blocks of `block_tokens` if that is given."""
    if trace.prefix is None:
        return repeat(())
    prefix = trace.prefix.take(np.arange(rows.start, rows.stop))
    if block_tokens is not None:
        prefix = prefix.with_block_tokens(block_tokens, trace.prompt_tokens[rows])
    return prefix.rows()


def _slos(trace: Trace, rows: slice, default: Slo | None) -> Iterable[Slo | None]:
    """Return the targets of the rows; a dimension the trace leaves open takes the default's."""
    columns = (trace.slo_ttft_ms, trace.slo_tpot_ms, trace.deadline_s)
    if all(column is None for column in columns):
        return repeat(default)
    ms_per_unit = (1.0, 1.0, 1000.0)
    merged = []
    for column, unit, fallback in zip(columns, ms_per_unit, default or Slo(), strict=True):
        absent = [math.nan] * (rows.stop - rows.start)
        values = absent if column is None else column[rows].tolist()
        merged.append([fallback if math.isnan(v) else v * unit for v in values])
    return [None if slo == (None, None, None) else Slo(*slo) for slo in zip(*merged, strict=True)]


def _checked_times(arrival_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the override times, or raise if they are negative or run backwards."""
    if arrival_ns.dtype.kind not in "iu":
        raise TraceError(f"arrival_ns must be integer nanoseconds, got {arrival_ns.dtype}")
    steps = np.diff(arrival_ns, prepend=0)
    if (steps < 0).any():
        raise TraceError(f"arrival_ns runs backwards at row {int(np.argmax(steps < 0))}")
    return arrival_ns


def _check_lengths(extras: dict[str, npt.NDArray[Any] | None], num_requests: int) -> None:
    """Raise if a per-request array does not have one value a request."""
    for name, column in extras.items():
        if column is not None and len(column) != num_requests:
            raise TraceError(f"{name} has {len(column)} values for {num_requests} requests")


def _cut(
    column: npt.NDArray[Any] | None, start: int, stop: int, name: str
) -> npt.NDArray[Any] | None:
    """Return the part of a per-request array that belongs to the rows being made."""
    if column is None:
        return None
    if len(column) < stop:
        raise TraceError(f"{name} has only {len(column)} values, the stream has more requests")
    return column[start:stop]
