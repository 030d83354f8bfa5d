"""Inputs for checks of the kernels, poisoned with NaN wherever a kernel must not look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile
from schedlab.gpu_backend.reference import reference_attention


@dataclass
class AttentionCase:
    """A batch of sequences in a paged pool; fields are the arguments of `paged_prefill`."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    max_query_tokens: int
    scale: float
    out: Tensor

    def expected(self) -> Tensor:
        """Return the float64 reference of `out`."""
        return reference_attention(
            self.q, self.k_pool, self.v_pool, self.block_tables, self.query_start,
            self.context_lens, self.scale,
        )  # fmt: skip

    def decode(self, ops: ModuleType, **tile: DecodeTile) -> Tensor:
        """Run `ops.paged_decode` and return `out`; every sequence must have one new token."""
        ops.paged_decode(
            self.q, self.k_pool, self.v_pool, self.block_tables, self.context_lens, self.scale,
            self.out, **tile,
        )  # fmt: skip
        return self.out

    def prefill(self, ops: ModuleType, **tile: PrefillTile) -> Tensor:
        """Run `ops.paged_prefill` and return `out`."""
        ops.paged_prefill(
            self.q, self.k_pool, self.v_pool, self.block_tables, self.query_start,
            self.context_lens, self.max_query_tokens, self.scale, self.out, **tile,
        )  # fmt: skip
        return self.out


def attention_case(
    sequences: Sequence[tuple[int, int]],
    *,
    head_dim: int = 64,
    group: int = 4,
    num_kv_heads: int = 2,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionCase:
    """Build a batch on shuffled blocks.

    Parameters
    ----------
    sequences : sequence of (int, int)
        New tokens, and tokens with them, of each sequence.
    head_dim, group, num_kv_heads, block_size : int
        Shape; `group` query heads share a KV head.
    dtype : torch.dtype
    device : torch.device or str
    seed : int
        Of the random numbers, which are the same on every device.

    Returns
    -------
    AttentionCase
        Queries are a view into a wider projection, as in the model. Cells of the pool that hold
        no token are NaN, the dummy block 0 included; so is `out`. Entries of the block tables
        behind a context are far out of range.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in sequences]
    ids = 1 + torch.randperm(sum(counts) + 3, generator=generator)
    tables = torch.full((len(sequences), max(counts) + 1), 2**30, dtype=torch.int32)
    pools = torch.full((2, len(ids) + 1, num_kv_heads, block_size, head_dim), float("nan"))
    taken = 0
    for row, (count, (_, context)) in enumerate(zip(counts, sequences, strict=True)):
        blocks = ids[taken : taken + count]
        taken += count
        tables[row, :count] = blocks.int()
        tokens = torch.full((2, count * block_size, num_kv_heads, head_dim), float("nan"))
        tokens[:, :context] = torch.randn(2, context, num_kv_heads, head_dim, generator=generator)
        by_block = tokens.view(2, count, block_size, num_kv_heads, head_dim)
        pools[:, blocks] = by_block.transpose(2, 3)
    new = torch.tensor([n for n, _ in sequences])
    query_start = torch.zeros(len(sequences) + 1, dtype=torch.int32)
    query_start[1:] = new.cumsum(0)
    width = (group + 2) * num_kv_heads
    fused = torch.randn(int(new.sum()), width, head_dim, generator=generator)
    q = fused.to(device, dtype)[:, : group * num_kv_heads]
    return AttentionCase(
        q=q,
        k_pool=pools[0].to(device, dtype),
        v_pool=pools[1].to(device, dtype),
        block_tables=tables.to(device),
        query_start=query_start.to(device),
        context_lens=torch.tensor([c for _, c in sequences], dtype=torch.int32, device=device),
        max_query_tokens=int(new.max()),
        scale=head_dim**-0.5,
        out=torch.full(q.shape, float("nan"), dtype=dtype, device=device),
    )


def decode_rows(*contexts: int) -> list[tuple[int, int]]:
    """Return the sequences of a decode batch."""
    return [(1, context) for context in contexts]


@dataclass
class RopeCase:
    """Tokens to rotate and to write to a pool; fields are the arguments of `rope_and_cache`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos_sin: Tensor
    positions: Tensor
    slots: Tensor
    k_pool: Tensor
    v_pool: Tensor

    def run(self, ops: ModuleType) -> None:
        """Run `ops.rope_and_cache`."""
        ops.rope_and_cache(
            self.q, self.k, self.v, self.cos_sin, self.positions, self.slots,
            self.k_pool, self.v_pool,
        )  # fmt: skip

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate heads in float64, as complex numbers: another formula than the kernels'."""
        half = x.shape[-1] // 2
        cos, sin = self.cos_sin[self.positions].double().split(half, dim=1)
        z = torch.complex(x[..., :half].double(), x[..., half:].double())
        z = z * torch.complex(cos, sin)[:, None]
        return torch.cat([z.real, z.imag], dim=-1)


def rope_case(
    slots: Sequence[int],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> RopeCase:
    """Build tokens for the given slots, as views into one projection, and pools of NaN."""
    generator = torch.Generator().manual_seed(seed)
    max_len = 50
    angles = torch.arange(max_len)[:, None] / 100.0 ** torch.linspace(0, 1, head_dim // 2)
    width = num_heads + 2 * num_kv_heads
    fused = torch.randn(len(slots), width, head_dim, generator=generator)
    q, k, v = fused.to(device, dtype).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    pool_shape = (max(slots) // block_size + 2, num_kv_heads, block_size, head_dim)
    k_pool, v_pool = (
        torch.full(pool_shape, float("nan"), dtype=dtype, device=device) for _ in "kv"
    )
    return RopeCase(
        q=q,
        k=k,
        v=v,
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
        positions=torch.randint(0, max_len, (len(slots),), generator=generator).to(device),
        slots=torch.tensor(slots, device=device),
        k_pool=k_pool,
        v_pool=v_pool,
    )
