"""Sums that are the same on every Python."""

from fractions import Fraction

import pytest

from schedlab.sim.sums import in_order


@pytest.mark.parametrize("values", [[1e16, 1.0, -1e16], [0.1] * 10, [], [3, 4]])
def test_sum_in_order_rounds_after_every_addition(values):
    expected = 0.0
    for value in values:
        expected = float(Fraction(expected) + Fraction(value))  # exact, then rounded once
    assert in_order(values) == expected
