"""Turn requests that came at their times into sessions whose requests wait for answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.trace import Trace
from schedlab.traces.turns import Turns

Int64 = npt.NDArray[np.int64]
NOBODY = -1


def linked(trace: Trace, parent: Int64) -> Trace:
    """Return the trace with its sessions one behind the other, and requests behind answers.

    A request that had another in front of it comes as long after that one's answer as it came
    after that one itself: a recording does not say when the answer was there, so think times are
    too long by what it took.

    Parameters
    ----------
    trace : Trace
        In order of arrival; requests without a session are one of their own each.
    parent : ndarray of int64, shape (num_requests,)
        The row whose answer each needs, before it and in its session; `NOBODY` if there is none.
    """
    names = trace.filled("session").tolist()
    session = np.array([n if n is not None else f"row {i}" for i, n in enumerate(names)], object)
    first: dict[str, int] = {}
    start_row = np.array([first.setdefault(name, i) for i, name in enumerate(session)])
    order = np.argsort(start_row, kind="stable")
    place = np.empty(len(trace), dtype=np.int64)
    place[order] = np.arange(len(trace))
    parents = parent[order]
    times_ns = trace.arrival_ns
    delay_ns = np.zeros(len(trace), dtype=np.int64)
    columns: dict[str, object] = {}
    if times_ns is not None:
        since = np.where(parents == NOBODY, start_row[order], parents)
        delay_ns = times_ns[order] - times_ns[since]
        columns["arrival_ns"] = times_ns[start_row[order]]
    needs = [[] if p == NOBODY else [int(place[p])] for p in parents.tolist()]
    answers = None
    if trace.prefix is not None:
        answers = _answers(trace, trace.prefix, parent).take(order)
    turns = Turns.from_rows(needs, delay_ns, answers=answers)
    report = trace.report.noted(
        "requests wait for the answer before them; think times are those between requests"
    )
    bare = replace(trace, arrival_ns=None, session=session)
    return replace(bare.take(order), turns=turns, report=report, **columns)  # type: ignore[arg-type]


def by_session(trace: Trace) -> Trace:
    """Return the trace with each request behind the one before it in its session."""
    last: dict[str, int] = {}
    parent = np.full(len(trace), NOBODY, dtype=np.int64)
    for row, name in enumerate(trace.filled("session").tolist()):
        if name is not None:
            parent[row] = last.get(name, NOBODY)
            last[name] = row
    return linked(trace, parent)


def _answers(trace: Trace, prefix: PrefixHashes, parent: Int64) -> PrefixHashes:
    """Return the blocks of answers as the first prompt that quotes one names them."""
    size = prefix.block_tokens
    ids = prefix.rows()
    prompt, output = trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    answers: list[tuple[int, ...]] = [()] * len(trace)
    for row, before in enumerate(parent.tolist()):
        if before == NOBODY or answers[before]:
            continue
        asked, end = prompt[before] // size, (prompt[before] + output[before]) // size
        full = ids[row][: prompt[row] // size]
        if len(full) >= end and full[:asked] == ids[before][:asked]:
            answers[before] = full[asked:end]
    return PrefixHashes.from_rows(answers, size)
