"""A recorded run of a real engine, and its latencies.

Source of the format: casys-kaist/LLMServingSim, bench (requests.jsonl, one JSON object a request);
or what a load generator saved, see `schedlab.traces.readers.client_results`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError
from schedlab.sim.files import parse_json, read_text
from schedlab.traces.readers.client_results import is_client_results, read_client_results

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TIMES = ("queued_ts", "first_token_ts", "last_token_ts")
_TOKENS = ("input_toks", "output_toks")
_SCHEDULED = "scheduled_ts"
_MOST_TOKENS = 2**31
_LATEST_S = 1e11
_MAX_DIGITS = 9
"""Of a row of the workload: a thousand million of them would not fit any file."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """When the tokens of some requests came, in one clock.

    Attributes
    ----------
    prompt_tokens, output_tokens : ndarray of int64, shape (num_requests,)
        Lengths.
    queued_s, first_token_s, last_token_s : ndarray of float64, shape (num_requests,)
        When the engine took a request in, and when its first and last token were done.
    scheduled_s : ndarray of float64, shape (num_requests,), or None
        When it was first scheduled, if that was recorded.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    queued_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    scheduled_s: Floats | None = None

    def latencies_ms(self) -> dict[str, float]:
        """Return mean, median, P90, P95 and P99 of TTFT, TPOT and end-to-end latency.

        Notes
        -----
        ``TTFT = first token - queued``, ``latency = last token - queued``,
        ``TPOT = (last - first) / (output - 1)`` of requests with more than one token; linear
        percentiles. Where no request has more than one, there is no TPOT. The clock starts when the
        engine takes a request in, not when it was sent.
        """
        ttft = self.first_token_s - self.queued_s
        several = self.output_tokens > 1
        tpot = (self.last_token_s - self.first_token_s)[several] / (self.output_tokens[several] - 1)
        found = {}
        for name, seconds in (
            ("TTFT", ttft), ("TPOT", tpot), ("Latency", self.last_token_s - self.queued_s),
        ):  # fmt: skip
            if not len(seconds):
                continue
            found[f"{name} Mean"] = float(seconds.mean()) * 1e3
            for label, q in (("Median", 50), ("P90", 90), ("P95", 95), ("P99", 99)):
                found[f"{name} {label}"] = float(np.percentile(seconds, q)) * 1e3
        return found


def read_recording(path: Path) -> Timeline:
    """Read a requests.jsonl, or what a load generator saved.

    Parameters
    ----------
    path : Path
        What vLLM's, GuideLLM's or inference-perf's client saved of its requests (its name ends in
        .json) or AIPerf's (lines), which are then queued when they were sent; or one object a
        line: request_id
        (``<anything>-<row of the workload>``), input_toks, output_toks, queued_ts, first_token_ts,
        last_token_ts (seconds, one clock), and scheduled_ts in all lines or none. Of a client's
        requests those that failed and those without tokens are left out.

    Returns
    -------
    Timeline
        In the order of the workload's rows.

    Raises
    ------
    SpecError, TraceError
        If it cannot be read, or a line lacks a field or has an impossible one.
    """
    if is_client_results(path):
        told, _ = read_client_results(path, keep_empty=True)
        results = [one for one in told if one.prompt_tokens and one.output_tokens]
        if not results:
            raise SpecError(f"{path}: no request has tokens")
        sent, prompts, outputs, firsts, lasts = map(np.array, zip(*results, strict=True))
        return Timeline(prompts, outputs, sent, firsts, lasts)
    lines = read_text(path).splitlines()
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            row = _parse(line, f"{path}:{number}")
            if row["row"] in rows:
                raise SpecError(f"{path}:{number}: request {row['row']} is there twice")
            rows[row["row"]] = row
    if sorted(rows) != list(range(len(rows))) or not rows:
        raise SpecError(f"{path}: request ids must end in 0, 1, 2, ... without gaps")
    ordered = [rows[i] for i in range(len(rows))]
    prompt, output = (np.array([r[key] for r in ordered], dtype=np.int64) for key in _TOKENS)
    queued, first, last = (np.array([r[key] for r in ordered]) for key in _TIMES)
    scheduled = [row.get(_SCHEDULED) for row in ordered]
    known = None if None in scheduled else np.array(scheduled, dtype=np.float64)
    return Timeline(prompt, output, queued, first, last, known)


def _parse(line: str, place: str) -> dict[str, Any]:
    row = parse_json(line, place)
    if not isinstance(row, dict):
        raise SpecError(f"{place}: must be a JSON object")
    for key in _TOKENS:
        value = row.get(key)
        if type(value) is not int or not 0 <= value < _MOST_TOKENS:
            raise SpecError(f"{place}: {key} must be a whole number of tokens, got {value!r}")
    for key in (*_TIMES, *({_SCHEDULED} & row.keys())):
        value = row.get(key, math.nan)
        if type(value) not in (int, float) or not abs(value) < _LATEST_S:
            raise SpecError(f"{place}: {key} must be a time in seconds, got {value!r}")
    queued, first, last = (row[key] for key in _TIMES)
    if not queued <= first <= last:
        raise SpecError(f"{place}: queued_ts, first_token_ts, last_token_ts must not run backwards")
    tail = str(row.get("request_id", "")).rpartition("-")[2]
    if not tail.isdecimal() or len(tail) > _MAX_DIGITS:
        raise SpecError(f"{place}: request_id must end in -<row>, got {row.get('request_id')!r}")
    return {**row, "row": int(tail)}
