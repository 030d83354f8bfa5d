"""Step time from a calibration: what was measured on one GPU, interpolated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.profile import (
    FIT_FILE,
    Fit,
    Regime,
    computed_tokens,
    measured_overhead,
    profile_of,
    read_fit,
    step_features,
)
from schedlab.sim.cost.registry import register
from schedlab.sim.cost.segment import segment_ns
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment


class FittedCostModel(CostModel):
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
    scatters : bool
        Whether steps are to scatter as those of the profile's runs did.
    draw : int
        Which of the runs that may come of it.

    Raises
    ------
    SpecError
        If they are to scatter, and the profile does not say how.

    Notes
    -----
    ``step = curve(new tokens) + sum of coefficient * feature`` with the features of
    `sim.cost.profile.step_features`. A decode-only step no larger than the largest CUDA-graph
    bucket is priced by the graph regime, its tokens rounded up to the bucket; any other by the
    eager one, its tokens rounded up to whole tiles where the profile knows of any. What comes out,
    but for swapped bytes, is multiplied by the profile's `RunLevel`, and what that adds for each
    request that decodes and for a step with prompts is added. Where that is negative for each, no
    step takes less than the least of the curve beside its contexts.

    Outside the validity box the formula goes on linearly, but nobody has checked it there:
    `outside` tells which steps those are, and `Pricing` counts them.
    """

    name = "fitted"
    is_measured = True

    def __init__(
        self,
        fit: Fit,
        meta: Mapping[str, object],
        source: str = "in memory",
        mismatches: Sequence[str] = (),
        scatters: bool = False,
        draw: int = 0,
    ) -> None:
        if scatters and fit.step_spread is None:
            raise SpecError(
                f"cost_model.scatters: {source} does not say how steps scatter (calibrate of vLLM "
                "measures that)"
            )
        self.fit = fit
        self.step_spread = fit.step_spread if scatters else None
        self.draw = draw
        self.meta = meta
        self.source = source
        self.mismatches = list(mismatches)
        level = fit.run_level
        row_s, lone_row_s = level.decode_row_s, level.decode_row_s + level.lone_row_s
        self._prompt_step_ns = level.prompt_step_s * 1e9
        self._prompts = _Pricer(fit.eager, level.prompt_steps, row_s)
        self._decodes = _Pricer(fit.eager, level.decode_steps, lone_row_s)
        self._graph = _Pricer(fit.graph, level.decode_steps, lone_row_s) if fit.graph else None
        self._largest_graph = fit.graph.buckets[-1] if fit.graph else 0
        self._box = list(fit.validity.items())
        self.scheduling_overhead = measured_overhead(meta)

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` successive steps; see `CostModel.step_ns`.

        Raises
        ------
        SpecError
            If bytes are swapped and the profile has no measurement of that.
        ValueError
            If `k` < 1, or `k` > 1 for a step that cannot repeat (chunks or swapped bytes).
        """
        num_decodes, chunks, swapped = shape.num_decodes, shape.chunks, shape.swapped_bytes
        context, longest = shape.decode_context_sum_tokens, shape.decode_context_max_tokens
        tokens = num_decodes + shape.padding_tokens
        pairs = cached = 0
        for q, c in chunks:
            tokens += q
            pairs += q * (2 * c + q + 1) // 2
            cached += c
        context += shape.padding_context_tokens
        pricer = self._prompts if chunks else self._decodes
        if self._graph is not None and not chunks and tokens <= self._largest_graph:
            pricer = self._graph
        try:
            base = pricer.curve_ns[tokens]
        except KeyError:
            base = pricer.price(tokens)
        base += pricer.decode_ns * (num_decodes + shape.padding_rows)
        if base < pricer.least_ns and tokens:
            base = pricer.least_ns
        if chunks:
            base += (
                pricer.pair_ns * pairs + pricer.cached_ns * cached
                + pricer.prefill_ns * len(chunks) + self._prompt_step_ns
            )  # fmt: skip
        if swapped:
            if pricer.swapped_byte_ns is None:
                raise SpecError(f"{self.source}: the profile has no coefficient for swapped_bytes")
            base += pricer.swapped_byte_ns * swapped
        if k != 1 and (k < 1 or chunks or swapped):
            raise ValueError(f"k = {k}: only a step without chunks and swapping can be repeated")

        if k == 1:
            cost = base + pricer.sum_ns * context + pricer.max_ns * longest
            return [int(cost + 0.5) or 1]
        return segment_ns(base, pricer.sum_ns, context, num_decodes, pricer.max_ns, longest, k)

    def outside(self, shape: BatchShape, k: int = 1) -> dict[str, list[int]]:
        """Return which steps lie outside the validity box, by feature; see `CostModel.outside`."""
        features = step_features(shape)
        grows = {
            "decode_context_sum_tokens": shape.num_decodes,
            "decode_context_max_tokens": 1 if shape.num_decodes else 0,
        }
        found = {}
        for key, (low, high) in self._box:
            value, slope = features[key], grows.get(key, 0)
            if low <= value and value + slope * (k - 1) <= high:
                continue
            # Zero, where the component is absent, is always inside.
            steps = [j for j in range(k) if (v := value + slope * j) and not low <= v <= high]
            if steps:
                found[key] = steps
        return found

    def describe(self) -> dict[str, object]:
        """Return source, errors and validity, for results."""
        return {
            "name": self.name,
            "calibration": "CALIBRATED",
            "model": self.meta.get("model"),
            "hardware": self.meta.get("hardware"),
            "profile": self.source,
            "meta": dict(self.meta),
            "error": {
                part: asdict(error)
                for part, error in (("train", self.fit.train), ("held_out", self.fit.held_out))
                if error.num_points
            },
            "validity": {key: list(bounds) for key, bounds in self.fit.validity.items()},
            "mismatches": list(self.mismatches),
            **({} if self.step_spread is None else {"scatters": True, "draw": self.draw}),
        }


@register("fitted", profile_file=FIT_FILE)
def fitted(
    deployment: Deployment | None,
    profile: str,
    allow_mismatch: bool = False,
    scatters: bool = False,
    draw: int = 0,
) -> FittedCostModel:
    """Interpolate the steps that a calibration measured on one device.

    Parameters
    ----------
    profile : str
        Folder with meta.json and fit.json, as `schedlab calibrate` writes it.
    allow_mismatch : bool
        Use a profile of another model or device than the run's.
    scatters : bool
        Draw how long single steps take, as far from their mean as those of the profile's runs were.
    draw : int
        Which of the runs that may come of it, >= 0.
    """
    if draw < 0:
        raise ValueError(f"draw must be at least 0, got {draw}")
    meta, mismatches = profile_of(profile, deployment, allow_mismatch)
    fit = read_fit(Path(profile))
    return FittedCostModel(fit, meta, profile, mismatches, scatters, draw)


class _Pricer:
    """A regime in nanoseconds, at the level of a run, with the curve's values remembered."""

    def __init__(self, regime: Regime, level: float, row_s: float) -> None:
        def ns(feature: str) -> float:
            return regime.coefficients_s.get(feature, 0.0) * 1e9 * level

        self._regime = regime
        self._level = level
        x, y = regime.knots_tokens, regime.knots_s
        middle = bisect_left(x, x[-1] / 2, hi=len(x) - 2)
        self._slope_beyond = max(0.0, (y[-1] - y[middle]) / (x[-1] - x[middle]))
        self.curve_ns: dict[int, float] = {}
        # What is taken off for each row may be more than a row adds where the curve is flat.
        self.least_ns = min(y) * 1e9 * level if row_s < 0 else 0.0
        self.sum_ns = ns("decode_context_sum_tokens")
        self.max_ns = ns("decode_context_max_tokens")
        self.pair_ns = ns("prefill_attention_pairs")
        self.cached_ns = ns("prefill_context_tokens")
        self.decode_ns = ns("num_decodes") + row_s * 1e9
        self.prefill_ns = ns("num_prefills")
        swapped_byte_s = regime.coefficients_s.get("swapped_bytes")
        self.swapped_byte_ns = None if swapped_byte_s is None else swapped_byte_s * 1e9

    def price(self, tokens: int) -> float:
        """Evaluate the curve at a token count and remember it."""
        regime = self._regime
        at = computed_tokens(tokens, regime.buckets, regime.tile_tokens)
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
        self.curve_ns[tokens] = seconds * 1e9 * self._level
        return self.curve_ns[tokens]
