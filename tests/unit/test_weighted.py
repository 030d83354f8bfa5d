"""What samples of values and their counts may be."""

import numpy as np
import pytest

from schedlab.sim.metrics.weighted import WeightedSample


@pytest.mark.parametrize(
    "shapes",
    [((2,), (3,)), ((2,), (2, 1)), ((2, 2), (2, 2)), ((2, 1), (2, 1)), ((0, 2), (0, 2)), ((), ())],
)
def test_weighted_sample_of_what_are_no_two_equal_rows_is_refused(shapes):
    good = np.ones(2, dtype=np.int64), np.ones(2, dtype=np.int64)
    bad = tuple(np.ones(shape, dtype=np.int64) for shape in shapes)
    for batches in ([bad], [good, bad]):
        with pytest.raises(ValueError, match="must be equal, 1-D"):
            WeightedSample(lambda batches=batches: batches)
    assert WeightedSample(lambda: [good]).size == 2


@pytest.mark.parametrize("value", [-1, 0])
@pytest.mark.parametrize("count", [-1, 0])
def test_weighted_sample_of_negative_values_or_counts_is_refused(value, count):
    batch = np.array([3, value]), np.array([2, count])
    if value == count == 0:
        assert WeightedSample(lambda: [batch]).size == 2
    else:
        with pytest.raises(ValueError, match=">= 0"):
            WeightedSample(lambda: [batch])
