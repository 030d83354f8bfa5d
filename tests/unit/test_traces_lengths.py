import math
import warnings

import numpy as np
import pytest

from schedlab.sim.errors import SpecError
from schedlab.traces import PRESETS, Trace, arrivals, read, synthesize, synthetic
from schedlab.traces import lengths as distributions
from schedlab.traces.arrivals import all_at_once, gamma, poisson
from schedlab.traces.lengths import (
    exponential,
    fixed,
    independent,
    lognormal,
    quantile_table,
    rows_of,
    uniform,
)
from schedlab.traces.presets import preset
from tests.data_folder import data_folder

EVEN = (np.arange(100_000) + 0.5) / 100_000


def test_fixed_is_always_the_same():
    assert set(fixed(7)(EVEN).tolist()) == {7}


def test_uniform_covers_both_ends_equally():
    values, counts = np.unique(uniform(3, 6)(EVEN), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6]
    assert counts.tolist() == [25_000] * 4


def test_exponential_has_its_mean_and_respects_its_cap():
    free, capped = exponential(128)(EVEN), exponential(128, cap=512)(EVEN)
    assert free.mean() == pytest.approx(128, rel=0.005)
    assert capped.max() == 512
    assert (capped == 512).mean() == pytest.approx(math.exp(-512 / 128), rel=0.02)
    assert free.min() == 1


def test_lognormal_has_its_median_and_log_spread():
    tokens = lognormal(6.0, 0.5)(EVEN)
    assert np.median(tokens) == round(math.exp(6.0))
    assert np.log(tokens).std() == pytest.approx(0.5, rel=0.01)


def test_lognormal_beyond_every_float_is_the_longest_request_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lognormal(800.0, 1.0)(np.array([0.5])).tolist() == [distributions.MOST_TOKENS]
        assert lognormal(800.0, 1.0, cap=9)(np.array([0.5])).tolist() == [9]


def test_gamma_has_mean_and_variance_of_its_parameters():
    tokens = distributions.gamma(2.0, 300.0)(EVEN)
    assert tokens.mean() == pytest.approx(600, rel=0.005)
    assert tokens.std() == pytest.approx(math.sqrt(2.0) * 300, rel=0.01)


def test_quantile_table_interpolates_between_its_points():
    table = quantile_table([0, 0.5, 1], [10, 20, 100])
    assert table(np.array([0.0, 0.25, 0.5, 0.75])).tolist() == [10, 15, 20, 60]


@pytest.mark.parametrize("name", distributions.LENGTHS)
def test_distribution_at_the_edges_of_u_gives_finite_lengths(name):
    arguments = {
        "fixed": (5,),
        "uniform": (1, 9),
        "exponential": (10.0,),
        "lognormal": (3.0, 1.0),
        "gamma": (0.5, 20.0),
        "quantile_table": ([0, 1], [1, 9]),
    }
    edges = np.array([0.0, np.nextafter(1.0, 0.0)])
    low, high = distributions.LENGTHS[name](*arguments[name])(edges)
    assert 1 <= low <= high < 10**6


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fixed(0), "tokens must be a positive number"),
        (lambda: fixed(1.5), "tokens must be a whole number"),
        (lambda: uniform(5, 4), "low <= high"),
        (lambda: exponential(-1), "mean must be"),
        (lambda: exponential(5, cap=0), "cap must be"),
        (lambda: lognormal(math.nan, 1.0), "mu must be a number"),
        (lambda: distributions.gamma(0, 1), "shape must be"),
        (lambda: quantile_table([0, 1], [1]), "two equal columns"),
        (lambda: quantile_table([0, 0.9], [1, 2]), "rise from 0 to 1"),
        (lambda: quantile_table([0, 0.5, 1], [1, 3, 2]), "must not fall"),
        (lambda: quantile_table([0, 1], [0, 2]), "must be >= 1"),
    ],
)
def test_distribution_with_wrong_parameter_raises(build, message):
    with pytest.raises(SpecError, match=message):
        build()


def test_rows_of_draws_only_pairs_that_exist():
    trace = Trace(prompt_tokens=np.array([1, 2, 3]), output_tokens=np.array([10, 20, 30]))
    drawn = synthesize(500, lengths=rows_of(trace))
    assert (drawn.output_tokens == 10 * drawn.prompt_tokens).all()
    assert set(drawn.prompt_tokens.tolist()) == {1, 2, 3}


def test_independent_uses_one_number_a_column():
    u = np.array([[0.0, 0.99], [0.5, 0.0]])
    prompt, output = independent(uniform(1, 2), uniform(1, 2))(u)
    assert (prompt.tolist(), output.tolist()) == ([1, 2], [2, 1])


@pytest.mark.parametrize("name", PRESETS)
def test_preset_shorter_trace_begins_the_longer_one(name):
    long, short = synthesize(600, preset=name, seed=9), synthesize(200, preset=name, seed=9)
    for column in ("arrival_ns", "prompt_tokens", "output_tokens"):
        assert getattr(long, column)[:200].tolist() == getattr(short, column).tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sends_at_the_rate_it_is_given_at_once_if_that_is_endless_and_refuses_none(name):
    for rate in (0, 0.0, -1.0, math.nan):
        with pytest.raises(SpecError, match="rate must be a positive number, got"):
            synthesize(3, preset=name, rate=rate)
    sends_at_once = PRESETS[name].process == "all_at_once"
    for rate, expected in ((None, sends_at_once), (math.inf, True), (0.01, False), (7, False)):
        drawn = synthesize(5, preset=name, rate=rate)
        assert bool(drawn.arrival_ns.any()) is not expected
        told = [note for note in drawn.report.notes if "arriv" in note]
        assert told[0].startswith("all requests arrive at once") is expected
        assert (rate is None or expected) or f" {rate:g} req/s" in told[0]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_drawn_in_pieces_gives_the_same_requests(name, monkeypatch):
    whole = synthesize(500, preset=name, seed=9)
    for module in (arrivals, synthetic):
        monkeypatch.setattr(module, "PIECE_ROWS", 70)
    pieces = synthesize(500, preset=name, seed=9)
    for column in ("arrival_ns", "prompt_tokens", "output_tokens"):
        assert getattr(pieces, column).tolist() == getattr(whole, column).tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_names_its_source_in_the_report(name):
    report = synthesize(3, preset=name).report
    assert any(PRESETS[name].source in note for note in report.notes)
    assert set(PRESETS[name].notes) <= set(report.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure-conv", "azure_2023/AzureLLMInferenceTrace_conv.csv"),
        ("azure-code", "azure_2023/AzureLLMInferenceTrace_code.csv"),
        ("mooncake-conversation", "mooncake/conversation_trace.jsonl"),
        ("arxiv-summarization", "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"),
    ],
)
def test_preset_lengths_match_the_trace_they_come_from(name, file):
    trace = read(data_folder() / "traces" / file)
    for column, distribution in (("prompt", preset(name).prompt), ("output", preset(name).output)):
        real, drawn = getattr(trace, f"{column}_tokens"), distribution(EVEN)
        assert drawn.mean() == pytest.approx(real.mean(), rel=0.005)
        assert drawn.std() == pytest.approx(real.std(), rel=0.021)
        for q in (50, 90, 99):
            assert np.percentile(drawn, q) == pytest.approx(np.percentile(real, q), rel=0.01, abs=1)
        values = np.unique(real)
        ranks = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (real, drawn)]
        assert np.abs(ranks[0] - ranks[1]).max() < 0.028


@pytest.mark.parametrize(
    ("name", "column", "mean", "p50", "p99"),
    [
        ("sharegpt", "prompt", 306, 74, 3388),
        ("sharegpt", "output", 500, 487, 1234),
        ("burstgpt", "prompt", 830, 582, 3549),
        ("burstgpt", "output", 271, 243, 964),
    ],
)
def test_preset_from_published_figures_reproduces_them(name, column, mean, p50, p99):
    drawn = getattr(preset(name), column)(EVEN)
    assert drawn.mean() == pytest.approx(mean, rel=0.002)
    assert np.percentile(drawn, [50, 99]) == pytest.approx([p50, p99], abs=1)


def test_synthesize_with_rate_keeps_the_presets_kind_of_arrivals():
    trace = synthesize(4000, preset="azure-code", rate=10.0, seed=2)
    gaps = np.diff(trace.arrival_ns)
    assert gaps.std() / gaps.mean() > 3
    assert any("on_off arrivals, 10 req/s" in note for note in trace.report.notes)


def test_synthesize_at_infinite_rate_or_all_at_once_preset_starts_together():
    assert synthesize(5, rate=math.inf).arrival_ns.tolist() == [0] * 5
    assert synthesize(5, preset="anyscale-exp").arrival_ns.tolist() == [0] * 5
    assert synthesize(5, preset="anyscale-exp", rate=2.0).arrival_ns[-1] > 0
    assert synthesize(5, arrivals=all_at_once()).arrival_ns.tolist() == [0] * 5


def test_synthesize_lengths_do_not_depend_on_arrivals():
    one, other = synthesize(50, arrivals=poisson(1.0)), synthesize(50, arrivals=gamma(9.0, 0.1))
    assert one.prompt_tokens.tolist() == other.prompt_tokens.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "num_requests must be"),
        ({"num_requests": 1.5}, "num_requests must be"),
        ({"num_requests": 5, "preset": "azure-con"}, r"did you mean azure-conv\?"),
        ({"num_requests": 5, "rate": -1.0}, "rate must be a positive number"),
        ({"num_requests": 5, "rate": 1.0, "arrivals": all_at_once()}, "either rate or arrivals"),
    ],
)
def test_synthesize_with_wrong_argument_raises(options, message):
    with pytest.raises(SpecError, match=message):
        synthesize(**options)


def test_drawn_trace_says_where_its_times_and_its_lengths_are_from():
    one, arrivals_given = PRESETS["fixed"], "arrivals from the process given"
    lengths_given = "lengths from the distribution given"
    for keys, told, not_told in (
        ({}, [f"lengths of preset fixed: {one.source}"], [lengths_given, arrivals_given]),
        ({"arrivals": arrivals.poisson(2.0)}, [arrivals_given], [lengths_given]),
        ({"lengths": independent(one.prompt, one.output)}, [lengths_given], [arrivals_given]),
    ):
        notes = synthesize(3, preset="fixed", seed=8, **keys).report.notes
        assert notes[0] == "drawn with seed 8"
        assert set(told) <= set(notes)
        assert not set(not_told) & set(notes)
