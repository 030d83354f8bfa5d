"""Vidur profiles: linear layers by tokens, and collectives by size.

Source: microsoft/vidur, data/profiling/compute and data/profiling/network. Times are milliseconds.
The attention measurements of that project are a file of their own and are not read: attention is
priced by a roofline instead, and so is the language-model head, which was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from schedlab.sim.cost.efficiency import efficiency_of
from schedlab.sim.cost.importers.all_reduce import all_reduce_curve
from schedlab.sim.cost.importers.csv_table import CsvTable, medians, read_csv
from schedlab.sim.cost.importers.imported import Imported
from schedlab.sim.cost.product import Product
from schedlab.sim.cost.table_profile import Curve, TableProfile
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import Gpu, gpu
from schedlab.sim.hardware.memory import check_tensor_parallel
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import model

_PER_LAYER = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm",
    "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
_BYTES = 2.0
_REDUCES_PER_LAYER = 2
_MOST_PADDING = 1023
"""Rows of the embedding beyond the vocabulary: Vidur has 32,768 for 32,000."""


def import_vidur(
    path: Path,
    hardware: str,
    model_name: str | None = None,
    tensor_parallel_size: int = 1,
    network: Path | None = None,
) -> Imported:
    """Return the profile of one mlp.csv.

    Parameters
    ----------
    path : Path
        ``compute/<gpu>/<org>/<model>/mlp.csv``.
    hardware : str
        The GPU, for what was not measured.
    model_name : str, optional
        The model; the name of the file's folder if absent.
    tensor_parallel_size : int
        Which rows to take.
    network : Path, optional
        all_reduce.csv of the machine; needed for more than one GPU.

    Raises
    ------
    SpecError
        If a file is missing or malformed, is of another model, or has no rows of that tensor
        parallel size.
    """
    table = read_csv(path, ("num_tokens", "num_tensor_parallel_workers"))
    shape, device = model(model_name or path.absolute().parent.name), gpu(hardware)
    check_tensor_parallel(shape, tensor_parallel_size)
    _check_shape(table, shape)
    workers = table.whole("num_tensor_parallel_workers")
    rows = [i for i, n in enumerate(workers) if n == tensor_parallel_size]
    if not rows:
        there = ", ".join(map(str, sorted(set(workers))))
        raise SpecError(f"{path}: no rows of tensor parallel size {tensor_parallel_size}: {there}")
    tokens = table.whole("num_tokens", least=1)
    curves = [_curve(table, "emb", 1, tokens, rows)]
    curves += [_curve(table, name, shape.num_layers, tokens, rows) for name in _PER_LAYER]
    assumptions = [
        "attention follows a roofline of the datasheet: its measurements are not in this profile",
        "the language-model head follows a roofline: it was not measured",
        "one addition of the residual a layer, as Vidur counts; times are medians",
    ]
    if tensor_parallel_size > 1:
        if network is None:
            raise SpecError("tensor parallelism needs all-reduces: give --network all_reduce.csv")
        calls = _REDUCES_PER_LAYER * shape.num_layers
        curve, assumed = all_reduce_curve(network, shape, tensor_parallel_size, calls)
        curves.append(curve)
        assumptions.append(assumed)
    share = 1e-6 * tensor_parallel_size
    pair_flops = 4 * shape.num_heads * shape.head_dim
    kv_bytes = shape.kv_bytes_per_token("fp16") / shape.num_layers
    reached = efficiency_of(device).attention
    compute = device.peak_flops_per_s("fp16") * reached.flops_share
    bandwidth = device.memory_bytes_per_s * reached.bandwidth_share
    profile = TableProfile(
        by_tokens=tuple(curves),
        by_requests=(_head(shape, device, tensor_parallel_size),),
        attention={
            "us_per_pair": pair_flops / compute / share,
            "us_per_kv_token": kv_bytes / bandwidth / share,
            "us_per_call": 1e6 * reached.latency_s,
        },
        attention_calls=shape.num_layers,
    )
    meta = {
        "model": shape.name,
        "hardware": device.name,
        "dtype": "fp16",
        "tensor_parallel_size": tensor_parallel_size,
        "source": "Vidur",
        "published_error": "none published of this profile, a mixture of measurement and roofline "
        "(under 9 % of Vidur itself, which measures attention: MLSys 2024)",
    }
    return Imported(profile, meta, tuple(assumptions))


def _check_shape(table: CsvTable, shape: ModelShape) -> None:
    """Refuse a table of another model: in all that the file says of it they must agree."""
    own = {
        "n_embd": shape.hidden_size,
        "n_head": shape.num_heads,
        "n_kv_head": shape.num_kv_heads,
        "n_expanded_embd": shape.intermediate_size,
    }
    for column, value in own.items():
        if (found := set(table.whole(column))) != {value}:
            raise _other_model(table, column, found, shape, value)
    words = set(table.whole("vocab_size"))
    if any(not 0 <= n - shape.vocab_size <= _MOST_PADDING for n in words):
        raise _other_model(table, "vocab_size", words, shape, shape.vocab_size)
    is_gated = set(table.text("use_gated_mlp"))
    if is_gated != {str(shape.mlp == "gated")}:
        raise _other_model(table, "use_gated_mlp", is_gated, shape, shape.mlp == "gated")


def _other_model(
    table: CsvTable, column: str, found: Iterable[object], shape: ModelShape, own: object
) -> SpecError:
    there = ", ".join(sorted(map(str, found)))
    return SpecError(f"{table.path}: {column} is {there}, but {shape.name} has {own}")


def _curve(
    table: CsvTable, name: str, calls: float, tokens: list[int], rows: Iterable[int]
) -> Curve:
    times = table.numbers(f"time_stats.{name}.median", least=0)
    at, us = medians((tokens[i], times[i] * 1e3) for i in rows)
    if not any(us):
        raise SpecError(f"{table.path}: all times of {name} are 0")
    return Curve(name, calls, at, us)


def _head(shape: ModelShape, device: Gpu, workers: int) -> Curve:
    """Price the head as the roofline does."""
    inputs, outputs = shape.hidden_size, shape.vocab_size / workers
    product = Product(
        efficiency_of(device).gemm["bf16"],
        inputs,
        outputs,
        weight_bytes=inputs * outputs * _BYTES,
        row_bytes=0,
        peak_flops_per_s=device.peak_flops_per_s("fp16"),
        device=device,
    )
    at = tuple(float(1 << i) for i in range(11))
    return Curve("lm_head", 1, at, tuple(1e6 * product.seconds(n) for n in at))
