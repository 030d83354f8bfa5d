"""The decoder's kernels in Triton: the functions of `schedlab.gpu_backend.cpu_ops`, for a GPU.

Every function enqueues its kernels on the current CUDA stream, reads nothing back and takes its
launch grid from tensor shapes alone, so a step can be captured in a CUDA graph. CPU tensors work
only under Triton's interpreter (``TRITON_INTERPRET=1`` before triton is imported).
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedlab.gpu_backend.kernels.activation import silu_and_mul_launch
from schedlab.gpu_backend.kernels.decode import decode_launches
from schedlab.gpu_backend.kernels.launch import device_of
from schedlab.gpu_backend.kernels.norm import add_rms_norm_launch
from schedlab.gpu_backend.kernels.prefill import prefill_launch
from schedlab.gpu_backend.kernels.rope_cache import rope_cache_launch
from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile


def paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
    tile: DecodeTile | None = None,
) -> None:
    """Attend from one token of each sequence to all of its cache.

    Parameters
    ----------
    q : Tensor, shape (B, num_heads, head_dim)
        Rotated queries; a view into a wider projection is fine.
    k_pool, v_pool : Tensor, shape (num_blocks, num_kv_heads, block_size, head_dim)
        The cache of one layer. Only the first stride may differ from a contiguous one.
    block_tables : Tensor of int32, shape (B, max_blocks)
        Blocks of each sequence, in order; entries behind its context are not looked at.
    context_lens : Tensor of int32, shape (B,)
        Tokens to attend to, the newest included, at most ``max_blocks * block_size``. A row of 0
        gets zeros.
    scale : float
        Factor of the scores.
    out : Tensor, shape (B, num_heads, head_dim)
        Written.
    tile : DecodeTile, optional
        How to cut the work; by default the table's answer.
    """
    _check_heads(q=q, out=out)
    _check_pools(k_pool, v_pool)
    for launch in decode_launches(
        device_of(q), q, k_pool, v_pool, block_tables, context_lens, scale, out, tile
    ):
        launch.run()


def paged_prefill(
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
) -> None:
    """Attend causally from the new tokens of each sequence, one or many, to its cache.

    Parameters
    ----------
    q, out : Tensor, shape (T, num_heads, head_dim)
        Queries of all sequences, one sequence after the other; `out` is written.
    k_pool, v_pool, block_tables, scale
        As for `paged_decode`, one row a sequence.
    query_start : Tensor of int32, shape (S + 1,)
        Where each sequence's tokens start in `q`; a sequence may have none.
    context_lens : Tensor of int32, shape (S,)
        Tokens of each sequence in the cache, the new ones included; the last new token attends
        to all of them.
    max_query_tokens : int
        Most new tokens of a sequence; where all are few, a smaller tile is taken.
    tile : PrefillTile, optional
        How to cut the work; by default the table's answer.
    """
    _check_heads(q=q, out=out)
    _check_pools(k_pool, v_pool)
    prefill_launch(
        device_of(q), q, k_pool, v_pool, block_tables, query_start, context_lens,
        max_query_tokens, scale, out, tile,
    ).run()  # fmt: skip


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> None:
    """Rotate queries and keys in place, and write keys and values to the cache.

    Parameters are those of `schedlab.gpu_backend.cpu_ops.rope_and_cache`.
    """
    _check_heads(q=q, k=k, v=v)
    _check_pools(k_pool, v_pool)
    rope_cache_launch(q, k, v, cos_sin, positions, slots, k_pool, v_pool).run()


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum.

    Parameters and result are those of `gpu_backend.cpu_ops.add_rms_norm`; computed in float32 from
    the sum as it is stored.
    """
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(normed)
    add_rms_norm_launch(x, residual, weight, eps, normed, total).run()
    return normed, total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of the two halves of (T, 2 * I), shape (T, I)."""
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty((num_tokens, width // 2))
    silu_and_mul_launch(gate_up, out).run()
    return out


def _check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    """Refuse layouts that the kernels would read wrongly without noticing."""
    strides, (_, _, block_size, head_dim) = k_pool.stride(), k_pool.shape
    if strides != v_pool.stride():
        raise ValueError(f"k_pool has strides {strides}, v_pool {v_pool.stride()}")
    # A view of one block takes longer than launching a kernel, and is seldom needed to tell.
    contiguous = strides[1:] == (block_size * head_dim, head_dim, 1)
    if not contiguous and not k_pool[:1].is_contiguous():
        raise ValueError(f"the blocks of a pool must be contiguous, not {strides}")


def _check_heads(**named: Tensor) -> None:
    for name, x in named.items():
        strides = x.stride()
        if strides[1:] != (x.shape[2], 1):
            raise ValueError(f"the heads of {name} must be contiguous, strides are {strides}")
