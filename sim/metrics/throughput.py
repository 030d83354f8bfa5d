"""How many requests and tokens were served, and how fast, as `vllm bench serve` counts them.

References
----------
vllm/benchmarks/serve.py, ``calculate_metrics``.
"""

from __future__ import annotations

import numpy as np

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import REJECTED, TRUNCATED, completed, whole_numbers

_NS_PER_S = 1_000_000_000


@register(better="neither", unit="", every_run=True)
def num_requests(run: Observation) -> int:
    """Return the number of requests."""
    return len(run.requests["status"])


@register("completed", better="higher", every_run=True)
def num_completed(run: Observation) -> int:
    """Return the requests that got their answer, also if a length limit cut it off."""
    return int(np.count_nonzero(run.completed))


@register(unit="requests", every_run=True)
def rejected(run: Observation) -> int:
    """Return the requests that were turned away."""
    return int(np.count_nonzero(run.requests["status"] == REJECTED))


@register(every_run=True)
def failed(run: Observation) -> int:
    """Return the same, under the name that vLLM has for it."""
    return rejected(run)


@register(every_run=True)
def truncated(run: Observation) -> int:
    """Return the completed requests that a length limit cut off."""
    return int(np.count_nonzero(run.requests["status"] == TRUNCATED))


@register(better="neither", every_run=True)
def total_input_tokens(run: Observation) -> int:
    """Return the prompt tokens of completed requests."""
    return int(whole_numbers(run.requests, "prompt_tokens")[run.completed].sum())


@register(better="neither", every_run=True)
def total_output_tokens(run: Observation) -> int:
    """Return the output tokens of completed requests."""
    return int(whole_numbers(run.requests, "generated_tokens")[run.completed].sum())


@register(every_run=True)
def duration_s(run: Observation) -> float:
    """Return last finish - first arrival, or the length of the measured window.

    vLLM's clock starts just before the first request is sent and stops at the last response; idle
    time before the first arrival does not count here.
    """
    return run.duration_s


@register(unit="requests/s", better="higher", label="throughput", every_run=True)
def request_throughput(run: Observation) -> float:
    """Return the completed requests per second of duration."""
    return ratio(int(np.count_nonzero(completed(run.leaving))), run.duration_s)


@register(unit="tokens/s", better="higher", label="output throughput", every_run=True)
def output_throughput(run: Observation) -> float:
    """Return the output tokens of completed requests per second of duration."""
    return ratio(answered_tokens(run), run.duration_s)


@register(unit="tokens/s", better="higher", label="total throughput", every_run=True)
def total_token_throughput(run: Observation) -> float:
    """Return the prompt and output tokens of completed requests per second of duration."""
    rows = run.leaving
    num_input = int(whole_numbers(rows, "prompt_tokens")[completed(rows)].sum())
    return ratio(num_input + answered_tokens(run), run.duration_s)


def answered_tokens(run: Observation) -> int:
    """Return the output tokens of completed requests that come out in what is measured."""
    if run.window is None:
        return total_output_tokens(run)
    return sum(int(tokens.sum()) for _, tokens in run.token_count_batches(answered=True))


@register(better="neither", every_run=True)
def offered_request_rate(run: Observation) -> float:
    """Return (requests - 1) / (last arrival - first arrival)."""
    arrival_ns = whole_numbers(run.requests, "arrival_ns")
    span_s = float(arrival_ns.max() - arrival_ns.min()) / _NS_PER_S if len(arrival_ns) else 0.0
    return ratio(len(arrival_ns) - 1, span_s)
