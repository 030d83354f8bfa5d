"""What cost models price on a few steps full of edges, what fits into memory, what is imported."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from schedlab.sim.cost.attention import Skew
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.importers.llmservingsim import Options, import_bundle
from schedlab.sim.cost.importers.splitwise import import_splitwise
from schedlab.sim.cost.importers.vidur import import_vidur
from schedlab.sim.cost.profile import Fit, FitError, Regime
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.table import TableCostModel, TableReading
from schedlab.sim.cost.table_profile import Curve, RingAllReduce, TableProfile
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.memory import memory_budget
from schedlab.sim.hardware.models import model
from tests.unit import test_importers

# -- prices: steps of every kind on every kind of model, and which lie outside what was measured --

DEPLOYMENTS = {
    "dense": Deployment(model("llama-3-8b"), gpu("a100-80gb")),
    "normed heads on 2 devices": Deployment(model("qwen3-8b"), gpu("h100"), 2),
    "more devices than KV heads": Deployment(model("llama-3-70b"), gpu("h100"), 16),
    "learnt positions": Deployment(model("opt-13b"), gpu("a100-40gb")),
    "experts on 2 devices": Deployment(model("mixtral-8x7b"), gpu("h100"), 2),
    "experts shared by 4 engines": Deployment(
        model("qwen3-30b-a3b"), gpu("h200"), data_parallel_size=4, enable_expert_parallel=True
    ),
    "a shared expert": Deployment(model("glm-4.5-air"), gpu("h200"), 4),
    "8 bits": Deployment(model("llama-3-8b"), gpu("h100"), dtype="fp8", kv_cache_dtype="fp8"),
    "4-bit weights": Deployment(model("qwen2.5-7b"), gpu("rtx-4090"), weight_dtype="int4"),
}
_COEFFICIENTS = {
    "decode_context_sum_tokens": 3.3e-9, "decode_context_max_tokens": 2.1e-9,
    "prefill_attention_pairs": 1.3e-9, "num_decodes": 110e-9, "num_prefills": 1000e-9,
    "swapped_bytes": 2e-9,
}  # fmt: skip
_ERROR = FitError(mape=0.03, p90=0.06, max=0.2, bias=-0.01, num_points=100)
_BOX = {
    "new_tokens": (2.0, 130.0), "num_decodes": (1.0, 65.0), "num_prefills": (1.0, 1.0),
    "decode_context_sum_tokens": (10.0, 7000.0), "decode_context_max_tokens": (5.0, 930.0),
}  # fmt: skip
_FIT = Fit(
    Regime((1, 7, 60, 64, 100), (10e-6, 21e-6, 40e-6, 39e-6, 70e-6), _COEFFICIENTS),
    Regime((1, 8, 64), (5e-6, 12e-6, 30e-6), _COEFFICIENTS, buckets=(1, 2, 4, 8, 64)),
    _BOX, train=_ERROR, held_out=_ERROR,
)  # fmt: skip
_POINTS = [
    (chunk, kv, n, context, 1.7 + 0.9 * chunk + kv**0.7 + 3 * n**0.9 + (chunk + n) * context**0.6)
    for chunk in (0, 16, 64, 300)
    for kv in ((0,) if chunk == 0 else (0, 100, 900))
    for n in (0, 1, 4, 40)
    for context in ((0,) if n == 0 else (16, 128, 900))
    if chunk or n
]
_GRID_AXES = ("prefill_chunk", "kv_prefill", "num_decodes", "kv_decode", "us")
_GRID = dict(zip(_GRID_AXES, map(list, zip(*_POINTS, strict=True)), strict=True))
_CELLS = {
    (chunk, n, rate, big, kv): 0.1 + 0.07 * n + 0.2 * rate + 0.03 * big + 0.01 * kv
    for chunk in (0, 16, 65)
    for n in range(3)
    for rate in range(2)
    for big in range(3)
    for kv in range(2)
}
_SKEW = Skew((2.0, 8.0), (0.5,), (100.0, 910.0), (30.0,), _CELLS, 0.1)
_TABLE = TableProfile(
    by_tokens=(
        Curve("dense", 2, (1.0, 65.0, 129.0), (10.0, 30.0, 110.0)),
        Curve("moe", 3, (1.0, 200.0), (4.0, 90.0), shared=True),
    ),
    by_requests=(Curve("head", 1, (1.0, 40.0), (5.0, 23.0)),),
    attention=_GRID,
    attention_calls=3,
    skew=_SKEW,
    all_reduce=RingAllReduce(4, 2, 128.0, 1e-6, 1e9),
)
_BY_KEY = {"prefill_key" if k == "kv_prefill" else k: column for k, column in _GRID.items()}
_META = {"model": "llama-3-8b", "hardware": "a100", "dtype": "bf16", "tensor_parallel_size": 1}
_READING = TableReading(profiling_overhead_s=2e-6, separate_prefills=True, nearest_skew=True)
MEASURED: dict[str, CostModel] = {
    "fitted": FittedCostModel(_FIT, _META),
    "table": TableCostModel(_TABLE, _META),
    "table read otherwise": TableCostModel(_TABLE, _META, reading=_READING),
    "table by key length": TableCostModel(replace(_TABLE, attention=_BY_KEY, skew=None), _META),
    "table of two rates": TableCostModel(
        replace(
            _TABLE,
            attention={"us_per_pair": 0.02, "us_per_kv_token": 0.7, "us_per_call": 1.0},
            skew=None,
        ),
        _META,
    ),
}
# Rows at the edges of tiles and of captured graphs, contexts at the edges of what was measured.
_ALONE = BatchShape(1, 15, 15, rows_sampled=1, num_running=1, decode_context_min_tokens=15)
_MANY = BatchShape(64, 7000, 930, rows_sampled=64, num_running=64, decode_context_min_tokens=3)
SHAPES = {
    "nothing decodes": BatchShape(0, 0, 0, ((65, 0),), rows_sampled=1, num_running=1),
    "alone": _ALONE,
    "at the end of the range": replace(
        _ALONE,
        decode_context_sum_tokens=930,
        decode_context_max_tokens=930,
        decode_context_min_tokens=930,
    ),
    "unequal": BatchShape(4, 1300, 900, rows_sampled=4, decode_context_min_tokens=17),
    "many": _MANY,
    "a row more than a tile": replace(_MANY, num_decodes=129, rows_sampled=129),
    "padded": replace(
        _MANY,
        num_decodes=5,
        padding_tokens=9,
        padding_rows=3,
        padding_context_tokens=450,
        rows_sampled=8,
    ),
    "rows that wait for others": BatchShape(
        2, 60, 40, padding_tokens=1, padding_rows=1, rows_sampled=9, decode_context_min_tokens=20
    ),
    "gathered": replace(_MANY, gathered_tokens=777),
    "one chunk": BatchShape(0, 0, 0, ((300, 900),), rows_sampled=0, num_running=1),
    "mixed": BatchShape(
        4, 3000, 910, ((17, 100), (64, 0), (1, 5)), rows_sampled=6, decode_context_min_tokens=500
    ),
    "single tokens": BatchShape(0, 0, 0, ((1, 70), (1, 30), (40, 2)), rows_sampled=3),
    "two tokens": BatchShape(1, 15, 15, ((2, 70), (1, 30)), rows_sampled=3),
    "a long decode beside": BatchShape(
        2, 60_000, 59_000, ((8, 8),), rows_sampled=3, decode_context_min_tokens=1000
    ),
    "swapping": BatchShape(1, 15, 15, ((8, 8),), rows_sampled=2, swapped_bytes=5000),
}


def prices(name: str) -> dict[str, Any]:
    """Price steps: the first, several at once, those outside."""
    cost = MEASURED.get(name) or RooflineCostModel(DEPLOYMENTS[name])
    found: dict[str, Any] = {}
    for label, shape in SHAPES.items():
        if shape.swapped_bytes and name.startswith("table"):
            continue
        many = 1 if shape.chunks or shape.swapped_bytes else 60
        steps = cost.step_ns(shape, many)
        outside = {key: list(map(int, ks)) for key, ks in cost.outside(shape, many).items()}
        found[label] = [steps[0], sum(steps[: many // 2]), sum(steps), _ends(outside)]
        if many > 1:  # short segments are priced another way than long ones
            assert cost.step_ns(shape, 11) == steps[:11], label
    return found


def _ends(outside: dict[str, list[int]]) -> dict[str, list[int]]:
    return {key: [steps[0], steps[-1], len(steps)] for key, steps in sorted(outside.items())}


def memory(name: str) -> dict[str, Any]:
    """Share out the memory of a deployment, for a few limits of batches."""
    d = DEPLOYMENTS[name]
    found = {}
    for tokens, rows, block_size in ((2048, 256, 16), (8192, 64, 32)):
        budget = memory_budget(
            d.model,
            d.gpu,
            gpu_memory_utilization=0.92,
            block_size=block_size,
            max_num_batched_tokens=tokens,
            max_num_seqs=rows,
            dtype=d.dtype,
            weight_dtype=d.stored_dtype,
            kv_dtype=d.kv_dtype,
            tensor_parallel_size=d.tensor_parallel_size,
            data_parallel_size=d.data_parallel_size,
        )
        found[f"{tokens} tokens of {rows}"] = [
            budget.weight_bytes,
            budget.activation_bytes,
            budget.kv_bytes_per_token,
            budget.num_blocks,
        ]
    return found


# -- profiles of others, as they are understood --------------------------------------------------

SKEW_META = {
    "skew_fit": {
        "enabled": True,
        "bucket_axes": {
            "n_bins": [0, 2, 8], "n_labels": ["few", "many"],
            "skew_rate_bins": [0.0, 0.5], "skew_rate_labels": ["even"],
            "kv_big_bins": [0, 100, 900], "kv_big_labels": ["short", "long"],
            "kp_bins": [0, 30], "kp_labels": ["none"],
        },
        "per_tp": {1: {"alpha_default": 0.25}},
    }
}  # fmt: skip
IMPORTS = ("skewed bundle", "experts of 2 engines", "experts by width", "vidur", "splitwise")


def imported(name: str) -> dict[str, Any]:
    """Import a small profile of another simulator; what is made of it."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        if name == "skewed bundle":
            path = test_importers.bundle(folder, meta=SKEW_META)
            header = ["pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha"]
            cells = [
                (pc, n, "even", big, "none", (pc + 1) * 0.01 * len(n + big))
                for pc in (0, 16)
                for n in ("few", "many")
                for big in ("short", "long")
            ]
            test_importers.write_csv(path / "tp1/skew_fit.csv", header, cells)
            found = import_bundle(path, Options())
        elif name == "experts of 2 engines":
            sharing = {"data_parallel_size": 2, "expert_parallel": True}
            _, found = test_importers.experts_curve(folder, (1, 4), **sharing)
        elif name == "experts by width":
            _, found = test_importers.experts_curve(folder, (1, 2), tensor_parallel_size=2)
        elif name == "vidur":
            rows = [(2, 8192, 2, 0.1), (2, 81920, 2, 0.2), (2, 8192, 1, 9)]
            header = ["num_workers", "size", "devices_per_node", "time_stats.all_reduce.median"]
            test_importers.write_csv(folder / "network.csv", header, rows)
            path = test_importers.vidur_rows(folder)
            found = import_vidur(path, "a100", None, 2, folder / "network.csv")
        else:
            path = test_importers.splitwise_rows(folder)
            found = import_splitwise(path, "llama2-70b", "a100-80gb")
        found.save(folder / "out")
        table = json.loads((folder / "out" / "table.json").read_text(encoding="utf-8"))
    return {key: json.dumps(_digits(value)) for key, value in sorted(table.items())}


def _digits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _digits(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_digits(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


CASES = {
    **{f"prices {name}": (prices, name) for name in (*DEPLOYMENTS, *MEASURED)},
    **{f"memory {name}": (memory, name) for name in DEPLOYMENTS},
    **{f"import {name}": (imported, name) for name in IMPORTS},
}
