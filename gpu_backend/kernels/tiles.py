"""The static table of tile sizes: chosen by reasoning and by what compiles, not by autotuning.

Autotuning would need a GPU at import, would differ from run to run, and cannot happen inside a
CUDA graph capture. `docs/kernels.md` gives the reasoning behind each number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from schedlab.gpu_backend.kernels.launch import Device
from schedlab.sim.errors import SpecError

MIN_DOT_ROWS = 16
"""Rows of the smallest tensor-core tile; the heads of a group are padded to it."""

HEAD_DIMS = (16, 32, 64, 128, 256)


class DecodeTile(NamedTuple):
    """How decode attention is cut up."""

    block_n: int
    """Tokens a program attends to at a time."""
    min_tiles: int
    """Fewest such tiles that are worth a split of their own."""
    programs_per_sm: int
    """Programs to aim for; several waves, so that the last, partly filled one costs little."""
    num_warps: int
    num_stages: int


class PrefillTile(NamedTuple):
    """How prefill attention is cut up."""

    block_m: int
    """Query rows of a program: tokens times the heads of a group."""
    block_n: int
    """Tokens a program attends to at a time."""
    num_warps: int
    num_stages: int


# (data-centre Hopper or Blackwell, head_dim) -> tile, for 16-bit caches.
_DECODE = {
    (False, 64): DecodeTile(64, 4, 8, num_warps=4, num_stages=5),
    (False, 128): DecodeTile(64, 4, 8, num_warps=4, num_stages=5),
    (False, 256): DecodeTile(32, 8, 8, num_warps=4, num_stages=3),
    (True, 64): DecodeTile(64, 4, 8, num_warps=4, num_stages=7),
    (True, 128): DecodeTile(64, 4, 8, num_warps=4, num_stages=5),
    (True, 256): DecodeTile(32, 8, 8, num_warps=4, num_stages=5),
}
_PREFILL = {
    (False, 64): PrefillTile(128, 64, num_warps=8, num_stages=5),
    (False, 128): PrefillTile(128, 32, num_warps=8, num_stages=3),
    (False, 256): PrefillTile(64, 32, num_warps=8, num_stages=2),
    (True, 64): PrefillTile(128, 64, num_warps=8, num_stages=5),
    (True, 128): PrefillTile(128, 128, num_warps=8, num_stages=3),
    (True, 256): PrefillTile(128, 32, num_warps=8, num_stages=3),
}
# Where no sequence fills more: hardly a matter of arithmetic any more, so more programs an SM.
_FEW_QUERIES = {
    (False, 64): PrefillTile(64, 32, num_warps=4, num_stages=5),
    (False, 128): PrefillTile(64, 32, num_warps=4, num_stages=5),
    (False, 256): PrefillTile(64, 32, num_warps=8, num_stages=2),
    (True, 64): PrefillTile(64, 64, num_warps=4, num_stages=5),
    (True, 128): PrefillTile(64, 64, num_warps=4, num_stages=3),
    (True, 256): PrefillTile(64, 32, num_warps=4, num_stages=3),
}


def decode_tile(device: Device, head_dim: int, dtype: torch.dtype) -> DecodeTile:
    """Return how to cut decode attention for a device, a head dimension and a cache format.

    Raises
    ------
    SpecError
        If there is no kernel for the head dimension.
    """
    tile = _DECODE[_row(device, head_dim)]
    if dtype.itemsize > 2:
        tile = tile._replace(block_n=32, num_stages=2)
    return tile


def prefill_tile(
    device: Device, head_dim: int, group_size: int, dtype: torch.dtype, max_query_tokens: int
) -> PrefillTile:
    """Return how to cut prefill attention; see `decode_tile`.

    Parameters
    ----------
    group_size : int
        Query heads that share a KV head; a tile holds at least one token of all of them.
    max_query_tokens : int
        Most new tokens of a sequence; where all are few, a smaller tile wastes less.
    """
    row = _row(device, head_dim)
    few = group_size * max_query_tokens <= _FEW_QUERIES[row].block_m
    tile = _FEW_QUERIES[row] if few else _PREFILL[row]
    if dtype.itemsize > 2:
        tile = tile._replace(block_m=64, block_n=32, num_stages=2)
    if group_size > tile.block_m:
        raise SpecError(
            f"{group_size} query heads a KV head: the prefill kernel takes at most {tile.block_m}"
        )
    return tile


def _row(device: Device, head_dim: int) -> tuple[bool, int]:
    if head_dim not in HEAD_DIMS:
        raise SpecError(f"head_dim {head_dim}: the kernels take {', '.join(map(str, HEAD_DIMS))}")
    # Consumer parts after Ampere (8.6, 8.9, 12.x) have Ampere's shared memory or less.
    return device.arch // 10 in (9, 10), max(head_dim, 64)
