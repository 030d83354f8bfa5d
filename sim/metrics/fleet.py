"""How evenly several engines are used, and what they cost.

Engines are those of a `cluster`. The time of a fleet is that of its run, from the first arrival to
the last answer: an engine is paid for as long as its devices are there, also while it is down or
starts, and is busy while any step of it is in flight within that time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.throughput import answered_tokens
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import Floats, Ints, whole_numbers
from schedlab.sim.record.fleet import STILL, Span
from schedlab.sim.sums import in_order

_NS_PER_S = 1e9
_S_PER_HOUR = 3600.0


@register(about="fleet", better="neither")
def num_engines(run: Observation) -> int:
    """Return the number of engines."""
    return _num_engines(run)


@register(about="fleet", unit="")
def load_imbalance(run: Observation) -> float:
    """Return busy time of the busiest engine / mean busy time of all; 1 = even."""
    busy_s = _busy_s(run)
    return ratio(float(busy_s.max()), float(busy_s.mean()))


@register(about="fleet", unit="")
def request_imbalance(run: Observation) -> float:
    """Return requests of the engine with the most / mean over the engines; 1 = even."""
    counts = _num_requests(run)
    return ratio(float(counts.max()), float(counts.mean()))


@register(about="fleet", unit="")
def token_imbalance(run: Observation) -> float:
    """Return tokens computed by the engine with the most / mean over the engines; 1 = even."""
    tokens = whole_numbers(run.steps, "num_decodes") + whole_numbers(run.steps, "prefill_tokens")
    sums = np.bincount(_engine(run), weights=tokens, minlength=_num_engines(run))
    return ratio(float(sums.max()), float(sums.mean()))


@register(about="fleet", better="neither")
def min_engine_busy_share(run: Observation) -> float:
    """Return busy time / time of the run, of the engine that is busy the least."""
    return ratio(float(_busy_s(run).min()), run.duration_s)


@register(about="fleet", better="neither")
def max_engine_busy_share(run: Observation) -> float:
    """Return busy time / time of the run, of the engine that is busy the most."""
    return ratio(float(_busy_s(run).max()), run.duration_s)


@register("engine_busy_share", about="fleet", better="neither")
def busy_share_of(run: Observation, engine: int) -> float:
    """Return busy time / time of the run, of one engine."""
    if not 0 <= engine < _num_engines(run):
        raise SpecError(f"engine: there are engines 0 to {_num_engines(run) - 1}, got {engine}")
    return ratio(float(_busy_s(run)[int(engine)]), run.duration_s)


@register(about="fleet", unit="GPU s")
def gpu_seconds(run: Observation) -> float:
    """Return the GPUs of all engines * time for which they were there."""
    if not run.engines:
        return float("nan")
    if not any(engine.paid for engine in run.engines):
        return sum(engine.num_gpus for engine in run.engines) * run.duration_s
    return in_order(engine.num_gpus * _span_s(run, engine.paid) for engine in run.engines)


@register(about="fleet", unit="USD")
def cost_usd(run: Observation) -> float:
    """Return the GPU hours of the run at their prices; not a number where one has no price."""
    prices = [engine.usd_per_gpu_hour for engine in run.engines]
    usd_per_hour = [
        float("nan") if price is None else price * engine.num_gpus
        for price, engine in zip(prices, run.engines, strict=True)
    ]
    if not run.engines:
        return float("nan")
    if not any(engine.paid for engine in run.engines):
        return in_order(usd_per_hour) * run.duration_s / _S_PER_HOUR
    paid_s = [_span_s(run, engine.paid) for engine in run.engines]
    # A product of vectors is rounded as the processor likes.
    return in_order(map(operator.mul, usd_per_hour, paid_s)) / _S_PER_HOUR


@register(about="fleet", better="higher", unit="%")
def availability_share(run: Observation) -> float:
    """Return the time for which engines were up / time for which their devices were there."""
    if not any(engine.paid for engine in run.engines):
        return 1.0
    up_s = in_order(_span_s(run, engine.served) for engine in run.engines)
    return ratio(up_s, in_order(_span_s(run, engine.paid) for engine in run.engines))


@register(about="fleet", better="neither")
def mean_engines_up(run: Observation) -> float:
    """Return the mean number of engines that were up."""
    if not any(engine.paid for engine in run.engines):
        return float(_num_engines(run))
    up_s = in_order(_span_s(run, engine.served) for engine in run.engines)
    return ratio(up_s, run.duration_s)


@register(about="fleet", better="lower", unit="")
def requests_retried(run: Observation) -> int:
    """Return how many requests lost their engine, which died."""
    if "num_losses" not in run.requests:
        return 0
    return int(np.count_nonzero(run.requests["num_losses"]))


@register(about="fleet", better="lower")
def lost_tokens(run: Observation) -> int:
    """Return the computed tokens whose keys and values were lost with their engine."""
    if "lost_tokens" not in run.requests:
        return 0
    return int(whole_numbers(run.requests, "lost_tokens").sum())


@register(about="fleet", unit="USD")
def usd_per_million_output_tokens(run: Observation) -> float:
    """Return the cost of the run / output tokens of completed requests, times a million."""
    return ratio(cost_usd(run) * 1e6, float(answered_tokens(run)))


@register(about="fleet", better="neither")
def transferred_bytes(run: Observation) -> float:
    """Return the KV that went from engine to engine."""
    if "transferred_bytes" not in run.requests:
        return 0
    return int(whole_numbers(run.requests, "transferred_bytes").sum())


@register(about="fleet")
def mean_handover_ms(run: Observation) -> float:
    """Return the mean time from the end of a prompt until its KV is where it is decoded.

    It waits for room there, and is then sent.
    """
    if "transfer_end_ns" not in run.requests:
        return float("nan")
    end_ns = whole_numbers(run.requests, "transfer_end_ns")
    # With the last of its prompt comes its first token, unless the engine that goes on gives it.
    done = "prefill_end_ns" if "prefill_end_ns" in run.requests else "first_token_ns"
    took_ns = (end_ns - whole_numbers(run.requests, done))[end_ns >= 0]
    return float(took_ns.mean()) / 1e6 if len(took_ns) else float("nan")


@register(about="fleet", better="neither", unit="")
def num_moves(run: Observation) -> int:
    """Return how often requests went from engine to engine while they decoded."""
    if "num_moves" not in run.requests:
        return 0
    return int(whole_numbers(run.requests, "num_moves").sum())


@register(about="fleet")
def mean_move_stop_ms(run: Observation) -> float:
    """Return the mean time for which a request stopped each time that it moved."""
    if "num_moves" not in run.requests:
        return float("nan")
    stop_ns = whole_numbers(run.requests, "moved_stop_ns").sum()
    return ratio(float(stop_ns) / 1e6, float(num_moves(run)))


def _span_s(run: Observation, spans: Sequence[Span]) -> float:
    """Return how much of the time of the run spans of it cover."""
    begin_ns = run.begin_ns
    end_ns = begin_ns + round(run.duration_s * _NS_PER_S)
    covered_ns = 0
    for from_ns, until_ns in spans:
        until_ns = end_ns if until_ns == STILL else min(until_ns, end_ns)
        covered_ns += max(until_ns - max(from_ns, begin_ns), 0)
    return covered_ns / _NS_PER_S


def _num_engines(run: Observation) -> int:
    return run.num_engines


def _engine(run: Observation) -> Ints:
    """Return which engine took each step."""
    if "engine" not in run.steps:
        return np.zeros_like(whole_numbers(run.steps, "num_decodes"))
    return whole_numbers(run.steps, "engine")


def _busy_s(run: Observation) -> Floats:
    return run.engine_busy_ns / _NS_PER_S


def _num_requests(run: Observation) -> Ints:
    if "engine" not in run.requests:
        return np.array([len(run.requests["id"])])
    return np.bincount(whole_numbers(run.requests, "engine"), minlength=_num_engines(run))
