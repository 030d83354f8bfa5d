"""Several steps of one batch at once: the formula, its rounding, and both ways to compute it."""

import math
from fractions import Fraction

import pytest

from schedlab.sim.cost import segment
from schedlab.sim.cost.segment import segment_ns


def exact(base, sum_ns, context_sum, num_decodes, max_ns, context_max, j):
    """Return one step in exact arithmetic."""
    grow = 1 if num_decodes else 0
    ns = (
        Fraction(base)
        + Fraction(sum_ns) * (context_sum + num_decodes * j)
        + Fraction(max_ns) * (context_max + grow * j)
    )
    return max(1, math.floor(ns + Fraction(1, 2)))


@pytest.mark.parametrize("num_steps", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("num_decodes", [0, 1, 7])
def test_segment_of_any_length_is_the_formula_step_by_step(num_steps, num_decodes):
    # Binary fractions, so that floating point is exact.
    case = (1000.25, 0.5, 900, num_decodes, 0.125, 300)
    expected = [exact(*case, j) for j in range(num_steps)]
    assert segment_ns(*case, num_steps) == expected


@pytest.mark.parametrize("num_steps", [3, 200])
def test_segment_rounds_half_up_and_takes_a_nanosecond_at_least(num_steps):
    assert segment_ns(12.5, 0.0, 5, 1, 0.0, 5, num_steps) == [13] * num_steps
    assert segment_ns(12.25, 0.0, 5, 1, 0.0, 5, num_steps) == [12] * num_steps
    assert segment_ns(0.0, 0.0, 5, 1, 0.0, 5, num_steps) == [1] * num_steps


def test_segment_by_numpy_and_by_a_loop_is_the_same_to_the_bit(monkeypatch):
    case = (1234.567, 0.0123, 90_001, 7, 0.0456, 30_007)
    by_numpy = segment_ns(*case, 500)
    monkeypatch.setattr(segment, "_NUMPY_FROM", 1000)
    assert segment_ns(*case, 500) == by_numpy
