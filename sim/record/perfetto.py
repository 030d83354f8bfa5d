"""A run as a Chrome trace, to be looked at in ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.sim.files import replacing
from schedlab.sim.record.columns import REJECTED, whole_numbers
from schedlab.sim.record.steps import num_stages_by_engine, stage_columns

if TYPE_CHECKING:
    from schedlab.sim.record.columns import Columns
    from schedlab.sim.result import RunResult

Event = dict[str, Any]

_MORE_STEPS = 1_000_000_000
"""Threads from here on are those of steps that overlap with those of thread 0."""
_STEP_ARGS = ("num_decodes", "num_prefills", "prefill_tokens", "padding_tokens", "overhead_ns")


def write_trace(
    result: RunResult, path: Path, *, max_requests: int = 500, max_steps: int = 50_000
) -> None:
    """Write a run as Chrome trace events.

    Parameters
    ----------
    result : RunResult
        The run.
    path : Path
        File to write, whole or not at all.
    max_requests, max_steps : int
        How many to write, the first by arrival and by start. A browser holds about a million
        events; ``otherData`` in the file says how many were left out.

    Notes
    -----
    Each engine is a process, and a request belongs to that of its engine. Thread 0 shows steps
    (and preemptions, as instants), of a pipeline threads of their own for batches in flight at the
    same time; each request has a thread with spans queued (arrival to first
    scheduled), prefill (to first token) and decode (to finish), and inside them preempted
    (eviction to resumption). Counters show KV tokens and requests running and waiting at step
    starts. Times are in microseconds.
    """
    requests, steps = result.requests, result.log.steps()
    num_requests, num_steps = len(requests["id"]), len(steps["start_ns"])
    header = {
        "displayTimeUnit": "ms",
        "otherData": {
            "name": result.name,
            "policy": result.policy,
            "requests_written": min(num_requests, max_requests),
            "requests_total": num_requests,
            "steps_written": min(num_steps, max_steps),
            "steps_total": num_steps,
        },
    }
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [\n')
        name = f"{result.name} ({result.policy})"
        file.write(json.dumps(_named("process_name", 0, name)))
        for engine in range(1, result.num_engines):
            kind = f" ({result.engines[engine].pool})" if result.engines else ""
            process = _of(engine, _named("process_name", 0, f"{name}, engine {engine}{kind}"))
            file.write(",\n" + json.dumps(process))
        for event in _events(result, max_requests, max_steps):
            file.write(",\n" + json.dumps(event))
        file.write("\n]}\n")


def _events(result: RunResult, max_requests: int, max_steps: int) -> Iterator[Event]:
    for engine in range(result.num_engines):
        yield _of(engine, _named("thread_name", 0, "steps"))
    num_stages = num_stages_by_engine(result.log.steps())
    num_threads = _most_in_flight(result.log.steps(), num_stages)
    for engine in sorted(num_stages):
        for row in range(1, num_threads[engine]):
            name = f"steps ({row} more in flight)"
            yield _of(engine, _named("thread_name", _MORE_STEPS + row, name))
    yield from _steps(result, num_stages, num_threads, max_steps)
    yield from _requests(result, max_requests)


def _most_in_flight(steps: Columns, num_stages: dict[int, int]) -> dict[int, int]:
    """Count the threads for batches in flight by engine: one a stage, one more if planned ahead."""
    most = dict(num_stages)
    for engine, size in num_stages.items():
        start_ns, end_ns = (whole_numbers(steps, name) for name in ("start_ns", "end_ns"))
        if "engine" in steps:
            here = steps["engine"] == engine
            start_ns, end_ns = start_ns[here], end_ns[here]
        if (start_ns[size:] < end_ns[:-size]).any():
            most[engine] += 1
    return most


def _steps(
    result: RunResult, num_stages: dict[int, int], num_threads: dict[int, int], max_steps: int
) -> Iterator[Event]:
    steps = {name: data[:max_steps].tolist() for name, data in result.log.steps().items()}
    engines = steps.get("engine", [0] * len(steps["start_ns"]))
    num_begun = [0] * result.num_engines
    for i, start in enumerate(steps["start_ns"]):
        row = num_begun[engines[i]] % num_threads.get(engines[i], 1)
        num_begun[engines[i]] += 1
        capacity_tokens = result.kv_capacity_tokens
        if result.engines:
            capacity_tokens = result.engines[engines[i]].kv_capacity_tokens
        for event in _step(capacity_tokens, steps, i, start, row, num_stages.get(engines[i], 1)):
            yield _of(engines[i], event)


def _step(
    capacity_tokens: int, steps: dict[str, list[int]], i: int, start: int, row: int, num_stages: int
) -> Iterator[Event]:
    args: Event = {name: steps[name][i] for name in _STEP_ARGS}
    args["kv_share"] = round(steps["kv_allocated_tokens"][i] / capacity_tokens, 4)
    if num_stages > 1:
        args |= {name: steps[name][i] for name in stage_columns(num_stages)}
    yield _span("step", _MORE_STEPS + row if row else 0, start, steps["end_ns"][i], args)
    if steps["num_preempted"][i]:
        yield _instant("preempted", 0, start, {"num_preempted": steps["num_preempted"][i]})
    yield _counter("KV tokens", start, {
        "resident": steps["kv_tokens"][i], "held": steps["kv_allocated_tokens"][i],
    })  # fmt: skip
    yield _counter("requests", start, {
        "running": steps["num_running"][i], "waiting": steps["num_waiting"][i],
    })  # fmt: skip


def _requests(result: RunResult, max_requests: int) -> Iterator[Event]:
    order = result.requests["arrival_ns"].argsort(kind="stable")[:max_requests]
    columns = {name: data[order].tolist() for name, data in result.requests.items()}
    evictions: dict[int, list[tuple[int, int]]] = {}
    for number, *span in zip(*(c.tolist() for c in result.log.preemptions().values()), strict=True):
        evictions.setdefault(number, []).append((span[0], span[1]))
    for i, number in enumerate(columns["id"]):
        row = {name: values[i] for name, values in columns.items()}
        for event in _request(result, row, i + 1, evictions.get(number, [])):
            yield _of(row.get("engine", 0), event)


def _request(
    result: RunResult, row: dict[str, Any], thread: int, evictions: list[tuple[int, int]]
) -> Iterator[Event]:
    number = row["id"]
    yield _named("thread_name", thread, f"request {number}")
    if row["status"] == REJECTED:
        reason = result.reject_reasons.get(number, "")
        yield _instant("rejected", thread, row["arrival_ns"], {"reason": reason})
        return
    args = {
        name: row[name]
        for name in (
            "prompt_tokens",
            "generated_tokens",
            "num_preemptions",
            "recomputed_tokens",
        )
    }
    marks = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
    for name, begin, end in zip(("queued", "prefill", "decode"), marks, marks[1:], strict=False):
        end_ns = row[end]
        if end_ns < 0:  # the run ended before
            break
        if name == "prefill" and row.get("prefill_end_ns", -1) >= 0:
            # The first token is told elsewhere. A prompt computed again may be done after it was.
            end_ns = min(end_ns, row["prefill_end_ns"])
        yield _span(name, thread, row[begin], end_ns, args)
    if row.get("transfer_end_ns", -1) >= 0:
        begin_ns, end_ns = row["transfer_start_ns"], row["transfer_end_ns"]
        transfer = {"from_engine": row["prefill_engine"], "bytes": row["transferred_bytes"]}
        yield _span("KV transfer", thread, begin_ns, end_ns, transfer)
    for begin_ns, end_ns in evictions:
        if end_ns >= 0:
            yield _span("preempted", thread, begin_ns, end_ns, {})


def _of(engine: int, event: Event) -> Event:
    """Put an event into the process of an engine."""
    return event | {"pid": engine}


def _named(kind: str, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}


def _span(name: str, thread: int, start_ns: int, end_ns: int, args: Event) -> Event:
    return {
        "name": name, "ph": "X", "pid": 0, "tid": thread,
        "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3, "args": args,
    }  # fmt: skip


def _instant(name: str, thread: int, at_ns: int, args: Event) -> Event:
    return {
        "name": name, "ph": "i", "s": "t", "pid": 0, "tid": thread, "ts": at_ns / 1e3, "args": args,
    }  # fmt: skip


def _counter(name: str, at_ns: int, values: Event) -> Event:
    return {"name": name, "ph": "C", "pid": 0, "ts": at_ns / 1e3, "args": values}
