"""What sessions are like: turns, think and tool times, and what a prefix cache could reuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.traces.trace import Trace
from schedlab.traces.turns import session_starts
from schedlab.traces.workload import workload

_BLOCK_TOKENS = 16
_LONGEST_TOKENS = 2**42


def describe_sessions(trace: Trace) -> dict[str, Any]:
    """Return counts, times and reuse of the sessions of a trace.

    Parameters
    ----------
    trace : Trace
        With turns.

    Returns
    -------
    dict
        ``sessions``; ``requests_per_session_mean``, ``_p50``, ``_p99``, ``_max``; ``turns_max``:
        the longest chain of requests; ``fan_out_max``: the most requests behind one answer;
        ``joins``: requests that need several answers; ``tool_calls``: answers that call one;
        ``think_p50_s``, ``_p90_s`` and ``tool_p50_s``, ``_p90_s``: delays behind answers for the
        user, and behind tools (`None` where there are none); ``reuse_with_answers`` and
        ``reuse_prompts_only``: the share of prompt tokens that an infinite cache of 16-token blocks
        holds if requests come one after another, with and without the blocks of answers: no cache
        finds more.
    """
    turns, session = trace.turns, trace.session
    assert turns is not None
    assert session is not None
    sizes = np.diff(np.append(session_starts(session), len(trace)))
    num_needs = np.diff(turns.offsets)
    needed = np.repeat(np.arange(len(trace)), num_needs) - turns.rows_back
    behind = np.bincount(needed, minlength=len(trace))
    last_need = np.full(len(trace), -1, dtype=np.int64)
    has_needs = num_needs > 0
    last_need[has_needs] = needed[turns.offsets[1:][has_needs] - 1]
    calls = np.zeros(len(trace), dtype=bool)
    if turns.tool is not None:
        calls = np.array([name is not None for name in turns.tool], dtype=bool)
    behind_tool = has_needs & calls[last_need]
    delay_s = turns.delay_ns / 1e9
    with_answers, prompts_only = _reuse(trace)
    return {
        "sessions": len(sizes),
        "requests_per_session_mean": float(sizes.mean()),
        "requests_per_session_p50": float(np.percentile(sizes, 50)),
        "requests_per_session_p99": float(np.percentile(sizes, 99)),
        "requests_per_session_max": int(sizes.max()),
        "turns_max": int(turns.numbers().max()),
        "fan_out_max": int(behind.max()),
        "joins": int((num_needs > 1).sum()),
        "tool_calls": int(calls.sum()),
        **_quantiles("think", delay_s[has_needs & ~behind_tool]),
        **_quantiles("tool", delay_s[behind_tool]),
        "reuse_with_answers": with_answers,
        "reuse_prompts_only": prompts_only,
    }


def _quantiles(name: str, seconds: npt.NDArray[np.float64]) -> dict[str, float | None]:
    return {
        f"{name}_p{q}_s": float(np.percentile(seconds, q)) if len(seconds) else None
        for q in (50, 90)
    }


def _reuse(trace: Trace) -> tuple[float, float]:
    """Return the share of prompt tokens that an infinite cache holds, with answers and without."""
    size = _BLOCK_TOKENS if trace.prefix is None else trace.prefix.block_tokens
    times = np.zeros(len(trace), dtype=np.int64)
    prompts: set[int] = set()
    answers: set[int] = set()
    found = [0, 0]
    for arrival in workload(trace, max_model_len=_LONGEST_TOKENS, arrival_ns=times):
        ids, turn = arrival.request.prefix_hash_ids, arrival.turn
        assert turn is not None
        most = (arrival.request.prompt_tokens - 1) // size
        for i, known in enumerate(((prompts, answers), (prompts,))):
            hits = 0
            while hits < min(most, len(ids)) and any(ids[hits] in some for some in known):
                hits += 1
            found[i] += hits * size
        prompts.update(ids)
        # The last token of an answer is never computed.
        full = (arrival.request.prompt_tokens + arrival.output_tokens - 1) // size
        answers.update(turn.answer_hash_ids[: max(full - len(ids), 0)])
    total = int(trace.prompt_tokens.sum())
    return found[0] / total, found[1] / total
