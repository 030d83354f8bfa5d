"""Public tables of kernels, read into one form: columns of shapes, and microseconds.

Sources: ai-dynamo/aiconfigurator (``systems/`` of the PyPI package aiconfigurator-core),
casys-kaist/LLMServingSim (``profiler/perf``), microsoft/vidur (``data/profiling``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.cost.importers.csv_table import read_csv
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import canonical_gpu, gpu_names
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import canonical_model, model, model_names

Columns = Mapping[str, npt.NDArray[np.float64]]

SYSTEMS = {
    "a100_sxm": "a100-80gb", "h100_sxm": "h100-80gb", "h200_sxm": "h200", "b200_sxm": "b200",
    "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
"""AIConfigurator's folders of GPUs whose kernels of vLLM were measured, and our names."""

GEMM_FORMATS = {
    "bfloat16": "bf16", "fp8": "fp8", "nvfp4": "fp4", "sq": "int8", "int8_wo": "bf16/int8",
    "int4_wo": "bf16/int4",
}  # fmt: skip
"""AIConfigurator's formats of products, and ours (`schedlab.sim.cost.efficiency.gemm_format`)."""

_ENGINES = ("vllm", "sglang", "trtllm")  # the first that has a format is taken


@dataclass(frozen=True)
class Table:
    """Measurements of one kind of kernel on one GPU.

    Attributes
    ----------
    gpu : str
        Our name of the GPU.
    kind : str
        ``gemm FORMAT``, ``decode``, ``prefill``, ``mixed``, ``elementwise``, ``sampler``,
        ``experts``, ``all_reduce`` or ``launch``.
    source : str
        Where it was read.
    columns : mapping of str to ndarray, shape (num_rows,)
        Shapes, and ``us``.
    """

    gpu: str
    kind: str
    source: str
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["us"])


def aiconfigurator_tables(systems: Path) -> Iterator[Table]:
    """Yield the tables of a ``systems`` folder: products, attention, experts, all-reduces.

    Raises
    ------
    SpecError
        If it holds no data of a known GPU.
    """
    found = [name for name in SYSTEMS if (systems / "data" / name).is_dir()]
    if not found:
        raise SpecError(f"{systems}: no data/{next(iter(SYSTEMS))} or other known GPU in it")
    for name in found:
        folder, device = systems / "data" / name, SYSTEMS[name]
        yield from _gemms(folder, device)
        yield from _attention(folder, device)
        if path := _newest(folder, "moe", "vllm", "moe_perf.parquet"):
            yield Table(device, "experts", _told(path), _experts(path))
        if path := _newest(folder, "comm", "vllm", "custom_allreduce_perf.parquet"):
            yield from _all_reduces(path, device)


def _gemms(folder: Path, device: str) -> Iterator[Table]:
    seen: set[str] = set()
    for engine in _ENGINES:
        path = _newest(folder, "gemm", engine, "gemm_perf.parquet")
        if path is None:
            continue
        data = _parquet(path)
        for theirs, ours in GEMM_FORMATS.items():
            rows = data["gemm_dtype"] == theirs
            if ours in seen or not rows.any():
                continue
            seen.add(ours)
            columns = {key: data[key][rows].astype(float) for key in ("m", "n", "k")}
            columns["us"] = 1e3 * data["latency"][rows].astype(float)
            yield Table(device, f"gemm {ours}", _told(path), columns)


def _attention(folder: Path, device: str) -> Iterator[Table]:
    for kind, file in (("decode", "generation"), ("prefill", "context")):
        path = _newest(folder, "attention", "vllm", f"{file}_attention_perf.parquet")
        if path is None:
            continue
        data = _parquet(path)
        rows = (data["kv_cache_dtype"] == "bfloat16") & (data["head_dim"] == 128)
        if "window_size" in data:
            rows &= data["window_size"] == 0
        names = {"rows": "batch_size", "heads": "num_heads", "kv_heads": "num_key_value_heads"}
        columns = {key: data[theirs][rows].astype(float) for key, theirs in names.items()}
        step = data["step"][rows].astype(float)
        if kind == "decode":
            columns["context"] = step
        else:
            columns |= {"new": data["isl"][rows].astype(float), "cached": step}
        columns["us"] = 1e3 * data["latency"][rows].astype(float)
        packs = any("fa3" in name or "trtllm" in name for name in set(data["kernel_source"][rows]))
        columns["packs"] = np.full(len(step), float(packs))
        yield Table(device, kind, _told(path), columns)


def _experts(path: Path) -> Columns:
    data = _parquet(path)
    of = {
        "tokens": "num_tokens", "hidden": "hidden_size", "width": "inter_size", "top": "topk",
        "experts": "num_experts", "slices": "moe_tp_size", "shares": "moe_ep_size",
    }  # fmt: skip
    # Where experts are chosen evenly; the newer tables have chosen ones, too.
    even = data["distribution"] == "balanced"
    rows = (data["moe_dtype"] == "bfloat16") & (even | ~even.any())
    columns = {key: data[theirs][rows].astype(float) for key, theirs in of.items()}
    columns["even"] = even[rows].astype(float)
    columns["us"] = 1e3 * data["latency"][rows].astype(float)
    return columns


def _all_reduces(path: Path, device: str) -> Iterator[Table]:
    data = _parquet(path)
    us = 1e3 * data["latency"].astype(float)
    # They count numbers of 16 bits.
    sizes, devices = 2.0 * data["message_size"].astype(float), data["num_gpus"].astype(float)
    in_graph = np.array(["graph" in name for name in data["kernel_source"]])
    columns = {"bytes": sizes[in_graph], "devices": devices[in_graph], "us": us[in_graph]}
    yield Table(device, "all_reduce", _told(path), columns)
    graph = {(n, s): t for n, s, t in zip(devices[in_graph], sizes[in_graph], us[in_graph])}  # noqa: B905
    # Small ones only: in others the devices wait for each other, and not for the host.
    more = [
        t - graph[n, s]
        for n, s, t in zip(devices[~in_graph], sizes[~in_graph], us[~in_graph])  # noqa: B905
        if n == 2 and s <= 2**15
    ]
    if more:
        yield Table(device, "launch", _told(path), {"us": np.array(more)})


def llmservingsim_tables(perf: Path) -> Iterator[Table]:
    """Yield the tables of all bf16 bundles below a ``perf`` folder that run on one GPU.

    Raises
    ------
    SpecError
        If there is none of a known model and GPU.
    """
    found = False
    for folder in sorted(perf.glob("*/*/*/bf16/tp1")):
        hardware, name = folder.parts[-5], folder.parts[-3]
        device = canonical_gpu(hardware)
        if device not in gpu_names() or canonical_model(name) not in model_names():
            continue
        found = True
        yield from _bundle(folder, device, model(name))
    if not found:
        raise SpecError(f"{perf}: no <GPU>/<org>/<model>/bf16/tp1 of a known GPU and model in it")


def _bundle(folder: Path, device: str, shape: ModelShape) -> Iterator[Table]:
    told = "LLMServingSim " + "/".join(folder.parts[-5:])
    dense = read_csv(folder / "dense.csv", ("layer", "tokens", "time_us"))
    layers, tokens, us = dense.text("layer"), dense.numbers("tokens"), dense.numbers("time_us")
    width = shape.num_heads * shape.head_dim
    kv_width = 2 * shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    products = {
        "qkv_proj": (width + kv_width, hidden), "o_proj": (hidden, width),
        "gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
    rows = [
        (t, *products[layer], u)
        for layer, t, u in zip(layers, tokens, us, strict=True)
        if layer in products and not shape.num_experts
    ]
    one_each = read_csv(folder / "per_sequence.csv", ("layer", "sequences", "time_us"))
    each = list(
        zip(
            one_each.text("layer"), one_each.numbers("sequences"), one_each.numbers("time_us"),
            strict=True,
        )
    )  # fmt: skip
    rows += [(n, shape.vocab_size, hidden, u) for layer, n, u in each if layer == "lm_head"]
    yield Table(device, "gemm bf16", told, _columns(("m", "n", "k", "us"), rows))
    # Values of 16 bits read and written for each token: the residual twice, or three times half.
    moved = {
        "layernorm": 4 * hidden, "rotary_emb": 2 * (width + kv_width / 2), "act_fn": 3 * inner,
    }  # fmt: skip
    plain = [
        (2 * t * moved[layer], u)
        for layer, t, u in zip(layers, tokens, us, strict=True)
        if layer in moved
    ]
    yield Table(device, "elementwise", told, _columns(("bytes", "us"), plain))
    logits = [(n * shape.vocab_size, u) for layer, n, u in each if layer == "sampler"]
    yield Table(device, "sampler", told, _columns(("logits", "us"), logits))
    grid = read_csv(folder / "attention.csv", ("prefill_chunk", "n_decode", "kv_decode"))
    if "kv_prefill" not in grid.columns:
        return  # the newer format, by keys instead of cached tokens
    names = {"new": "prefill_chunk", "cached": "kv_prefill", "rows": "n_decode",
             "context": "kv_decode", "us": "time_us"}  # fmt: skip
    columns = {key: np.array(grid.numbers(theirs)) for key, theirs in names.items()}
    columns |= {
        "heads": np.full(len(columns["us"]), float(shape.num_heads)),
        "kv_heads": np.full(len(columns["us"]), float(shape.num_kv_heads)),
    }
    has_chunk, has_rows = columns["new"] > 0, columns["rows"] > 0
    yield Table(device, "decode", told, _where(columns, ~has_chunk))
    alone = _where(columns, has_chunk & ~has_rows)
    yield Table(device, "prefill", told, {**alone, "rows": np.ones(len(alone["us"]))})
    yield Table(device, "mixed", told, _where(columns, has_chunk & has_rows))


def vidur_tables(profiling: Path) -> Iterator[tuple[str, Table]]:
    """Yield the products of each model's layer in a ``profiling`` folder, with the model's name.

    Raises
    ------
    SpecError
        If it holds none of a known GPU.
    """
    found = False
    for path in sorted(profiling.glob("compute/*/*/*/mlp.csv")):
        device = canonical_gpu(path.parts[-4])
        if device not in gpu_names():
            continue
        found = True
        table = read_csv(path, ("num_tokens", "num_tensor_parallel_workers"))
        numbers = {
            key: np.array(table.numbers(key))
            for key in ("num_tokens", "num_tensor_parallel_workers", "n_head", "n_kv_head",
                        "n_embd", "n_expanded_embd")
        }  # fmt: skip
        gated = np.array([cell == "True" for cell in table.text("use_gated_mlp")])
        workers, hidden = numbers["num_tensor_parallel_workers"], numbers["n_embd"]
        head_dim = hidden / numbers["n_head"]
        kv_heads = np.ceil(numbers["n_kv_head"] / workers)
        inner = numbers["n_expanded_embd"] / workers
        shapes = {
            "attn_pre_proj": ((numbers["n_head"] / workers + 2 * kv_heads) * head_dim, hidden),
            "attn_post_proj": (hidden, hidden / workers),
            "mlp_up_proj": (np.where(gated, 2, 1) * inner, hidden),
            "mlp_down_proj": (hidden, inner),
        }
        parts = [
            {
                "m": numbers["num_tokens"], "n": n, "k": k, "workers": workers,
                "us": 1e3 * np.array(table.numbers(f"time_stats.{name}.median")),
            }
            for name, (n, k) in shapes.items()
        ]  # fmt: skip
        columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        told = "Vidur " + "/".join(path.parts[-4:])
        yield path.parts[-2], Table(device, "gemm bf16", told, columns)
    if not found:
        raise SpecError(f"{profiling}: no compute/<gpu>/<org>/<model>/mlp.csv of a known GPU in it")


def _newest(folder: Path, kind: str, engine: str, file: str) -> Path | None:
    paths = [path for path in (folder / kind / engine).glob(f"*/{file}") if path.stat().st_size]
    return max(paths, key=_version) if paths else None


def _version(path: Path) -> list[int]:
    return [int("".join(c for c in part if c.isdigit()) or 0) for part in path.parts[-2].split(".")]


def _told(path: Path) -> str:
    return "AIConfigurator " + "/".join(path.parts[-5:])


def _parquet(path: Path) -> dict[str, npt.NDArray[Any]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_table

    try:
        table = read_table(path)
    except (ArrowInvalid, OSError) as error:
        raise SpecError(f"{path}: no parquet file (a pointer to one?): {error}") from error
    return {name: table[name].to_numpy() for name in table.column_names}


def _columns(names: tuple[str, ...], rows: Sequence[tuple[float, ...]]) -> Columns:
    return dict(zip(names, np.array(rows, dtype=float).T, strict=True))


def _where(columns: Columns, rows: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[np.float64]]:
    return {key: values[rows] for key, values in columns.items()}
