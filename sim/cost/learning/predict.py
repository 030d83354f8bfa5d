"""Times of many kernels at once, by the formulas that `schedlab.sim.cost.efficiency` prices by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from schedlab.sim.cost.efficiency import (
    AllReduce,
    Attention,
    Elementwise,
    Experts,
    Gemm,
    Host,
    Sampler,
)
from schedlab.sim.cost.learning.tables import Columns
from schedlab.sim.cost.product import OVERLAP, TILE
from schedlab.sim.hardware.dtypes import dtype_bytes, stored_bytes
from schedlab.sim.hardware.gpus import Gpu

Floats = npt.NDArray[np.float64]


def gemm_us(kernel: Gemm, table: Columns, gpu: Gpu, formats: str) -> Floats:
    """Price products; columns m (rows), n (outputs) and k (inputs)."""
    dtype, _, stored = formats.partition("/")
    m, n, k = table["m"], table["n"], table["k"]
    tile = np.where(m > TILE / 2, TILE, TILE / 2)
    whole_rows = np.ceil(m / tile) * tile
    tiles = np.ceil(whole_rows / TILE) * np.ceil(n / TILE)
    wave = np.ceil(tiles / gpu.num_sms) * gpu.num_sms * TILE * TILE
    plain = 1.0 - kernel.tile_share - kernel.wave_share
    area = (plain * m + kernel.tile_share * whole_rows) * n + kernel.wave_share * wave
    compute = 2e6 * k * area / (gpu.peak_flops_per_s(dtype) * kernel.flops_share)
    moved = n * k * stored_bytes(stored or dtype) + m * (k * dtype_bytes(dtype) + 2.0 * n)
    read = 1e6 * moved / (gpu.memory_bytes_per_s * kernel.bandwidth_share)
    return _us(kernel.latency_s) + (compute**OVERLAP + read**OVERLAP) ** (1 / OVERLAP)


def decode_us(kernel: Attention, table: Columns, gpu: Gpu) -> Floats:
    """Price decodes; columns rows, context, heads, kv_heads."""
    return _us(kernel.latency_s) + _alone_us(kernel, table, gpu)


def prefill_us(kernel: Attention, table: Columns, gpu: Gpu) -> Floats:
    """Price prompts of one size; columns rows, new, cached, heads, kv_heads."""
    pole = _us(kernel.key_s) * (table["new"] + table["cached"])
    work = table["rows"] * _chunk_us(kernel, table, gpu)
    return _us(kernel.latency_s) + np.maximum(work, pole)


def mixed_us(kernel: Attention, table: Columns, gpu: Gpu) -> Floats:
    """Price one chunk beside decodes; columns as for both."""
    keys = table["context"] + 1.0
    rows = kernel.mixed_rows * table["rows"]
    padded = rows * (_query_us(kernel, table, gpu) + keys * _pair_us(kernel, table, gpu))
    work = np.maximum(_alone_us(kernel, table, gpu), padded) + _chunk_us(kernel, table, gpu)
    longest = np.maximum(keys, table["new"] + table["cached"])
    return _us(kernel.latency_s) + np.maximum(work, _us(kernel.key_s) * longest)


def elementwise_us(kernel: Elementwise, table: Columns, gpu: Gpu) -> Floats:
    """Price traffic; column bytes."""
    moved = 1e6 * table["bytes"] / (gpu.memory_bytes_per_s * kernel.bandwidth_share)
    return _us(kernel.latency_s) + moved


def sampler_us(kernel: Sampler, table: Columns, gpu: Gpu) -> Floats:
    """Price sampling; column logits."""
    moved = 1e6 * kernel.bytes_per_logit * table["logits"] / gpu.memory_bytes_per_s
    return _us(kernel.latency_s) + moved


def experts_us(kernel: Experts, table: Columns, gpu: Gpu) -> Floats:
    """Price gated experts in 16 bits.

    Columns tokens, hidden, width, top, experts, slices (of an expert's width), shares (of the
    experts), and even: 1 where every expert was given as many tokens as the others.
    """
    tokens, top, experts = table["tokens"], table["top"], table["experts"]
    by_chance = experts * (1 - (1 - top / experts) ** tokens)
    touched = np.where(table["even"] > 0, np.minimum(tokens * top, experts), by_chance)
    width, pairs = table["width"] / table["slices"], tokens * top / table["shares"]
    parameters = 3 * table["hidden"] * width
    moved = 2 * (touched / table["shares"] * parameters + pairs * (2 * table["hidden"] + 3 * width))
    read = 1e6 * moved / (gpu.memory_bytes_per_s * kernel.bandwidth_share)
    compute = 2e6 * pairs * parameters / (gpu.peak_flops_per_s("bf16") * kernel.flops_share)
    return _us(kernel.latency_s) + read + compute


def all_reduce_us(kernel: AllReduce, table: Columns, gpu: Gpu) -> Floats:
    """Price all-reduces; columns bytes, devices."""
    further = table["devices"] - 1
    moved = 2e6 * further / table["devices"] * table["bytes"]
    moved *= 1.0 + kernel.crowding * (table["devices"] - 2)
    start = _us(kernel.latency_s) + _us(kernel.hop_s) * further
    return start + moved / (gpu.interconnect_bytes_per_s * kernel.link_share)


def launch_us(kernel: Host, table: Columns, gpu: Gpu) -> Floats:
    """Price what a launch outside of a graph adds."""
    return np.full(len(table["us"]), _us(kernel.call_s))


PREDICT: dict[str, Callable[..., Floats]] = {
    "decode": decode_us, "prefill": prefill_us, "mixed": mixed_us, "elementwise": elementwise_us,
    "sampler": sampler_us, "experts": experts_us, "all_reduce": all_reduce_us, "launch": launch_us,
}  # fmt: skip
"""By kind of table; products go by their format, too: `gemm_us`."""


def _us(seconds: float) -> float:
    return 1e6 * seconds


def _alone_us(kernel: Attention, table: Columns, gpu: Gpu) -> Floats:
    """Price decodes without prompts beside them, and without the start of the call."""
    rows = _us(kernel.row_s) * table["rows"] * table["kv_heads"] / gpu.num_sms
    moved = 1e6 * _kv_bytes(table) * table["rows"] * (table["context"] + 1.0)
    read = moved / (gpu.memory_bytes_per_s * kernel.bandwidth_share)
    ramped = read + np.minimum(read, _us(kernel.ramp_s))
    return np.maximum(rows, kernel.row_share * rows + ramped)


def _chunk_us(kernel: Attention, table: Columns, gpu: Gpu) -> Floats:
    new, cached = table["new"], table["cached"]
    queries = np.ceil(new / kernel.query_block) * kernel.query_block
    pairs = cached + (new + 1) / 2
    compute = queries * (_query_us(kernel, table, gpu) + pairs * _pair_us(kernel, table, gpu))
    share = gpu.memory_bytes_per_s * kernel.bandwidth_share
    return np.maximum(compute, 1e6 * _kv_bytes(table) * (new + cached) / share)


def _query_us(kernel: Attention, table: Columns, gpu: Gpu) -> Floats:
    return _us(kernel.block_s) * table["heads"] / TILE / gpu.num_sms


def _pair_us(kernel: Attention, table: Columns, gpu: Gpu) -> Floats:
    return 4e6 * table["heads"] * _HEAD_DIM / (gpu.peak_flops_per_s("bf16") * kernel.flops_share)


def _kv_bytes(table: Columns) -> Floats:
    return 4.0 * _HEAD_DIM * table["kv_heads"]


_HEAD_DIM = 128.0  # of all tables that are read
