"""How fast the kernels are, as ratios within one run: to a device copy, to torch's attention.

Absolute times say little across machines and days; every figure that is held against a goal is
one measurement divided by another of the same run. The goals are those of `docs/kernels.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from schedlab.gpu_backend import triton_ops
from schedlab.gpu_backend.device_timer import Timer, Timing
from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
"""The attention of Llama-3-8B."""

_KV_BYTES_PER_TOKEN = 2 * NUM_KV_HEADS * HEAD_DIM * 2
_SCALE = HEAD_DIM**-0.5
# Data that one measurement rotates over: several times any L2 cache.
_ROTATED_BYTES = 512 * 2**20
_MAX_ROTATION = 16


Batch = tuple[str, tuple[int, ...]]
"""Name and contexts of a decode batch."""

DECODE_BATCHES: tuple[Batch, ...] = (
    ("B=128 ctx=2048", (2048,) * 128),
    ("B=32 ctx=2048", (2048,) * 32),
    ("B=16 ctx=8192", (8192,) * 16),
    ("B=64 skewed 512..32768", (32768, *range(512, 512 + 63 * 32, 32))),
)


class BenchResult(NamedTuple):
    """One result, with what it is held against."""

    name: str
    value: float
    unit: str
    required: float | None = None
    stretch: float | None = None
    smaller_is_better: bool = False
    detail: str = ""

    def meets(self, goal: float | None) -> bool | None:
        """Whether the value reaches a goal; None where there is none."""
        if goal is None:
            return None
        return self.value <= goal if self.smaller_is_better else self.value >= goal


class Paged(NamedTuple):
    """A cache with room for a batch, and block tables into it."""

    k_pool: Tensor
    v_pool: Tensor
    tables: list[Tensor]
    """Disjoint sets of blocks, to rotate over."""


def paged_cache(
    device: torch.device,
    dtype: torch.dtype,
    contexts: Sequence[int],
    *,
    contiguous: bool = False,
    rotation: int | None = None,
) -> Paged:
    """Allocate random caches for a batch.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
    contexts : sequence of int
        Tokens of each sequence.
    contiguous : bool
        One block for each whole sequence, in order, instead of shuffled blocks of 16 tokens.
    rotation : int or None
        Copies of the batch on other blocks; None makes enough to exceed the L2 cache.
    """
    longest = max(contexts)
    block_size = longest if contiguous else BLOCK_SIZE
    counts = [-(-c // block_size) for c in contexts]
    if rotation is None:
        copy_bytes = sum(counts) * block_size * _KV_BYTES_PER_TOKEN
        rotation = min(_MAX_ROTATION, -(-_ROTATED_BYTES // copy_bytes))
    num_blocks = 1 + rotation * sum(counts)
    shape = (num_blocks, NUM_KV_HEADS, block_size, HEAD_DIM)
    k_pool, v_pool = (torch.empty(shape, dtype=dtype, device=device).normal_() for _ in "kv")
    ids = torch.arange(1, num_blocks, dtype=torch.int32)
    if not contiguous:
        # Blocks in order would flatter the memory system.
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    tables = []
    parts = iter(ids.split(counts * rotation))
    for _ in range(rotation):
        table = torch.zeros(len(contexts), -(-longest // block_size), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = next(parts)
        tables.append(table.to(device))
    return Paged(k_pool, v_pool, tables)


def time_decode(
    timer: Timer,
    cache: Paged,
    contexts: Sequence[int],
    tile: DecodeTile | None = None,
) -> Timing:
    """Time paged decode attention of one layer."""
    device, dtype = cache.k_pool.device, cache.k_pool.dtype
    q = torch.randn(len(contexts), NUM_HEADS, HEAD_DIM, device=device).to(dtype)
    out = torch.empty_like(q)
    context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)

    def work() -> None:
        for table in cache.tables:
            triton_ops.paged_decode(
                q, cache.k_pool, cache.v_pool, table, context_lens, _SCALE, out, tile
            )

    return timer(work, len(cache.tables))


def time_prefill(
    timer: Timer, cache: Paged, num_tokens: int, tile: PrefillTile | None = None
) -> Timing:
    """Time paged attention of one whole prompt in one layer."""
    device, dtype = cache.k_pool.device, cache.k_pool.dtype
    q = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device=device).to(dtype)
    out = torch.empty_like(q)
    query_start = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    context_lens = query_start[1:]

    def work() -> None:
        for table in cache.tables:
            triton_ops.paged_prefill(
                q, cache.k_pool, cache.v_pool, table, query_start, context_lens, num_tokens,
                _SCALE, out, tile,
            )  # fmt: skip

    return timer(work, len(cache.tables))


def time_sdpa(
    timer: Timer, device: torch.device, dtype: torch.dtype, num_tokens: int, backend: SDPBackend
) -> Timing:
    """Time one of torch's attention backends, by name, on the same prompt without paging.

    Raises
    ------
    RuntimeError
        If the backend cannot run here; the message is torch's.
    """
    q = torch.randn(1, NUM_HEADS, num_tokens, HEAD_DIM, device=device).to(dtype)
    # Expanded beforehand: not every backend groups heads, and this costs it only cache space.
    k, v = (torch.randn_like(q) for _ in "kv")

    def work() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=_SCALE)

    with sdpa_kernel(backend):
        return timer(work)


def decode_figures(
    timer: Timer,
    device: torch.device,
    dtype: torch.dtype,
    copy_rate: float,
    batches: Sequence[Batch] = DECODE_BATCHES,
) -> Iterator[BenchResult]:
    """Yield decode attention against the measured copy rate.

    Parameters
    ----------
    copy_rate : float
        Of `schedlab.gpu_backend.ceilings.device_copy` in the same run, B/s.
    batches : sequence of (str, sequence of int)
        Name and contexts; at least 256 MB of keys and values each, to be held to the goal.
    """
    for name, contexts in batches:
        cache = paged_cache(device, dtype, contexts, rotation=1)
        timing = time_decode(timer, cache, contexts)
        share = sum(contexts) * _KV_BYTES_PER_TOKEN / timing.median_s / copy_rate
        yield BenchResult(
            f"decode {name} / device copy", share, "", 0.70, 0.85, detail=_told(timing)
        )


def single_decode_figure(
    timer: Timer,
    device: torch.device,
    dtype: torch.dtype,
    copy_rate: float,
    context: int = 8192,
    rotation: int | None = None,
) -> BenchResult:
    """Return how long decode attention of a single sequence takes, in us."""
    contexts = (context,)
    cache = paged_cache(device, dtype, contexts, rotation=rotation)
    timing = time_decode(timer, cache, contexts)
    floor_s = context * _KV_BYTES_PER_TOKEN / copy_rate
    return BenchResult(
        f"decode B=1 ctx={context}", timing.median_s * 1e6, "us",
        (2.5 * floor_s + 12e-6) * 1e6, 20.0, True, _told(timing),
    )  # fmt: skip


def paged_decode_figure(
    timer: Timer, device: torch.device, dtype: torch.dtype, batch: Batch = DECODE_BATCHES[0]
) -> BenchResult:
    """Return decode attention on scattered blocks against one block a sequence."""
    name, contexts = batch
    flat, paged = (
        time_decode(
            timer, paged_cache(device, dtype, contexts, contiguous=flat, rotation=1), contexts
        )
        for flat in (True, False)
    )
    return _paged_share(f"decode {name}", flat, paged)


def prefill_figures(
    timer: Timer,
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int] = (2048, 4096, 8192, 16384),
) -> Iterator[BenchResult]:
    """Yield prefill attention against torch's backends by name, and paged against contiguous."""
    backends = (
        ("flash", SDPBackend.FLASH_ATTENTION, 0.9, 1.1),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION, 0.55, 0.75),
    )
    for length in lengths:
        paged = time_prefill(timer, paged_cache(device, dtype, (length,), rotation=1), length)
        # Half of the square is masked; 4 operations a pair and dimension.
        flops = 4 * NUM_HEADS * HEAD_DIM * length * (length + 1) / 2
        yield BenchResult(
            f"prefill S={length}", flops / paged.median_s / 1e12, "TFLOP/s", detail=_told(paged)
        )
        for name, backend, required, stretch in backends:
            title = f"prefill S={length} vs torch {name}"
            try:
                other = time_sdpa(timer, device, dtype, length, backend)
            except RuntimeError as error:
                why = f"not measured: {str(error).splitlines()[0]}"
                yield BenchResult(title, float("nan"), "", required, stretch, detail=why)
                continue
            speed = other.median_s / paged.median_s
            yield BenchResult(title, speed, "", required, stretch, detail=f"torch {_told(other)}")
        cache = paged_cache(device, dtype, (length,), contiguous=True, rotation=1)
        yield _paged_share(f"prefill S={length}", time_prefill(timer, cache, length), paged)


def elementwise_figures(
    timer: Timer, device: torch.device, dtype: torch.dtype, copy_rate: float, rows: int = 8192
) -> Iterator[BenchResult]:
    """Yield the bytes that the small kernels move against the copy rate (no goals are set)."""
    hidden, intermediate = 4096, 14336

    def figure(name: str, num_elements: int, work: Callable[[], object]) -> BenchResult:
        timing = timer(work)
        share = num_elements * dtype.itemsize / timing.median_s / copy_rate
        return BenchResult(f"{name} T={rows} / device copy", share, "", detail=_told(timing))

    x, residual = (torch.randn(rows, hidden, device=device).to(dtype) for _ in "xr")
    weight = torch.ones(hidden, device=device, dtype=dtype)
    yield figure(
        "add_rms_norm", 4 * rows * hidden,
        lambda: triton_ops.add_rms_norm(x, residual, weight, 1e-5),
    )  # fmt: skip
    gate_up = torch.randn(rows, 2 * intermediate, device=device).to(dtype)
    yield figure("silu_and_mul", 3 * rows * intermediate, lambda: triton_ops.silu_and_mul(gate_up))
    widths = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    fused = torch.randn(rows, sum(widths), HEAD_DIM, device=device).to(dtype)
    q, k, v = fused.split(widths, dim=1)
    cache = paged_cache(device, dtype, (rows,), rotation=1)
    cos_sin = torch.randn(rows, HEAD_DIM, device=device)
    positions = torch.arange(rows, device=device)
    slots = cache.tables[0][0].long().repeat_interleave(BLOCK_SIZE)[:rows] * BLOCK_SIZE
    slots += positions % BLOCK_SIZE
    moved = rows * HEAD_DIM * (2 * NUM_HEADS + 2 * NUM_KV_HEADS + 3 * NUM_KV_HEADS)
    yield figure(
        "rope_and_cache", moved,
        lambda: triton_ops.rope_and_cache(
            q, k, v, cos_sin, positions, slots, cache.k_pool, cache.v_pool
        ),
    )  # fmt: skip


def _paged_share(name: str, contiguous: Timing, paged: Timing) -> BenchResult:
    share = contiguous.median_s / paged.median_s
    told = f"contiguous {_told(contiguous)}"
    return BenchResult(f"{name} paged vs contiguous", share, "", 0.90, 0.97, detail=told)


def _told(timing: Timing) -> str:
    median, iqr = timing.median_s * 1e6, timing.iqr_s * 1e6
    return f"{median:.1f} us, IQR {iqr:.1f}, n={timing.repetitions}, {timing.mode}"
