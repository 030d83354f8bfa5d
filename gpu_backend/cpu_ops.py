"""The decoder's kernels in portable PyTorch: the reference, and what runs on a CPU.

Sequences are attended to one by one, so no result depends on who else is in the batch. The
functions here and in `schedlab.gpu_backend.triton_ops` have the same names, arguments and meaning.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor


def paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Attend from one token of each sequence to all of its cache.

    Parameters
    ----------
    q : Tensor, shape (B, num_heads, head_dim)
        Rotated queries.
    k_pool, v_pool : Tensor, shape (num_blocks, num_kv_heads, block_size, head_dim)
        The cache of one layer, contiguous; heads of a group share a KV head.
    block_tables : Tensor of int32, shape (B, max_blocks)
        Blocks of each sequence, in order; entries behind its context are not looked at.
    context_lens : Tensor of int32, shape (B,)
        Tokens to attend to, >= 1, the newest included.
    scale : float
        Factor of the scores.
    out : Tensor, shape (B, num_heads, head_dim)
        Written.
    """
    for row, length in enumerate(context_lens.tolist()):
        k, v = _gather(k_pool, v_pool, block_tables[row], length)
        out[row] = _attend_one(q[row], k, v, scale)


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
) -> None:
    """Attend causally from the new tokens of each sequence, one or many, to its cache.

    Parameters
    ----------
    q, out : Tensor, shape (T, num_heads, head_dim)
        Queries of all sequences, one sequence after the other; `out` is written.
    k_pool, v_pool, block_tables, scale
        As for `paged_decode`, one row a sequence.
    query_start : Tensor of int32, shape (S + 1,)
        Where each sequence's tokens start in `q`.
    context_lens : Tensor of int32, shape (S,)
        Tokens of each sequence in the cache, the new ones included; the last new token attends
        to all of them.
    max_query_tokens : int
        Most new tokens of a sequence.
    """
    starts = query_start.tolist()
    for row, length in enumerate(context_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        k, v = _gather(k_pool, v_pool, block_tables[row], length)
        if end - start == 1:
            out[start] = _attend_one(q[start], k, v, scale)
        else:
            out[start:end] = _attend_many(q[start:end], k, v, scale)


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

    Parameters
    ----------
    q, k, v : Tensor, shape (T, heads, head_dim)
        Views into one projection are fine. Dimension i is rotated with i + head_dim / 2.
    cos_sin : Tensor of float32, shape (max_len, head_dim)
        Cosines, then sines.
    positions, slots : Tensor of int64, shape (T,)
        Position of each token, and ``block * block_size + offset`` to write to (-1: nowhere).
    k_pool, v_pool : Tensor, shape (num_blocks, num_kv_heads, block_size, head_dim)
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        low, high = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))
    block_size = k_pool.shape[2]
    written = slots >= 0
    if not bool(written.all()):
        k, v, slots = k[written], v[written], slots[written]
    blocks, offsets = slots // block_size, slots % block_size
    k_pool[blocks, :, offsets] = k
    v_pool[blocks, :, offsets] = v


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum.

    Parameters
    ----------
    x : Tensor, shape (T, H)
    residual : Tensor, shape (T, H), or None
        The stream so far; `None` stands for zeros.
    weight : Tensor, shape (H,)
    eps : float
        Added to the mean square.

    Returns
    -------
    (Tensor, Tensor), both of shape (T, H)
        ``sum * rsqrt(mean(sum**2) + eps) * weight``, and the sum. Computed in float32.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight, total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of the two halves of (T, 2 * I), shape (T, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gather(
    k_pool: Tensor, v_pool: Tensor, block_table: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Copy a sequence's keys and values together: two of (num_kv_heads, length, head_dim)."""
    _, num_heads, block_size, head_dim = k_pool.shape
    blocks = block_table[: -(-length // block_size)].long()
    # Seen as a table of (block, head) runs, the pool is copied once and comes out head-major.
    runs = (blocks * num_heads + torch.arange(num_heads, device=blocks.device)[:, None]).view(-1)
    k, v = (
        pool.view(-1, block_size * head_dim)
        .index_select(0, runs)
        .view(num_heads, -1, head_dim)[:, :length]
        for pool in (k_pool, v_pool)
    )
    return k, v


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from (num_heads, head_dim); grouped queries share one product."""
    grouped = q.reshape(k.shape[0], -1, q.shape[-1])
    scores = torch.bmm(grouped, k.transpose(1, 2)).mul_(scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.bmm(weights, v).view(q.shape)


def _attend_many(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally from (n, num_heads, head_dim), the last n of the sequence."""
    num_new, length = q.shape[0], k.shape[1]
    mask = None
    if num_new < length:
        mask = torch.ones(num_new, length, dtype=torch.bool, device=q.device)
        mask = mask.tril(length - num_new)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
