"""Paged attention for chunked prefill and mixed batches: any number of new tokens a sequence.

A tile of queries packs tokens and the heads of a group, so grouped heads share every key that is
fetched. Which sequence a program serves is found on the device from the prefix sums of the new
tokens; the grid is an upper bound that needs no length on the host.
"""

# Kernels are Triton's language: arguments have no Python types, compile-time ones are upper case.
# ruff: noqa: N803, N806, ANN001, ANN201, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedlab.gpu_backend.kernels.decode import LOG2_E
from schedlab.gpu_backend.kernels.launch import Device, Launch, Plan, planned
from schedlab.gpu_backend.kernels.paging import block_ids, block_offsets
from schedlab.gpu_backend.kernels.tiles import PrefillTile, prefill_tile

_SEARCH_WIDTH = 128


@triton.jit
def _attend(
    q_tile,
    q_positions,
    m,
    norm,
    acc,
    first_token,
    end_token,
    context,
    k_pool,
    v_pool,
    block_table,
    kv_head,
    scale_log2,
    stride_block,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add tokens first_token .. end_token of the cache to a running softmax.

    `m` is in units of the base-2 exponent: the largest score so far times `scale_log2`, which is
    above 0.
    """
    dims = tl.arange(0, HEAD_DIM)
    # The block ids of a tile are loaded while the tile before is computed. Addresses of keys and
    # values then come from registers, and the compiler spends none of its stages on block ids:
    # each tile is asked for a whole iteration before anybody waits for it.
    next_positions = first_token + tl.arange(0, BLOCK_N)
    blocks = block_ids(block_table, next_positions, next_positions < context, BLOCK_SIZE)
    for start in range(first_token, end_token, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        live = positions < context
        offsets = block_offsets(blocks, positions, kv_head, stride_block, BLOCK_SIZE, HEAD_DIM)
        next_positions = positions + BLOCK_N
        blocks = block_ids(block_table, next_positions, next_positions < context, BLOCK_SIZE)
        kv = offsets[:, None] + dims[None, :]
        if MASKED:
            k_tile = tl.load(k_pool + kv, mask=live[:, None], other=0.0)
            v_tile = tl.load(v_pool + kv, mask=live[:, None], other=0.0)
        else:
            k_tile = tl.load(k_pool + kv)
            v_tile = tl.load(v_pool + kv)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if MASKED:
            seen = (positions[None, :] <= q_positions[:, None]) & live[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        # The scale is applied to a row's maximum, and to its scores within the exponent's FMA.
        new_m = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_m[:, None])
        decay = tl.exp2(m - new_m)
        m = new_m
        norm = norm * decay + tl.sum(weights, axis=1)
        weights = weights.to(v_tile.dtype)
        acc = tl.dot(weights, v_tile, acc * decay[:, None], input_precision="ieee")
    return m, norm, acc


@triton.jit(do_not_specialize=("num_seqs",))
def prefill_kernel(
    q,
    k_pool,
    v_pool,
    block_tables,
    query_start,
    context_lens,
    out,
    scale_log2,
    num_seqs,
    stride_table,
    stride_q,
    stride_out,
    stride_block: tl.int64,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
):
    """Attend causally from one tile of queries of one sequence and one group of heads.

    Grid: (KV heads, upper bound of query tiles).
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # The last tiles of a long prompt see the most keys: they start first, so that none is left
    # to run alone at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    # Sequence s owns the tiles from query_start[s] // BLOCK_Q + s on: enough, and increasing.
    found = 0
    for start in range(0, num_seqs, SEARCH_WIDTH):
        seqs = start + tl.arange(0, SEARCH_WIDTH)
        starts = tl.load(query_start + seqs, mask=seqs < num_seqs, other=0)
        owned = (starts // BLOCK_Q + seqs <= tile) & (seqs < num_seqs)
        found += tl.sum(owned.to(tl.int32), axis=0)
    seq = found - 1
    first_row = tl.load(query_start + seq)
    num_new = tl.load(query_start + seq + 1) - first_row
    first_new = (tile - (first_row // BLOCK_Q + seq)) * BLOCK_Q
    if first_new >= num_new:
        return
    context = tl.load(context_lens + seq)
    before = context - num_new

    packed = tl.arange(0, BLOCK_M)
    token = first_new + packed // GROUP
    dims = tl.arange(0, HEAD_DIM)
    row_mask = ((packed < BLOCK_Q * GROUP) & (token < num_new))[:, None]
    row = (first_row + token).to(tl.int64)[:, None]
    head_offset = (kv_head * GROUP + packed % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    q_tile = tl.load(q + row * stride_q + head_offset, mask=row_mask, other=0.0)
    block_table = block_tables + seq.to(tl.int64) * stride_table

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # Every query of the tile sees every token before `diagonal`: no mask is needed there.
    diagonal = (before + first_new + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(before + first_new + BLOCK_Q, context)
    q_positions = before + token
    m, norm, acc = _attend(
        q_tile, q_positions, m, norm, acc, 0, diagonal, context,
        k_pool, v_pool, block_table, kv_head, scale_log2, stride_block,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=False,
    )  # fmt: skip
    m, norm, acc = _attend(
        q_tile, q_positions, m, norm, acc, diagonal, end, context,
        k_pool, v_pool, block_table, kv_head, scale_log2, stride_block,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True,
    )  # fmt: skip
    acc = acc / norm[:, None]
    to = out + row * stride_out + head_offset
    tl.store(to, acc.to(out.dtype.element_ty), mask=row_mask)


def prefill_launch(
    device: Device,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_tokens: int,
    scale: float,
    out: Tensor,
    tile: PrefillTile | None = None,
) -> Launch:
    """Return the launch of attention from many new tokens.

    Parameters
    ----------
    device : Device
        What to run on.
    q, k_pool, v_pool, block_tables, query_start, context_lens, max_query_tokens, scale, out
        As for `schedlab.gpu_backend.triton_ops.paged_prefill`.
    tile : PrefillTile or None
        How to cut; None takes the table's answer.
    """
    _, num_kv_heads, block_size, _ = k_pool.shape
    plan = _plan(
        device, tile, k_pool.dtype, max_query_tokens, *q.shape, num_kv_heads, block_size,
        context_lens.shape[0], scale, block_tables.stride(0), q.stride(0), out.stride(0),
        k_pool.stride(0),
    )  # fmt: skip
    return Launch(plan, (q, k_pool, v_pool, block_tables, query_start, context_lens, out))


@planned
def _plan(
    device: Device,
    tile: PrefillTile | None,
    dtype: torch.dtype,
    max_query_tokens: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    block_size: int,
    num_seqs: int,
    scale: float,
    stride_table: int,
    stride_q: int,
    stride_out: int,
    stride_block: int,
) -> Plan:
    group = num_heads // num_kv_heads
    tile = tile or prefill_tile(device, head_dim, group, dtype, max_query_tokens)
    num_tiles = num_tokens // (tile.block_m // group) + num_seqs
    return Plan(
        kernel=prefill_kernel,
        grid=(num_kv_heads, num_tiles),
        numbers={
            "scale_log2": scale * LOG2_E,
            "num_seqs": num_seqs,
            "stride_table": stride_table,
            "stride_q": stride_q,
            "stride_out": stride_out,
            "stride_block": stride_block,
        },
        constants={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "SEARCH_WIDTH": _SEARCH_WIDTH,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
