"""Which batches a calibration measures: a grid for the shape of the curve, random ones between."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedlab.sim.config import EngineConfig
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.rng import stream

TILES_TOKENS = (1, 64, 128)
"""Rows that a tile of a GPU's matrix products may have; 1: none is seen."""


class BatchPoint(NamedTuple):
    """A batch to measure.

    Attributes
    ----------
    kind : str
        ``decode``, ``prefill``, ``mixed``, ``sentinel`` or ``held_out``.
    decodes : tuple of int
        Tokens in the cache of each decode row.
    chunks : tuple of (int, int)
        New and cached tokens of each prefill chunk.
    """

    kind: str
    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> BatchShape:
        """What the step costs by."""
        return BatchShape(
            num_decodes=len(self.decodes),
            decode_context_sum_tokens=sum(self.decodes),
            decode_context_max_tokens=max(self.decodes, default=0),
            chunks=self.chunks,
            rows_sampled=len(self.decodes) + len(self.chunks),
            num_running=len(self.decodes) + len(self.chunks),
        )

    def fits(self, config: EngineConfig) -> bool:
        """Whether the engine could run it: seats, budget, lengths and memory."""
        lengths = [c + 1 for c in self.decodes] + [n + c for n, c in self.chunks]
        new_tokens = len(self.decodes) + sum(n for n, _ in self.chunks)
        blocks = sum(-(-length // config.block_size) for length in lengths)
        return (
            0 < len(lengths) <= config.max_num_seqs
            and new_tokens <= config.max_num_batched_tokens
            and max(lengths) <= config.max_model_len
            and blocks <= config.num_blocks
        )


def batch_kind(shape: BatchShape) -> str:
    """Return what a batch is made of: ``decode``, ``prefill`` or ``mixed``."""
    if not shape.chunks:
        return "decode"
    return "mixed" if shape.num_decodes else "prefill"


def design(
    config: EngineConfig, num_random: int, seed: int, buckets: Sequence[int] = ()
) -> list[BatchPoint]:
    """Return the batches to fit on.

    Parameters
    ----------
    config : EngineConfig
        Limits; they are the validity box of the fit.
    num_random : int
        Random batches in addition to the grid, log-uniform in size and length.
    seed : int
        Stream ``"calibration"``.
    buckets : sequence of int
        Batch sizes of captured decode steps, which are measured beside the knots of the curve. They
        are of a GPU, whose products are computed in tiles: there batches that need one more than a
        knot does are measured, too.

    Returns
    -------
    list of BatchPoint
        Decode-only, prefill-only and mixed batches, uniform and skewed in context; each one fits
        the limits.
    """
    longest = config.max_model_len - 1
    budget = config.max_num_batched_tokens
    contexts = _ladder(min(16, longest), longest, 4)
    tokens = token_knots(1, min(budget, longest))
    most = min(config.max_num_seqs, budget)
    sizes = sorted({*token_knots(1, most), *(b for b in buckets if b <= most)})
    few = _ladder(1, sizes[-1], 4)
    points = [BatchPoint("decode", (c,) * b, ()) for b in sizes for c in contexts]
    # One long row among short ones: uniform contexts alone cannot show what skew costs.
    points += [
        BatchPoint("decode", (longest, *((contexts[0],) * (b - 1))), ()) for b in few if b > 1
    ]
    points += [
        BatchPoint("prefill", (), ((n, c),)) for n in tokens if n > 1 for c in (0, longest // 2)
    ]
    for k in (4, 16):
        points += [BatchPoint("prefill", (), ((n // k, 0),) * k) for n in tokens if n >= 2 * k]
    points += [
        BatchPoint("mixed", (contexts[1],) * b, ((n, 0),)) for b in few for n in tokens[1::2]
    ]
    # Beside prompts, too, what decodes read may be most of a step's time: all that memory holds.
    for n in _ladder(2, min(budget, longest), 8):
        blocks = config.num_blocks - -(-n // config.block_size)
        for b in few:
            context = min(longest, max(1, blocks // b * config.block_size - 1))
            points.append(BatchPoint("mixed", (context,) * b, ((n, 0),)))
    if buckets:
        tile = max(TILES_TOKENS)
        points += [BatchPoint("prefill", (), ((n + 1, 0),)) for n in tokens if n >= tile]
    rng = stream(seed, "calibration")
    points = [point for point in points if point.fits(config)]
    while num_random > 0:
        point = _random(config, rng)
        if point.fits(config):
            points.append(point)
            num_random -= 1
    return points


def sentinels(config: EngineConfig) -> list[BatchPoint]:
    """Return a few batches that are measured again and again, to see the machine drift."""
    middle = max(1, config.max_model_len // 4)
    batch = max(1, config.max_num_seqs // 4)
    blocks = -(-(middle + 1) // config.block_size)
    batch = max(1, min(batch, config.num_blocks // blocks))
    prompt = max(1, min(config.max_num_batched_tokens, config.max_model_len) // 2)
    return [
        BatchPoint("sentinel", (middle,), ()),
        BatchPoint("sentinel", (middle,) * batch, ()),
        BatchPoint("sentinel", (), ((prompt, 0),)),
    ]


def design_hash(points: Sequence[BatchPoint], config: EngineConfig, about: str) -> str:
    """Return the identity of a calibration: measurements of another one must not be mixed in."""
    text = json.dumps([about, [list(p) for p in points], repr(config)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def token_knots(low: int, high: int) -> list[int]:
    """Return the token counts at which the curve of a step's time has its knots.

    They are `low`, `high` and, between them, every count to 16, then powers of two and the middles
    of these. Below 16 the kernels' tiles make the curve jagged: on a CPU an odd number of rows
    takes longer than the next even one.
    """
    coarse = (base << i for base in (16, 24) for i in range(high.bit_length()))
    return sorted({low, high, *(n for n in (*range(1, 16), *coarse) if low < n < high)})


def _ladder(low: int, high: int, factor: int) -> list[int]:
    """Return low, low * factor, ... and high."""
    steps = [low]
    while steps[-1] * factor < high:
        steps.append(steps[-1] * factor)
    return [*steps, high] if high > steps[-1] else steps


def _random(config: EngineConfig, rng: np.random.Generator) -> BatchPoint:
    """Draw a batch: decodes, chunks or both, lengths log-uniform."""
    longest = config.max_model_len - 1

    def between(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))

    kind = ("decode", "mixed", "prefill")[int(rng.integers(3))]
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    if kind != "prefill":
        spread = rng.uniform(0.0, 1.0)
        typical = between(8, longest)
        low = max(1, int(typical * (1 - spread)))
        size = between(1, config.max_num_seqs)
        decodes = tuple(rng.integers(low, typical + 1, size).tolist())
    if kind != "decode":
        left = config.max_num_batched_tokens - len(decodes)
        for _ in range(int(rng.integers(1, 4))):
            if left < 2:
                break
            n = between(2, min(left, longest))
            cached = 0 if rng.random() < 0.6 else int(rng.integers(0, longest - n + 1))
            chunks = (*chunks, (n, cached))
            left -= n
    return BatchPoint(kind, decodes, chunks)
