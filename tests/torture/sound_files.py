"""Sound files of every kind that a command reads, and the command that reads each."""

import gzip
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.torture.feature_experiments import FEATURES, experiment
from tests.torture.odd_values import SMALL
from tests.torture.sandbox import DONE, Case, run_case
from tests.trace_samples import SAMPLES

_RUN = ("run", "s.yaml", "-q", "-o", "out")


@dataclass(frozen=True)
class Seed:
    """A sound file among others, and the command that reads it.

    Attributes
    ----------
    kind : str
        What the file is.
    argv : tuple of str
        The command line.
    name : str
        The file that is changed.
    files : dict of str to bytes
        All files the command finds, that one among them.
    names : tuple of str
        One of these must be in a refusal.
    """

    kind: str
    argv: tuple[str, ...]
    name: str
    files: dict[str, bytes]
    names: tuple[str, ...]


def seeds(kind: str = "") -> Iterator[Seed]:
    """Yield a sound example of every kind of file that a command reads, of kinds that begin so."""
    makers = {
        "trace": _traces,
        "experiment": _experiments,
        "model hardware profile": _specification_parts,
        "report by-class plot compare": _results,
        "recording load": _recordings,
        "regression": _regressions,
    }
    for kinds, made in makers.items():
        if not kind or kind.split()[0] in kinds.split():  # results take seconds to make
            yield from (seed for seed in made() if seed.kind.startswith(kind))


def _traces() -> Iterator[Seed]:
    describe = ("trace", "describe")
    for form, text in SAMPLES.items():
        name = "t.csv" if "," in text.partition("\n")[0] and text[0] not in "[{" else "t.jsonl"
        reading = (*describe, name, "--format", form, "--tokenizer", "estimate")
        yield Seed(f"trace {form}", reading, name, {name: text.encode()}, (name,))
    text = SAMPLES["schedlab"].encode()
    yield Seed(
        "trace gz", (*describe, "t.csv.gz"), "t.csv.gz", {"t.csv.gz": gz(text)}, ("t.csv.gz",)
    )
    table = parquet(arrival_s=[0.0, 1.0], prompt_tokens=[20, 30], output_tokens=[5, 6])
    yield Seed(
        "trace parquet", (*describe, "t.parquet"), "t.parquet", {"t.parquet": table}, ("t.parquet",)
    )
    small = SMALL.encode()
    replay = (*_RUN, "workload={trace: t.csv}")
    yield Seed(
        "trace replayed", replay, "t.csv", {"s.yaml": small, "t.csv": text}, ("t.csv", "s.yaml")
    )
    # What a client measured is a workload, whose rows are drawn again.
    drawn = (*_RUN, "workload={trace: t.json, num_requests: 20, resample: true}")
    files = {"s.yaml": small, "t.json": SAMPLES["client_results"].encode()}
    yield Seed("trace resampled", drawn, "t.json", files, ("t.json", "s.yaml"))


_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
_GPU = (
    "name: my-gpu\nmemory_bytes: 80e9\nmemory_bytes_per_s: 2.0e12\n"
    "flops_per_s: {bf16: 3.0e14, fp16: 3.0e14}\n"
    "interconnect_bytes_per_s: 3.0e11\npcie_bytes_per_s: 3.2e10\nnum_sms: 108\n"
)


_OF_PROFILE = {"model": "model", "hardware": "hardware", "engine.dtype": "dtype"}


def _experiments() -> Iterator[Seed]:
    yield Seed("experiment", _RUN, "s.yaml", {"s.yaml": SMALL.encode()}, ("s.yaml",))
    for feature in FEATURES:
        # JSON is YAML, too, and can be changed at every key.
        text = json.dumps(experiment(feature)).encode()
        yield Seed(
            f"experiment {feature}", _command(feature), "s.yaml", {"s.yaml": text}, ("s.yaml",)
        )


def _command(feature: str) -> tuple[str, ...]:
    return (feature, *_RUN[1:], "-j", "1") if feature in ("find", "tune") else _RUN


def _specification_parts() -> Iterator[Seed]:
    small = SMALL.encode()
    files = {"s.yaml": small, "config.json": json.dumps(_MODEL).encode()}
    yield Seed(
        "model", (*_RUN, "model=config.json"), "config.json", files, ("config.json", "s.yaml")
    )
    files = {"s.yaml": small, "gpu.yaml": _GPU.encode()}
    yield Seed("hardware", (*_RUN, "hardware=gpu.yaml"), "gpu.yaml", files, ("gpu.yaml", "s.yaml"))
    for kind, parts in (("fit", _fitted_profile()), ("table", _table_profile())):
        files = {"s.yaml": small} | {f"profile/{name}": part for name, part in parts.items()}
        meta = json.loads(parts["meta.json"])
        reading = (
            *_RUN,
            "cost_model=profile",
            *(f"{key}={meta[name]}" for key, name in _OF_PROFILE.items()),
        )
        for name in parts:
            if not name.endswith((".png", "points.jsonl", "residuals.json")):
                changed = f"profile/{name}"
                yield Seed(f"profile {kind} {name}", reading, changed, files, ("profile", "s.yaml"))


def _fitted_profile() -> dict[str, bytes]:
    folder = Path(__file__).parents[2] / "profiles" / "cpu" / "schedlab-small" / "fp32-tp1"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _table_profile() -> dict[str, bytes]:
    from schedlab.sim.cost.table_profile import Curve, TableProfile, write_table

    meta = {
        "model": "llama-3-8b", "hardware": "a100-80gb", "dtype": "bf16", "tensor_parallel_size": 1,
    }  # fmt: skip
    curve = Curve("all", 1, (1.0, 4096.0), (9000.0, 40000.0))
    table = TableProfile((curve,), (), {"us_per_pair": 0.001, "us_per_kv_token": 0.01}, 0)
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / "p", meta, table)
        return _content(Path(folder) / "p")


def _results() -> Iterator[Seed]:
    readers: dict[str, tuple[str, ...]] = {
        "": ("report", "by-class", "plot", "compare"),
        "disaggregated": ("report", "plot"),
        "tiers": ("report",),
        "find": ("report", "plot"),
        "tune": ("report", "plot"),
    }
    for feature, commands in readers.items():
        files = {f"out/{name}": part for name, part in finished(feature).items()}
        # Of points that are alike one is enough.
        points = sorted({name.split("/")[1] for name in files if name.count("/") == 2})
        alike = tuple(f"out/{point}/" for point in points[1:])
        for command in commands:
            for name in files:
                if not name.endswith((".png", ".svg", ".html", ".lock")) | name.startswith(alike):
                    kind = f"{command} {feature} {name}"
                    yield Seed(kind, (command, "out"), name, files, ("out",))


@cache
def finished(feature: str = "") -> dict[str, bytes]:
    """Return the files of a finished run, sweep or search: of a sweep if no feature is named."""
    argv, text = _command(feature), json.dumps(experiment(feature)) if feature else SMALL
    if not feature:
        argv = (*argv, "sweep.policy=[fcfs, shortest_prompt]", "replications=2")
    with tempfile.TemporaryDirectory() as outside:
        (folder := Path(outside) / "cwd").mkdir()
        ending = run_case(Case(argv, {"s.yaml": text}), folder, limit_s=120.0)
        assert ending.code == DONE, ending.err
        return _content(folder / "out")


def _content(folder: Path) -> dict[str, bytes]:
    parts = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in parts}


_RECORDED = "".join(
    json.dumps(
        {
            "request_id": f"bench-{i}", "input_toks": 8, "output_toks": 3,
            "queued_ts": 1.0 + i, "first_token_ts": 1.5 + i, "last_token_ts": 2.5 + i,
        }
    )
    + "\n"
    for i in range(2)
)  # fmt: skip
_REPLAYED = '{"input_toks":8,"output_toks":3,"arrival_time_ns":%d}\n'
_QUANTILES = {"mean": 20, "min": 10, "p10": 12, "median": 20, "p90": 30, "max": 40}
_LOAD_TEST = {
    "id": "small", "model": "meta-llama/Llama-3.1-8B", "tp": 1, "max_num_seqs": 16,
    "max_num_batched_tokens": 512, "max_model_len": 2048, "system_prompt_tokens": 5,
    "num_system_prompts": 2, "users_per_system_prompt": 3,
    "stages": [
        {
            "rate": 5.0, "duration_s": 4, "succeeded": 20, "failed": 0, "prompt": _QUANTILES,
            "output": _QUANTILES, "ttft_s": _QUANTILES, "e2e_s": _QUANTILES,
        }
    ],
}  # fmt: skip


def _recordings() -> Iterator[Seed]:
    spec = SMALL.replace(
        "workload: {num_requests: 20, request_rate: 4, prompt_tokens: 64, output_tokens: 8}",
        "workload: {trace: t.jsonl, format: llmservingsim}\nvalidation: {measured: r.jsonl}",
    )
    trace = (_REPLAYED % 0) + (_REPLAYED % 10**9)
    files = {"s.yaml": spec.encode(), "t.jsonl": trace.encode(), "r.jsonl": _RECORDED.encode()}
    yield Seed("recording", ("validate", "s.yaml", "-q"), "r.jsonl", files, ("r.jsonl", "s.yaml"))
    profile = {f"p/one/{name}": part for name, part in _table_profile().items()}
    meta = json.loads(profile["p/one/meta.json"]) | {
        "model": "llama-3.1-8b",
        "hardware": "h100-80gb",
    }
    files = profile | {"p/one/meta.json": json.dumps(meta).encode()}
    files["runs.json"] = json.dumps([_LOAD_TEST]).encode()
    reading = ("validate", "runs.json", "hardware=h100-80gb", "--profiles", "p", "-q")
    yield Seed("load test", reading, "runs.json", files, ("runs.json",))


_MATRIX = b"""\
seeds: [0]
experiment: {model: llama-3-8b, hardware: a100-80gb, engine: {max_num_seqs: 4}}
workloads:
  chat:
    workload: {num_requests: 8, request_rate: 6.0, prompt_tokens: 20, output_tokens: 5}
registered: false
policies:
  fcfs: fcfs
  guessing: {name: sjf, predictor: oracle}
metrics:
  completed: {better: higher}
  mean_ttft_ms: {relative: 0.05, absolute: 1.0}
"""


def _regressions() -> Iterator[Seed]:
    keep = ("regress", "update", "--baseline", "r", "-q", "-j", "1")
    yield Seed("regression matrix", keep, "r/matrix.yaml", {"r/matrix.yaml": _MATRIX}, ("matrix",))


def parquet(**columns: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)
