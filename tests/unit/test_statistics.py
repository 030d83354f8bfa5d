"""Intervals cover what they should, pairing narrows them, and one run gives no verdict."""

import math

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp
from typer.testing import CliRunner

from schedlab.experiments import statistics
from schedlab.experiments.analysis.run_intervals import run_intervals
from schedlab.experiments.commands.app import app
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.statistics import (
    Change,
    batch_means,
    corrected,
    is_decided,
    paired_change,
    verdict,
    with_interval,
)
from schedlab.sim.errors import SpecError


def test_paired_change_by_hand():
    change = paired_change([11.0, 21.0, 34.0], [10.0, 20.0, 30.0])
    logs = np.log([1.1, 1.05, 34 / 30])
    half = t(2).ppf(0.975) * logs.std(ddof=1) / math.sqrt(3)
    assert change.change == pytest.approx(math.exp(logs.mean()) - 1)
    assert change.low == pytest.approx(math.exp(logs.mean() - half) - 1, rel=1e-6)
    assert change.high == pytest.approx(math.exp(logs.mean() + half) - 1, rel=1e-6)
    assert change.p_value == pytest.approx(ttest_1samp(logs, 0.0).pvalue)
    # Differences 1, 1, 4: mean 2, s = sqrt(3).
    assert change.effect_size == pytest.approx(2 / math.sqrt(3))


@pytest.mark.parametrize(
    ("values", "effect"), [([1.0, 2.0], -math.inf), ([3.0, 4.0], math.inf), ([2.0, 3.0], math.nan)]
)
def test_change_that_is_the_same_in_every_pair_has_no_end_of_an_effect_with_its_sign(
    values, effect
):
    found = paired_change(values, [2.0, 3.0]).effect_size
    assert found == effect or (math.isnan(found) and math.isnan(effect))


@pytest.mark.parametrize(
    "values", [[500.0, 3.0, 40.0, 90.0, 7.0], [0.0, 3.0, 900.0, 1.0, 0.0]], ids=["logs", "means"]
)
def test_nothing_falls_by_more_than_all_of_it(values):
    change = paired_change(values, [400.0, 30.0, 90.0, 10.0, 2.0])
    assert change.low >= -1.0


def test_corrected_is_the_method_of_holm():
    p_values = [0.04, 0.01, 0.03, math.nan, 0.005]
    changes = [Change(0.1, 0.05, 0.2, 1.0, 5, p) for p in p_values]
    found = [one.p_value for one in corrected(changes)]
    assert found[:3] == pytest.approx([0.06, 0.03, 0.06])
    assert math.isnan(found[3])
    assert found[4] == pytest.approx(0.02)


@pytest.mark.slow
def test_corrected_verdicts_are_rarely_wrong_where_nothing_differs():
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(200):
        family = [paired_change(*np.exp(rng.normal(0, 0.2, (2, 6))).tolist()) for _ in range(20)]
        wrong += any(is_decided(change) for change in corrected(family))
    assert wrong <= 20  # 5 % of 200, and 3 standard errors


def test_paired_change_cancels_what_a_seed_does_to_both():
    rng = np.random.default_rng(1)
    load = rng.lognormal(3, 1, 10)
    change = paired_change(list(1.05 * load), list(load))
    assert (change.low, change.high) == pytest.approx((0.05, 0.05))


@pytest.mark.parametrize("runs", [[], [1.0]])
def test_paired_change_refuses_one_run(runs):
    with pytest.raises(SpecError, match="no verdict from one run"):
        paired_change(runs, runs)


def test_paired_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        base = rng.normal(10, 1, 6)
        change = paired_change(list(1.1 * base + rng.normal(0, 0.3, 6)), list(base))
        covered += change.low <= 0.1 <= change.high
    assert 930 <= covered <= 970  # 95 % +- 3 standard errors


@pytest.mark.parametrize(
    ("values", "larger", "words"),
    [
        ([8.0, 8.1, 8.0, 8.1, 8.05], False, "a beats b in m by 19.5 %"),
        ([8.0, 8.1, 8.0, 8.1, 8.05], True, "a is worse than b in m by 19.5 %"),
        ([8.0, 8.1, 8.0, 8.1, 8.05], None, "m of a is 19.5 % [18.9, 20.1] below that of b"),
        ([8.0, 12.1, 9.0, 11.0, 10.0], False, "no difference shown between a and b in m: -0.8 %"),
        ([10.02, 10.03, 10.02, 10.03, 10.02], False, "a and b are equal within 1% in m: +0.2 %"),
        ([10.0] * 5, False, "a and b are equal in m"),
        ([8.0, 8.1, 8.0, 8.1], False, "no verdict on a and b in m from 4 seeds, 5 are needed"),
    ],
)
def test_verdict_says_which_way_and_only_if_the_interval_does(values, larger, words):
    change = paired_change(values, [10.0] * len(values))
    assert verdict("a", "b", "m", change, larger).startswith(words)


def test_verdict_undecided_among_many_though_its_interval_excludes_zero_says_why():
    told = verdict("a", "b", "m", Change(0.1, 0.02, 0.2, 1.0, 5, 0.07), True)
    assert told.endswith("+10.0 % [+2.0, +20.0], but p = 0.07 among all that are told together")


def test_verdict_against_nothing_is_none():
    assert "no verdict" in verdict("a", "b", "m", paired_change([1.0, 2.0], [0.0, 0.0]), True)


def autoregressive(n, rho, seed):
    rng = np.random.default_rng(seed)
    values, x = np.empty(n), 0.0
    for i, shock in enumerate(rng.normal(0, 1, n)):
        x = rho * x + shock
        values[i] = x
    return values


@pytest.mark.slow
def test_batch_means_cover_where_independence_would_not():
    naive = covered = 0
    for seed in range(150):
        values = autoregressive(4000, 0.9, seed)
        found = batch_means(values)
        covered += abs(found.mean) <= found.half_width
        naive += abs(values.mean()) <= 1.96 * values.std() / math.sqrt(len(values))
    assert naive < 80  # treating requests as independent covers about a third
    assert 135 <= covered <= 149


def test_batch_means_of_ten_batches_by_hand():
    # Three values at the start fill no batch. Means 0 (seven times), 1, 2, 1: 0.4 on average,
    # squares from there 4.4, neighbours' products 2.64; t = 2.262157 with 9 degrees of freedom.
    values = [99.0] * 3 + np.repeat([0.0] * 7 + [1.0, 2.0, 1.0], 10).tolist()
    found = batch_means(values, 10)
    assert found.mean == pytest.approx(0.4)
    assert found.half_width == pytest.approx(2.262157 * math.sqrt(4.4 / 9 / 10), rel=1e-6)
    assert found.lag1 == pytest.approx(2.64 / 4.4)
    assert not found.long_enough  # 0.6 is above 1.64 / sqrt(10) = 0.519


@pytest.mark.parametrize(
    ("low", "high", "words"), [(0.0, 0.2, "no difference shown"), (1e-9, 0.2, "a beats b")]
)
def test_verdict_on_an_interval_that_touches_zero_is_none(low, high, words):
    assert verdict("a", "b", "m", Change(0.1, low, high, 1.0, 5), True).startswith(words)


def test_batch_means_say_when_batches_are_too_short():
    assert not batch_means(autoregressive(400, 0.99, 0)).long_enough
    assert batch_means(np.random.default_rng(0).normal(size=4000)).long_enough


def test_batch_means_of_too_few_values_raise():
    with pytest.raises(SpecError, match="too few"):
        batch_means(range(100))


@pytest.mark.slow
def test_intervals_of_a_run_are_around_its_means(tmp_path):
    workload = {"trace": "azure-conv", "num_requests": 400, "request_rate": 3}
    done = run(make_spec({"workload": workload, "measure": {"warm_up_requests": 40}}))
    found = run_intervals(done, 10)
    metrics = done.metrics()
    for name, one in found.items():
        assert one.mean == pytest.approx(metrics[name], rel=0.03), name
        assert 0 < one.half_width < one.mean
    done.save(tmp_path)
    shown = CliRunner().invoke(app, ["batch-means", str(tmp_path), "--batches", "10"])
    assert shown.exit_code == 0, shown.output
    mean_ms, half_ms = found["mean_ttft_ms"].mean, found["mean_ttft_ms"].half_width
    cells = " ".join(shown.stdout.split())
    assert f"mean_ttft_ms {with_interval(mean_ms, half_ms)}" in cells
    assert "warm-up is in it" not in shown.stdout
    few = CliRunner().invoke(app, ["batch-means", str(tmp_path), "--batches", "100"])
    assert few.exit_code == 2
    assert "too few" in few.output


@pytest.mark.parametrize(
    ("differences", "p"),
    [((0.0, 0.0, 0.0), 1.0), ((2.0, 2.0, 2.0), 0.0), ((-2.0, -2.0), 0.0), ((1.0, 3.0), 0.29517)],
)
def test_differences_that_are_all_alike_are_chance_only_where_there_are_none(differences, p):
    # The last: t = 2 with one degree of freedom, 1 - 2 atan(2) / pi.
    assert statistics._p_value(differences) == pytest.approx(p, abs=1e-5)
