import math
import re

import numpy as np
import pytest

from schedlab.sim.errors import SpecError
from schedlab.traces import arrivals
from schedlab.traces.arrivals import (
    PROCESSES,
    all_at_once,
    constant,
    gamma,
    linear_ramp,
    normalize_span,
    on_off,
    poisson,
    process,
    replay,
    varying,
)

SAMPLES = {
    "poisson": lambda seed: poisson(5.0, seed=seed),
    "gamma": lambda seed: gamma(5.0, 0.25, seed=seed),
    "linear_ramp": lambda seed: linear_ramp(1.0, 9.0, 5000, seed=seed),
    "on_off": lambda seed: on_off(5.0, 10.0, 20.0, 0.1, seed=seed),
    "varying": lambda seed: varying(5.0, seed=seed),
    "constant": lambda seed: constant(5.0),
    "all_at_once": lambda seed: all_at_once(),
}
RANDOM = [name for name in SAMPLES if name not in ("constant", "all_at_once")]


def gaps_s(times_ns):
    return np.diff(times_ns, prepend=0) / 1e9


def fano(times_ns, window_s):
    counts = np.bincount(times_ns // int(window_s * 1e9))[:-1]
    return counts.var() / counts.mean()


def test_samples_cover_every_process():
    assert set(SAMPLES) == set(PROCESSES)


@pytest.mark.parametrize("name", SAMPLES)
def test_process_drawn_in_pieces_equals_process_drawn_at_once(name):
    whole = SAMPLES[name](3)(5000)
    draw = SAMPLES[name](3)
    pieces = np.concatenate([draw(n) for n in (1, 0, 999, 3000, 1000)])
    assert whole.dtype == np.int64
    assert pieces.tolist() == whole.tolist()
    assert (np.diff(whole) >= 0).all()
    assert whole[0] >= 0


@pytest.mark.parametrize("name", RANDOM)
def test_process_with_another_seed_differs_and_same_seed_repeats(name):
    assert SAMPLES[name](1)(100).tolist() == SAMPLES[name](1)(100).tolist()
    assert SAMPLES[name](1)(100).tolist() != SAMPLES[name](2)(100).tolist()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_has_the_rate_and_the_burstiness_asked_for(burstiness):
    n, rate = 200_000, 8.0
    gaps = gaps_s(gamma(rate, burstiness)(n))
    cv = 1 / np.sqrt(burstiness)
    # The mean of n gaps has a standard error of cv / rate / sqrt(n): allow four of them.
    assert gaps.mean() == pytest.approx(1 / rate, abs=4 * cv / rate / np.sqrt(n))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_is_gamma_of_burstiness_one():
    assert poisson(2.0, seed=5)(50).tolist() == gamma(2.0, 1.0, seed=5)(50).tolist()
    assert fano(poisson(20.0)(200_000), 10) == pytest.approx(1.0, abs=0.2)


def test_linear_ramp_gaps_follow_the_rate_of_their_request():
    n = 40_000
    gaps = gaps_s(linear_ramp(2.0, 10.0, n)(2 * n))
    assert 1 / gaps[: n // 20].mean() == pytest.approx(2.2, rel=0.1)
    assert 1 / gaps[n - n // 20 : n].mean() == pytest.approx(9.8, rel=0.1)
    assert 1 / gaps[n:].mean() == pytest.approx(10.0, rel=0.03)


def test_on_off_has_the_rate_and_the_cv_of_an_interrupted_poisson_process():
    rate, on_s, off_s = 4.0, 2.0, 6.0
    gaps = gaps_s(on_off(rate, on_s, off_s)(400_000))
    a, b = 1 / on_s, 1 / off_s
    cv_squared = 1 + 2 * (rate * (a + b) / b) * a / (a + b) ** 2
    assert 1 / gaps.mean() == pytest.approx(rate, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(cv_squared, rel=0.05)


def test_on_off_with_off_share_still_has_the_mean_rate():
    times = on_off(4.0, 2.0, 6.0, 0.25)(300_000)
    assert len(times) / (times[-1] / 1e9) == pytest.approx(4.0, rel=0.03)


def test_rate_that_changes_too_often_for_its_arrivals_is_refused(monkeypatch):
    monkeypatch.setattr(arrivals, "_MOST_SEGMENTS", 2_000)
    for draw in (on_off(1e-9, 0.001, 0.001), varying(1e-9)):
        with pytest.raises(SpecError, match=r"changes of the rate of arrivals are not enough for"):
            draw(20)


def test_changes_of_the_rate_are_counted_one_by_one(monkeypatch):
    monkeypatch.setattr(arrivals, "_MOST_SEGMENTS", 10)
    six = np.ones(6), np.full(6, 0.01)  # six segments of a second, 0.06 arrivals
    with pytest.raises(
        SpecError, match=r"^12 changes of the rate of arrivals are not enough for 1"
    ):
        arrivals._extended([np.zeros(1)] * 3, iter([six] * 3), 1.0)


def test_varying_has_the_fano_factor_of_its_formula():
    rate, sigma, window_s = 20.0, 0.3, 2.0
    times = varying(rate, sigma, timescale_s=40.0, seed=1)(400_000)
    assert len(times) / (times[-1] / 1e9) == pytest.approx(rate, rel=0.06)
    expected = 1 + rate * window_s * (np.exp(sigma**2) - 1)
    assert fano(times, window_s) == pytest.approx(expected, rel=0.12)


def test_constant_arrivals_have_equal_gaps_from_time_zero():
    assert constant(4.0)(4).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]


@pytest.mark.slow
def test_constant_arrivals_at_a_rate_that_no_nanosecond_divides_do_not_drift():
    assert constant(3.0)(3_000_001)[-1] == 1_000_000 * 10**9


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf")])
def test_constant_arrivals_refuse_a_rate_that_is_not_positive_and_finite(rate):
    with pytest.raises(SpecError, match="rate must be a positive number"):
        constant(rate)


def test_all_at_once_is_all_zero():
    assert all_at_once()(3).tolist() == [0, 0, 0]


def test_replay_scales_like_a_trace_and_ends_with_the_record():
    draw = replay(np.array([0, 4, 8]), rate_scale=2.0)
    assert draw(2).tolist() == [0, 2]
    assert draw(1).tolist() == [4]
    with pytest.raises(SpecError, match="only 3 arrivals"):
        draw(1)


def test_normalize_span_puts_the_last_arrival_at_n_over_rate():
    times = normalize_span(gamma(3.0, 0.2)(600), 3.0)
    assert times[-1] == 200 * 1_000_000_000
    for rate in (0, -1.0, float("nan")):
        with pytest.raises(SpecError, match="rate must be a positive number"):
            normalize_span(np.array([1, 2]), rate)
    half = 500_000_000
    assert normalize_span(np.array([0, 1, 2, 4]), 2.0).tolist() == [0, half, 2 * half, 4 * half]
    assert normalize_span(np.array([0, 1]), 4.0).tolist() == [0, 500_000_000]
    with pytest.raises(SpecError, match="all fall at time 0"):
        normalize_span(all_at_once()(3), 3.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: poisson(0), "rate must be a positive number, got 0"),
        (lambda: poisson(1e308), r"rate must be at most 1e\+15, got 1e\+308"),
        (lambda: poisson(float("nan")), "rate must be"),
        (lambda: gamma(1.0, -1), "burstiness must be"),
        (lambda: on_off(1.0, 1.0, float("inf")), "mean_off_s must be"),
        (lambda: on_off(1.0, 1.0, 1.0, 1.0), r"off_share must lie in \[0, 1\)"),
        (lambda: varying(1.0, sigma=0), "sigma must be"),
        (lambda: linear_ramp(1.0, 0.0, 5), "end_rate must be"),
        (lambda: replay(np.array([1]), 0), "rate_scale must be"),
        (lambda: process("poison", rate=1.0), r"did you mean poisson\?"),
        (lambda: process("poisson", rat=1.0), r"no parameter 'rat'; did you mean rate\?"),
        (lambda: process("on_off", rate=1.0), "needs 'mean_on_s'"),
        (lambda: process("all_at_once", rate=1.0), "no parameter 'rate'; there are none"),
    ],
)
def test_process_with_wrong_parameter_raises_and_names_it(build, message):
    with pytest.raises(SpecError, match=message):
        build()


def test_process_by_name_equals_its_function():
    by_name = process("gamma", seed=4, rate=2.0, burstiness=0.5)
    assert by_name(20).tolist() == gamma(2.0, 0.5, seed=4)(20).tolist()
    assert process("all_at_once", seed=4)(2).tolist() == [0, 0]


def test_rates_go_on_until_they_bring_as_many_arrivals_as_are_expected():
    drawn = iter([
        (np.array([1.0, 2.0]), np.array([3.0, 1.0])), (np.array([4.0]), np.array([0.5])),
        (np.array([1.0]), np.array([9.0])),
    ])  # fmt: skip
    expected, ends_s, rates = arrivals._extended([np.zeros(1)] * 3, drawn, 5.5)
    assert expected.tolist() == [0.0, 3.0, 5.0, 7.0]
    assert ends_s.tolist() == [0.0, 1.0, 3.0, 7.0]
    assert rates.tolist() == [0.0, 3.0, 1.0, 0.5]
    more = arrivals._extended([expected, ends_s, rates], drawn, 7.5)
    assert [column.tolist()[4:] for column in more] == [[16.0], [8.0], [9.0]]
    assert len(arrivals._extended([*more], drawn, 16.0)[0]) == 5


def test_parameter_of_arrivals_is_a_positive_number_up_to_the_largest_and_that_one_too():
    largest = arrivals._LARGEST
    for value in (1, 0.5, largest, float(largest)):
        arrivals._positive(rate=1.0, other=value)
    for value in (0, -1.0, math.nan, math.inf, "3", None):
        with pytest.raises(SpecError, match=r"^other must be a positive number, got "):
            arrivals._positive(rate=1.0, other=value)
    with pytest.raises(SpecError, match=re.escape(f"rate must be at most {largest:g}, got ")):
        arrivals._positive(rate=math.nextafter(largest, math.inf), other=0)
