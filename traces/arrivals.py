"""Arrival processes: when requests come.

Each function returns a *process*: a function that gives the next `n` arrival times, int64
nanoseconds from the start, and goes on where its last call ended. Drawing in pieces gives the
same numbers as drawing at once, and a longer run begins with the shorter one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.rng import stream

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Process = Callable[[int], Int64]
Segments = Iterator[tuple[Float64, Float64]]

NS_PER_S = 1_000_000_000
PIECE_ROWS = 1_000_000
"""Requests that are drawn at a time: what is drawn beside their times and lengths stays small."""

_LATEST_NS = float(2**62)
_MOST_SEGMENTS = 10_000_000

_LARGEST = 1e15
"""Of a rate or a time: what is made of it by sums and products stays finite."""


def next_times(draw: Process, num_requests: int) -> Int64:
    """Return the next arrival times of a process; beside them only a piece is in memory."""
    times_ns = np.empty(num_requests, dtype=np.int64)
    for low in range(0, num_requests, PIECE_ROWS):
        piece = times_ns[low : low + PIECE_ROWS]
        piece[:] = draw(len(piece))
    return times_ns


def poisson(rate: float, *, seed: int = 0) -> Process:
    """Return a Poisson process of `rate` requests a second.

    Raises
    ------
    SpecError
        If the rate is not a positive number.
    """
    return gamma(rate, 1.0, seed=seed)


def gamma(rate: float, burstiness: float = 1.0, *, seed: int = 0) -> Process:
    """Return a renewal process whose gaps are gamma distributed, as `vllm bench serve` has it.

    Parameters
    ----------
    rate : float
        Mean requests a second.
    burstiness : float
        Shape of the gamma distribution: 1 is Poisson, smaller is burstier. The coefficient of
        variation of the gaps is ``1 / sqrt(burstiness)``.
    seed : int
        Seed of the experiment; the stream is ``"arrivals"``.

    Raises
    ------
    SpecError
        If a parameter is not a positive number.

    Notes
    -----
    vLLM then rescales the times so that the last one falls at ``num_requests / rate``; that takes
    variance away, so here it is a separate function, `normalize_span`.
    """
    _positive(rate=rate, burstiness=burstiness)
    rng = stream(seed, "arrivals")
    if burstiness == 1.0:
        return _renewal(lambda n: rng.standard_exponential(n) / rate)
    return _renewal(lambda n: rng.standard_gamma(burstiness, n) / (rate * burstiness))


def linear_ramp(
    start_rate: float,
    end_rate: float,
    num_requests: int,
    burstiness: float = 1.0,
    *,
    seed: int = 0,
) -> Process:
    """Return gamma arrivals whose rate goes from `start_rate` to `end_rate`.

    The gap before request i is drawn at rate ``start + (end - start) * i / (num_requests - 1)``:
    linear in the request's number, as in `vllm bench serve --ramp-up-strategy linear`, so not
    linear in time. Requests after `num_requests` keep the end rate.

    Raises
    ------
    SpecError
        If a parameter is not a positive number.
    """
    _positive(
        start_rate=start_rate, end_rate=end_rate, num_requests=num_requests, burstiness=burstiness
    )
    rng = stream(seed, "arrivals")
    drawn = 0

    def gaps(num_requests_now: int) -> Float64:
        nonlocal drawn
        index = np.arange(drawn, drawn + num_requests_now)
        drawn += num_requests_now
        progress = np.minimum(1.0, index / max(1, num_requests - 1))
        rate = start_rate + (end_rate - start_rate) * progress
        return rng.standard_gamma(burstiness, num_requests_now) / (rate * burstiness)

    return _renewal(gaps)


def on_off(
    rate: float,
    mean_on_s: float,
    mean_off_s: float,
    off_share: float = 0.0,
    *,
    seed: int = 0,
) -> Process:
    """Return a two-state Markov-modulated Poisson process: bursts and lulls.

    Parameters
    ----------
    rate : float
        Long-run mean requests a second.
    mean_on_s, mean_off_s : float
        Mean length of a burst and of a lull; both exponential. It starts in its steady state.
    off_share : float
        Rate in a lull over the rate in a burst, in [0, 1); 0 is an interrupted Poisson process.
    seed : int
        Seed of the experiment; the streams are ``"arrivals"`` and ``"arrivals/modulation"``.

    Raises
    ------
    SpecError
        If a parameter is out of range.

    Notes
    -----
    With ``off_share`` 0, ``a = 1 / mean_on_s``, ``b = 1 / mean_off_s`` and the burst rate
    ``rate * (a + b) / b``, the gaps have the squared coefficient of variation
    ``1 + 2 * burst_rate * a / (a + b)**2`` (Fischer and Meier-Hellstern, "The Markov-modulated
    Poisson process cookbook", 1993).
    """
    _positive(rate=rate, mean_on_s=mean_on_s, mean_off_s=mean_off_s)
    if not 0 <= off_share < 1:
        raise SpecError(f"off_share must lie in [0, 1), got {off_share}")
    on_rate = rate * (mean_on_s + mean_off_s) / (mean_on_s + off_share * mean_off_s)

    def segments() -> Segments:
        rng = stream(seed, "arrivals/modulation")
        on_first = rng.random() < mean_on_s / (mean_on_s + mean_off_s)
        states = np.array([(mean_on_s, on_rate), (mean_off_s, off_share * on_rate)])
        cycle = np.tile(states if on_first else states[::-1], (256, 1))
        while True:
            yield rng.standard_exponential(len(cycle)) * cycle[:, 0], cycle[:, 1]

    return _modulated(segments(), seed)


def varying(
    rate: float, sigma: float = 0.23, timescale_s: float = 600.0, *, seed: int = 0
) -> Process:
    """Return a Poisson process whose rate drifts slowly around its mean.

    The log of the rate is an Ornstein-Uhlenbeck process, held constant for a second at a time.

    Parameters
    ----------
    rate : float
        Mean requests a second.
    sigma : float
        Standard deviation of the log of the rate. The defaults suit the Azure 2023 conversation
        trace: 10 s counts with a variance 4 times their mean.
    timescale_s : float
        Time in which the correlation of the log rate falls to 1/e.
    seed : int
        Seed of the experiment; the streams are ``"arrivals"`` and ``"arrivals/modulation"``.

    Raises
    ------
    SpecError
        If a parameter is not a positive number.

    Notes
    -----
    For windows w much shorter than `timescale_s`, variance over mean of the counts is
    ``1 + rate * w * (exp(sigma**2) - 1)``.
    """
    _positive(rate=rate, sigma=sigma, timescale_s=timescale_s)
    step_s, block = 1.0, 1024
    keep = math.exp(-step_s / timescale_s)

    def segments() -> Segments:
        rng = stream(seed, "arrivals/modulation")
        level = rng.standard_normal()
        kick = math.sqrt(1 - keep * keep)
        while True:
            path = np.empty(block)
            for i, shock in enumerate(rng.standard_normal(block).tolist()):
                path[i] = level
                level = keep * level + kick * shock
            yield np.full(block, step_s), rate * np.exp(sigma * path - sigma * sigma / 2)

    return _modulated(segments(), seed)


def constant(rate: float) -> Process:
    """Return a process with equal gaps, as load generators send by default.

    Request i, counted from 0, comes after ``i / rate`` seconds. Times are rounded one by one, so
    that gaps which are no whole number of nanoseconds do not drift.

    Raises
    ------
    SpecError
        If the rate is not a positive number.
    """
    _positive(rate=rate)
    drawn = 0

    def draw(num_requests: int) -> Int64:
        nonlocal drawn
        numbers = np.arange(drawn, drawn + num_requests)
        drawn += num_requests
        return _whole_ns(numbers / rate * NS_PER_S)

    return draw


def all_at_once() -> Process:
    """Return a process whose requests all arrive at time 0 (an offline batch)."""
    return lambda num_requests: np.zeros(num_requests, dtype=np.int64)


def replay(arrival_ns: Int64, rate_scale: float = 1.0) -> Process:
    """Return recorded arrival times, `rate_scale` times as frequent (2 halves every gap).

    Raises
    ------
    SpecError
        If the factor is not positive, or, on drawing, if the record is used up.
    """
    _positive(rate_scale=rate_scale)
    with np.errstate(over="ignore"):
        times = _whole_ns(arrival_ns / rate_scale)
    drawn = 0

    def draw(num_requests: int) -> Int64:
        nonlocal drawn
        if drawn + num_requests > len(times):
            raise SpecError(f"the recorded trace has only {len(times)} arrivals")
        drawn += num_requests
        return times[drawn - num_requests : drawn]

    return draw


def normalize_span(arrival_ns: Int64, rate: float) -> Int64:
    """Return the times rescaled so that the last falls at ``num_requests / rate`` seconds.

    `vllm bench serve` does so with every schedule. It removes the randomness of the span.
    """
    _positive(rate=rate)
    if arrival_ns[-1] == 0:
        raise SpecError("cannot stretch arrivals that all fall at time 0")
    wanted_ns = len(arrival_ns) / rate * NS_PER_S
    return _whole_ns(arrival_ns * (wanted_ns / arrival_ns[-1]))


PROCESSES: dict[str, Callable[..., Process]] = {
    "poisson": poisson,
    "gamma": gamma,
    "linear_ramp": linear_ramp,
    "on_off": on_off,
    "varying": varying,
    "constant": constant,
    "all_at_once": all_at_once,
}


def process(name: str, *, seed: int = 0, **parameters: float) -> Process:
    """Return the process of that name in `PROCESSES`.

    Raises
    ------
    SpecError
        If there is no such process or parameter, or one is missing; the nearest name is given.
    """
    if name not in PROCESSES:
        raise SpecError(f"unknown arrival process {name!r}; {nearest(name, PROCESSES)}")
    known = inspect.signature(PROCESSES[name]).parameters
    if "seed" in known:
        parameters["seed"] = seed
    for parameter in parameters:
        if parameter not in known:
            hint = nearest(parameter, [p for p in known if p != "seed"])
            raise SpecError(f"arrival process {name!r} has no parameter {parameter!r}; {hint}")
    for parameter, spec in known.items():
        if spec.default is spec.empty and parameter not in parameters:
            raise SpecError(f"arrival process {name!r} needs {parameter!r}")
    return PROCESSES[name](**parameters)


def _renewal(gaps_s: Callable[[int], Float64]) -> Process:
    """Return the process with these gaps; gaps are rounded first, so that sums stay exact."""
    now_ns = 0

    def draw(num_requests: int) -> Int64:
        nonlocal now_ns
        with np.errstate(over="ignore"):
            gaps_ns = np.rint(gaps_s(num_requests) * NS_PER_S)
        _check_span(now_ns + float(gaps_ns.sum()))
        times: Int64 = now_ns + np.cumsum(gaps_ns.astype(np.int64))
        now_ns = int(times[-1]) if num_requests else now_ns
        return times

    return draw


def _modulated(segments: Segments, seed: int) -> Process:
    """Return the Poisson process whose rate is piecewise constant: (durations_s, rates) blocks.

    A unit-rate Poisson process is drawn on the axis of expected arrivals and mapped back to time
    through the integral of the rate. Sums carry over from call to call, term by term, so that
    pieces and the whole agree to the bit.
    """
    rng = stream(seed, "arrivals")
    expected = 0.0
    ends: list[Float64] = [np.zeros(1), np.zeros(1), np.zeros(1)]

    def draw(num_requests: int) -> Int64:
        nonlocal expected, ends
        if num_requests == 0:
            return np.zeros(0, dtype=np.int64)
        steps = rng.standard_exponential(num_requests)
        steps[0] += expected
        marks = np.cumsum(steps)
        expected = float(marks[-1])
        ends = counts, times_s, rates = _extended(ends, segments, expected)
        index = np.searchsorted(counts, marks)
        offset_s = (marks - counts[index - 1]) / rates[index]
        done = max(0, int(index[-1]) - 1)
        ends = [column[done:] for column in ends]
        return _whole_ns((times_s[index - 1] + offset_s) * NS_PER_S)

    return draw


def _whole_ns(times_ns: Float64) -> Int64:
    times = np.rint(times_ns)
    _check_span(float(times.max(initial=0.0)))
    whole: Int64 = times.astype(np.int64)
    return whole


def _check_span(last_ns: float) -> None:
    if not last_ns < _LATEST_NS:
        raise SpecError(
            f"the last request would arrive after {last_ns / NS_PER_S:.3g} s, and clocks here end "
            f"at {_LATEST_NS / NS_PER_S:.3g} s: is the rate too low?"
        )


def _extended(ends: list[Float64], segments: Segments, expected: float) -> list[Float64]:
    """Append segments to the columns (expected arrivals at end, end time, rate) of segments.

    As many as are needed to expect so many arrivals.

    Raises
    ------
    SpecError
        If that takes too many.
    """
    pieces = [[column] for column in ends]
    num_segments = 0
    while pieces[0][-1][-1] < expected:
        durations_s, rates = next(segments)
        for column, added in zip(pieces, (durations_s * rates, durations_s), strict=False):
            column.append(np.cumsum(np.concatenate([column[-1][-1:], added]))[1:])
        pieces[2].append(rates)
        num_segments += len(rates)
        if num_segments > _MOST_SEGMENTS:
            raise SpecError(
                f"{num_segments:,} changes of the rate of arrivals are not enough for "
                f"{expected:,.0f} requests: it is too low, or changes too fast"
            )
    return [np.concatenate(column) for column in pieces]


def _positive(**values: float) -> None:
    """Raise for the first value that is not a positive, finite number, or beyond all measure."""
    for name, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise SpecError(f"{name} must be a positive number, got {value!r}")
        if value > _LARGEST:
            raise SpecError(f"{name} must be at most {_LARGEST:g}, got {value!r}")
