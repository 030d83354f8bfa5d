"""Rotary positions and the cache write, fused: keys are read once and written where they live."""

# Kernels are Triton's language: arguments have no Python types, compile-time ones are upper case.
# ruff: noqa: N803, N806, ANN001, ANN201, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from schedlab.gpu_backend.kernels.launch import Launch, Plan, planned


@triton.jit
def _rotate(heads_ptr, cos, sin, NUM_HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate all heads of a token in place; return both halves and their element offsets."""
    heads = tl.arange(0, triton.next_power_of_2(NUM_HEADS))
    low_at = heads[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    mask = (heads < NUM_HEADS)[:, None]
    low = tl.load(heads_ptr + low_at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(heads_ptr + low_at + HALF, mask=mask, other=0.0).to(tl.float32)
    new_low = (low * cos - high * sin).to(heads_ptr.dtype.element_ty)
    new_high = (high * cos + low * sin).to(heads_ptr.dtype.element_ty)
    tl.store(heads_ptr + low_at, new_low, mask=mask)
    tl.store(heads_ptr + low_at + HALF, new_high, mask=mask)
    return new_low, new_high


@triton.jit
def rope_cache_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    slots,
    k_pool,
    v_pool,
    stride_q,
    stride_k,
    stride_v,
    stride_block: tl.int64,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Rotate the queries and keys of one token and write its keys and values to the cache.

    Grid: (tokens,). A token with a negative slot, such as a padding row's, is not cached.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    angles = cos_sin + tl.load(positions + token) * HEAD_DIM + tl.arange(0, HALF)
    cos = tl.load(angles)[None, :]
    sin = tl.load(angles + HALF)[None, :]
    _rotate(q + token * stride_q, cos, sin, NUM_HEADS, HALF)
    k_low, k_high = _rotate(k + token * stride_k, cos, sin, NUM_KV_HEADS, HALF)

    if slot < 0:
        return
    heads = tl.arange(0, triton.next_power_of_2(NUM_KV_HEADS))[:, None]
    mask = heads < NUM_KV_HEADS
    cell = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * HEAD_DIM
    to_low = cell + heads * (BLOCK_SIZE * HEAD_DIM) + tl.arange(0, HALF)[None, :]
    tl.store(k_pool + to_low, k_low.to(k_pool.dtype.element_ty), mask=mask)
    tl.store(k_pool + to_low + HALF, k_high.to(k_pool.dtype.element_ty), mask=mask)
    dims = tl.arange(0, HEAD_DIM)[None, :]
    value = tl.load(v + token * stride_v + heads * HEAD_DIM + dims, mask=mask, other=0.0)
    to = cell + heads * (BLOCK_SIZE * HEAD_DIM) + dims
    tl.store(v_pool + to, value.to(v_pool.dtype.element_ty), mask=mask)


def rope_cache_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> Launch:
    """Return the launch that rotates and caches; see `gpu_backend.triton_ops.rope_and_cache`."""
    _, num_kv_heads, block_size, _ = k_pool.shape
    plan = _plan(
        *q.shape, num_kv_heads, block_size, q.stride(0), k.stride(0), v.stride(0), k_pool.stride(0)
    )
    return Launch(plan, (q, k, v, cos_sin, positions, slots, k_pool, v_pool))


@planned
def _plan(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    block_size: int,
    stride_q: int,
    stride_k: int,
    stride_v: int,
    stride_block: int,
) -> Plan:
    return Plan(
        kernel=rope_cache_kernel,
        grid=(num_tokens,),
        numbers={
            "stride_q": stride_q,
            "stride_k": stride_k,
            "stride_v": stride_v,
            "stride_block": stride_block,
        },
        constants={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
        },
        # At most 16 numbers a thread, two 128-bit accesses, up to 32 heads of 128.
        num_warps=8 if num_heads * head_dim >= 4096 else 4,
    )
