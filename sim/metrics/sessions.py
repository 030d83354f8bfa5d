"""How long sessions take as a whole: conversations, and the tasks of agents.

Sessions are told of where the requests of a run waited for answers of others. Those count whose
first request is measured, with all their requests, and times are those of sessions that got all
their answers; a rate counts those whose last answer comes in the time that is measured.
"""

from __future__ import annotations

import numpy as np

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import Columns, Floats, Ints

_NS_PER_S = 1e9


@register(about="sessions", better="neither", unit="")
def num_sessions(run: Observation) -> int:
    """Return the number of sessions."""
    return len(_column(run.sessions, "num_requests"))


@register(about="sessions", better="higher", unit="")
def completed_sessions(run: Observation) -> int:
    """Return the sessions that got all their answers."""
    return int(_is_done(run).sum())


@register(about="sessions", better="higher", unit="sessions/s")
def session_throughput(run: Observation) -> float:
    """Return the sessions that get their last answer in the time that is measured / duration."""
    finish_ns = _column(run.leaving_sessions, "finish_ns")
    return ratio(int((finish_ns >= 0).sum()), run.duration_s)


@register(about="sessions", better="neither", unit="")
def mean_session_requests(run: Observation) -> float:
    """Return requests / sessions."""
    return _mean(_column(run.sessions, "num_requests").astype(np.float64))


@register(about="sessions", label="mean session time")
def mean_session_s(run: Observation) -> float:
    """Return the mean time from a session's first request to its last answer."""
    return _mean(_times_s(run))


@register(about="sessions", label="P50 session time")
def p50_session_s(run: Observation) -> float:
    """Return the median time from a session's first request to its last answer."""
    return _percentile(_times_s(run), 50)


@register(about="sessions", label="P90 session time")
def p90_session_s(run: Observation) -> float:
    """Return the 90th percentile of the time from a session's first request to its last answer."""
    return _percentile(_times_s(run), 90)


@register(about="sessions", label="P99 session time")
def p99_session_s(run: Observation) -> float:
    """Return the 99th percentile of the time from a session's first request to its last answer."""
    return _percentile(_times_s(run), 99)


@register(about="sessions", better="neither", label="mean time in tools and thought, a session")
def mean_session_away_s(run: Observation) -> float:
    """Return the mean time that a session has no request in flight: users think, tools work."""
    return _mean(_of_done(run, "away_ns") / _NS_PER_S)


@register(about="sessions", label="mean time in the queue, a session")
def mean_session_queue_s(run: Observation) -> float:
    """Return the mean time that the requests of a session wait to be scheduled, summed up."""
    return _mean(_of_done(run, "queue_ns") / _NS_PER_S)


@register(about="sessions", label="mean time on the GPU, a session")
def mean_session_running_s(run: Observation) -> float:
    """Return the mean time from being scheduled to the last token, summed up over a session.

    Preemptions are part of it.
    """
    return _mean(_of_done(run, "running_ns") / _NS_PER_S)


@register(about="sessions", label="mean session time without tools and thought, a token", unit="s")
def mean_session_normalized_s(run: Observation) -> float:
    """Return the mean of (session time - time without a request in flight) / tokens of answers."""
    tokens = _of_done(run, "generated_tokens")
    return _mean((_times_s(run) - _of_done(run, "away_ns") / _NS_PER_S) / np.maximum(tokens, 1))


@register(about="sessions", label="makespan of all sessions")
def session_makespan_s(run: Observation) -> float:
    """Return the time from the first request of any session to the last answer of any."""
    done = _is_done(run)
    if not done.any():
        return float("nan")
    start_ns, finish_ns = _column(run.sessions, "start_ns"), _column(run.sessions, "finish_ns")
    return float(finish_ns[done].max() - start_ns[done].min()) / _NS_PER_S


def _column(sessions: Columns, name: str) -> Ints:
    if not sessions:
        raise SpecError("the requests of this run waited for no answers: there are no sessions")
    return sessions[name].astype(np.int64)


def _is_done(run: Observation) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return _column(run.sessions, "finish_ns") >= 0


def _of_done(run: Observation, name: str) -> Ints:
    return _column(run.sessions, name)[_is_done(run)]


def _times_s(run: Observation) -> Floats:
    return (_of_done(run, "finish_ns") - _of_done(run, "start_ns")) / _NS_PER_S


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _percentile(values: Floats, q: int) -> float:
    return float(np.percentile(values, q)) if len(values) else float("nan")
