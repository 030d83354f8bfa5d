"""From measured batches to a cost model: non-negative least squares on what a step costs by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from schedlab.gpu_backend.calibration_design import TILES_TOKENS, batch_kind, token_knots
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.profile import (
    FEATURES,
    Fit,
    FitError,
    Regime,
    RunLevel,
    computed_tokens,
    step_features,
)
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.step_spread import StepSpread
from schedlab.sim.rng import stream

Floats = npt.NDArray[np.float64]

_UNKNOWN = FitError(0.0, 0.0, 0.0, 0.0, 0)
_RESAMPLES = 200
_SHARES, _STEPS_A_SHARE = 100, 5
_MOST_ALIKE = 100


class MeasuredBatch(NamedTuple):
    """A batch and how long it took (the median of its repetitions), in seconds."""

    shape: BatchShape
    seconds: float


class SwapTime(NamedTuple):
    """Copying some blocks one way: bytes, and median seconds from the order to the last byte."""

    direction: str
    """``out`` (device to host) or ``in``."""
    num_blocks: int
    num_bytes: int
    seconds: float


class RunStep(Protocol):
    """A step of a run, whoever recorded it."""

    @property
    def shape(self) -> BatchShape:
        """What it costs by."""

    @property
    def duration_ns(self) -> int:
        """What it took."""

    @property
    def overhead_ns(self) -> int:
        """How much of that is scheduling overhead."""


def without_overhead(steps: Sequence[RunStep]) -> list[MeasuredBatch]:
    """Return what the steps of a run took beside the scheduler."""
    return [MeasuredBatch(s.shape, (s.duration_ns - s.overhead_ns) / 1e9) for s in steps]


def fit_profile(
    points: Sequence[MeasuredBatch], held_out: Sequence[MeasuredBatch], buckets: Sequence[int] = ()
) -> Fit:
    """Fit both regimes and judge them on batches they have not seen.

    Parameters
    ----------
    points : sequence of Measured
        What to fit.
    held_out : sequence of Measured
        What to judge by; never fitted.
    buckets : sequence of int
        CUDA-graph batch sizes of decode-only steps; empty without graphs.

    Notes
    -----
    The time of a step is a continuous piecewise-linear function of its new tokens (rounded up to
    the bucket where a graph is replayed) plus a non-negative multiple of each feature. Residuals
    are weighted by 1 / measured time, so that the fit is good in percent.

    A GPU computes whole tiles of a product, so the time of a step rises in stairs. Where graphs are
    replayed, which only a GPU does, the eager regime rounds tokens up to the tile, of those in
    question, with which it fits batches best that are larger than any of them.
    """
    graphed = [p for p in points if _is_graphed(p.shape, buckets)]
    eager = [p for p in points if not _is_graphed(p.shape, buckets)]
    eager_regime, graph_regime = _fit_regimes(eager, graphed, tuple(buckets))
    validity = _box([p.shape for p in points])
    draft = Fit(eager_regime, graph_regime, validity, _UNKNOWN, _UNKNOWN)
    return Fit(eager_regime, graph_regime, validity, judge(draft, points), judge(draft, held_out))


def with_swapping(fit: Fit, times: Sequence[SwapTime]) -> Fit:
    """Return the fit with what a swapped byte costs, whatever else the step does."""
    cost = {"swapped_bytes": swapped_byte_s(times)}
    eager, graph = (
        regime and replace(regime, coefficients_s={**regime.coefficients_s, **cost})
        for regime in (fit.eager, fit.graph)
    )
    assert eager is not None
    sizes = [float(t.num_bytes) for t in times]
    validity = {**fit.validity, "swapped_bytes": (min(sizes), max(sizes))}
    return replace(fit, eager=eager, graph=graph, validity=validity)


def swapped_byte_s(times: Sequence[SwapTime]) -> float:
    """Return seconds a swapped byte, both directions alike: least squares in relative error."""
    inverse = np.array([t.num_bytes / t.seconds for t in times])
    return float(inverse.sum() / (inverse**2).sum())


def run_level(
    fit: Fit,
    steps: Sequence[MeasuredBatch],
    decode_row_s: float | None = None,
    lone_row_s: float = 0.0,
) -> RunLevel:
    """Return by how much the steps of a run differ from a fit to batches timed by themselves.

    Parameters
    ----------
    fit : Fit
        Whose own level is not looked at.
    steps : sequence of MeasuredBatch
        Of runs; a kind of which there are none keeps the level one.
    decode_row_s : float, optional
        What each decoding request adds, if that is known: then `prompt_step_s` is found. Else it is
        found itself, and that is zero: few runs tell one of the two from the levels, not both.
    lone_row_s : float
        What each adds beside in steps without prompt tokens, as `lone_row` finds it.

    Notes
    -----
    ``measured = level of its kind * predicted + decode_row_s * decoding requests + prompt_step_s
    (if there are prompt tokens; else lone_row_s * decoding requests)``, by non-negative least
    squares in which a step weighs 1 / predicted: so the sums of both sides are equal for each kind,
    and a run takes as long as its steps together, the slow ones among them. `prompt_step_s` makes
    up half of what steps with prompts take at most: where all of them took alike, longer prompts
    would cost nothing else.
    """
    if not steps:
        return RunLevel()
    measured, predicted, has_prompts = _beside_fit(fit, steps)
    rows = np.array([float(s.shape.num_decodes) for s in steps])
    columns = [predicted * ~has_prompts, predicted * has_prompts]
    # What is added is told from a level only where steps differ in their share of it.
    added = rows if np.ptp(rows / predicted) else np.zeros(len(steps))
    measured = measured - lone_row_s * rows * ~has_prompts
    if decode_row_s is not None:
        measured = measured - decode_row_s * rows
        added = has_prompts * float(has_prompts.any() and np.ptp(predicted[has_prompts]) > 0)
    columns.append(added)
    matrix = np.stack(columns, axis=1) / np.sqrt(predicted)[:, None]
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(matrix / scale, measured / np.sqrt(predicted))
    decode, prompt, more_s = (float(value) for value in solution / scale)
    if decode_row_s is not None and more_s:
        total_s, priced_s = measured[has_prompts].sum(), predicted[has_prompts].sum()
        more_s = min(more_s, float(total_s / 2 / has_prompts.sum()))
        prompt = float((total_s - more_s * has_prompts.sum()) / priced_s)
    return RunLevel(
        decode_steps=1.0 if has_prompts.all() else decode,
        prompt_steps=prompt if has_prompts.any() else 1.0,
        decode_row_s=more_s if decode_row_s is None else decode_row_s,
        prompt_step_s=0.0 if decode_row_s is None else more_s,
        lone_row_s=lone_row_s,
    )


def lone_row(fit: Fit, rounds: Sequence[Sequence[MeasuredBatch]], decode_row_s: float) -> float:
    """Return what each decode adds to steps without prompt tokens beside `decode_row_s`.

    Parameters
    ----------
    fit : Fit
        Whose own level is not looked at.
    rounds : sequence of sequence of MeasuredBatch
        Of runs; those of a round stand at one level.
    decode_row_s : float
        What each adds in steps of both kinds.

    Returns
    -------
    float
        Seconds, of either sign; 0 where steps do not differ in their share of it.

    Notes
    -----
    ``measured = level of its round * predicted + row * decoding requests`` over steps without
    prompt tokens, by least squares in which a step weighs 1 / predicted. What a round's few
    hundred steps do not tell from their level, all rounds together do.
    """
    decodes = [[s for s in steps if not s.shape.chunks] for steps in rounds]
    every = [step for steps in decodes for step in steps]
    if not every:
        return 0.0
    measured, predicted, _ = _beside_fit(fit, every)
    rows = np.array([float(step.shape.num_decodes) for step in every])
    which = np.repeat(np.arange(len(decodes)), [len(steps) for steps in decodes])
    levels = predicted[:, None] * (which[:, None] == np.unique(which))
    matrix = np.column_stack([levels, rows]) / np.sqrt(predicted)[:, None]
    scale = matrix.max(axis=0)
    if np.linalg.matrix_rank(matrix / scale) < matrix.shape[1]:
        return 0.0
    found, *_ = np.linalg.lstsq(matrix / scale, measured / np.sqrt(predicted), rcond=None)
    return float(found[-1] / scale[-1]) - decode_row_s


def sustained_level(fit: Fit, steps: Sequence[MeasuredBatch]) -> RunLevel:
    """Return by how much the steps of a run on a GPU differ from a fit to batches timed alone.

    Parameters
    ----------
    fit : Fit
        Whose own level is not looked at.
    steps : sequence of MeasuredBatch
        Of runs that keep the device busy; a kind of which there are none keeps the level one.

    Notes
    -----
    Between two batches that are timed by themselves the device waits for the host. One that
    computes without a pause draws more power and clocks lower: the longer its matrix products, the
    more, and what waits for launches or for memory not at all. So for steps with prompts
    ``measured = prompt_steps * predicted + prompt_step_s``, the latter of either sign, by least
    squares in relative error of which large ones count less (soft L1 beyond 3 %: the host is
    interrupted now and then). Both are scaled so that the sums of both sides are equal, as they are
    for the steps without prompts.
    """
    if not steps:
        return RunLevel()
    measured, predicted, has_prompts = _beside_fit(fit, steps)
    decode, prompt, more_s = 1.0, 1.0, 0.0
    if not has_prompts.all():
        decode = float(measured[~has_prompts].sum() / predicted[~has_prompts].sum())
    if has_prompts.any():
        priced, took = predicted[has_prompts], measured[has_prompts]
        if np.ptp(priced) > 0:
            # In units of the mean step both are of one size.
            unit = float(priced.mean())
            # As long as the shortest step at most: where all steps are of a size, nothing else says
            # what belongs to each token.
            most = max(1e-9, min(1.0, min(fit.eager.knots_s) / unit))
            found = least_squares(
                lambda x: (x[0] * priced + x[1] * unit) / took - 1.0,
                [1.0, 0.0], bounds=([0.0, -1.0], [np.inf, most]), loss="soft_l1", f_scale=0.03,
            )  # fmt: skip
            prompt, more_s = float(found.x[0]), float(found.x[1] * unit)
            # The shortest step with prompts still takes a tenth of what it takes alone.
            more_s = max(more_s, -0.9 * prompt * min(fit.eager.knots_s))
        scale = float(took.sum() / (prompt * priced + more_s).sum())
        prompt, more_s = prompt * scale, more_s * scale
    return RunLevel(decode_steps=decode, prompt_steps=prompt, prompt_step_s=more_s)


def _beside_fit(
    fit: Fit, steps: Sequence[MeasuredBatch]
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Return what steps took, what a fit says of them at no level, and which have prompts."""
    return (
        np.array([s.seconds for s in steps]),
        predictions(replace(fit, run_level=RunLevel()), steps),
        np.array([bool(s.shape.chunks) for s in steps]),
    )


def step_spread(fit: Fit, steps: Sequence[MeasuredBatch]) -> StepSpread | None:
    """Return how far the steps of a run scatter about a fit at their level.

    Parameters
    ----------
    fit : Fit
        With its `run_level`.
    steps : sequence of MeasuredBatch
        Of runs, in their order.

    Returns
    -------
    StepSpread or None
        None if there are too few steps of a kind to say.

    Notes
    -----
    Steps are sorted by measured / predicted and cut into shares of equal predicted time; the factor
    of a share is its measured time over its predicted one, so that their mean is one and the
    slowest keep their weight. Where a stretch of n steps draws one factor, the correlation of one
    step with the next is (n - 1) / n, so n is 1 / (1 - the correlation that was measured).
    """
    kinds = ([s for s in steps if not s.shape.chunks], [s for s in steps if s.shape.chunks])
    if min(map(len, kinds)) < 2 * _STEPS_A_SHARE:
        return None
    decodes, prompts = (_shares(fit, some) for some in kinds)
    ratios = np.log([s.seconds for s in steps] / predictions(fit, steps))
    correlation = float(np.corrcoef(ratios[:-1], ratios[1:])[0, 1])
    num_alike = round(1 / (1 - min(max(correlation, 0.0), 1 - 1 / _MOST_ALIKE)))
    return StepSpread(decodes, prompts, num_alike)


def _shares(fit: Fit, steps: Sequence[MeasuredBatch]) -> tuple[float, ...]:
    measured, predicted = np.array([s.seconds for s in steps]), predictions(fit, steps)
    order = np.argsort(measured / predicted, kind="stable")
    measured, predicted = measured[order], predicted[order]
    ends = np.cumsum(predicted)
    num = min(_SHARES, len(steps) // _STEPS_A_SHARE)
    share = ((ends - predicted / 2) / ends[-1] * num).astype(int)
    used = np.unique(share)
    factors = np.array(
        [measured[share == one].sum() / predicted[share == one].sum() for one in used]
    )
    return tuple((factors / factors.mean()).tolist())


def judge(fit: Fit, points: Sequence[MeasuredBatch]) -> FitError:
    """Return how far a fit is from measured batches."""
    if not points:
        return FitError(0.0, 0.0, 0.0, 0.0, 0)
    error = predictions(fit, points) / np.array([p.seconds for p in points]) - 1
    size = np.abs(error)
    return FitError(
        mape=float(size.mean()),
        p90=float(np.quantile(size, 0.9)),
        max=float(size.max()),
        bias=float(error.mean()),
        num_points=len(points),
    )


def error_by_kind(fit: Fit, points: Sequence[MeasuredBatch]) -> dict[str, dict[str, float]]:
    """Return how far a fit is from measured batches, by what they are made of, and by time.

    Returns
    -------
    dict
        ``decode``, ``mixed`` and ``prefill``, as far as there are such batches: what `judge` says
        of them. ``by_time``: the sums of absolute (``mape``) and of signed errors (``bias``) over
        the sum of what was measured; long steps dominate it as they dominate a run.
    """
    kinds: dict[str, list[MeasuredBatch]] = {}
    for point in points:
        kinds.setdefault(batch_kind(point.shape), []).append(point)
    found = {kind: asdict(judge(fit, some)) for kind, some in sorted(kinds.items())}
    if points:
        measured = np.array([p.seconds for p in points])
        off = predictions(fit, points) - measured
        by_time = {"mape": np.abs(off).sum(), "bias": off.sum()}
        found["by_time"] = {key: float(value / measured.sum()) for key, value in by_time.items()}
    return found


def predictions(fit: Fit, points: Sequence[MeasuredBatch]) -> Floats:
    """Return what the simulator would say of these batches, in seconds."""
    model = FittedCostModel(fit, {})
    return np.array([model.step_ns(p.shape)[0] for p in points]) / 1e9


def coefficient_intervals(
    points: Sequence[MeasuredBatch], buckets: Sequence[int], seed: int
) -> dict[str, tuple[float, float]]:
    """Return 95 % bootstrap intervals of the eager regime's coefficients, seconds per unit."""
    graphed = [p for p in points if _is_graphed(p.shape, buckets)]
    eager = [p for p in points if not _is_graphed(p.shape, buckets)]
    rng = stream(seed, "bootstrap")
    drawn: dict[str, list[float]] = {name: [] for name in FEATURES}
    for _ in range(_RESAMPLES):
        some, others = (
            [of[i] for i in rng.integers(len(of), size=len(of))] if of else []
            for of in (eager, graphed)
        )
        regime, _ = _fit_regimes(some, others, tuple(buckets))
        for name in FEATURES:
            drawn[name].append(float(regime.coefficients_s.get(name, 0.0)))
    return {
        name: (float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975)))
        for name, values in drawn.items()
    }


def _is_graphed(shape: BatchShape, buckets: Sequence[int]) -> bool:
    return bool(buckets) and not shape.chunks and shape.num_decodes <= max(buckets)


def _fit_regimes(
    eager: Sequence[MeasuredBatch], graphed: Sequence[MeasuredBatch], buckets: tuple[int, ...]
) -> tuple[Regime, Regime | None]:
    """Fit what is launched eagerly, and what is replayed from graphs if anything is."""
    graph = _fit_regime(graphed, buckets=buckets) if graphed else None
    large = [p for p in eager if step_features(p.shape)["new_tokens"] > max(TILES_TOKENS)]
    if graph is None or not large:
        return _fit_regime(eager), graph
    regimes = [_fit_regime(eager, tile) for tile in TILES_TOKENS]
    measured_s = np.array([p.seconds for p in large])

    def error(regime: Regime) -> float:
        draft = Fit(regime, graph, {"new_tokens": (1.0, 1.0)}, _UNKNOWN, _UNKNOWN)
        return float(np.square(predictions(draft, large) / measured_s - 1).mean())

    return min(regimes, key=error), graph


def _fit_regime(
    points: Sequence[MeasuredBatch], tile_tokens: int = 1, buckets: tuple[int, ...] = ()
) -> Regime:
    """Fit one regime; without buckets its tokens are rounded up to whole tiles."""
    features = [step_features(p.shape) for p in points]
    tokens = np.array(
        [computed_tokens(f["new_tokens"], buckets, tile_tokens) for f in features],
        dtype=np.float64,
    )  # fmt: skip
    # A graph takes one time for all batches it is replayed for: each bucket is a knot.
    knots = [int(n) for n in np.unique(tokens)] if buckets else _knots(tokens)
    names = [name for name in FEATURES if any(f[name] for f in features)]
    columns = [np.interp(tokens, knots, hat) for hat in np.eye(len(knots))]
    columns += [np.array([f[name] for f in features], dtype=np.float64) for name in names]
    matrix = np.stack(columns, axis=1)
    weight = 1.0 / np.array([p.seconds for p in points])
    scale = (matrix * weight[:, None]).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(matrix * weight[:, None] / scale, np.ones(len(points)))
    solution = solution / scale
    coefficients = dict(zip(names, solution[len(knots) :].tolist(), strict=True))
    values = [float(v) for v in solution[: len(knots)]]
    if len(knots) == 1:  # a flat curve: nothing says how it goes on
        knots, values = [knots[0], knots[0] + 1], values * 2
    return Regime(tuple(knots), tuple(values), coefficients, buckets, tile_tokens)


def _knots(tokens: Floats) -> list[int]:
    """Return the knots that have been measured."""
    counts = set(tokens.tolist())
    low, high = int(min(counts)), int(max(counts))
    return [n for n in token_knots(low, high) if n in counts]


def _box(shapes: Sequence[BatchShape]) -> dict[str, tuple[float, float]]:
    features = [step_features(shape) for shape in shapes]
    box = {}
    for name in ("new_tokens", *FEATURES):
        values = [f[name] for f in features if f[name]]
        if values:
            box[name] = (float(min(values)), float(max(values)))
    return box
