"""Paged decode attention: one new token a sequence, long contexts split over many programs.

A decode step reads the cache once and computes little, so what matters is that every
multiprocessor has the same number of bytes to fetch. The device itself cuts the work: all
programs read all context lengths, agree on how many tiles a split may have, and program i takes
the i-th split. A skewed batch is thus balanced, the host need not know a length, and the launch
grid depends only on the batch size, as a CUDA graph demands.
"""

# Kernels are Triton's language: arguments have no Python types, compile-time ones are upper case.
# ruff: noqa: N803, ANN001, ANN201, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedlab.gpu_backend.kernels.launch import Device, Launch, Plan, planned
from schedlab.gpu_backend.kernels.paging import token_offsets
from schedlab.gpu_backend.kernels.tiles import MIN_DOT_ROWS, DecodeTile, decode_tile

LOG2_E = 1.4426950408889634
_REDUCE_SPLITS = 16
_UNSPECIALIZED = ("num_rows", "num_slots", "target_splits")


@triton.jit
def _count_splits(
    context_lens,
    num_rows,
    target_splits,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Return of all rows: index, context and number of splits."""
    rows = tl.arange(0, BLOCK_B)
    contexts = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    tiles = (contexts + BLOCK_N - 1) // BLOCK_N
    total = tl.sum(tiles, axis=0)
    max_tiles = tl.maximum((total + target_splits - 1) // target_splits, MIN_TILES)
    splits = (tiles + max_tiles - 1) // max_tiles
    # A row without context still needs somebody to write its zeros.
    splits = tl.where(rows < num_rows, tl.maximum(splits, 1), 0)
    return rows, contexts, splits


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def decode_kernel(
    q,
    k_pool,
    v_pool,
    block_tables,
    context_lens,
    out,
    partial_out,
    partial_lse,
    scale_log2,
    num_rows,
    num_slots,
    target_splits,
    stride_table,
    stride_q,
    stride_out,
    stride_block: tl.int64,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Attend from the heads of one group of one row to one split of its context.

    Grid: (KV heads, slots); a slot is one split of one row, counted over all rows.
    """
    kv_head = tl.program_id(0)
    slot = tl.program_id(1)
    rows, contexts, splits = _count_splits(
        context_lens, num_rows, target_splits, BLOCK_B, BLOCK_N, MIN_TILES
    )
    ends = tl.cumsum(splits, axis=0)
    row = tl.sum((ends <= slot).to(tl.int32), axis=0)
    if row >= num_rows:
        return
    context = tl.sum(tl.where(rows == row, contexts, 0), axis=0)
    num_splits = tl.sum(tl.where(rows == row, splits, 0), axis=0)
    split = slot - tl.sum(tl.where(rows == row, ends - splits, 0), axis=0)
    num_tiles = (context + BLOCK_N - 1) // BLOCK_N
    # Even shares: with equal ceilings the last split of each row would be a stub.
    first_tile = num_tiles * split // num_splits
    end_tile = num_tiles * (split + 1) // num_splits

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, HEAD_DIM)
    head_mask = (heads < GROUP)[:, None]
    head_rows = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q_tile = tl.load(q + row.to(tl.int64) * stride_q + head_rows, mask=head_mask, other=0.0)
    block_table = block_tables + row.to(tl.int64) * stride_table

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    for tile in range(first_tile, end_tile):
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live = positions < context
        offsets = token_offsets(
            block_table, positions, live, kv_head, stride_block, BLOCK_SIZE, HEAD_DIM
        )
        kv = offsets[:, None] + dims[None, :]
        # Masked, as the dummy block may hold NaN, and 0 * NaN is NaN.
        k_tile = tl.load(k_pool + kv, mask=live[:, None], other=0.0)
        v_tile = tl.load(v_pool + kv, mask=live[:, None], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        scores = tl.where(live[None, :], scores, float("-inf"))
        # As in the prefill kernel: `m` is scaled, `scores` only within the exponent's FMA.
        new_m = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_m[:, None])
        decay = tl.exp2(m - new_m)
        m = new_m
        norm = norm * decay + tl.sum(weights, axis=1)
        weights = weights.to(v_tile.dtype)
        acc = acc * decay[:, None] + tl.dot(weights, v_tile, input_precision="ieee")

    # No context: norm is 0 and so is acc; the row's output is zero, not NaN.
    acc = acc / tl.where(norm > 0.0, norm, 1.0)[:, None]
    if num_splits == 1:
        to = out + row.to(tl.int64) * stride_out + head_rows
        tl.store(to, acc.to(out.dtype.element_ty), mask=head_mask)
    else:
        part = ((kv_head * num_slots + slot) * GROUP + heads).to(tl.int64)
        tl.store(partial_lse + part, m + tl.log2(norm), mask=heads < GROUP)
        tl.store(partial_out + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=head_mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def reduce_kernel(
    partial_out,
    partial_lse,
    context_lens,
    out,
    num_rows,
    num_slots,
    target_splits,
    stride_out,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge the splits of one head of one row; rows in one piece are done already.

    Grid: (query heads, rows).
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    rows, _, splits = _count_splits(
        context_lens, num_rows, target_splits, BLOCK_B, BLOCK_N, MIN_TILES
    )
    num_splits = tl.sum(tl.where(rows == row, splits, 0), axis=0)
    if num_splits == 1:
        return
    first_slot = tl.sum(tl.where(rows < row, splits, 0), axis=0)
    dims = tl.arange(0, HEAD_DIM)
    m = float("-inf")
    norm = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        live = split < num_splits
        slot = (head // GROUP) * num_slots + first_slot + split
        part = (slot * GROUP + head % GROUP).to(tl.int64)
        lse = tl.load(partial_lse + part, mask=live, other=float("-inf"))
        values = tl.load(
            partial_out + part[:, None] * HEAD_DIM + dims[None, :],
            mask=live[:, None],
            other=0.0,
        )
        new_m = tl.maximum(m, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_m)
        decay = tl.exp2(m - new_m)
        m = new_m
        norm = norm * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(weights[:, None] * values, axis=0)
    to = out + row.to(tl.int64) * stride_out + head * HEAD_DIM + dims
    tl.store(to, (acc / norm).to(out.dtype.element_ty))


def decode_launches(
    device: Device,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
    tile: DecodeTile | None = None,
) -> tuple[Launch, Launch]:
    """Return the launches of one decode attention: the splits, then their reduction.

    Parameters
    ----------
    device : Device
        What to fill.
    q, k_pool, v_pool, block_tables, context_lens, scale, out
        As for `schedlab.gpu_backend.triton_ops.paged_decode`.
    tile : DecodeTile or None
        How to cut; None takes the table's answer.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pool.shape
    split, merge = _plans(
        device, tile, k_pool.dtype, num_rows, num_heads, head_dim, num_kv_heads, block_size,
        block_tables.shape[1], scale, block_tables.stride(0), q.stride(0), out.stride(0),
        k_pool.stride(0),
    )  # fmt: skip
    shape = (num_kv_heads, split.numbers["num_slots"], num_heads // num_kv_heads, head_dim)
    partial_out = q.new_empty(shape, dtype=torch.float32)
    partial_lse = q.new_empty(shape[:3], dtype=torch.float32)
    whole = (q, k_pool, v_pool, block_tables, context_lens, out, partial_out, partial_lse)
    return Launch(split, whole), Launch(merge, (partial_out, partial_lse, context_lens, out))


@planned
def _plans(
    device: Device,
    tile: DecodeTile | None,
    dtype: torch.dtype,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    block_size: int,
    max_blocks: int,
    scale: float,
    stride_table: int,
    stride_q: int,
    stride_out: int,
    stride_block: int,
) -> tuple[Plan, Plan]:
    group = num_heads // num_kv_heads
    tile = tile or decode_tile(device, head_dim, dtype)
    # ceil(tiles / max_tiles) summed over the rows is at most target_splits + num_rows, as
    # max_tiles >= total / target_splits. What the block tables can hold is a bound, too.
    target_splits = max(1, tile.programs_per_sm * device.num_sms // num_kv_heads)
    most_splits = triton.cdiv(max_blocks * block_size, tile.block_n * tile.min_tiles)
    num_slots = min(target_splits + num_rows, num_rows * most_splits)
    counts = {"num_rows": num_rows, "num_slots": num_slots, "target_splits": target_splits}
    cut = {
        # Powers of two from 32: a handful of variants for all batch sizes.
        "BLOCK_B": max(32, triton.next_power_of_2(num_rows)),
        "BLOCK_N": tile.block_n,
        "MIN_TILES": tile.min_tiles,
    }
    split = Plan(
        kernel=decode_kernel,
        grid=(num_kv_heads, num_slots),
        numbers={
            "scale_log2": scale * LOG2_E,
            **counts,
            "stride_table": stride_table,
            "stride_q": stride_q,
            "stride_out": stride_out,
            "stride_block": stride_block,
        },
        constants={
            "GROUP": group,
            "BLOCK_G": max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            **cut,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge = Plan(
        kernel=reduce_kernel,
        grid=(num_heads, num_rows),
        numbers={**counts, "stride_out": stride_out},
        constants={"GROUP": group, "HEAD_DIM": head_dim, **cut, "BLOCK_S": _REDUCE_SPLITS},
        num_warps=4,
    )
    return split, merge
