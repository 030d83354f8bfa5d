"""How metrics are written, and which way they are better."""

import math

import pytest

from schedlab.experiments.statistics import with_interval
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.registry import every_run, metric_named


@pytest.mark.parametrize(
    ("metric", "label", "scale"),
    [
        ("p99_ttft_ms", "P99 TTFT (s)", 1e-3),
        ("median_itl_ms", "median ITL (ms)", 1.0),
        ("mean_queue_time_ms", "mean queue time (s)", 1e-3),
        ("tpot_slo_attainment", "TPOT attainment (%)", 100.0),
        ("kv_fragmentation_share", "KV fragmentation (%)", 100.0),
        ("num_preemptions", "preemptions", 1.0),
        ("duration_s", "duration (s)", 1.0),
    ],
)
def test_metric_is_written_with_its_unit(metric, label, scale):
    assert metric_named(metric).axis == label
    assert metric_named(metric).scale == scale


def test_every_metric_can_be_written():
    labels = [metric.axis for metric in every_run()]
    assert len(set(labels)) == len(labels), "two metrics look alike"


def test_unknown_metric_names_the_nearest():
    with pytest.raises(SpecError, match="did you mean p99_ttft_ms"):
        metric_named("p99_tft_ms")


@pytest.mark.parametrize(
    ("metric", "larger"),
    [
        ("request_goodput", True), ("output_throughput", True), ("ttft_slo_attainment", True),
        ("p99_itl_ms", False), ("num_preemptions", False), ("kv_fragmentation_share", False),
        ("num_requests", None),
    ],
)  # fmt: skip
def test_metric_has_a_better_side(metric, larger):
    assert metric_named(metric).larger_is_better is larger


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (0.5, 0.04, "0.500 ±0.040"),
        (0.5, 4.0, "0.5 ±4.0"),
        (3.0, 0.0, "3"),
        (0.0, None, "0"),
        (1e6, math.inf, "1,000,000"),
        (-2.5, None, "-2.50"),
    ],
)
def test_interval_has_as_many_digits_as_tell_something(mean, half_width, text):
    assert with_interval(mean, half_width) == text
