"""Where a token lies in a paged pool: the one place that does this arithmetic on the device."""

# Kernels are Triton's language: arguments have no Python types, compile-time ones are upper case.
# ruff: noqa: N803, ANN001, ANN201
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_ids(block_table, positions, live, BLOCK_SIZE: tl.constexpr):
    """Return the block that holds each token of one sequence, of those not `live` the dummy, 0."""
    return tl.load(block_table + positions // BLOCK_SIZE, mask=live, other=0)


@triton.jit
def block_offsets(
    blocks,
    positions,
    kv_head,
    stride_block,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return the element offsets, int64, in a pool of tokens whose blocks are known.

    The pool is [num_blocks, num_kv_heads, block_size, head_dim] with the last three axes
    contiguous.
    """
    # A pool holds more than 2**31 elements soon: 32-bit products would wrap silently.
    start = blocks.to(tl.int64) * stride_block
    return start + (kv_head * BLOCK_SIZE + positions % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def token_offsets(
    block_table,
    positions,
    live,
    kv_head,
    stride_block,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return the element offsets, int64, of tokens of one sequence; see `block_offsets`."""
    blocks = block_ids(block_table, positions, live, BLOCK_SIZE)
    return block_offsets(blocks, positions, kv_head, stride_block, BLOCK_SIZE, HEAD_DIM)
