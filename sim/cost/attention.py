"""What attention costs in a step, from measurements of whole calls or from two rates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from schedlab.sim.sums import in_order

Floats = npt.NDArray[np.float64]
Chunks = Sequence[tuple[int, int]]
"""Prefill chunks as (new tokens, context tokens)."""


class AttentionTime(Protocol):
    """Time of the attention of one layer, in microseconds."""

    def call_us(self, chunks: Chunks, num_decodes: int, context: int) -> float:
        """Price one call: chunks, together with decodes that each have `context` tokens."""

    def decodes_us(self, num_decodes: int, length: int) -> Floats:
        """Price calls of decodes only with contexts 0..length-1, shape (length,)."""


class AttentionGrid:
    """Measured calls, interpolated linearly on all four axes.

    Parameters
    ----------
    prefill_chunk, kv_prefill, num_decodes, kv_decode : sequence of int, shape (num_points,)
        A point is one prefill of `prefill_chunk` new tokens after `kv_prefill` cached ones,
        together with `num_decodes` decodes that each have `kv_decode` cached ones. 0 = absent.
    us : sequence of float, shape (num_points,)
        Microseconds of the call.
    separate_prefills : bool
        How several prefills in one call are priced. False: pooled, their new tokens add up and so
        do their contexts, as LLMServingSim does with these tables; that counts pairs of tokens of
        different prompts. True: the longest together with the decodes, each other one alone.
    by_key : bool
        Whether `kv_prefill` holds key lengths instead of cached tokens: ``context + chunk / 2``, of
        several prefills the mean weighted by their new tokens, which keeps the number of pairs.

    Raises
    ------
    ValueError
        If there is no point, one is there twice, or a time is not positive and finite.

    Notes
    -----
    Inside a slice (prefill_chunk, num_decodes) the time is
    interpolated along kv_decode, then along kv_prefill; then between neighbouring num_decodes, then
    between neighbouring prefill_chunks. Below an axis its first value holds, above it the line
    through its last two. Where a slice was not measured (batch and memory limits cut the corners of
    such grids) the nearest measured one stands in.
    """

    def __init__(
        self,
        prefill_chunk: Sequence[int],
        kv_prefill: Sequence[float],
        num_decodes: Sequence[int],
        kv_decode: Sequence[int],
        us: Sequence[float],
        separate_prefills: bool = False,
        by_key: bool = False,
    ) -> None:
        self.separate_prefills = separate_prefills
        self.by_key = by_key
        times = np.asarray(us, dtype=np.float64)
        if not len(times) or not (np.isfinite(times).all() and (times > 0).all()):
            raise ValueError("attention times must be positive and finite, and there must be some")
        cells: dict[tuple[int, int], dict[float, dict[int, float]]] = {}
        for chunk, kv, n, context, value in zip(
            prefill_chunk, kv_prefill, num_decodes, kv_decode, times.tolist(), strict=True
        ):
            row = cells.setdefault((chunk, n), {}).setdefault(kv, {})
            if context in row:
                raise ValueError(f"point {(chunk, kv, n, context)} is there twice")
            row[context] = value
        self._slices = {pair: _Slice(rows) for pair, rows in cells.items()}
        self._chunks = sorted({chunk for chunk, _ in cells})
        self._decodes = sorted({n for _, n in cells})
        self._stand_ins: dict[tuple[int, int], _Slice] = {}
        self.bounds = {
            "prefill_chunk_tokens": (0, max(prefill_chunk)),
            "prefill_context_tokens": (0, max(kv_prefill)),
            "num_decodes": (0, max(num_decodes)),
            "decode_context_tokens": (0, max(kv_decode)),
        }

    def call_us(self, chunks: Chunks, num_decodes: int, context: int) -> float:
        """Price one call; see `AttentionTime.call_us`."""
        if self.separate_prefills and len(chunks) > 1:
            longest, *others = sorted(chunks, reverse=True)
            alone = in_order(self.call_us((other,), 0, 0) for other in others)
            return alone + self.call_us((longest,), num_decodes, context)
        chunk, kv = self.pooled(chunks)
        low, high, weight = _between(self._chunks, chunk)
        value = self._at_chunk(low, kv, num_decodes, context)
        if weight:
            value += weight * (self._at_chunk(high, kv, num_decodes, context) - value)
        return max(value, 0.0)

    def pooled(self, chunks: Chunks) -> tuple[int, float]:
        """Return where several prefills lie on the first two axes."""
        chunk = kv = 0
        work = 0.0
        for q, c in chunks:
            chunk += q
            kv += c
            work += q * (c + q * 0.5)
        if self.by_key:
            return chunk, work / chunk if chunk else 0.0
        return chunk, kv

    def decodes_us(self, num_decodes: int, length: int) -> Floats:
        """Price calls of decodes only; see `AttentionTime.decodes_us`."""
        low, high, weight = _between(self._decodes, num_decodes)
        contexts = np.arange(length, dtype=np.float64)
        row = self._slice(0, low).decodes_us(contexts)
        if weight:
            row = row + weight * (self._slice(0, high).decodes_us(contexts) - row)
        return np.maximum(row, 0.0)

    def _at_chunk(self, chunk: int, kv: float, num_decodes: int, context: int) -> float:
        low, high, weight = _between(self._decodes, num_decodes)
        value = self._slice(chunk, low).us(kv, context)
        if weight:
            value += weight * (self._slice(chunk, high).us(kv, context) - value)
        return value

    def _slice(self, chunk: int, num_decodes: int) -> _Slice:
        pair = (chunk, num_decodes)
        found = self._slices.get(pair) or self._stand_ins.get(pair)
        if found is None:
            near = min(self._slices, key=lambda p: (abs(p[0] - chunk) + abs(p[1] - num_decodes), p))
            found = self._stand_ins[pair] = self._slices[near]
        return found


class _Slice:
    """The points of one (prefill_chunk, num_decodes): a row of contexts for each kv_prefill."""

    def __init__(self, rows: dict[float, dict[int, float]]) -> None:
        self._kvs = sorted(rows)
        self._rows = [
            (sorted(row), [row[x] for x in sorted(row)]) for _, row in sorted(rows.items())
        ]

    def us(self, kv: float, context: int) -> float:
        low, high, weight = _between(range(len(self._kvs)), kv, self._kvs)
        value = _line(*self._rows[low], context)
        if weight:
            value += weight * (_line(*self._rows[high], context) - value)
        return value

    def decodes_us(self, contexts: Floats) -> Floats:
        x, y = (np.array(values, dtype=np.float64) for values in self._rows[0])
        if len(x) == 1:
            return np.full(len(contexts), y[0])
        i = np.clip(np.searchsorted(x, contexts, side="left"), 1, len(x) - 1)
        weight = np.maximum((contexts - x[i - 1]) / (x[i] - x[i - 1]), 0.0)
        return y[i - 1] + weight * (y[i] - y[i - 1])


@dataclass(frozen=True, slots=True)
class RooflineAttention:
    """Attention bound by arithmetic or by reading the cache, where no measurement is at hand.

    Attributes
    ----------
    us_per_pair, us_per_kv_token : float
        Microseconds per (query token, key token) pair, and per cached token read, of one layer.
    us_per_call : float
        Start-up of the kernel.
    """

    us_per_pair: float
    us_per_kv_token: float
    us_per_call: float = 0.0

    def call_us(self, chunks: Chunks, num_decodes: int, context: int) -> float:
        """Price one call; see `AttentionTime.call_us`."""
        total = self.us_per_call + self._row_us * num_decodes * (context + 1)
        for q, c in chunks:
            pairs = q * (c + (q + 1) * 0.5)
            total += max(pairs * self.us_per_pair, (c + q) * self.us_per_kv_token)
        return total

    def decodes_us(self, num_decodes: int, length: int) -> Floats:
        """Price calls of decodes only; see `AttentionTime.decodes_us`."""
        contexts = np.arange(1, length + 1, dtype=np.float64)
        return self.us_per_call + self._row_us * num_decodes * contexts

    @property
    def _row_us(self) -> float:
        return max(self.us_per_pair, self.us_per_kv_token)


@dataclass(frozen=True, slots=True)
class Skew:
    """What unequal contexts of decodes add to the time at their mean.

    Attributes
    ----------
    decode_bins, rate_bins, context_bins, kv_bins : tuple of float
        Upper bounds of the buckets of: decodes; (mean - least) / (largest - least context); largest
        context; pooled context of the prefills. A value falls into the first whose bound it does
        not exceed.
    cells : mapping of (chunk, 4 buckets) to float
        Fitted alpha, by the pooled new tokens of the prefills exactly.
    default : float
        Alpha of every other step.
    nearest : bool
        False: a chunk that was not measured gets `default`, as in LLMServingSim, so nearly every
        step with prompts does. True: it gets the alpha of the nearest chunk that was measured.

    Raises
    ------
    ValueError
        If bounds do not rise.

    Notes
    -----
    ``attention = at(mean) + alpha * (at(largest) - at(mean))`` where the difference is positive.
    """

    decode_bins: tuple[float, ...]
    rate_bins: tuple[float, ...]
    context_bins: tuple[float, ...]
    kv_bins: tuple[float, ...]
    cells: Mapping[tuple[int, ...], float]
    default: float
    nearest: bool = False
    _chunks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for bounds in (self.decode_bins, self.rate_bins, self.context_bins, self.kv_bins):
            if any(not a < b for a, b in pairwise(bounds)):
                raise ValueError(f"skew: bounds of buckets must rise, got {list(bounds)}")
        chunks = tuple(sorted({cell[0] for cell in self.cells if cell[0]}))
        object.__setattr__(self, "_chunks", chunks)

    def alpha(self, chunk: int, kv: int, num_decodes: int, rate: float, largest: int) -> float:
        """Return the share of the way from the time at the mean to that at the largest context."""
        cell = (
            self._nearest_chunk(chunk) if self.nearest and chunk else chunk,
            bisect_left(self.decode_bins, num_decodes),
            bisect_left(self.rate_bins, rate),
            bisect_left(self.context_bins, largest),
            bisect_left(self.kv_bins, kv),
        )
        return self.cells.get(cell, self.default)

    def _nearest_chunk(self, chunk: int) -> int:
        return min(self._chunks, key=lambda known: abs(known - chunk), default=chunk)

    def steps_to_next_bin(self, largest: int) -> int:
        """Return how far the largest context can grow in its bucket, at least 1."""
        i = bisect_left(self.context_bins, largest)
        return int(self.context_bins[i]) - largest + 1 if i < len(self.context_bins) else 1 << 60


def line_us(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Interpolate linearly: the first value below, the line through the last two above.

    Examples
    --------
    >>> [line_us([1, 3], [10.0, 20.0], at) for at in (0, 1, 2, 4)]
    [10.0, 10.0, 15.0, 25.0]
    """
    return _line(x, y, at)


def _line(x: Sequence[float], y: Sequence[float], at: float) -> float:
    if len(x) == 1 or at <= x[0]:
        return y[0]
    i = min(bisect_left(x, at), len(x) - 1)
    return y[i - 1] + (at - x[i - 1]) / (x[i] - x[i - 1]) * (y[i] - y[i - 1])


def _between(
    values: Sequence[int], at: float, axis: Sequence[float] | None = None
) -> tuple[int, int, float]:
    """Return the neighbours of `at` on an axis, and the weight of the second (> 1 beyond it)."""
    axis = values if axis is None else axis
    if len(axis) == 1 or at <= axis[0]:
        return values[0], values[0], 0.0
    i = min(bisect_left(axis, at), len(axis) - 1)
    return values[i - 1], values[i], (at - axis[i - 1]) / (axis[i] - axis[i - 1])
