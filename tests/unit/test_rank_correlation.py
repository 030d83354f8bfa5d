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
