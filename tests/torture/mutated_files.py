"""Sound files of every kind, each changed in one place: how files come to be wrong."""

import csv
import gzip
import io
import json
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.torture.odd_values import SMALL
from tests.torture.sandbox import DONE, Case, run_case
from tests.trace_samples import SAMPLES

_CELLS = ("", "x", "nan", "-1", "0", "1e400", "9" * 30, "9" * 5000, "1_0", "0x10", "١", "\x00", "é")
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, 10**18, 10**40, "", "x", "x" * 5000, "\x00", "../..", [], [1],
    [[[[]]]], {}, {"a": {"a": 1}},
)  # fmt: skip
_RAW = ("1" * 5000, "NaN", "Infinity", "-Infinity", '"\\ud800"', "[" * 3000, "1e999")
_FLIPS = 24


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


def mutated_file_cases(kind: str = "") -> Iterator[tuple[str, Case]]:
    """Change each sound file (of kinds that begin so) in each way that its form allows."""
    for seed in seeds():
        if not seed.kind.startswith(kind):
            continue
        yield f"{seed.kind} sound", Case(seed.argv, dict(seed.files), seed.names, ends=[DONE])
        for how, content in _mutations(seed.name, seed.files[seed.name]):
            files = dict(seed.files) | {seed.name: content}
            yield f"{seed.kind} {how}", Case(seed.argv, files, seed.names)


@cache
def seeds() -> tuple[Seed, ...]:
    """Return every kind of file that a command reads, with a sound example."""
    return (*_traces(), *_specification_parts(), *_results(), *_recordings())


def _traces() -> Iterator[Seed]:
    describe = ("trace", "describe")
    for form, text in SAMPLES.items():
        name = "t.csv" if "," in text.partition("\n")[0] and text[0] not in "[{" else "t.jsonl"
        reading = (*describe, name, "--format", form, "--tokenizer", "estimate")
        yield Seed(f"trace {form}", reading, name, {name: text.encode()}, (name,))
    text = SAMPLES["schedlab"].encode()
    yield Seed(
        "trace gz", (*describe, "t.csv.gz"), "t.csv.gz", {"t.csv.gz": _gz(text)}, ("t.csv.gz",)
    )
    table = _parquet(arrival_s=[0.0, 1.0], prompt_tokens=[20, 30], output_tokens=[5, 6])
    yield Seed(
        "trace parquet", (*describe, "t.parquet"), "t.parquet", {"t.parquet": table}, ("t.parquet",)
    )
    run = ("run", "s.yaml", "-q", "-o", "out", "workload={trace: t.csv}")
    yield Seed(
        "replayed", run, "t.csv", {"s.yaml": SMALL.encode(), "t.csv": text}, ("t.csv", "s.yaml")
    )


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


def _specification_parts() -> Iterator[Seed]:
    small = SMALL.encode()
    run = ("run", "s.yaml", "-q", "-o", "out")
    yield Seed("experiment", run, "s.yaml", {"s.yaml": small}, ("s.yaml",))
    files = {"s.yaml": small, "config.json": json.dumps(_MODEL).encode()}
    yield Seed(
        "model", (*run, "model=config.json"), "config.json", files, ("config.json", "s.yaml")
    )
    files = {"s.yaml": small, "gpu.yaml": _GPU.encode()}
    yield Seed("hardware", (*run, "hardware=gpu.yaml"), "gpu.yaml", files, ("gpu.yaml", "s.yaml"))
    for kind, parts in (("fit", _fitted_profile()), ("table", _table_profile())):
        files = {"s.yaml": small} | {f"profile/{name}": part for name, part in parts.items()}
        meta = json.loads(parts["meta.json"])
        reading = (
            *run,
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
    files = {f"out/{name}": part for name, part in _finished_run().items()}
    readers = (("report", "out"), ("by-class", "out"), ("plot", "out"), ("compare", "out"))
    for argv in readers:
        for name in files:
            yield Seed(f"{argv[0]} {name}", argv, name, files, ("out",))


@cache
def _finished_run() -> dict[str, bytes]:
    argv = [
        "run",
        "s.yaml",
        "sweep.policy=[fcfs, shortest_prompt]",
        "replications=2",
        "-q",
        "-o",
        "out",
    ]
    with tempfile.TemporaryDirectory() as outside:
        (folder := Path(outside) / "cwd").mkdir()
        ending = run_case(Case(argv, {"s.yaml": SMALL}), folder, limit_s=120.0)
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


def _parquet(**columns: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def _gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def _mutations(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    yield from _bytewise(content)
    ending = "".join(Path(name).suffixes[-2:])
    form: dict[str, Callable[[bytes], Iterator[tuple[str, bytes]]]] = {
        ".csv": _csv, ".json": _json, ".jsonl": _json_lines, ".yaml": _lines, ".csv.gz": _zipped,
        ".parquet": _columns,
    }  # fmt: skip
    if ending in form:
        yield from form[ending](content)


def _bytewise(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Change bytes as a bad disk, a bad copy or another system would."""
    size = len(content)
    yield "empty", b""
    yield "newline only", b"\n"
    for part in (1, 2, 3):
        yield f"cut at {part}/4", content[: size * part // 4]
    yield "without its end", content[:-1]
    yield "twice", content + content
    yield "BOM", b"\xef\xbb\xbf" + content
    yield "UTF-16", content.decode("latin-1").encode("utf-16")
    yield "returns", content.replace(b"\n", b"\r\n")
    yield "zipped", _gz(content)
    rng = random.Random(zlib.crc32(content[:4096]))
    for i in range(_FLIPS):
        where = rng.randrange(max(size, 1))
        value = rng.choice((0, 10, 34, 44, 58, 91, 123, 128, 255, rng.randrange(256)))
        yield f"byte {i} changed", content[:where] + bytes([value]) + content[where + 1 :]


def _csv(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Put odd cells into the second row, and change the columns."""
    header, *rows = list(csv.reader(io.StringIO(content.decode())))
    for i, column in enumerate(header):
        for value in _CELLS:
            row = [*rows[0][:i], value, *rows[0][i + 1 :]]
            yield f"{column}={value[:20]!r}", _table([header, row, *rows[1:]])
        fewer = [[*row[:i], *row[i + 1 :]] for row in (header, *rows)]
        yield f"without {column}", _table(fewer)
        yield f"{column} twice", _table([[*row, row[i]] for row in (header, *rows)])
    yield "a row alone", _table(rows[:1])
    yield "a short row", _table([header, rows[0][:-1], *rows[1:]])
    yield "a long row", _table([header, [*rows[0], "1"], *rows[1:]])
    yield "a wide row", _table([header, ["1"] * 5000])
    yield "rows the other way round", _table([header, *rows[::-1]])


def _table(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _json(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Put odd values everywhere in a JSON value, and leave every key out once."""
    whole = json.loads(content)
    for path in _paths(whole):
        where = "/".join(map(str, path))
        for value in _VALUES:
            yield f"{where}={str(value)[:20]!r}", _dumped(_with(whole, path, value))
        marked = _dumped(_with(whole, path, "MARK"))
        for raw in _RAW:
            yield f"{where}={raw[:12]}", marked.replace(b'"MARK"', raw.encode())
        if path:
            yield f"without {where}", _dumped(_without(whole, path))


def _json_lines(content: bytes) -> Iterator[tuple[str, bytes]]:
    first, *others = content.splitlines(keepends=True)
    for how, changed in _json(first):
        yield how, b"".join([changed, b"\n", *others])
    yield "rows the other way round", b"".join([*others[::-1], first])


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _paths(value: Any, most: int = 60) -> list[tuple[Any, ...]]:
    """Return where values stand, outer ones first; of a long list only its first two entries."""
    found: list[tuple[Any, ...]] = [()]
    for path in found:
        inner = _at(value, path)
        if isinstance(inner, dict):
            found += [(*path, key) for key in inner]
        elif isinstance(inner, list):
            found += [(*path, i) for i in range(min(len(inner), 2))]
        if len(found) >= most:
            break
    return found[:most]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = json.loads(json.dumps(whole))
    _at(copy, path[:-1])[path[-1]] = value
    return copy


def _without(whole: Any, path: tuple[Any, ...]) -> Any:
    copy = json.loads(json.dumps(whole))
    del _at(copy, path[:-1])[path[-1]]
    return copy


def _lines(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Leave out, repeat and break every line of a YAML file."""
    lines = content.splitlines(keepends=True)
    for i, line in enumerate(lines):
        before, after = lines[:i], lines[i + 1 :]
        key = line.split(b":")[0].decode("latin-1")
        yield f"without {key}", b"".join(before + after)
        yield f"{key} twice", b"".join([*before, line, line, *after])
        yield f"{key} indented", b"".join([*before, b"  " + line, *after])
        yield f"{key} without colon", b"".join([*before, line.replace(b":", b"", 1), *after])
        yield f"{key} bracketed", b"".join([*before, line.rstrip() + b" [{\n", *after])


def _zipped(content: bytes) -> Iterator[tuple[str, bytes]]:
    plain = gzip.decompress(content)
    yield "not gzip at all", plain
    yield "two members", content + content
    yield "trailing garbage", content + b"garbage"
    yield "bomb of one line", _gz(b"a" * (1 << 28))
    row = plain.splitlines(keepends=True)
    yield "bomb of a cell", _gz(row[0] + b"1," + b"9" * (1 << 28))


def _columns(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Give a Parquet table columns of other kinds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pq.read_table(io.BytesIO(content))
    for column in whole.column_names:
        columns = whole.to_pydict()
        num_rows = whole.num_rows
        yield f"without {column}", _parquet(**{k: v for k, v in columns.items() if k != column})
        odd = (None, "x", -1, True, 1e400, float("nan"), 2**62, [1, 2], {"a": 1}, b"\xff", 0.5)
        for value in odd:
            changed = columns | {column: [value] * num_rows}
            yield f"{column}={value!r}", _parquet(**changed)
    yield "no rows", _parquet(**{name: pa.array([], pa.int64()) for name in whole.column_names})
    yield "no columns", _parquet()
