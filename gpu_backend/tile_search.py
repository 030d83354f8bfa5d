"""Other tiles than the table's, timed: what to look at before the table is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from schedlab.gpu_backend.device_timer import Timer
from schedlab.gpu_backend.kernel_bench import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    paged_cache,
    time_decode,
    time_prefill,
)
from schedlab.gpu_backend.kernels.launch import device_of
from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile, decode_tile, prefill_tile

DECODE_TILES = (
    DecodeTile(64, 4, 4, num_warps=4, num_stages=5),
    DecodeTile(64, 4, 16, num_warps=4, num_stages=5),
    DecodeTile(64, 2, 8, num_warps=4, num_stages=5),
    DecodeTile(64, 4, 8, num_warps=4, num_stages=3),
    DecodeTile(64, 4, 8, num_warps=4, num_stages=7),
    DecodeTile(64, 4, 8, num_warps=8, num_stages=5),
    DecodeTile(32, 8, 8, num_warps=4, num_stages=7),
    DecodeTile(32, 8, 8, num_warps=2, num_stages=5),
    DecodeTile(128, 2, 8, num_warps=4, num_stages=3),
)
PREFILL_TILES = (
    PrefillTile(128, 64, num_warps=8, num_stages=3),
    PrefillTile(128, 64, num_warps=8, num_stages=4),
    PrefillTile(128, 64, num_warps=8, num_stages=5),
    PrefillTile(64, 64, num_warps=4, num_stages=3),
    PrefillTile(64, 64, num_warps=4, num_stages=5),
    PrefillTile(128, 32, num_warps=8, num_stages=5),
    PrefillTile(64, 128, num_warps=4, num_stages=3),
)


class TileTime(NamedTuple):
    """How long one case took with one tile."""

    case: str
    tile: str
    in_table: bool
    """Whether this is what the table chooses."""
    median_us: float | None
    """None if the tile needs more shared memory or registers than there are."""


def search_tiles(
    timer: Timer,
    device: torch.device,
    dtype: torch.dtype,
    decode_batches: tuple[tuple[int, int], ...] = ((1, 8192), (8, 2048), (64, 2048), (128, 2048)),
    prefill_lengths: tuple[int, ...] = (2048, 8192),
    decode_tiles: tuple[DecodeTile, ...] = DECODE_TILES,
    prefill_tiles: tuple[PrefillTile, ...] = PREFILL_TILES,
    rotation: int | None = None,
) -> Iterator[TileTime]:
    """Time decode and prefill attention of Llama-3-8B's shape with the table's and other tiles.

    Parameters
    ----------
    timer : Timer
    device : torch.device
    dtype : torch.dtype
        Of the cache, 16 bits.
    decode_batches : tuple of (int, int)
        Batch sizes and contexts.
    prefill_lengths : tuple of int
        Prompt lengths, tokens.
    decode_tiles, prefill_tiles : tuple
        What to try besides the table's.
    rotation : int or None
        See `schedlab.gpu_backend.kernel_bench.paged_cache`.
    """
    where = device_of(torch.empty(0, device=device))
    own_decode = decode_tile(where, HEAD_DIM, dtype)
    for batch_size, context in decode_batches:
        contexts = (context,) * batch_size
        cache = paged_cache(device, dtype, contexts, rotation=rotation)
        for tile in dict.fromkeys((own_decode, *decode_tiles)):
            try:
                median_us = time_decode(timer, cache, contexts, tile).median_s * 1e6
            except OutOfResources:
                median_us = None
            case = f"decode B={batch_size} ctx={context}"
            yield TileTime(case, str(tile), tile == own_decode, median_us)
    for length in prefill_lengths:
        own_prefill = prefill_tile(where, HEAD_DIM, NUM_HEADS // NUM_KV_HEADS, dtype, length)
        cache = paged_cache(device, dtype, (length,), rotation=1)
        for prefill in dict.fromkeys((own_prefill, *prefill_tiles)):
            try:
                median_us = time_prefill(timer, cache, length, prefill).median_s * 1e6
            except OutOfResources:
                median_us = None
            yield TileTime(f"prefill S={length}", str(prefill), prefill == own_prefill, median_us)
