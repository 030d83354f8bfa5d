"""The Pareto frontier."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.experiments.analysis.frontier import on_frontier


@pytest.mark.parametrize(
    ("points", "upwards", "expected"),
    [
        ([[1, 1]], [True, False], [True]),
        ([[1, 1], [1, 1]], [True, False], [True, True]),
        ([[1, 5], [2, 5], [2, 4]], [True, False], [False, False, True]),
        ([[1, 5], [2, 5], [2, 4]], [True, True], [False, True, False]),
        ([[1, 3], [2, 2], [3, 1]], [False, False], [True, True, True]),
        ([[np.nan, 0], [1, 1]], [False, False], [False, True]),
        ([[np.nan, 0]], [False, False], [False]),
        ([[1, 2, 3], [1, 2, 4]], [True, True, True], [False, True]),
        ([[np.inf, 1], [5, 1]], [False, False], [False, True]),
    ],
)
def test_frontier_of_points_worked_out_by_hand(points, upwards, expected):
    assert on_frontier(points, upwards).tolist() == expected


def test_frontier_of_a_wrong_number_of_objectives_is_an_error():
    with pytest.raises(ValueError, match="do not have 3 objectives"):
        on_frontier([[1, 2]], [True, True, False])


@given(
    st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, 3.0, float("nan")])] * 3), min_size=1),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_frontier_is_what_the_definition_says(points, upwards):
    def dominates(a, b):
        pairs = [(x, y) if up else (y, x) for x, y, up in zip(a, b, upwards, strict=True)]
        return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)

    known = [not any(np.isnan(point)) for point in points]
    expected = [
        is_known and not any(dominates(q, p) for q, k in zip(points, known, strict=True) if k)
        for p, is_known in zip(points, known, strict=True)
    ]
    assert on_frontier(points, upwards).tolist() == expected
