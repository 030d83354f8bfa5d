"""What front ends, predictors and statistics give on a few drawn numbers with ties among them."""

from typing import Any

import numpy as np

from schedlab.experiments import statistics
from schedlab.policies.fluid import fluid_equilibrium
from schedlab.policies.predictors import registry as predictors
from schedlab.policies.predictors.predictor import PredictionInputs
from schedlab.sim.drive.frontend import Frontend
from schedlab.sim.rng import stream

# -- what happens before and after the engine ---------------------------------------------------


def frontend(case: str) -> dict[str, Any]:
    """Hand requests and tokens on through few or several servers."""
    draw = stream(5, "front end")
    arrival_ns = np.cumsum(draw.integers(0, 3, 40)) * 1_000_000
    prompts = draw.integers(1, 900, 40)
    ends_ns = np.cumsum(draw.integers(1, 4, 60)) * 700_000
    tokens = draw.integers(1, 50, 60)
    seen_ns = np.concatenate([[-1, 0, ends_ns[0] - 1], draw.choice(ends_ns, 20)])
    front = Frontend(0.003, 0.0004, 2e-6, 30e-6, servers=int(case))
    received_ns = front.received_ns(arrival_ns, prompts)
    return {
        "received_us": (received_ns // 1000).tolist(),
        "seen_us": (front.seen_ns(seen_ns, (ends_ns, tokens)) // 1000).tolist(),
    }


PREDICTORS: dict[str, dict[str, Any]] = {
    "oracle": {},
    "constant": {"tokens": 77.0, "latency_s": 0.003},
    "noisy": {"sigma": 0.7, "factor": 1.5},
    "noisy/tau": {"kendall_tau": 0.6, "factor": 0.5},
    "bucketed": {"num_buckets": 4, "accuracy": 0.7},
    "bert_errors": {"one_at_a_time": True},
    "refined": {"every_tokens": 5, "latency_s": 0.001},
}


def predicted(case: str) -> dict[str, Any]:
    """Predict lengths, equal ones among them; the delays, and what is said later."""
    draw = stream(7, "lengths")
    lengths = np.concatenate([draw.integers(1, 40, 12), [5, 5, 5, 10, 20, 20, 200, 1000]])
    predictor = predictors.make(case.partition("/")[0], **PREDICTORS[case])
    inputs = PredictionInputs(np.full(len(lengths), 50), lengths, stream(3, "predictor"))
    found = {
        "lengths": predictor.predict(inputs).tolist(),
        "delay_ms": (1e3 * predictor.delay_s(np.arange(len(lengths)) // 3 * 20_000_000)).tolist(),
    }
    later = predictor.refine(inputs)
    if later is not None:
        found["later"] = [one._totals for one in later]
    return found


# -- figures of results -------------------------------------------------------------------------

PAIRS: dict[str, tuple[list[float], list[float]]] = {
    "better": ([8.0, 9.1, 7.7, 8.4, 8.8], [10.0, 11.2, 9.6, 10.4, 10.9]),
    "worse": ([8.0, 9.1, 7.7, 8.4, 8.8, 9.0], [7.0, 8.8, 6.6, 8.1, 7.9, 7.7]),
    "equal": ([5.0, 5.0, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 5.0, 5.0]),
    "nearly equal": ([5.001, 5.002, 5.0, 5.003, 5.001], [5.0, 5.0, 5.001, 5.001, 5.002]),
    "noise": ([5.0, 7.0, 6.0, 9.0, 2.0], [6.0, 6.5, 5.0, 7.0, 4.0]),
    "four seeds": ([8.0, 9.0, 7.0, 8.5], [10.0, 11.0, 9.5, 10.5]),
    "from zero": ([0.0, 1.0, 0.5, 0.0, 2.0], [3.0, 2.5, 4.0, 3.5, 3.0]),
    "below zero": ([-2.0, -1.0, -3.0, -2.5, -2.2], [1.0, 0.5, 2.0, 1.5, 1.2]),
}


def verdicts(_: str) -> dict[str, Any]:
    """Judge pairs of runs one by one and together, and say so in words."""
    changes = {name: statistics.paired_change(*pair) for name, pair in PAIRS.items()}
    together = dict(zip(changes, statistics.corrected([*changes.values()]), strict=True))
    found: dict[str, Any] = {}
    for name, change in together.items():
        words = [statistics.verdict("x", "y", "m", change, larger) for larger in (True, False)]
        words.append(statistics.verdict("x", "y", "m", change, None))
        found[name] = [*changes[name], change.p_value, statistics.is_decided(change), *words]
        for compare in ("value", "difference", "ratio", "increase", "decrease"):
            found[f"{name}, {compare}"] = list(statistics.compared(compare, *PAIRS[name]))
    return found


def intervals(_: str) -> dict[str, Any]:
    """Batch means of correlated values, numbers with their intervals, and a fluid's equilibrium."""
    draw = stream(9, "values")
    noise = draw.standard_normal(1013)
    slow = np.convolve(draw.standard_normal(1413), np.ones(60), "valid")[:1013]
    means = {
        "noise": statistics.batch_means(noise),
        "drift": statistics.batch_means(slow),
        "few": statistics.batch_means(slow[:121], 7),
    }
    numbers = (0.0, 3.0, 0.004567, 12.3456, 99_999.5, 1.5e6, float("nan"), float("inf"))
    halves = (None, 0.0, 0.1234, 7.0, float("nan"))
    return {
        **{name: list(found) for name, found in means.items()},
        "told": [statistics.with_interval(x, half) for x in numbers for half in halves],
        "scaled": [statistics.with_interval(x, half, 100.0) for x in numbers for half in halves],
        "fluid": list(fluid_equilibrium((2.0, 0.5), (100.0, 300.0), (20.0, 50.0), 0.01, 5e-6)),
    }


CASES = {
    **{f"front end {servers}": (frontend, servers) for servers in ("1", "3")},
    **{f"predictor {name}": (predicted, name) for name in PREDICTORS},
    "verdicts": (verdicts, ""),
    "intervals": (intervals, ""),
}
