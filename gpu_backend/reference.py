"""Attention in float64, written to be obviously right: what the kernels are held against."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Attend causally from the new tokens of each sequence to its paged cache.

    Parameters
    ----------
    q, k_pool, v_pool, block_tables, query_start, context_lens, scale
        As for `gpu_backend.cpu_ops.paged_prefill`. A decode batch is one new token a sequence:
        ``query_start = arange(B + 1)``.

    Returns
    -------
    Tensor of float64, shape (T, num_heads, head_dim)
        ``softmax(scale * q @ k.T) @ v`` over the tokens up to each query's own.
    """
    group = q.shape[1] // k_pool.shape[1]
    outputs = []
    for row, context in enumerate(context_lens.tolist()):
        first, end = query_start[row].item(), query_start[row + 1].item()
        queries = q[first:end].double()
        keys = paged_tokens(k_pool, block_tables[row], context).double()
        values = paged_tokens(v_pool, block_tables[row], context).double()
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", queries, keys) * scale
        last_seen = context - len(queries) + torch.arange(len(queries), device=q.device)
        unseen = torch.arange(context, device=q.device) > last_seen[:, None]
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(outputs)


def paged_tokens(pool: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """Return a sequence's first tokens in a pool, contiguous: (num_tokens, num_kv_heads, D)."""
    num_blocks = -(-num_tokens // pool.shape[2])
    blocks = pool[block_table[:num_blocks].long()]
    return blocks.transpose(1, 2).flatten(0, 1)[:num_tokens]


def worst_row_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest ``|got - expected| / |expected|`` of a row, an index of the first axis.

    A norm over all rows would hide a wrong one among larger ones. A row that should be all zeros
    has error 0 if it is, and infinity otherwise; NaN anywhere gives NaN.
    """
    size = expected.double().flatten(1).norm(dim=1)
    off = (got.double() - expected).flatten(1).norm(dim=1)
    error = torch.where((off == 0) & (size == 0), 0.0, off / size)
    return float(error.max())
