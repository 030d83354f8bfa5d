"""Weighted statistics against numpy on the list written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.sim.metrics import weighted
from schedlab.sim.metrics.weighted import WeightedSample

pairs = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 30)), min_size=1, max_size=40)
batches = st.sampled_from([1, 3, 40])
percents = st.lists(
    st.one_of(st.sampled_from([0, 25, 50, 90, 95, 99, 100]), st.floats(0, 100)),
    min_size=1, max_size=5,
)  # fmt: skip


def sample_and_list(rows, batch):
    values, counts = np.array(rows).T
    # In one batch, or a row at a time: then elements are counted out, not sorted.
    cuts = range(0, len(rows), batch)
    pieces = [(values[low : low + batch], counts[low : low + batch]) for low in cuts]
    return WeightedSample(lambda: pieces, per=1e6), np.repeat(values / 1e6, counts)


@given(pairs, batches, percents)
def test_weighted_percentiles_equal_numpy_on_the_expanded_list_exactly(rows, batch, percents):
    sample, expanded = sample_and_list(rows, batch)
    if len(expanded):
        assert sample.percentiles(percents) == np.percentile(expanded, percents).tolist()
    else:
        assert np.isnan(sample.percentiles(percents)).all()


@given(pairs, batches)
def test_weighted_median_equals_numpy_on_the_expanded_list_exactly(rows, batch):
    sample, expanded = sample_and_list(rows, batch)
    if len(expanded):
        assert sample.median() == np.median(expanded)


@given(pairs, batches)
def test_weighted_mean_and_std_equal_numpy_up_to_rounding(rows, batch):
    sample, expanded = sample_and_list(rows, batch)
    if len(expanded):
        assert sample.mean() == pytest.approx(np.mean(expanded), rel=1e-12)
        assert sample.std() == pytest.approx(np.std(expanded), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("edge", [1, 2, 3, 5])
@pytest.mark.parametrize("bits_a_pass", [1, 2, 20])
def test_weighted_percentiles_on_the_edges_of_spans_equal_numpy(monkeypatch, edge, bits_a_pass):
    # Every value lies on a power of two or beside it: where the spans of the passes meet.
    monkeypatch.setattr(weighted, "_BITS_A_PASS", bits_a_pass)
    rows = [(max(0, edge * 2**i + off), 1 + i % 3) for i in range(8) for off in (-1, 0, 1)]
    sample, expanded = sample_and_list(rows, 5)
    asked = list(range(0, 101, 4))
    assert sample.percentiles(asked) == np.percentile(expanded, asked).tolist()
    assert sample.median() == np.median(expanded)
