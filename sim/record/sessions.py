"""One row a session, from the rows of its requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedlab.sim.record.columns import Column, Columns, Ints, completed, whole_numbers


def has_sessions(requests: Columns) -> bool:
    """Return whether the requests of a run waited for answers of others."""
    return "turn" in requests and "session" in requests


def session_columns(requests: Columns) -> dict[str, Column]:
    """Return one row a session, in order of their first requests.

    Parameters
    ----------
    requests : mapping of str to ndarray
        One row a request, by id; those of a session lie together.

    Returns
    -------
    dict of str to ndarray
        ``session``; ``num_requests``, and ``num_completed`` of them; ``start_ns``: the first
        request is sent; ``finish_ns``: the last answer is there, -1 unless all are; ``away_ns``:
        time in between without any request in flight, while users think or tools work;
        ``queue_ns``: of all requests, from being sent to being scheduled; ``running_ns``: of all
        requests, from being scheduled to the last token; ``prompt_tokens``,
        ``generated_tokens``, ``prefix_hit_tokens``: of all requests.
    """
    name = requests["session"]
    num_rows = len(name)
    first = np.flatnonzero(np.append(True, name[1:] != name[:-1])) if num_rows else np.zeros(0, int)
    sizes = np.diff(np.append(first, num_rows))
    of = np.repeat(np.arange(len(first)), sizes)
    done = completed(requests)
    arrival_ns = whole_numbers(requests, "arrival_ns")
    finish_ns = whole_numbers(requests, "finish_ns")
    scheduled_ns = whole_numbers(requests, "first_scheduled_ns")
    last_ns = whole_numbers(requests, "last_token_ns")
    num_done = _sums(done.astype(np.int64), first)
    end_ns = np.maximum.reduceat(finish_ns, first) if num_rows else finish_ns
    return {
        "session": name[first],
        "num_requests": sizes.astype(np.int64),
        "num_completed": num_done,
        "start_ns": np.minimum.reduceat(arrival_ns, first) if num_rows else arrival_ns,
        "finish_ns": np.where(num_done == sizes, end_ns, -1),
        "away_ns": _away_ns(of, np.where(done, arrival_ns, -1), finish_ns, len(first)),
        "queue_ns": _sums(np.where(done, scheduled_ns - arrival_ns, 0), first),
        "running_ns": _sums(np.where(done, last_ns - scheduled_ns, 0), first),
        **{
            column: _sums(whole_numbers(requests, column), first)
            for column in ("prompt_tokens", "generated_tokens", "prefix_hit_tokens")
        },
    }


def _sums(values: Ints, first: npt.NDArray[np.int64]) -> Ints:
    return np.add.reduceat(values, first) if len(values) else values


def _away_ns(of: Ints, arrival_ns: Ints, finish_ns: Ints, num_sessions: int) -> Ints:
    """Return how long no request of each session was in flight; an arrival of -1 never was."""
    there = arrival_ns >= 0
    of, arrival_ns, finish_ns = of[there], arrival_ns[there], finish_ns[there]
    order = np.lexsort((arrival_ns, of))
    of, arrival_ns, finish_ns = of[order], arrival_ns[order], finish_ns[order]
    if not len(of):
        return np.zeros(num_sessions, dtype=np.int64)
    # The latest finish so far in the session, by ranks: those of later sessions are larger.
    ends, rank = np.unique(finish_ns, return_inverse=True)
    until = ends[np.maximum.accumulate(of * len(ends) + rank) - of * len(ends)]
    gap_ns = np.maximum(arrival_ns[1:] - until[:-1], 0)
    gap_ns[of[1:] != of[:-1]] = 0
    total = np.zeros(num_sessions, dtype=np.int64)
    np.add.at(total, of[1:], gap_ns)
    return total
