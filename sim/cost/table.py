"""Step time from measured operators: a sum of tables, interpolated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from schedlab.sim.cost.attention import AttentionGrid, Floats, line_us
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.profile import measured_overhead, profile_of
from schedlab.sim.cost.registry import register
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.table_profile import TABLE_FILE, Curve, TableProfile, read_table
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.sums import in_order

_NUMPY_FROM = 16


@dataclass(frozen=True, slots=True)
class TableReading:
    """How tables are read, where the way of their authors is not the only one.

    Attributes
    ----------
    profiling_overhead_s : float
        What timing every kernel alone added to the sum of a step; taken off each step.
    separate_prefills : bool or None
        How the attention of several prefills is priced (see `AttentionGrid`); None = as its
        authors do.
    nearest_skew : bool
        How unequal contexts beside chunks that were not measured are corrected: see `Skew`.
    """

    profiling_overhead_s: float = 0.0
    separate_prefills: bool | None = None
    nearest_skew: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.profiling_overhead_s) and self.profiling_overhead_s >= 0):
            raise SpecError(
                f"profiling_overhead_s must be finite and >= 0, got {self.profiling_overhead_s!r}"
            )


_AS_PUBLISHED = TableReading()


class TableCostModel(CostModel):
    """Price a step by adding up its operators, each looked up in a table.

    Parameters
    ----------
    profile : TableProfile
        The tables.
    meta : mapping
        What was measured: model, hardware, dtype, tensor_parallel_size, ...
    source : str
        Name of the profile, for messages and results.
    mismatches : sequence of str
        In what the profile differs from the run, if that was allowed.
    reading : TableReading
        How to read them.

    Notes
    -----
    For T new tokens (padding included) and S requests in the batch,
    ``step = sum calls * by_tokens(T) + sum calls * by_requests(S) + calls * attention
    + all-reduce(T)``. A request that computes one token counts as a decode, whatever its phase; the
    decodes are priced at the whole part of their mean context, with the profile's correction for
    unequal contexts if it has one. Rows of finished requests add their contexts to the decodes'.

    Kernels only: neither host time nor launch gaps are in such tables; see `SchedulingOverhead`.
    """

    name = "table"
    is_measured = True

    def __init__(
        self,
        profile: TableProfile,
        meta: Mapping[str, object],
        source: str = "in memory",
        mismatches: Sequence[str] = (),
        reading: TableReading = _AS_PUBLISHED,
    ) -> None:
        if reading.nearest_skew:
            if profile.skew is None:
                raise SpecError(f"{source}: nearest_skew needs a correction for unequal contexts")
            profile = replace(profile, skew=replace(profile.skew, nearest=True))
        self.profile = profile
        self.reading = reading
        self.meta = meta
        self.source = source
        self.mismatches = list(mismatches)
        self.scheduling_overhead = measured_overhead(meta)
        try:
            self._attention = profile.make_attention(reading.separate_prefills)
        except SpecError as error:
            raise SpecError(f"{source}: {error}") from error
        self._attention_ns = profile.attention_calls * 1e3
        self._own = [curve for curve in profile.by_tokens if not curve.shared]
        self._shared = [curve for curve in profile.by_tokens if curve.shared]
        self._token_ns: dict[int, float] = {}
        self._shared_ns: dict[int, float] = {}
        self._request_ns: dict[int, float] = {}
        self._rows: dict[int, Floats] = {}
        self.validity = {"new_tokens": _bounds(self._own)}
        if self._shared:
            self.validity["gathered_tokens"] = _bounds(self._shared)
        self.validity["num_requests"] = _bounds(profile.by_requests)
        self._contexts = "priced at their mean"
        if profile.skew is not None:
            self._contexts = "corrected beside measured chunk sizes, by an average beside others"
            if profile.skew.nearest:
                self._contexts = "corrected as beside the nearest measured chunk size"
        self._prefills = "priced one by one"
        if isinstance(self._attention, AttentionGrid):
            self.validity |= self._attention.bounds
            if not self._attention.separate_prefills:
                self._prefills = "pooled into one"

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` successive steps; see `CostModel.step_ns`.

        Raises
        ------
        SpecError
            If bytes are swapped: these tables do not say what that takes.
        ValueError
            If `k` < 1, or `k` > 1 for a step that cannot repeat.
        """
        if shape.swapped_bytes:
            raise SpecError(f"{self.source}: the profile has no measurement of swapping")
        if k != 1 and (k < 1 or shape.chunks):
            raise ValueError(f"k = {k}: only a step without chunks and swapping can be repeated")
        tokens, requests, prefills, n, mean, shortest, longest = _rows(shape)
        base = self._by_tokens(tokens) + self._by_requests(requests)
        if self._shared:
            base += self._by_shared(shape.gathered_tokens or tokens)
        base -= self.reading.profiling_overhead_s * 1e9
        if prefills:
            attention = self._mixed_us(prefills, n, mean, shortest, longest)
            return [max(int(base + self._attention_ns * attention + 0.5), 1)]
        if not n:
            return [max(int(base + 0.5), 1)] * k
        return self._decode_steps(base, n, mean, shortest, longest, k)

    def outside(self, shape: BatchShape, k: int = 1) -> dict[str, range]:
        """Return which steps lie beyond the tables, by feature; see `CostModel.outside`."""
        tokens, requests, prefills, n, mean, *_ = _rows(shape)
        values: dict[str, float] = {"new_tokens": tokens, "num_requests": requests}
        if self._shared:
            values["gathered_tokens"] = shape.gathered_tokens or tokens
        if isinstance(self._attention, AttentionGrid):
            values["num_decodes"] = n
            values["decode_context_tokens"] = mean
            if prefills:
                values["prefill_chunk_tokens"] = sum([q for q, _ in prefills])
                values["prefill_context_tokens"] = self._attention.pooled(prefills)[1]
        found = {}
        for key, value in values.items():
            most = self.validity[key][1]
            grows = key == "decode_context_tokens" and n > 0
            if value + (k - 1 if grows else 0) > most:
                found[key] = range(max(0, math.floor(most - value) + 1) if grows else 0, k)
        return found

    def describe(self) -> dict[str, object]:
        """Return source, errors and validity, for results."""
        return {
            "name": self.name,
            "calibration": "MEASURED OPERATORS",
            "model": self.meta.get("model"),
            "hardware": self.meta.get("hardware"),
            "profile": self.source,
            "meta": dict(self.meta),
            "published_error": self.meta.get("published_error", "none published"),
            "validity": {key: list(bounds) for key, bounds in self.validity.items()},
            "mismatches": list(self.mismatches),
            "profiling_overhead_s": self.reading.profiling_overhead_s,
            "several_prefills": self._prefills,
            "unequal_contexts": self._contexts,
        }

    def _decode_steps(
        self, base: float, n: int, mean: int, shortest: int, longest: int, k: int
    ) -> list[int]:
        """Price `k` steps of decodes only; every context grows by one a step."""
        skew, scale = self.profile.skew, self._attention_ns
        is_skewed = skew is not None and n > 1 and longest > mean
        row = self._row(n, (longest if is_skewed else mean) + k)
        durations: list[int] = []
        done = 0
        while done < k:
            at, steps, alpha = mean + done, k - done, 0.0
            if skew is not None and is_skewed:
                rate = (mean - shortest) / (longest - shortest)
                alpha = skew.alpha(0, 0, n, min(max(rate, 0.0), 1.0), longest + done)
                steps = min(steps, skew.steps_to_next_bin(longest + done))
            top = longest + done
            if steps < _NUMPY_FROM:
                for j in range(steps):
                    us = row.item(at + j)
                    if is_skewed and (more := row.item(top + j) - us) > 0:
                        us += alpha * more
                    durations.append(max(int(base + scale * us + 0.5), 1))
            else:
                part = row[at : at + steps]
                if is_skewed:
                    part = part + alpha * np.maximum(row[top : top + steps] - part, 0.0)
                cost = (base + scale * part + 0.5).astype(np.int64)
                durations += np.maximum(cost, 1).tolist()
            done += steps
        return durations

    def _mixed_us(
        self, prefills: Sequence[tuple[int, int]], n: int, mean: int, shortest: int, longest: int
    ) -> float:
        attention, skew = self._attention, self.profile.skew
        us = attention.call_us(prefills, n, mean)
        if skew is None or n < 2 or longest <= mean:
            return us
        more = attention.call_us(prefills, n, longest) - us
        if more <= 0:
            return us
        chunk, kv = sum(q for q, _ in prefills), sum(c for _, c in prefills)
        rate = min(max((mean - shortest) / (longest - shortest), 0.0), 1.0)
        return us + skew.alpha(chunk, kv, n, rate, longest) * more

    def _row(self, n: int, length: int) -> Floats:
        row = self._rows.get(n)
        if row is None or len(row) < length:
            row = self._rows[n] = self._attention.decodes_us(n, max(4096, 2 * length))
        return row

    def _by_tokens(self, tokens: int) -> float:
        try:
            return self._token_ns[tokens]
        except KeyError:
            total = _sum_ns(self._own, tokens) if tokens else 0.0
            if self.profile.all_reduce is not None and tokens:
                total += self.profile.all_reduce.ns(tokens)
            self._token_ns[tokens] = total
            return total

    def _by_shared(self, tokens: int) -> float:
        if tokens not in self._shared_ns:
            self._shared_ns[tokens] = _sum_ns(self._shared, tokens) if tokens else 0.0
        return self._shared_ns[tokens]

    def _by_requests(self, requests: int) -> float:
        try:
            return self._request_ns[requests]
        except KeyError:
            total = _sum_ns(self.profile.by_requests, requests) if requests else 0.0
            self._request_ns[requests] = total
            return total


@register("table", profile_file=TABLE_FILE)
def table(
    deployment: Deployment | None,
    profile: str,
    allow_mismatch: bool = False,
    profiling_overhead_s: float = 0.0,
    separate_prefills: bool | None = None,
    nearest_skew: bool = False,
) -> TableCostModel:
    """Add up operators that other projects measured and published.

    Parameters
    ----------
    profile : str
        Folder with meta.json and table.json, as `schedlab profile import` writes it.
    allow_mismatch : bool
        Use a profile of another model or device than the run's.
    profiling_overhead_s, separate_prefills, nearest_skew
        See `TableReading`.
    """
    meta, mismatches = profile_of(profile, deployment, allow_mismatch)
    reading = TableReading(profiling_overhead_s, separate_prefills, nearest_skew)
    return TableCostModel(read_table(Path(profile)), meta, profile, mismatches, reading)


class _Rows(NamedTuple):
    """A step as tables see it: a request that computes one token is a decode."""

    tokens: int
    requests: int
    prefills: tuple[tuple[int, int], ...]
    num_decodes: int
    mean_context: int
    shortest_context: int
    longest_context: int


def _rows(shape: BatchShape) -> _Rows:
    n, chunks = shape.num_decodes, shape.chunks
    longest, shortest = shape.decode_context_max_tokens, shape.decode_context_min_tokens
    tokens = n + shape.padding_tokens
    requests = max(shape.rows_sampled, n + len(chunks))
    context = shape.decode_context_sum_tokens + shape.padding_context_tokens
    prefills = chunks
    if chunks:
        tokens += sum([q for q, _ in chunks])
        singles = [c for q, c in chunks if q == 1]
        if singles:
            prefills = tuple([chunk for chunk in chunks if chunk[0] > 1])
            shortest = min(singles) if not n else min(shortest, *singles)
            longest = max(longest, *singles)
            n += len(singles)
            context += sum(singles)
    return _Rows(tokens, requests, prefills, n, context // n if n else 0, shortest, longest)


def _bounds(curves: Sequence[Curve]) -> tuple[float, float]:
    return 1, min((curve.at[-1] for curve in curves), default=math.inf)


def _sum_ns(curves: Sequence[Curve], at: int) -> float:
    times_us = (curve.calls * max(line_us(curve.at, curve.us, at), 0.0) for curve in curves)
    return 1e3 * in_order(times_us)
