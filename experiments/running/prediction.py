"""What a predictor says of a workload, how good that is, and what it costs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.policies import registry
from schedlab.policies.predictors import registry as predictors
from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.own_code import FAULTS, as_json, raised, short
from schedlab.sim.request import LARGEST
from schedlab.sim.rng import stream
from schedlab.traces.published import PUBLISHED
from schedlab.traces.rank_correlation import kendall_tau
from schedlab.traces.trace import Trace

TAU_SAMPLE = 20_000


@dataclass(frozen=True)
class Predictions:
    """What the scheduler is told of each request, and when.

    Attributes
    ----------
    predicted_tokens : ndarray of float64, shape (num_requests,)
        Lengths or scores, smaller = shorter.
    delay_s : ndarray of float64, shape (num_requests,)
        How long after its arrival the scheduler sees a request.
    provenance : dict
        The predictor, what it cost, and how well it really ordered and sized this workload.
    refinements : ndarray of Refinement, shape (num_requests,), optional
        What it says while answers are generated, if it is asked again.
    """

    predicted_tokens: Floats
    delay_s: Floats
    provenance: dict[str, Any]
    refinements: npt.NDArray[np.object_] | None = None


def predictions(spec: ExperimentSpec, trace: Trace) -> Predictions | None:
    """Predict the outputs of a workload; `None` if the specification names no predictor.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    trace : Trace
        Its workload, with arrival times.

    Raises
    ------
    SpecError
        If the policy needs a predictor and has none, or the predictor cannot do this workload.
    """
    chosen = spec.policy.predictor
    if chosen is None:
        if registry.make(spec.policy.name, **spec.policy.knobs).needs_prediction:
            raise SpecError(
                f"policy.predictor: {spec.policy.name} orders by predicted output; give it one, "
                f"e.g. policy: {{name: {spec.policy.name}, predictor: oracle}}"
            )
        return None
    predictor = predictors.make(chosen.name, **chosen.knobs)
    if predictor.one_at_a_time and spec.workload.max_concurrency is not None:
        raise SpecError(
            "policy.predictor.one_at_a_time: when a closed loop (workload.max_concurrency) sends "
            "is not known beforehand, nor which predictions wait for each other"
        )
    inputs = PredictionInputs(
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        rng=stream(spec.seed, "predictor"),
        application=trace.application,
        prompt=trace.prompt,
    )
    predicted = _rounded(_numbers(predictor, "predict", len(trace), predictor.predict, inputs))
    delay_s = _numbers(
        predictor, "delay_s", len(trace), predictor.delay_s, trace.require_arrivals()
    )
    described = _described(predictor)
    provenance = {
        "predictor": chosen.name,
        **_agreement(predicted, trace.output_tokens),
        **described,
        "mean_delay_s": float(delay_s.mean()),
        "learned_from_this_trace": _learned_from(described, spec.workload.trace),
    }
    refinements = _asked(predictor, "refine", predictor.refine, inputs)
    return Predictions(predicted, delay_s, provenance, refinements)


def _asked(
    predictor: Predictor,
    hook: str,
    ask: Callable[..., Any],
    *given: object,
) -> Any:  # noqa: ANN401 - whatever it says
    """Return what a predictor says when it is asked; blame it if it raises."""
    try:
        return ask(*given)
    except SchedlabError:
        raise
    except FAULTS as error:
        cls = type(predictor)
        raise SpecError(
            f"predictor {cls.__name__}: {hook}() raised {raised(error, cls)}"
        ) from error


def _numbers(
    predictor: Predictor, hook: str, count: int, ask: Callable[..., Any], *given: object
) -> Floats:
    """Return what a predictor says of each request, if that is a number or NaN."""
    found = _asked(predictor, hook, ask, *given)
    name = f"predictor {type(predictor).__name__}: {hook}()"
    try:
        values = np.asarray(found)
        numbers = values.astype(np.float64) if values.dtype.kind in "biufO" else None
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None or numbers.ndim != 1 or len(numbers) != count:
        raise SpecError(f"{name} returned {short(found)}, expected an array of {count} numbers")
    wrong = np.flatnonzero(np.abs(numbers) > LARGEST)
    if len(wrong):
        raise SpecError(
            f"{name} says {numbers[wrong[0]]} of request {wrong[0]}, which is no number of "
            f"{-LARGEST:g} to {LARGEST:g}"
        )
    return numbers


def _described(predictor: Predictor) -> dict[str, Any]:
    """Return what a result says of a predictor, if JSON can hold it."""
    found = _asked(predictor, "describe", predictor.describe)
    name = f"predictor {type(predictor).__name__}"
    as_json(found, name)
    if not isinstance(found, dict):
        raise SpecError(f"{name}: describe() gives {short(found)}, expected a dict")
    return found


def _rounded(predicted: Floats) -> Floats:
    """Round to 32 significant bits: processors differ in the last of 53 bits of exponentials."""
    mantissa, exponent = np.frexp(predicted)
    kept: Floats = np.ldexp(np.rint(np.ldexp(mantissa, 32)), exponent - 32)
    return kept


def _agreement(predicted: Floats, output_tokens: npt.NDArray[np.int64]) -> dict[str, float]:
    # tau is O(n log n); a sample is plenty and keeps a million requests cheap.
    some = slice(None, None, max(1, len(predicted) // TAU_SAMPLE))
    true = output_tokens[some].astype(np.float64)
    tau = kendall_tau(predicted[some], true)
    error = np.abs(predicted[some] - true)
    return {"kendall_tau": tau, "mean_absolute_error_tokens": float(error.mean())}


def _learned_from(described: Mapping[str, Any], trace: str | None) -> bool:
    """Say whether the workload is the file that a predictor was trained on."""
    learned = described.get("data")
    if not isinstance(learned, dict) or trace is None:
        return False
    path = PUBLISHED[trace].path if trace in PUBLISHED else Path(trace)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == learned.get("sha256")


def prediction_line(found: Sequence[object]) -> str:
    """Return one line on the predictor of a setting, for the screen.

    Parameters
    ----------
    found : sequence of object
        The entries ``prediction`` in the provenance of its replications.

    Examples
    --------
    >>> run = {"predictor": "noisy", "kendall_tau": 0.4, "latency_s": 0.002}
    >>> runs = [run, run | {"kendall_tau": 0.6}]
    >>> prediction_line(runs)
    'predictor: noisy, Kendall tau 0.50 on this workload, 2 ms a prediction'
    """
    runs = [run for run in found if isinstance(run, dict)]
    first = runs[0]
    kind = f" ({first['kind']})" if "kind" in first else ""
    # A constant prediction orders nothing: its tau is not a number.
    taus = [tau for run in runs if (tau := run["kendall_tau"]) is not None and not math.isnan(tau)]
    order = f"Kendall tau {sum(taus) / len(taus):.2f}" if taus else "no order"
    latency = first.get("latency_s") or 0.0
    cost = f"{latency * 1e3:.3g} ms a prediction" if latency else "free of charge"
    queued = ", one at a time" if first.get("one_at_a_time") else ""
    return f"predictor: {first['predictor']}{kind}, {order} on this workload, {cost}{queued}"
