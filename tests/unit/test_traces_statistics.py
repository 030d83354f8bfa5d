"""The statistics of public traces against printed figures that were computed independently."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.errors import TraceError
from schedlab.traces import Trace, read
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.prefix_statistics import _reuse_gaps_s, describe_prefixes, lru_hit_rate
from schedlab.traces.read_report import ReadReport
from schedlab.traces.statistics import describe, fit_gamma, fit_lognormal
from tests.data_folder import data_folder

FILES = {
    "conv": "traces/azure_2023/AzureLLMInferenceTrace_conv.csv",
    "code": "traces/azure_2023/AzureLLMInferenceTrace_code.csv",
    "conversation": "traces/mooncake/conversation_trace.jsonl",
    "synthetic": "traces/mooncake/synthetic_trace.jsonl",
    "arxiv": "traces/vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
    "sharegpt300": "vllm_ground_truth/workloads/sharegpt-llama-3.1-8b-300-sps10.lean.jsonl",
}


@functools.cache
def described(name):
    return describe(read(data_folder() / FILES[name]))


# requests, duration, rate, per-minute min and max, CV, gamma shape from CV, zero gaps, gamma shape,
# scale, KS gamma, KS exponential, Fano
# Where all gaps are the same but for rounding, the shape is known to no more digits than these.
ARRIVALS = {
    "conv": "19366 3501.7 5.530 3.18 8.45 1.094 0.835 0.000 0.871 0.2076 0.017 0.022 4.00",
    "code": "8819 3435.9 2.566 0.00 10.53 13.151 0.006 0.000 0.231 1.685 0.218 0.520 71.30",
    "conversation": "12031 3537.0 3.401 2.40 4.12 3.034 0.109 0.902 1.91881e7 1.563e-07 0.276 "
    "0.632 2.09",
    "synthetic": "3993 1022.0 3.906 3.47 4.55 1.011 0.978 0.003 1.018 0.2521 0.012 0.011 1.37",
    "sharegpt300": "300 29.1 10.262 10.30 10.30 0.942 1.128 0.000 0.991 0.09837 0.038 0.037 1.53",
}
# mean, std, p50, p90, p99, max, lognormal mu, sigma, KS, gamma shape, scale, KS
PROMPTS = {
    "conv": "1154.7 1108.8 1020 2734 4142 14050 6.633 0.985 0.159 1.338 863.3 0.137",
    "code": "2047.8 1973.8 1469 5188 7436 7437 6.999 1.360 0.107 0.930 2201.4 0.035",
    "conversation": "12035.1 15800.3 6909 27367 85400 126195 8.737 1.199 0.067 0.889 13542.6 0.090",
    "synthetic": "15325.5 18380.2 11587 38611 66456 191378 7.982 2.700 0.203 0.398 38519.6 0.162",
    "arxiv": "2588.1 944.7 2730 3702 3933 4054 7.717 0.755 0.221 3.677 703.9 0.143",
    "sharegpt300": "857.5 527.4 732 1460 2765 3998 6.598 0.550 0.050 3.357 255.5 0.070",
}
OUTPUTS = {
    "conv": "211.1 162.9 129 424 601 1000 5.019 0.859 0.182 1.646 128.2 0.183",
    "code": "27.9 59.9 13 55 251 1899 2.788 0.847 0.133 1.062 26.3 0.208",
    "conversation": "342.6 249.9 350 597 1119 2000 5.336 1.358 0.212 1.137 301.3 0.165",
    "synthetic": "149.1 178.1 69 389 768 893 3.916 1.768 0.105 0.572 260.8 0.089",
    "arxiv": "291.4 530.5 167 372 3271 4056 5.187 0.796 0.107 1.163 250.7 0.213",
    "sharegpt300": "652.5 98.3 632 770 784 1021 6.470 0.150 0.152 44.384 14.7 0.152",
}
# Pearson, Spearman, Pearson of logs
CORRELATIONS = {
    "conv": "-0.112 0.073 0.087",
    "code": "0.001 -0.021 -0.005",
    "conversation": "0.072 0.072 0.051",
    "synthetic": "-0.374 -0.517 -0.491",
    "arxiv": "-0.463 -0.114 -0.484",
    "sharegpt300": "0.157 0.189 0.170",
}
PREFIXES = {
    "block_references": ("288500", "121877"),
    "distinct_blocks": ("182790", "43924"),
    "block_hit_rate": ("0.3664", "0.6396"),
    "token_hit_rate": ("0.3736", "0.6512"),
    "seen_before_share": ("0.3664", "0.6396"),
    "requests_with_1_hit": ("0.9999", "0.4463"),
    "requests_with_2_hits": ("0.3872", "0.4378"),
    "requests_all_hit": ("0.009808", "0.05334"),
    "mean_hit_blocks": ("8.786", "19.52"),
    "used_once_share": ("0.7585", "0.5845"),
    "max_uses": ("12031", "24"),
    "reuse_gap_p50_s": ("114", "59.39"),
    "reuse_gap_p90_s": ("519", "281.8"),
}
LRU = {
    1_000: ("0.04453", "0.08412"),
    3_000: ("0.06534", "0.1906"),
    10_000: ("0.2116", "0.4239"),
    30_000: ("0.3257", "0.6242"),
    50_000: ("0.3546", "0.6396"),
    100_000: ("0.3637", "0.6396"),
}


def assert_prints_as(value, printed):
    """The value rounds to the printed digits (half a unit in the last place, and a hair)."""
    mantissa, _, exponent = printed.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    assert value == pytest.approx(float(printed), abs=0.5001 * 10.0**-decimals), printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRIVALS)
def test_describe_public_trace_reproduces_its_arrival_figures(name):
    stats = described(name)
    values = [stats["num_requests"], *stats["arrivals"].values()]
    for value, printed in zip(values, ARRIVALS[name].split(), strict=True):
        assert_prints_as(value, printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize(
    ("column", "table"), [("prompt_tokens", PROMPTS), ("output_tokens", OUTPUTS)]
)
def test_describe_public_trace_reproduces_its_length_figures(name, column, table):
    stats = dict(described(name)[column])
    fits = (*stats.pop("lognormal").values(), *stats.pop("gamma").values())
    for value, printed in zip((*stats.values(), *fits), table[name].split(), strict=True):
        assert_prints_as(value, printed)


@pytest.mark.parametrize("name", CORRELATIONS)
def test_describe_public_trace_reproduces_its_correlations(name):
    values = described(name)["correlation"].values()
    for value, printed in zip(values, CORRELATIONS[name].split(), strict=True):
        assert_prints_as(value, printed)


@pytest.mark.parametrize(("index", "name"), [(0, "conversation"), (1, "synthetic")])
def test_describe_mooncake_reproduces_its_prefix_reuse(index, name):
    prefix = described(name)["prefix"]
    for key, printed in PREFIXES.items():
        assert_prints_as(prefix[key], printed[index])
    for size, printed in LRU.items():
        assert_prints_as(prefix["lru"][size], printed[index])


def tiny(**columns) -> Trace:
    base = {"prompt_tokens": np.array([8, 8, 8]), "output_tokens": np.array([1, 2, 3])}
    return Trace(**{**base, **columns})


def test_describe_without_times_spread_or_prefix_says_none():
    stats = describe(tiny())
    assert stats["arrivals"] is None
    assert stats["prefix"] is None
    assert stats["correlation"]["pearson"] is None
    assert stats["prompt_tokens"]["gamma"] == {"shape": None, "scale": None, "ks": None}
    assert stats["prompt_tokens"]["lognormal"]["ks"] is None


def test_describe_of_blocks_that_no_row_has_says_none():
    assert describe(tiny(prefix=PrefixHashes.from_rows([[], [], []], 16)))["prefix"] is None


def test_describe_arrivals_at_one_instant_has_no_rate():
    stats = describe(tiny(arrival_ns=np.array([5, 5, 5])))["arrivals"]
    assert stats["duration_s"] == 0
    assert stats["rate"] is None


def test_describe_single_request_works():
    stats = describe(tiny(arrival_ns=np.array([1, 2, 3])).head(1))
    assert stats["num_requests"] == 1
    assert stats["output_tokens"]["mean"] == 1.0


def test_describe_regular_arrivals_have_no_variation():
    stats = describe(tiny(arrival_ns=np.array([0, 10, 20]) * 10**9))["arrivals"]
    assert stats["rate"] == pytest.approx(0.1)
    assert stats["cv"] == 0
    assert stats["gamma_shape_from_cv"] is None
    assert stats["fano_10s"] == 0


@pytest.mark.parametrize(("shape", "scale"), [(0.3, 5.0), (2.0, 100.0), (400.0, 1.0)])
def test_fit_gamma_recovers_the_parameters_of_its_own_sample(shape, scale):
    sample = np.random.default_rng(0).gamma(shape, scale, 50_000)
    fit = fit_gamma(sample)
    assert fit["shape"] == pytest.approx(shape, rel=0.03)
    assert fit["scale"] == pytest.approx(scale, rel=0.03)
    assert fit["ks"] < 0.01


def test_fit_lognormal_recovers_the_parameters_of_its_own_sample():
    fit = fit_lognormal(np.random.default_rng(0).lognormal(3.0, 0.7, 50_000))
    assert fit["mu"] == pytest.approx(3.0, abs=0.02)
    assert fit["sigma"] == pytest.approx(0.7, abs=0.02)
    assert fit["ks"] < 0.01


def test_describe_prefixes_by_hand():
    trace = tiny(
        arrival_ns=np.array([0, 2, 5]) * 10**9,
        prefix=PrefixHashes.from_rows([[1, 2], [1, 3], [1, 2]], 4),
    )
    stats = describe_prefixes(trace)
    assert stats["block_hit_rate"] == pytest.approx(3 / 6)
    assert stats["token_hit_rate"] == pytest.approx(12 / 24)
    assert stats["requests_with_1_hit"] == pytest.approx(2 / 3)
    assert stats["requests_all_hit"] == pytest.approx(1 / 3)
    assert stats["used_once_share"] == pytest.approx(1 / 3)
    assert stats["max_uses"] == 3
    assert stats["reuse_gap_p50_s"] == 3.0


def test_lru_that_is_too_small_evicts_the_end_of_a_prompt_first():
    prefix = PrefixHashes.from_rows([[1, 2, 3], [1, 2, 3]], 16)
    assert lru_hit_rate(prefix, 3) == pytest.approx(3 / 6)
    assert lru_hit_rate(prefix, 2) == pytest.approx(2 / 6)


def test_block_seen_only_off_prefix_is_no_hit():
    trace = tiny(prefix=PrefixHashes.from_rows([[1, 2], [9, 2], [9, 2]], 4))
    stats = describe_prefixes(trace)
    assert stats["seen_before_share"] == pytest.approx(3 / 6)
    assert stats["block_hit_rate"] == pytest.approx(2 / 6)


def test_describe_prefixes_without_hashes_raises():
    with pytest.raises(TraceError, match=r"^a\.csv: no prefix hashes"):
        describe_prefixes(tiny(report=ReadReport(path="a.csv")))


def test_blocks_of_a_trace_without_times_are_used_again_after_no_known_time():
    block, row = np.array([7, 8, 7, 7]), np.array([0, 1, 2, 3])
    timed = SimpleNamespace(arrival_ns=np.array([1, 2, 5, 9]) * 10**9)
    assert _reuse_gaps_s(timed, block, row).tolist() == [4.0, 4.0]
    assert _reuse_gaps_s(SimpleNamespace(arrival_ns=None), block, row).tolist() == []
