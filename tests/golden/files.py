"""What readers make of small files full of edges, and what is drawn, told and served of it."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from schedlab.sim.request import Slo
from schedlab.sim.rng import stream
from schedlab.traces import lengths, read
from schedlab.traces import stream as chunks
from schedlab.traces.arrivals import PROCESSES, normalize_span, process, replay
from schedlab.traces.durations import DURATIONS
from schedlab.traces.lengths import LENGTHS
from schedlab.traces.load_test_requests import load_test_requests
from schedlab.traces.load_tests import load_test, read_load_tests
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.prefix_statistics import lru_hit_rate
from schedlab.traces.presets import PRESETS
from schedlab.traces.readers.client_results import read_client_results
from schedlab.traces.session_generator import FanOut, SessionShape, Tool, draw_sessions
from schedlab.traces.statistics import describe
from schedlab.traces.synthetic import synthesize
from schedlab.traces.trace import Trace
from schedlab.traces.traffic_classes import TrafficClass, in_classes
from schedlab.traces.turns import Turns
from schedlab.traces.workload import workload
from schedlab.traces.writer import write
from tests import trace_samples


def _lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


_AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-02-29 23:59:59.9999999,374,44\n"
    "2024-03-01 03:30:00.25+03:30,396,109\n"
    "2024-02-29 19:15:00.5-04:45,7,0\n"
    "2024-02-29 19:15:01-04:45,9,2\n"
    "2024-03-01 00:02:00Z,8,3\n"
)
_MOONCAKE = _lines(
    {"timestamp": 5, "input_length": 31, "output_length": 5, "hash_ids": [], "session_id": "x"},
    {"timestamp": 7.5, "input_length": 33, "output_length": 1, "hash_ids": [3, 4, 5]},
    {"timestamp": 7.5, "input_length": 48, "output_length": 2, "hash_ids": [3, 4, 6]},
    {"timestamp": 9000, "input_length": 40, "output_length": 2, "hash_ids": [3, 4, 5]},
)
_BAILIAN = _lines(*(
    {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": prompt,
     "output_length": output, "type": kind, "turn": 1, "hash_ids": ids}
    for chat, parent, at, prompt, output, kind, ids in (
        (1, -1, 0.5, 32, 17, "text", [7, 8]),
        (2, -1, 1.0, 20, 3, "image", [7, 9]),
        (3, 1, 4.0, 64, 20, "text", [7, 8, 10, 11]),
        (4, 1, 4.0, 52, 9, "file", [7, 8, 12, 13]),
        (5, 2, 6.25, 40, 9, "text", [7, 9, 14]),
        (6, 3, 60.0, 100, 9, "text", [7, 8, 10, 11, 15, 16, 17]),
        (7, 99, 61.0, 16, 1, "text", [7]),
    )
))  # fmt: skip
_AGENTS = _lines(
    {"session_id": "s", "arrival_time_ns": 1000, "sub_requests": [
        {"input_toks": 33, "output_toks": 15, "tool_duration_ns": 70, "input_tok_ids": [1] * 33,
         "output_tok_ids": [2] * 15},
        {"input_toks": 52, "output_toks": 4, "input_tok_ids": [1] * 33 + [2] * 15 + [3] * 4},
        {"input_toks": 60, "output_toks": 4, "tool_duration_ns": 9,
         "input_tok_ids": [1] * 33 + [2] * 15 + [3] * 12},
    ]},
    {"input_toks": 16, "output_toks": 2, "arrival_time_ns": 2000, "input_tok_ids": [1] * 16},
)  # fmt: skip
_BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "10,a,3,GPT-4,40,5,45,API log\n"
    "11,,3,GPT-4,50,0,50,API log\n"
    "11,b,3,ChatGPT,60,7,67,Conversation log\n"
    "15,a,3,GPT-4,70,8,78,API log\n"
    "15,a,3,GPT-4,90,9,99,API log\n"
)
_OWN = (
    "arrival_s,prompt_tokens,output_tokens,max_tokens,priority,deadline_s,slo_ttft_ms,"
    "slo_tpot_ms,application,tenant,session_id,prefix_hash_ids,hash_block_tokens\n"
    "0.5,20,5,,1,2.5,100,,chat,acme,s1,1 2,16\n"
    "0.500000001,33,6,64,,,,20.5,,,,1 3 4,16\n"
    "75,16,600,600,-2,,,,,,s1,,16\n"
)
_CUSTOM = _lines(
    {"prompt": "one", "output_tokens": 4, "prompt_tokens": 9, "application": "chat"},
    {"prompt": "two", "output_tokens": 5, "prompt_tokens": 8},
)
_SESSIONS = _lines(
    {"session": "a", "arrival_s": 0, "new_tokens": 8, "output_tokens": 5, "tenant": "acme",
     "application": "chat", "priority": 2},
    {"session": "a", "new_tokens": 7, "output_tokens": 3, "application": "code"},
    {"session": "b", "arrival_s": 1, "new_tokens": 6, "output_tokens": 4, "tenant": "other"},
)  # fmt: skip
_GUIDELLM = json.dumps({"benchmarks": [{"requests": {
    "successful": [
        {"prompt_tokens": 30, "output_tokens": 3, "info": {"timings": {
            "request_start": 101.0, "first_token_iteration": 101.5, "last_token_iteration": 102.0,
        }}},
        {"prompt_tokens": 20, "output_tokens": 1, "info": {"timings": {
            "request_start": 100.0, "first_token_iteration": 100.5, "last_token_iteration": 100.5,
        }}},
    ],
    "errored": [{}], "incomplete": [{}, {}],
}}]})  # fmt: skip
_INFERENCE_PERF = json.dumps([
    {"start_time": 5.0, "error": None, "info": {
        "input_tokens": 12, "output_tokens": 2, "output_token_times": [5.5, 6.0]}},
    {"start_time": 5.5, "error": {"what": "refused"}, "info": {}},
    {"start_time": 4.0, "error": None, "info": {"input_tokens": 13, "response_metrics": {
        "output_tokens": 3, "output_token_times": [4.25, 4.5, 7.0]}}},
])  # fmt: skip
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name} sample": (text, {}) for name, text in trace_samples.SAMPLES.items()},
    "azure": (_AZURE, {"drop_empty": True}),
    "mooncake": (_MOONCAKE, {}),
    "bailian": (_BAILIAN, {}),
    "bailian sessions": (_BAILIAN, {"sessions": True}),
    "agents": (_AGENTS, {}),
    "agents without names": (_AGENTS.replace("_tok_ids", "_other_ids"), {}),
    "burstgpt": (_BURST, {}),
    "burstgpt sessions": (_BURST, {"sessions": True}),
    "sharegpt sessions": (trace_samples.SHAREGPT, {"sessions": True, "tokenizer": "estimate"}),
    "schedlab": (_OWN, {}),
    "sessions of tenants": (_SESSIONS, {}),
    "vllm_custom applications": (_CUSTOM, {}),
    "guidellm": (_GUIDELLM, {"format": "client_results"}),
    "inference-perf": (_INFERENCE_PERF, {}),
}


def _plain(values: Any) -> Any:
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    return [None if value != value else value for value in listed]


def columns(trace: Trace) -> dict[str, Any]:
    """Return every column of a trace, its report last."""
    found = {
        name: _plain(column)
        for name, column in trace.columns().items()
        if name not in ("prefix", "turns")
    }
    if trace.prefix is not None:
        found["prefix"] = [trace.prefix.block_tokens, trace.prefix.rows()]
    if trace.turns is not None:
        found["turns"] = trace.turns.rows()
        found["numbers"] = trace.turns.numbers().tolist()
        found["tool"] = _plain(trace.turns.tool) if trace.turns.tool is not None else None
        found["shared"] = _plain(trace.turns.shared) if trace.turns.shared is not None else None
        answers = trace.turns.answers
        found["answers"] = None if answers is None else answers.rows()
    found["report"] = [line for line in trace.report.lines() if not line.startswith("source")]
    return found


def _served(trace: Trace, **options: Any) -> list[list[Any]]:
    """Return what a server would see of each request."""
    return [
        [arrival.output_tokens, arrival.ready_ns, *(
            getattr(arrival.request, name)
            for name in ("id", "arrival_ns", "prompt_tokens", "max_tokens", "priority", "slo",
                         "application", "session_id", "tenant", "predicted_tokens",
                         "prefix_hash_ids", "predicted_session_tokens")
            if hasattr(arrival.request, name)
        ), arrival.turn]
        for arrival in workload(trace, **options)
    ]  # fmt: skip


def file(name: str) -> dict[str, Any]:
    """Read a file, whole and in chunks of two rows; describe it and serve it."""
    text, options = FILES[name]
    ends = ".json" if text[0] in "[{" and "\n" not in text.strip() else ".txt"
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{ends}"
        path.write_bytes(text.encode())
        trace = read(path, **options)
        pieces = list(chunks(path, chunk_rows=2, **options))
        told = {**columns(trace), "pieces": [len(piece) for piece in pieces]}
        assert columns(Trace.concat(pieces))["prompt_tokens"] == told["prompt_tokens"]
        if trace.turns is None:
            written = write(trace, Path(folder) / "again.csv").read_text(encoding="utf-8")
            told["written"] = written.splitlines()
    step_ns = 7 if trace.turns is None else 0
    times_ns = np.arange(len(trace), dtype=np.int64) * step_ns
    given = {} if trace.arrival_ns is not None else {"arrival_ns": times_ns}
    whole = _served(trace, max_model_len=64, first_id=10, slo=Slo(30.0, None, 700.0), **given)
    fine = None
    if trace.prefix is not None and trace.prefix.block_tokens % 8 == 0:
        fine = [row[-3:] for row in _served(trace, max_model_len=64, hash_block_tokens=8, **given)]
        told["lru"] = [lru_hit_rate(trace.prefix, n) for n in (1, 2, 3, 5)] * bool(
            len(trace.prefix.ids)
        )
    return {**told, "described": describe(trace), "served": whole, "in finer blocks": fine}


# -- what is drawn --------------------------------------------------------------------------------

_PARAMETERS: dict[str, dict[str, float]] = {
    "poisson": {"rate": 3.0},
    "gamma": {"rate": 3.0, "burstiness": 0.4},
    "linear_ramp": {"start_rate": 2.0, "end_rate": 20.0, "num_requests": 5, "burstiness": 2.0},
    "on_off": {"rate": 5.0, "mean_on_s": 1.0, "mean_off_s": 2.0, "off_share": 0.1},
    "varying": {"rate": 5.0, "sigma": 0.5, "timescale_s": 3.0},
    "constant": {"rate": 3.0},
    "all_at_once": {},
}


def arrivals(name: str) -> dict[str, Any]:
    """Draw arrivals of two seeds in pieces: how many are asked at once must not matter."""
    found = {}
    for seed in (0, 5):
        draw = process(name, seed=seed, **_PARAMETERS[name])
        pieces = np.concatenate([draw(n) for n in (1, 2, 0, 4, 1)])
        found[f"seed {seed}"] = (pieces // 1000).tolist()
    return found


def _quantiles(of: Any) -> list[Any]:
    edges = [0.0, 1e-12, 0.1, 0.25, 0.4999999, 0.5, 0.75, 0.9, 0.99, 1 - 1e-12, 1.0]
    return np.asarray(of(np.array(edges))).tolist()


def drawn(_: str) -> dict[str, Any]:
    """Return quantiles of every distribution of lengths and times, and what presets say."""
    given: dict[str, dict[str, Any]] = {
        "fixed": {"tokens": 7}, "uniform": {"low": 3, "high": 6},
        "exponential": {"mean": 30.0, "cap": 90}, "lognormal": {"mu": 3.0, "sigma": 1.2},
        "gamma": {"shape": 0.5, "scale": 80.0, "cap": 200},
        "quantile_table": {"probabilities": [0, 0.5, 1], "tokens": [1, 10.4, 100]},
    }  # fmt: skip
    seconds: dict[str, dict[str, Any]] = {
        "fixed": {"seconds": 0.5}, "uniform": {"low_s": 1.0, "high_s": 3.0},
        "exponential": {"mean_s": 2.0, "cap_s": 5.0}, "lognormal": {"median_s": 3.0, "sigma": 0.5},
    }  # fmt: skip
    rows = Trace(prompt_tokens=np.array([5, 6, 7]), output_tokens=np.array([1, 2, 3]))
    grid = np.array([[0.0, 0.9], [0.34, 0.1], [0.999, 0.5], [1.0, 0.0]])
    return {
        **{name: _quantiles(LENGTHS[name](**keys)) for name, keys in given.items()},
        **{f"{name} seconds": _quantiles(DURATIONS[name](**keys))
           for name, keys in seconds.items()},
        "rows": [part.tolist() for part in lengths.rows_of(rows)(grid)],
        "replayed": replay(np.array([0, 10, 15]), 2.0)(3).tolist(),
        "stretched": normalize_span(np.array([0, 10, 40]), 2.0).tolist(),
        "presets": {name: [_quantiles(one.prompt), _quantiles(one.output), one.rate, one.process]
                    for name, one in PRESETS.items()},
        "synthetic": columns(synthesize(5, preset="azure-code", rate=3.0, seed=4)),
    }  # fmt: skip


def sessions(_: str) -> dict[str, Any]:
    """Draw sessions with tools and agents; cut, join and drop them."""
    fixed, spread = LENGTHS["fixed"], LENGTHS["uniform"]
    wait = DURATIONS["exponential"]
    shape = SessionShape(
        turns=spread(1, 3), new_tokens=spread(5, 40), output_tokens=spread(3, 30),
        think=wait(2.0), first_tokens=fixed(50),
        tools={"search": Tool(0.3, wait(0.5), fixed(9)), "code": Tool(0.2, wait(5.0), fixed(11))},
        fan_out=FanOut(0.25, spread(2, 3), fixed(4)), max_calls=3,
        shared_tokens=32, shared_groups=2,
    )  # fmt: skip
    trace = draw_sessions(6, shape, 3)
    first = trace.turns.without(trace.prompt_tokens > 150)
    return {
        "drawn": columns(trace),
        "left": first.tolist(),
        "short": columns(trace.fit(150, "drop")),
        "twice": columns(Trace.concat([trace.take(first), _renamed(trace)])),
        "described": describe(trace),
        "served": _served(trace, max_model_len=300, hash_block_tokens=8,
                          arrival_ns=np.zeros(len(trace), dtype=np.int64)),
    }  # fmt: skip


def _renamed(trace: Trace) -> Trace:
    return replace(trace, session=np.array([f"again {s}" for s in trace.session], dtype=object))


def classes(_: str) -> dict[str, Any]:
    """Put requests into classes with lengths, targets and beginnings of their own."""
    u = stream(1, "lengths").random((14, 2))
    trace = Trace(
        prompt_tokens=LENGTHS["uniform"](10, 90)(u[:, 0]),
        output_tokens=LENGTHS["uniform"](1, 30)(u[:, 1]),
        arrival_ns=np.arange(14) * 1_000,
        priority=np.arange(14) % 3,
    )
    asked = {
        "paying": TrafficClass(share=1, priority=7, ttft_ms=200.0, e2el_ms=1500.0,
                               prefix_tokens=40, prefix_groups=2),
        "free": TrafficClass(share=2, tpot_ms=30.0, prompt=LENGTHS["fixed"](33)),
        "batch": TrafficClass(share=1, output=LENGTHS["uniform"](5, 9), prefix_tokens=64),
    }  # fmt: skip
    mixed = in_classes(trace, asked, 2)
    return {
        "mixed": columns(mixed),
        "given": columns(in_classes(trace, asked, 2, np.arange(14) // 5)),
        "clipped": columns(mixed.fit(60, "clip_prompt")),
        "slice": columns(mixed.slice(2e-6, 9e-6)),
        "slow": columns(mixed.scale(0.3)),
    }


def turned(_: str) -> dict[str, Any]:
    """Take, drop and number turns whose needs are in no order; change the size of blocks."""
    turns = Turns.from_rows([[], [0], [1], [2, 0], [3, 1], [], [5, 5]], [0, 5, 6, 7, 8, 0, 9])
    blocks = PrefixHashes.from_rows([(1, 2, 3, 4, 5), (1, 2), (), (1, 2, 9)], 16)
    prompts = np.array([80, 25, 15, 47])
    gone = np.zeros(7, dtype=bool)
    gone[2] = True
    return {
        "rows": turns.rows(),
        "numbers": turns.numbers().tolist(),
        "taken": turns.take(np.array([0, 1, 2, 3, 5, 6])).rows(),
        "left": turns.without(gone).tolist(),
        "joined": Turns.concat([turns, turns.take(np.array([5, 6]))]).rows(),
        **{f"blocks of {size}": blocks.with_block_tokens(size, prompts).rows()
           for size in (4, 8, 16, 32, 48)},
    }  # fmt: skip


# -- load tests -----------------------------------------------------------------------------------

_STAGE = {
    "rate": 4.0, "duration_s": 5.0, "failed": 0,
    "prompt": {"mean": 61.0, "min": 40, "p10": 41.4, "p50": 60, "p90": 80.6, "max": 81},
    "output": {"mean": 9.0, "min": 1, "p25": 4, "median": 10, "p90": 11, "max": 12},
    "ttft_s": {"mean": 0.3, "median": 0.2, "p99": 0.9},
    "e2e_s": {"mean": 1.3, "median": 1.2, "p99": 2.9},
}  # fmt: skip
LOAD_TEST = {
    "id": "one", "model": "llama", "hardware": "H100", "tp": 2, "max_num_seqs": 8,
    "enable_prefix_caching": True, "dtype": "bf16", "gpu_memory_utilization": 0.8,
    "system_prompt_tokens": 32, "num_system_prompts": 2, "users_per_system_prompt": 4,
    "stages": [_STAGE, {**_STAGE, "rate": 2.0, "succeeded": 5, "failed": 2}], "remark": "mine",
}  # fmt: skip


def load_tests(_: str) -> dict[str, Any]:
    """Read two load tests and make their requests; three kinds of results of clients."""
    alone = {key: value for key, value in LOAD_TEST.items() if "system_prompt" not in key}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tests.json"
        path.write_text(
            json.dumps([LOAD_TEST, {**alone, "id": "two", "counts_begin_token": False}])
        )
        tests = read_load_tests(path)
        assert load_test(path, "two") == tests["two"]
        results = {}
        texts = {"vllm": trace_samples.CLIENT_RESULTS, "guidellm": _GUIDELLM,
                 "inference-perf": _INFERENCE_PERF}  # fmt: skip
        for name, text in texts.items():
            path.write_text(text)
            results[name] = read_client_results(path)
    return {
        "tests": [repr(test) for test in tests.values()],
        "changes": [stage.changes() for stage in tests["one"].stages],
        "requests": {name: columns(load_test_requests(one, 3)) for name, one in tests.items()},
        "quantiles": tests["one"].stages[0].ttft_s.at([0, 0.3, 0.5, 0.75, 1]).tolist(),
        "results": results,
    }


assert set(_PARAMETERS) == set(PROCESSES)
CASES = {
    **{f"file {name}": (file, name) for name in FILES},
    **{f"arrivals {name}": (arrivals, name) for name in PROCESSES},
    "draws": (drawn, ""),
    "drawn sessions": (sessions, ""),
    "traffic classes": (classes, ""),
    "turns": (turned, ""),
    "load tests": (load_tests, ""),
}
