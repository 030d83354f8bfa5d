"""Step time from a calibration: what was measured on one GPU, interpolated."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from schedlab.sim.cost.profile import Fit, Regime, step_features
from schedlab.sim.cost.segment import segment_ns
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError

_INSIDE = (0.0, float("inf"))


class ExtrapolationWarning(UserWarning):
    """A run asks for steps outside the range that was measured."""


class FittedCostModel:
    """Price a step by a fit to measured steps.

    Parameters
    ----------
    fit : Fit
        Knots, coefficients, validity box and errors.
    meta : dict
        What was measured: model, hardware, dtype, tensor_parallel_size, ...
    source : str
        Name of the profile, for messages and results.
    mismatches : sequence of str
        In what the profile differs from the run, if that was allowed.

    Notes
    -----
    ``step = curve(new tokens) + sum of coefficient * feature`` with the features of
    `sim.cost.profile.step_features`. A decode-only step no larger than the largest CUDA-graph
    bucket is priced by the graph regime, its tokens rounded up to the bucket; any other by the
    eager one.

    Outside the validity box the formula goes on linearly, but nobody has checked it there: such
    steps are counted per feature (`extrapolated_steps`), shown by `describe`, and the first one
    gives an `ExtrapolationWarning`. Every priced step counts: also estimates a policy asks for,
    and steps priced ahead that an arrival then cut off.
    """

    name = "fitted"

    def __init__(
        self,
        fit: Fit,
        meta: Mapping[str, object],
        source: str = "in memory",
        mismatches: Sequence[str] = (),
    ) -> None:
        self.fit = fit
        self.meta = meta
        self.source = source
        self.mismatches = list(mismatches)
        self.num_priced_steps = 0
        self._num_outside = 0
        self._outside_by_feature: dict[str, int] = {}
        self._eager = _Pricer(fit.eager)
        self._graph = _Pricer(fit.graph) if fit.graph else None
        self._largest_graph = fit.graph.buckets[-1] if fit.graph else 0
        box = fit.validity
        self._tokens_box = box["new_tokens"]
        self._sum_box = box.get("decode_context_sum_tokens", _INSIDE)
        self._max_box = box.get("decode_context_max_tokens", _INSIDE)
        self._pairs_box = box.get("prefill_attention_pairs", _INSIDE)
        self._decodes_box = box.get("num_decodes", _INSIDE)
        self._prefills_box = box.get("num_prefills", _INSIDE)
        self._swapped_box = box.get("swapped_bytes", _INSIDE)

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` successive steps; see `CostModel.step_ns`.

        Raises
        ------
        SpecError
            If bytes are swapped and the profile has no measurement of that.
        ValueError
            If `k` < 1, or `k` > 1 for a step that cannot repeat (chunks or swapped bytes).
        """
        num_decodes, context, longest, chunks, padding, padding_context, _, swapped = shape[:8]
        tokens = num_decodes + padding
        pairs = 0
        for q, c in chunks:
            tokens += q
            pairs += q * (2 * c + q + 1) // 2
        context += padding_context
        pricer = self._eager
        if self._graph is not None and not chunks and tokens <= self._largest_graph:
            pricer = self._graph
        try:
            base = pricer.curve_ns[tokens]
        except KeyError:
            base = pricer.price(tokens)
        base += pricer.decode_ns * (num_decodes + shape.padding_rows)
        if chunks:
            base += pricer.pair_ns * pairs + pricer.prefill_ns * len(chunks)
        if swapped:
            if pricer.swapped_byte_ns is None:
                raise SpecError(f"{self.source}: the profile has no coefficient for swapped_bytes")
            base += pricer.swapped_byte_ns * swapped
        if k != 1 and (k < 1 or chunks or swapped):
            raise ValueError(f"k = {k}: only a step without chunks and swapping can be repeated")

        self.num_priced_steps += k
        last = context + num_decodes * (k - 1)
        last_max = longest + k - 1 if num_decodes else longest
        low, high = self._tokens_box
        if (
            not low <= tokens <= high
            or (last and not (self._sum_box[0] <= context and last <= self._sum_box[1]))
            or (last_max and not (self._max_box[0] <= longest and last_max <= self._max_box[1]))
            or (num_decodes and not self._decodes_box[0] <= num_decodes <= self._decodes_box[1])
            or (chunks and not self._chunks_inside(pairs, len(chunks)))
            or (swapped and not self._swapped_box[0] <= swapped <= self._swapped_box[1])
        ):
            self._count_outside(shape, k)

        if k == 1:
            cost = base + pricer.sum_ns * context + pricer.max_ns * longest
            return [int(cost + 0.5) or 1]
        return segment_ns(base, pricer.sum_ns, context, num_decodes, pricer.max_ns, longest, k)

    @property
    def extrapolated_steps(self) -> int:
        """Priced steps with any feature outside the validity box."""
        return self._num_outside

    @property
    def extrapolated_by_feature(self) -> dict[str, int]:
        """Priced steps outside the validity box, by the feature that is."""
        return dict(self._outside_by_feature)

    def describe(self) -> dict[str, object]:
        """Return source, errors, validity and extrapolation so far, for results."""
        return {
            "name": self.name,
            "calibration": "CALIBRATED",
            "model": self.meta.get("model"),
            "hardware": self.meta.get("hardware"),
            "profile": self.source,
            "meta": dict(self.meta),
            "error": {"train": asdict(self.fit.train), "held_out": asdict(self.fit.held_out)},
            "validity": {key: list(bounds) for key, bounds in self.fit.validity.items()},
            "mismatches": list(self.mismatches),
            "priced_steps": self.num_priced_steps,
            "extrapolated_steps": self.extrapolated_steps,
            "extrapolated_by_feature": self.extrapolated_by_feature,
        }

    def _chunks_inside(self, pairs: int, num_prefills: int) -> bool:
        low, high = self._pairs_box
        least, most = self._prefills_box
        return low <= pairs <= high and least <= num_prefills <= most

    def _count_outside(self, shape: BatchShape, k: int) -> None:
        """Count step by step, off the fast path."""
        first = self._num_outside == 0
        features = step_features(shape)
        grows = {
            "decode_context_sum_tokens": shape.num_decodes,
            "decode_context_max_tokens": 1 if shape.num_decodes else 0,
        }
        outside: set[int] = set()
        for key, (low, high) in self.fit.validity.items():
            value, slope = features[key], grows.get(key, 0)
            steps = [j for j in range(k) if (v := value + slope * j) and not low <= v <= high]
            if steps:
                counts = self._outside_by_feature
                counts[key] = counts.get(key, 0) + len(steps)
                outside.update(steps)
        self._num_outside += len(outside)
        if first and outside:
            names = ", ".join(self._outside_by_feature)
            warnings.warn(
                f"cost model {self.source}: steps outside the measured range ({names}); their "
                "times are extrapolated and counted as extrapolated_steps",
                ExtrapolationWarning,
                stacklevel=3,
            )


class _Pricer:
    """A regime in nanoseconds, with the curve's values remembered."""

    def __init__(self, regime: Regime) -> None:
        def ns(feature: str) -> float:
            return regime.coefficients_s.get(feature, 0.0) * 1e9

        self._regime = regime
        x, y = regime.knots_tokens, regime.knots_s
        middle = bisect_left(x, x[-1] / 2, hi=len(x) - 2)
        self._slope_beyond = max(0.0, (y[-1] - y[middle]) / (x[-1] - x[middle]))
        self.curve_ns: dict[int, float] = {}
        self.sum_ns = ns("decode_context_sum_tokens")
        self.max_ns = ns("decode_context_max_tokens")
        self.pair_ns = ns("prefill_attention_pairs")
        self.decode_ns = ns("num_decodes")
        self.prefill_ns = ns("num_prefills")
        swap = "swapped_bytes"
        self.swapped_byte_ns = ns(swap) if swap in regime.coefficients_s else None

    def price(self, tokens: int) -> float:
        """Evaluate the curve at a token count and remember it."""
        regime = self._regime
        at = tokens
        if regime.buckets:
            at = regime.buckets[bisect_left(regime.buckets, tokens)]
        x, y = regime.knots_tokens, regime.knots_s
        if tokens == 0:
            seconds = 0.0
        elif at <= x[0]:
            seconds = y[0]
        elif at <= x[-1]:
            i = bisect_left(x, at)
            seconds = y[i - 1] + (y[i] - y[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1])
        else:
            seconds = y[-1] + self._slope_beyond * (at - x[-1])
        self.curve_ns[tokens] = seconds * 1e9
        return seconds * 1e9
