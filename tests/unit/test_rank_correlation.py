"""Kendall's tau against scipy's."""

import math

import numpy as np
import pytest
from scipy.stats import kendalltau

from schedlab.traces.rank_correlation import kendall_tau


@pytest.mark.parametrize("seed", range(20))
def test_tau_with_and_without_ties_is_scipys_to_the_bit(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 400))
    first = rng.integers(0, rng.integers(2, 500), n).astype(float)
    second = first * rng.integers(0, 2) + rng.normal(0, rng.integers(1, 50), n).round(seed % 3 - 1)
    assert kendall_tau(first, second) == pytest.approx(
        float(kendalltau(first, second).statistic), rel=0, abs=0, nan_ok=True
    )


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0, 2.0]])
def test_tau_of_what_orders_nothing_is_nan(values):
    assert math.isnan(kendall_tau(values, values))


@pytest.mark.parametrize("other", [[1.0, 2.0, 3.0], [3.0, 1.0, 1.0]])
@pytest.mark.parametrize("constant", [[2.0, 2.0, 2.0], [math.inf] * 3])
def test_tau_beside_what_orders_nothing_is_nan_on_either_side(constant, other):
    assert math.isnan(kendall_tau(constant, other))
    assert math.isnan(kendall_tau(other, constant))


def test_tau_of_what_is_no_number_is_nan_on_either_side():
    assert math.isnan(kendall_tau([1.0, math.nan], [1.0, 2.0]))
    assert math.isnan(kendall_tau([1.0, 2.0], [math.nan, 1.0]))


def test_tau_by_hand():
    # Of ten pairs 1-1 is equal in both, 9-9 in the second alone; 6 rise together, 2 do not.
    first, second = [1, 1, 2, 3, 4], [5, 5, 9, 9, 7]
    balance, x_pairs, y_pairs = 6 - 2, 10 - 1, 10 - 2
    expected = balance / math.sqrt(x_pairs * y_pairs)
    assert kendall_tau(first, second) == pytest.approx(expected)
    assert kendall_tau(second, first) == pytest.approx(expected)
    assert kendall_tau(first, [-y for y in second]) == pytest.approx(-expected)
