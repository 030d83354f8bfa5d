"""What comes of small files that are wrong, or odd, in one place.

A reader is asked for sound files nearly always, so what it says of a cell that is empty, negative,
of another type or only in some of the rows is seen by nobody. Here each value of each file is put
to others, one at a time, in the first row and in the last, and left out; a row of a table is a
column or a key, with a digest of all that is read, or refused and in which words.

``python -m tests.golden.damaged "trace mooncake"`` prints every change and what comes of it.
"""

import csv
import hashlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from schedlab.experiments.comparing.vllm_recording import read_recording
from schedlab.experiments.regression.matrix import load_matrix
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sweep import points
from schedlab.sim.cost.importers.llmservingsim import Options, import_bundle, read_link
from schedlab.sim.cost.importers.splitwise import import_splitwise
from schedlab.sim.cost.importers.vidur import import_vidur
from schedlab.sim.cost.profile import measured_overhead, read_meta
from schedlab.sim.cost.registry import load_profile
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.table_profile import Curve, TableProfile, write_table
from schedlab.sim.errors import SchedlabError
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.model_config import read_config
from schedlab.sim.speculation.recording import read_drafts
from schedlab.traces import read
from schedlab.traces.load_tests import read_load_tests
from tests.golden import files, prices
from tests.golden.rounding import rounded
from tests.torture.feature_experiments import FEATURES, experiment
from tests.unit import test_importers

_CELLS = ("", "x", "nan", "inf", "-1", "0", "1", "2.5", "1e400", "0x10")
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2.5, 1e308, "", "x", "1", [], [1], {"a": 1},
)  # fmt: skip
_MOST_IN_LIST = 2
"""Of a list, so many entries are changed: the others are alike."""

Change = tuple[str, str, str]
"""The column or key, what is done to it, and the text of the file then."""


@dataclass(frozen=True)
class Sound:
    """Sound files and what reads them.

    Attributes
    ----------
    write : callable
        Writes them into a folder.
    reads : callable
        Reads them from it.
    known : set of str
        Keys that are changed in files of another kind already, and are left alone here.
    """

    write: Callable[[Path], object]
    reads: Callable[[Path], Any]
    known: Set[str] = frozenset()


# -- changes --------------------------------------------------------------------------------------


def changes(name: str, text: str) -> Iterator[Change]:
    """Yield every change of a file by the form that its name tells."""
    if name.endswith(".csv"):
        yield from _of_table(text)
    elif name.endswith(".jsonl"):
        yield from _of_lines(text)
    elif name.endswith((".yaml", ".json")):
        whole = yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
        dump = yaml.safe_dump if name.endswith(".yaml") else json.dumps
        for key, how, changed in _of_value(whole):
            yield key, how, dump(changed)


def _of_table(text: str) -> Iterator[Change]:
    header, *rows = list(csv.reader(io.StringIO(text)))
    for i, column in enumerate(header):
        for at in sorted({0, len(rows) - 1}):
            for cell in _CELLS:
                changed = [list(row) for row in rows]
                changed[at][i] = cell
                yield column, f"row {at}: {cell}", _table([header, *changed])
        without = [[*row[:i], *row[i + 1 :]] for row in (header, *rows)]
        yield column, "left out", _table(without)
        yield column, "twice", _table([[*row, row[i]] for row in (header, *rows)])
        yield (
            column,
            "named otherwise",
            _table([[*header[:i], f"{column}s", *header[i + 1 :]], *rows]),
        )
    further = ["further", *("7" for _ in rows)]
    whole = [header, *rows]
    yield "columns", "one more", _table([[*row, c] for row, c in zip(whole, further, strict=True)])
    yield "columns", "first one", _table([[c, *row] for row, c in zip(whole, further, strict=True)])
    yield "rows", "none", _table([header])
    yield "rows", "one", _table([header, rows[0]])
    yield "rows", "turned round", _table([header, *rows[::-1]])
    yield "rows", "the last twice", _table([header, *rows, rows[-1]])
    yield "rows", "the first short", _table([header, rows[0][:-1], *rows[1:]])
    yield "rows", "the last long", _table([header, *rows[:-1], [*rows[-1], "1"]])


def _table(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _of_lines(text: str) -> Iterator[Change]:
    rows = [json.loads(line) for line in text.splitlines()]
    for at in sorted({0, len(rows) - 1}):
        for key, how, changed in _of_value(rows[at]):
            yield key, f"row {at}: {how}", _lines([*rows[:at], changed, *rows[at + 1 :]])
    yield "keys", "one more", _lines([{**row, "further": 7} for row in rows])
    yield "keys", "first one", _lines([{"further": 7, **row} for row in rows])
    yield "rows", "one", _lines(rows[:1])
    yield "rows", "turned round", _lines(rows[::-1])
    yield "rows", "the last twice", _lines([*rows, rows[-1]])


def _lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _of_value(whole: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the key of every value inside with what it is changed to."""
    for path in _paths(whole):
        key = _key(path)
        for value in _VALUES:
            yield key, json.dumps(value), _with(whole, path, value)
        yield key, "left out", _with(whole, path, _with)
        if isinstance(_at(whole, path), dict):
            yield key, "a key more", _with(whole, (*path, "further"), 7)
    if isinstance(whole, dict):
        yield "keys", "one more", {**whole, "further": 7}


def _key(path: tuple[Any, ...]) -> str:
    return "/".join("*" if isinstance(part, int) else part for part in path)


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        ends = sorted({0, len(value) - 1})[:_MOST_IN_LIST] if value else []
        inside = [(i, value[i]) for i in ends]
    for key, one in inside:
        yield (*above, key)
        yield from _paths(one, (*above, key))


def _at(whole: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        whole = whole[part]
    return whole


def _with(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at a place, or without one there (if it is this)."""
    copy = deepcopy(whole)
    at = _at(copy, path[:-1])
    if value is _with:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return copy


# -- what comes of them ---------------------------------------------------------------------------


def outcomes(kind: str) -> Iterator[tuple[str, str, Any]]:
    """Change each file of a kind in each way; yield its column or key, how, and what came of it."""
    sound = KINDS[kind]
    with TemporaryDirectory() as place:
        folder = Path(place) / "here"  # some call what they read by its folder
        folder.mkdir()
        sound.write(folder)
        told: set[str] = set()
        yield "", "sound", _outcome(sound, folder, told)
        for path in sorted(one for one in folder.rglob("*") if one.is_file()):
            text = path.read_text(encoding="utf-8")
            for key, how, changed in changes(path.name, text):
                if key in sound.known:
                    continue
                path.write_text(changed, encoding="utf-8")
                name = f"{path.name} {key}"
                yield name, how, _outcome(sound, folder, told)
            path.write_text(text, encoding="utf-8")


def _outcome(sound: Sound, folder: Path, told: set[str]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _told(sound.reads(folder), folder)
    except SchedlabError as error:
        return f"{type(error).__name__}: {_own_words(error, folder)}"


def _told(value: Any, folder: Path) -> Any:
    """Return what was read as plain data, the same on any machine."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return [[str(key), _told(one, folder)] for key, one in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_told(one, folder) for one in value]
    if isinstance(value, str | Path):
        return _placeless(str(value), folder)
    return rounded(value)


def _placeless(text: str, folder: Path) -> str:
    """Return a text without the folders that differ from machine to machine."""
    return (
        text.replace(f"{folder}/", "").replace(str(folder), "FOLDER").replace(f"{Path.cwd()}/", "")
    )


def _own_words(error: BaseException, folder: Path) -> str:
    """Return what an error says but for folders, and for what Python or a library said."""
    said = _placeless(str(error), folder)
    others, above = [], error.__cause__ or error.__context__
    while above is not None:
        others.append(above)
        above = above.__cause__ or above.__context__
    for other in others:
        words = [str(other)]
        if isinstance(other, ValidationError):
            words = [one["msg"] for one in other.errors()]
        if not isinstance(other, SchedlabError):
            for one in filter(None, words):
                said = said.replace(one, type(other).__name__)
    return said


def table(kind: str) -> dict[str, str]:
    """Return a digest of all that comes of the changes of each column or key."""
    found: dict[str, list[Any]] = {}
    for key, how, outcome in outcomes(kind):
        found.setdefault(key, []).append([how, outcome])
    return {
        key: f"{len(rows)} {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:8]}"
        for key, rows in found.items()
    }


# -- sound files ----------------------------------------------------------------------------------

_GPU = {
    "name": "my-gpu", "memory_bytes": 80e9, "memory_bytes_per_s": 2.0e12,
    "flops_per_s": {"bf16": 3.0e14, "fp16": 3.0e14}, "interconnect_bytes_per_s": 3.0e11,
    "pcie_bytes_per_s": 3.2e10, "num_sms": 108,
}  # fmt: skip
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
_EXPERTS = _MODEL | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 768, "head_dim": 128, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
_MATRIX = {
    "seeds": [0], "registered": False,
    "experiment": {"model": "llama-3-8b", "hardware": "a100-80gb", "engine": {"max_num_seqs": 4}},
    "workloads": {"chat": {"workload": {
        "num_requests": 8, "request_rate": 6.0, "prompt_tokens": 20, "output_tokens": 5}}},
    "policies": {"fcfs": "fcfs", "guessing": {"name": "sjf", "predictor": "oracle"}},
    "metrics": {"completed": {"better": "higher"},
                "mean_ttft_ms": {"relative": 0.05, "absolute": 1.0}},
}  # fmt: skip
_RECORDED = [
    {"request_id": f"bench-{i}", "input_toks": 8, "output_toks": 3, "queued_ts": 1.0 + i,
     "first_token_ts": 1.5 + i, "last_token_ts": 2.5 + i}
    for i in range(2)
]  # fmt: skip
_DRAFTS = [
    {"id": 3, "drafted": [2, 3], "accepted": [1, 3]}, {"id": 4, "drafted": [], "accepted": []},
]  # fmt: skip
_FITTED = Path(__file__).parents[2] / "profiles" / "cpu" / "schedlab-small" / "fp32-tp1"


def _writes(**texts: str) -> Callable[[Path], None]:
    """Return what writes files, by name with its dot as an underscore."""

    def write(folder: Path) -> None:
        for name, text in texts.items():
            (folder / ".".join(name.rsplit("_", 1))).write_text(text, encoding="utf-8")

    return write


def _trace(name: str) -> Sound:
    text, options = files.FILES[name]
    if text[0] not in "[{":
        ends = "csv"
    else:
        ends = "json" if text.startswith("[") or text.count("\n") < 2 else "jsonl"
    return Sound(
        _writes(**{f"t_{ends}": text}),
        lambda folder: files.columns(read(folder / f"t.{ends}", **options)),
    )


def _bundle(folder: Path) -> None:
    """Write a bundle with skew and experts."""
    config = test_importers.EXPERTS
    path = test_importers.bundle(folder, config=config, meta=prices.SKEW_META)
    cells = [(0, "few", "even", "short", "none", 0.1), (16, "many", "even", "long", "none", 0.2)]
    header = ["pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha"]
    test_importers.write_csv(path / "tp1/skew_fit.csv", header, cells)
    rows = [(1, 1, 1, 30), (1, 1, 8, 50), (1, 64, 1, 60), (1, 64, 8, 90)]
    header = ["ep", "tokens", "activated_experts", "time_us"]
    test_importers.write_csv(path / "tp1/moe.csv", header, rows)


def _of_bundle(folder: Path) -> Any:
    return import_bundle(folder / "perf/RTX4090/Qwen/tiny/bf16", Options())


def _vidur(folder: Path) -> None:
    test_importers.vidur_rows(folder)
    header = ["num_workers", "size", "devices_per_node", "time_stats.all_reduce.median"]
    rows = [(2, 8192, 2, 0.1), (2, 81920, 2, 0.2), (2, 8192, 1, 9)]
    test_importers.write_csv(folder / "network.csv", header, rows)


def _of_vidur(folder: Path) -> Any:
    path = folder / "Meta-Llama-3-8B" / "mlp.csv"
    return import_vidur(path, "a100", None, 2, folder / "network.csv")


def _table_profile(folder: Path) -> None:
    meta = {
        "model": "llama-3-8b", "hardware": "a100-80gb", "dtype": "bf16", "tensor_parallel_size": 1,
        "scheduling_overhead": {"base_s": 0.001, "per_running_s": 1e-6},
    }  # fmt: skip
    curves = Curve("all", 1, (1.0, 4096.0), (9000.0, 40000.0)), Curve("head", 2, (1.0,), (3.0,))
    rates = {"us_per_pair": 0.001, "us_per_kv_token": 0.01}
    write_table(folder, meta, TableProfile(curves[:1], curves[1:], rates, 32))


def _fitted(folder: Path) -> None:
    for name in ("fit.json", "meta.json"):
        (folder / name).write_bytes((_FITTED / name).read_bytes())


def _of_profile(folder: Path) -> Any:
    cost = load_profile(folder)
    shapes = [BatchShape(3, 900, 400, ()), BatchShape(1, 50, 50, ((64, 100), (7, 0)))]
    meta = read_meta(folder)
    return [measured_overhead(meta), meta, [cost.step_ns(shape) for shape in shapes]]


def _experiments() -> Iterator[tuple[str, Sound]]:
    known: frozenset[str] = frozenset()
    for feature in FEATURES:
        yield f"experiment {feature}", replace(_experiment(feature), known=known)
        known |= set(map(_key, _paths(experiment(feature))))


def _experiment(feature: str) -> Sound:
    def reads(folder: Path) -> Any:
        text = (folder / "spec.json").read_text(encoding="utf-8")
        return [point.spec.model_dump(mode="json") for point in points(make_spec(json.loads(text)))]

    return Sound(_writes(spec_json=json.dumps(experiment(feature))), reads)


KINDS: dict[str, Sound] = {
    **{f"trace {name}": _trace(name) for name in files.FILES},
    "bundle": Sound(_bundle, _of_bundle),
    "vidur": Sound(_vidur, _of_vidur),
    "splitwise": Sound(
        test_importers.splitwise_rows,
        lambda folder: import_splitwise(folder / "perf_model.csv", "llama2-70b", "a100-80gb"),
    ),
    "links of a cluster": Sound(
        _writes(cluster_json=json.dumps({"link_latency": 500, "link_bw": 16})),
        lambda folder: read_link(folder / "cluster.json"),
    ),
    "table profile": Sound(_table_profile, _of_profile),
    "fitted profile": Sound(_fitted, _of_profile),
    "gpu": Sound(_writes(gpu_yaml=json.dumps(_GPU)), lambda folder: gpu(f"{folder}/gpu.yaml")),
    **{
        name: Sound(
            _writes(config_json=json.dumps(config)),
            lambda folder: read_config(folder / "config.json"),
        )
        for name, config in (("model", _MODEL), ("model of experts", _EXPERTS))
    },
    "load tests": Sound(
        _writes(tests_json=json.dumps([files.LOAD_TEST])),
        lambda folder: read_load_tests(folder / "tests.json"),
    ),
    "recording": Sound(
        _writes(r_jsonl=_lines(_RECORDED)), lambda folder: read_recording(folder / "r.jsonl")
    ),
    "drafts": Sound(
        _writes(d_jsonl=_lines(_DRAFTS)),
        lambda folder: sorted(read_drafts(folder / "d.jsonl").items()),
    ),
    "matrix": Sound(
        _writes(matrix_yaml=json.dumps(_MATRIX)),
        lambda folder: [point.spec.model_dump(mode="json") for point in load_matrix(folder).points],
    ),
    **dict(_experiments()),
}  # fmt: skip
CASES = {f"damaged {kind}": (table, kind) for kind in KINDS}


def main() -> None:
    """Print every change of some kinds and what comes of it."""
    for kind in sys.argv[1:]:
        for key, how, outcome in outcomes(kind):
            print(f"{key}: {how} -> {json.dumps(outcome)}")


if __name__ == "__main__":
    main()
