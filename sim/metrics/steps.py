"""How the engine spent its time and memory.

Means weigh each step with its duration: they describe an engine while it is busy, not the time
between steps. In a pipeline steps overlap, and each counts for the time since the one before ended.
Of several engines, times are summed over all of them, and counts, batches and shares of memory are
those of one engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.step_lengths import StepLengths
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import Floats, Ints, whole_numbers

_NS_PER_S = 1_000_000_000


@register(better="neither", about="engine", every_run=True)
def num_steps(run: Observation) -> int:
    """Return the number of steps."""
    return run.step_totals.num_steps


@register(about="engine", every_run=True)
def busy_s(run: Observation) -> float:
    """Return the time inside steps."""
    return run.step_totals.busy_ns / _NS_PER_S


@register(about="engine", every_run=True)
def idle_s(run: Observation) -> float:
    """Return the time between steps."""
    return (_span_ns(run) - run.step_totals.busy_ns) / _NS_PER_S


@register(better="higher", about="engine", every_run=True)
def busy_share(run: Observation) -> float:
    """Return busy time / (last end - first start), of all engines."""
    return ratio(run.step_totals.busy_ns, _span_ns(run))


@register(about="engine", every_run=True)
def overhead_share(run: Observation) -> float:
    """Return scheduling overhead / busy time; it is inside the steps."""
    return ratio(float(run.step_totals.sums["overhead_ns"]), run.step_totals.busy_ns)


@register(better="higher", about="engine", every_run=True)
def mean_batch_size(run: Observation) -> float:
    """Return the mean of decodes + prefill chunks in a step."""
    return run.step_totals.mean("batch")


@register(better="higher", about="engine", every_run=True)
def max_batch_size(run: Observation) -> int:
    """Return the most decodes + prefill chunks in a step."""
    return run.step_totals.most["batch"]


@register(about="engine", every_run=True)
def mean_num_running(run: Observation) -> float:
    """Return the mean number of requests that hold a seat."""
    return run.step_totals.mean("num_running")


@register(about="engine", every_run=True)
def mean_num_waiting(run: Observation) -> float:
    """Return the mean number of requests in the queue."""
    return run.step_totals.mean("num_waiting")


@register(better="neither", about="engine", every_run=True)
def computed_tokens(run: Observation) -> int:
    """Return the tokens computed, padding and drafts included."""
    sums = run.step_totals.sums
    tokens = sums["num_decodes"] + sums["prefill_tokens"] + sums["padding_tokens"]
    return tokens + sums.get("draft_tokens", 0)


@register(about="engine", every_run=True)
def padding_share(run: Observation) -> float:
    """Return padding / tokens computed."""
    return ratio(run.step_totals.sums["padding_tokens"], computed_tokens(run))


@register(better="higher", about="engine", every_run=True)
def kv_utilization(run: Observation) -> float:
    """Return KV tokens resident / capacity."""
    return _share_of_memory(run, "kv_tokens")


@register(about="engine", every_run=True)
def kv_allocated_share(run: Observation) -> float:
    """Return KV memory held by requests / capacity, on average."""
    return _share_of_memory(run, "kv_allocated_tokens")


@register(about="engine", every_run=True)
def max_kv_allocated_share(run: Observation) -> float:
    """Return the largest KV memory held by requests / capacity."""
    if _memories_differ(run):
        shares = (share for share, _ in _shares(run, "kv_allocated_tokens"))
        return max(float(share.max(initial=0.0)) for share in shares)
    return ratio(run.step_totals.most["kv_allocated_tokens"], run.kv_capacity_tokens)


@register(about="engine", every_run=True)
def kv_reserved_unused_share(run: Observation) -> float:
    """Return the KV memory that is held, and to be used later by its owner / held."""
    return ratio(run.step_totals.mean("kv_reserved_unused_tokens"), _mean_held(run))


@register(about="engine", every_run=True)
def kv_fragmentation_share(run: Observation) -> float:
    """Return the KV memory held and never used (tails of last blocks, over-reservation) / held."""
    return ratio(run.step_totals.mean("kv_fragmentation_tokens"), _mean_held(run))


@register(about="engine", every_run=True)
def swapped_bytes(run: Observation) -> int:
    """Return the KV moved between device and host."""
    return run.step_totals.sums["swapped_bytes"]


@register(unit="%", scale=100.0, about="engine")
def kv_waste(run: Observation) -> float:
    """Return 1 - KV tokens resident / KV memory held, over busy time.

    What is reserved for later, reserved for nothing, or the tail of a last block; memory that
    nobody holds is not in it.
    """
    return 1.0 - ratio(kv_utilization(run), kv_allocated_share(run))


@register(better="higher", about="engine")
def slot_utilization(run: Observation, slots: int) -> float:
    """Return output tokens / (slots * steps that gave any).

    For a sealed batch that is computed in one prefill, the sum of its output lengths over `slots`
    times the longest.
    """
    tokens = run.token_counts[1]
    return ratio(float(tokens.sum()), float(slots * len(tokens)))


@register(unit="requests/s", about="engine")
def queue_growth(run: Observation) -> float:
    """Return the slope of the number waiting over the second half of the arrivals.

    By least squares, where each step weighs with its duration: near 0 in a stable system, rate
    minus capacity in an overloaded one.
    """
    arrival_ns = whole_numbers(run.requests, "arrival_ns")
    start_ns = _column(run, "start_ns")
    then = (start_ns >= np.median(arrival_ns)) & (start_ns <= arrival_ns.max())
    if np.count_nonzero(then) < 2:
        return float("nan")
    seconds = (start_ns[then] - start_ns[then][0]) / 1e9
    if not seconds[-1]:
        return float("nan")
    # Steps are dense where they are short: each counts for the time it took.
    weight = run.step_ns[then]
    waiting = _column(run, "num_waiting")[then].astype(np.float64)
    centred = seconds - np.average(seconds, weights=weight)
    return float((weight * centred * waiting).sum() / (weight * centred * centred).sum())


def _column(run: Observation, name: str) -> Ints:
    return whole_numbers(run.steps, name)


def _span_ns(run: Observation) -> float:
    """Return the time from the first step to the last one, once for each engine."""
    totals = run.step_totals
    return float(totals.last_end_ns - totals.first_start_ns) * run.num_engines


def _memories_differ(run: Observation) -> bool:
    return len({engine.kv_capacity_tokens for engine in run.engines}) > 1


def _share_of_memory(run: Observation, name: str) -> float:
    """Return the mean share of its engine's KV memory that tokens of a column are."""
    if not _memories_differ(run):
        return ratio(run.step_totals.mean(name), run.kv_capacity_tokens)
    held = busy_ns = 0.0
    for share, took_ns in _shares(run, name):
        held += float((share * took_ns).sum())
        busy_ns += float(took_ns.sum())
    return ratio(held, busy_ns)


def _shares(run: Observation, name: str) -> Iterator[tuple[Floats, Floats]]:
    """Yield, of some steps at a time, tokens / memory of the engine that took it, and its time."""
    capacity_tokens = np.array([engine.kv_capacity_tokens for engine in run.engines])
    lengths = StepLengths()
    for steps in run.step_batches():
        took_ns = lengths.of(steps)
        of_engine = capacity_tokens[whole_numbers(steps, "engine")]
        yield whole_numbers(steps, name) / of_engine, took_ns.astype(np.float64)


def _mean_held(run: Observation) -> float:
    return run.step_totals.mean("kv_allocated_tokens")
