"""Latency targets: who holds them, of requests and of single tokens."""

from __future__ import annotations

import numpy as np

from schedlab.sim.metrics.latencies import Latencies
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import Bools, Columns, Floats, completed, whole_numbers

_DIMENSIONS = ("ttft", "tpot", "e2el")
_NS_PER_MS = 1e6


@register(better="neither", every_run=True)
def num_with_slo(run: Observation) -> int:
    """Return the requests with any target: the denominator.

    Rejected ones are in it, as misses; requests without a target are not.
    """
    return int(np.count_nonzero(_stated(run.requests)))


@register(better="higher", every_run=True)
def num_slo_met(run: Observation) -> int:
    """Return the good requests: completed, with a target, and every target held (<=).

    The TPOT of a one-token answer counts as 0.
    """
    return _num_met(run.requests, run.latencies)


@register(better="higher", label="SLO attainment", every_run=True)
def slo_attainment(run: Observation) -> float:
    """Return ``num_slo_met`` / ``num_with_slo``."""
    return ratio(num_slo_met(run), num_with_slo(run))


def _attainment(name: str) -> None:
    def attainment(run: Observation) -> float:
        stated, met = _target(run.requests, run.latencies, name)
        return ratio(int(np.count_nonzero(met & stated)), int(np.count_nonzero(stated)))

    attainment.__doc__ = (
        f"Return the share that hold their {name.upper()} target, of those with one."
    )
    register(
        f"{name}_slo_attainment", better="higher", label=f"{name.upper()} attainment",
        every_run=True,
    )(attainment)  # fmt: skip


for _name in _DIMENSIONS:
    _attainment(_name)


@register(unit="requests/s", better="higher", label="goodput", every_run=True)
def request_goodput(run: Observation) -> float:
    """Return the good requests per second of duration."""
    if not num_with_slo(run):
        return float("nan")
    waited = run.latencies if run.window is None else Latencies(run.leaving)
    return ratio(_num_met(run.leaving, waited), run.duration_s)


@register(unit="%", scale=100.0)
def deadline_misses(run: Observation) -> float:
    """Return the share of requests with targets of which a token came after its deadline.

    Token i = 0, 1, ... is due at arrival + TTFT target + i * TPOT target, so that a token that is
    early leaves time for the next ones; with a target to the end the last token is due then.
    Requests without a target are not counted, rejected ones are misses.

    Notes
    -----
    This is how deadlines are counted in arXiv:2503.22562; the attainments judge the mean time per
    token instead.
    """
    rows = run.requests
    ttft, tpot, end = (rows[f"slo_{name}_ms"] for name in _DIMENSIONS)
    stated = _stated(rows)
    met = 0
    for i in np.flatnonzero(stated & run.completed).tolist():
        tokens_ms = (run.token_times(int(rows["id"][i])) - rows["arrival_ns"][i]) / _NS_PER_MS
        late = not np.isnan(end[i]) and tokens_ms[-1] > end[i]
        late |= not np.isnan(ttft[i]) and tokens_ms[0] > ttft[i]
        if not np.isnan(tpot[i]):
            # Without a target for the first token, the clock of the others starts with it.
            first = tokens_ms[0] if np.isnan(ttft[i]) else ttft[i]
            late |= bool((tokens_ms > first + tpot[i] * np.arange(len(tokens_ms))).any())
        met += not late
    num_stated = int(np.count_nonzero(stated))
    return ratio(float(num_stated - met), num_stated)


@register(unit="requests/s", better="higher")
def stall_free_goodput(run: Observation, ttft_ms: float, stall_ms: float) -> float:
    """Return the completed requests per second of duration that start in time and never stall.

    Their TTFT is at most `ttft_ms`, and every gap between two tokens at most `stall_ms`: the
    service level agreement of Gong et al. (ASPLOS 2025).
    """
    rows = run.leaving
    done = completed(rows)
    arrivals_ns = whole_numbers(rows, "arrival_ns")[done].tolist()
    good = 0
    for arrival_ns, number in zip(arrivals_ns, rows["id"][done].tolist(), strict=True):
        waits_ms = np.diff(run.token_times(number), prepend=arrival_ns) / _NS_PER_MS
        good += bool(waits_ms[0] <= ttft_ms and (waits_ms[1:] <= stall_ms).all())
    return ratio(float(good), run.duration_s)


def _target(requests: Columns, waited: Latencies, name: str) -> tuple[Bools, Bools]:
    """Say of each request whether it has a target, and whether it holds it."""
    target = requests[f"slo_{name}_ms"].astype(np.float64, copy=False)
    value: Floats = getattr(waited, name)
    if name == "tpot":
        # An answer of one token has no time per token to miss a target by.
        value = np.where(completed(requests) & np.isnan(value), 0.0, value)
    return ~np.isnan(target), value <= target  # False where there is no target or no latency


def _stated(requests: Columns) -> Bools:
    stated = np.zeros(len(requests["status"]), dtype=bool)
    for name in _DIMENSIONS:
        stated |= ~np.isnan(requests[f"slo_{name}_ms"].astype(np.float64, copy=False))
    return stated


def _num_met(requests: Columns, waited: Latencies) -> int:
    good = completed(requests) & _stated(requests)
    for name in _DIMENSIONS:
        stated, met = _target(requests, waited, name)
        good &= met | ~stated
    return int(np.count_nonzero(good))
