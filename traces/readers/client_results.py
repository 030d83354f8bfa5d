"""What load generators write of single requests: when each was sent, and when its tokens came.

Sources of the formats: vLLM 0.32, `vllm bench serve --save-result --save-detailed`
(vllm/benchmarks/serve.py); GuideLLM 0.4 to 0.8.1 (schemas/base/request_stats.py and info.py), its
JSON report; inference-perf (kubernetes-sigs, inference_perf/apis/base.py and reportgen/base.py),
its ``per_request_lifecycle_metrics.json``, with token counts and times inside `request_metrics`
and `response_metrics` or, before those, beside them; AIPerf (ai-dynamo, db4f639,
docs/tutorials/working-with-profile-exports.md), its ``profile_export.jsonl``, a request a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedlab.sim.errors import TraceError
from schedlab.sim.sums import in_order
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import (
    JSON_ERRORS,
    Peek,
    Records,
    open_text,
    peek,
    readable,
)
from schedlab.traces.readers.trace_builder import EMPTY_HINT, MOST_TOKENS, TraceBuilder
from schedlab.traces.trace import Trace

_NO_ANSWER = "failed or not finished when it was recorded"
_WITHOUT_REQUESTS = {"request_throughput", "total_input_tokens"}
"""Keys that vLLM's results have with and without --save-detailed."""
_OF_GENAI_PERF = {"experiments", "service_kind"}
"""Keys of GenAI-Perf's profile_export.json."""
_TOTALS_OF_AIPERF = {"request_throughput", "request_latency", "input_config"}
"""Keys of profile_export_aiperf.json and profile_export_genai_perf.json."""
_BEFORE_0_4 = "first_token_time"
"""A key of GuideLLM's requests that they had until then."""
_MEASURED, _MADE = ("metrics", "request_totals"), ("scheduler_metrics", "requests_made")
_GUIDELLM_TOTALS = {
    "successful": (_MEASURED, _MADE),
    "errored": (_MEASURED, _MADE),
    "incomplete": (_MEASURED,),  # the other counts those that never began, too
}
"""Where GuideLLM's report counts requests: without warm-up and cool-down, and all of them."""
_LATEST_S = 4e9
"""Seconds since 1970 until 2096; differences then fit 64 bits of nanoseconds."""


class ClientResult(NamedTuple):
    """One request that was answered."""

    sent_s: float
    """By the client's clock."""
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    last_token_s: float


class _Told(NamedTuple):
    """The same as a file has it, whatever that is."""

    at: str
    sent: object
    prompt: object
    output: object
    first: object
    last: object


def is_client_results(path: Path) -> bool:
    """Whether a file is one of these: JSON, by its name, or lines of AIPerf, by what is there."""
    return path.suffix == ".json" or _is_of_aiperf(path)


def _is_of_aiperf(path: Path) -> bool:
    try:
        return path.is_file() and _has_lines_of_aiperf(peek(path))
    except TraceError:
        return False


def _has_lines_of_aiperf(peek: Peek) -> bool:
    return peek.kind == "jsonl" and {"metadata", "metrics", "error"} <= set(peek.names)


def read_client_results(path: Path, *, keep_empty: bool = False) -> tuple[list[ClientResult], int]:
    """Read the requests of one run of a load generator.

    Parameters
    ----------
    path : Path
        A file of any of the formats above.
    keep_empty : bool
        Return requests without tokens, of prompt or answer, with 0 of them; by default they are
        an error. What the file does not know (null) is 0, too.

    Returns
    -------
    results : list of ClientResult
        The answered requests, in the order in which they were sent.
    num_failed : int
        How many were not answered.

    Raises
    ------
    TraceError
        If it is none of them, lacks what a recording needs, or says the impossible; names the
        request and the key.
    """
    with open_text(path) as text, readable(path, [0]):
        content = text.read()
    rows = list(_aiperf(content, path)) if _is_of_aiperf(path) else list(_rows(content, path))
    answered = [_result(row, keep_empty) for row in rows if row is not None]
    if not answered:
        raise TraceError(f"{path}: no request was answered")
    return sorted(answered, key=lambda row: row.sent_s), len(rows) - len(answered)


def _rows(content: str, path: Path) -> Iterator[_Told | None]:
    """Return the requests of one JSON value, None of each that was not answered."""
    try:
        data = json.loads(content)
    except JSON_ERRORS as error:
        several = ""
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            several = ": several results in one file, as vllm bench serve --append-result writes?"
        raise TraceError(f"{path}: not JSON ({error!s:.200}){several}") from None
    if isinstance(data, list):
        return _inference_perf(data, path)
    if isinstance(data, dict) and "benchmarks" in data:
        return _guidellm(data, path)
    if isinstance(data, dict) and "start_times" in data:
        return _vllm(data, path)
    if isinstance(data, dict) and data.keys() >= _WITHOUT_REQUESTS:
        raise TraceError(
            f"{path}: vllm bench serve saved no single requests in it; run it again with "
            "--save-result --save-detailed"
        )
    if isinstance(data, dict) and data.keys() >= _OF_GENAI_PERF:
        raise TraceError(
            f"{path}: GenAI-Perf saves no token counts of single requests; its successor AIPerf "
            "does, in profile_export.jsonl"
        )
    if isinstance(data, dict) and data.keys() >= _TOTALS_OF_AIPERF:
        raise TraceError(
            f"{path}: totals of a run of AIPerf or GenAI-Perf; AIPerf's single requests are in "
            "profile_export.jsonl"
        )
    raise TraceError(
        f"{path}: not the per-request results of a load generator: vLLM's have start_times "
        "(vllm bench serve --save-result --save-detailed), GuideLLM's have benchmarks, "
        "inference-perf's are a list (report.request_lifecycle.per_request: true), AIPerf's are "
        "lines of metadata and metrics (profile_export.jsonl)"
    )


def _vllm(data: dict[str, Any], path: Path) -> Iterator[_Told | None]:
    names = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
    columns = {}
    for name in (*names, "errors"):
        column = data.get(name)
        if not isinstance(column, list):
            raise TraceError(f"{path}: {name} must be a list, one entry a request")
        columns[name] = column
    count = len(columns["start_times"])
    for name, column in columns.items():
        if len(column) != count:
            raise TraceError(f"{path}: {count} start_times, but {len(column)} {name}")
    for i in range(count):
        at = f"{path}: request {i}"
        sent, prompt, output, ttft, itl = (columns[name][i] for name in names)
        if columns["errors"][i]:
            yield None
            continue
        if not isinstance(itl, list):
            raise TraceError(f"{at}: itls must be a list of seconds, got {itl!r:.40}")
        first_s = _seconds(sent, "start_times", at) + _seconds(ttft, "ttfts", at)
        last_s = first_s + in_order(_seconds(gap, "itls", at) for gap in itl)
        yield _Told(at, sent, prompt, output, first_s, last_s)


def _guidellm(data: dict[str, Any], path: Path) -> Iterator[_Told | None]:
    benchmarks = data["benchmarks"]
    if not isinstance(benchmarks, list) or len(benchmarks) != 1:
        told = len(benchmarks) if isinstance(benchmarks, list) else "no list of"
        raise TraceError(
            f"{path}: {told} benchmarks; a recording is of one: give GuideLLM one rate at a time"
        )
    requests = _get(benchmarks[0], "requests", f"{path}: benchmarks[0]")
    for status in ("successful", "errored", "incomplete"):
        some = _get(requests, status, f"{path}: requests") or []
        if not isinstance(some, list):
            raise TraceError(f"{path}: requests.{status} must be a list")
        _check_whole(benchmarks[0], status, len(some), path)
        for i, request in enumerate(some):
            at = f"{path}: {status} request {i}"
            if status != "successful":
                yield None
                continue
            if isinstance(request, dict) and "info" not in request and _BEFORE_0_4 in request:
                raise TraceError(
                    f"{at}: no info: GuideLLM before 0.4 wrote this, which is not read"
                )
            timings = _get(_get(request, "info", at), "timings", at)
            yield _Told(
                at,
                _get(timings, "request_start", at),
                _get(request, "prompt_tokens", at),
                _get(request, "output_tokens", at),
                _get(timings, "first_token_iteration", at),
                _get(timings, "last_token_iteration", at),
            )


def _check_whole(benchmark: dict[str, Any], status: str, num_listed: int, path: Path) -> None:
    """Raise where a report counts more requests than it lists: then those are a sample."""
    for section, totals in _GUIDELLM_TOTALS[status]:
        counted: Any = benchmark
        for key in (section, totals, status):
            counted = counted.get(key, {}) if isinstance(counted, dict) else {}
        if isinstance(counted, int) and counted > num_listed:
            raise TraceError(
                f"{path}: lists {num_listed:,} of {counted:,} {status} requests: a sample is no "
                "recording of a run; run GuideLLM again without --sample-requests (sample_size of "
                "--metrics since 0.7)"
            )


def _inference_perf(data: list[Any], path: Path) -> Iterator[_Told | None]:
    for i, request in enumerate(data):
        at = f"{path}: request {i}"
        if _get(request, "error", at):
            yield None
            continue
        info = _get(request, "info", at)
        response = info.get("response_metrics") or info if isinstance(info, dict) else info
        times = response.get("output_token_times") if isinstance(response, dict) else None
        if not isinstance(times, list):
            raise TraceError(f"{at}: no output_token_times: only streamed answers have them")
        asked = info.get("request_metrics", {"text": info})  # at the top in older ones
        yield _Told(
            at,
            _get(request, "start_time", at),
            _get(_get(asked, "text", at), "input_tokens", at),
            _get(response, "output_tokens", at),
            times[0] if times else None,
            times[-1] if times else None,
        )


def _aiperf(content: str, path: Path) -> Iterator[_Told | None]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        at = f"{path}:{number}"
        try:
            request = json.loads(line)
        except JSON_ERRORS as error:
            raise TraceError(f"{at}: not JSON ({error!s:.200})") from None
        if _get(request, "error", at):
            yield None
            continue
        started_ns = _get(_get(request, "metadata", at), "request_start_ns", at)
        sent_s = _seconds(started_ns, "request_start_ns", at, "nanoseconds")
        metrics = _get(request, "metrics", at)
        first, last = (
            None if told is None else sent_s + _seconds(told, name, at, "milliseconds")
            for name in ("time_to_first_token", "request_latency")
            for told in [_metric(metrics, name, "ms", at)]
        )
        yield _Told(
            at,
            sent_s,
            _metric(metrics, "input_sequence_length", "tokens", at),
            _metric(metrics, "output_sequence_length", "tokens", at),
            first,
            last,
        )


def _metric(metrics: object, name: str, unit: str, at: str) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a metric of AIPerf, None if a request has none."""
    if not isinstance(metrics, dict):
        raise TraceError(f"{at}: metrics must be a JSON object")
    if name not in metrics:
        return None
    told = metrics[name]
    if _get(told, "unit", f"{at}: {name}") != unit:
        raise TraceError(f"{at}: {name} must be in {unit}, got {told['unit']!r:.40}")
    return _get(told, "value", f"{at}: {name}")


def _get(data: Any, key: str, at: str) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(data, dict) or key not in data:
        raise TraceError(f"{at}: no {key}")
    return data[key]


def _result(told: _Told, keep_empty: bool) -> ClientResult:
    at = told.at
    sent_s = _seconds(told.sent, "start", at)
    prompt = _tokens(told.prompt, "prompt", at, keep_empty)
    output = _tokens(told.output, "output", at, keep_empty)
    if not prompt or not output:
        return ClientResult(sent_s, prompt, output, sent_s, sent_s)
    if told.first is None or told.last is None:
        raise TraceError(f"{at}: no times of its tokens: only streamed answers have them")
    first_s = _seconds(told.first, "first token", at)
    last_s = _seconds(told.last, "last token", at)
    if not sent_s <= first_s <= last_s:
        raise TraceError(f"{at}: sent, first token and last token must not run backwards")
    return ClientResult(sent_s, prompt, output, first_s, last_s)


def _tokens(value: object, name: str, at: str, keep_empty: bool) -> int:
    if type(value) is int and 0 < value < MOST_TOKENS:
        return value
    is_empty = value is None or (type(value) is int and value == 0)
    if is_empty and keep_empty:
        return 0
    hint = f" {EMPTY_HINT}" if is_empty else ""
    raise TraceError(f"{at}: {name} tokens must be a whole number above 0, got {value!r:.40}{hint}")


def _seconds(value: object, what: str, at: str, unit: str = "seconds") -> float:
    per_s = {"seconds": 1.0, "milliseconds": 1e3, "nanoseconds": 1e9}[unit]
    most = _LATEST_S * per_s
    if isinstance(value, int | float) and type(value) is not bool and abs(value) < most:
        return value / per_s
    raise TraceError(f"{at}: {what} must be a time in {unit}, got {value!r:.40}")


def _sniff(peek: Peek) -> bool:
    is_report = peek.kind == "jsonl" and bool(
        {"start_times", "benchmarks"} & set(peek.names) or set(peek.names) >= _WITHOUT_REQUESTS
    )
    is_inference_perf = peek.kind == "json" and {"start_time", "info"} <= set(peek.names)
    return is_report or is_inference_perf or _has_lines_of_aiperf(peek)


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    report = ReadReport(
        format="client_results",
        path=str(path),
        time_unit="s",
        time_zero="the first request",
        tokens="counted by the client or the server",
    )
    builder = TraceBuilder(report, rebase=True, empty_reason=options.empty_reason)
    results, num_failed = read_client_results(path, keep_empty=options.drop_empty)
    if num_failed:
        builder.drop(_NO_ANSWER, num_failed)
    for begin in range(0, len(results), options.chunk_rows):
        some = results[begin : begin + options.chunk_rows]
        numbers = list(range(begin + 1, begin + 1 + len(some)))
        sent_s = np.array([row.sent_s for row in some]) - results[0].sent_s
        trace = builder.trace(
            Records(path, numbers, some, separator=": request "),
            arrival_ns=np.round(sent_s * 1e9).astype(np.int64),
            prompt_tokens=np.array([row.prompt_tokens for row in some], dtype=np.int64),
            output_tokens=np.array([row.output_tokens for row in some], dtype=np.int64),
        )
        if trace is not None:
            yield trace
    yield builder.finish()


READER = Reader(
    "client_results",
    "per-request results of vllm bench serve, GuideLLM, inference-perf or AIPerf",
    _sniff,
    _chunks,
)
