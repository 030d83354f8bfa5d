"""The calibrated cost model and its files."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.profile import (
    Fit,
    FitError,
    Regime,
    RunLevel,
    computed_tokens,
    read_fit,
    read_meta,
    write_fit,
)
from schedlab.sim.cost.registry import load_profile
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model

ERROR = FitError(mape=0.03, p90=0.06, max=0.2, bias=-0.01, num_points=100)
COEFFICIENTS = {
    "decode_context_sum_tokens": 3e-9,
    "decode_context_max_tokens": 2e-9,
    "prefill_attention_pairs": 1e-9,
    "prefill_context_tokens": 4e-9,
    "num_decodes": 100e-9,
    "num_prefills": 1000e-9,
}
EAGER = Regime((1, 11, 21), (10e-6, 20e-6, 40e-6), COEFFICIENTS)
GRAPH = Regime((1, 8), (5e-6, 12e-6), {}, buckets=(1, 2, 4, 8))
BOX = {"new_tokens": (1.0, 100.0)}
FIT = Fit(EAGER, None, BOX, train=ERROR, held_out=replace(ERROR, mape=0.04))
WHERE = Deployment(model("llama-3-8b"), gpu("h200"))
META = {"model": "llama-3-8b", "hardware": "h200", "dtype": "bf16", "tensor_parallel_size": 1}


def cost(fit=FIT):
    return FittedCostModel(fit, META)


def edited(folder, change):
    """Write the profile, change fit.json, return the folder."""
    write_fit(folder, META, FIT)
    data = json.loads((folder / "fit.json").read_text())
    change(data)
    (folder / "fit.json").write_text(json.dumps(data))
    return folder


def test_fitted_step_is_the_curve_plus_each_term_by_hand():
    # 2 decodes and a chunk of 4 after 10: T = 6, half way between the knots at 1 and 11 -> 15 us.
    # Sum 300 * 3 = 900 ns, max 200 * 2 = 400, pairs 4*10 + 4*5/2 = 50, in the cache 10 * 4 = 40,
    # 2 * 100, one prefill 1000.
    shape = BatchShape(2, 300, 200, chunks=((4, 10),))
    assert cost().step_ns(shape) == [15_000 + 900 + 400 + 50 + 40 + 200 + 1000]


def test_fitted_step_reads_what_each_chunk_has_in_the_cache():
    free = Regime((1, 11), (10e-6, 20e-6), {"prefill_context_tokens": 7e-9})
    step_ns = cost(replace(FIT, eager=free)).step_ns
    for chunks, tokens in ((((3, 0),), 0), (((1, 50), (2, 0)), 50), (((1, 50), (2, 6)), 56)):
        assert step_ns(BatchShape(0, 0, 0, chunks)) == [12_000 + 7 * tokens]
    assert step_ns(BatchShape(3, 500, 300)) == [12_000]  # decodes have what they cost by


@pytest.mark.parametrize(
    ("tokens", "computed"),
    [(1, 1), (3, 3), (4, 4), (5, 8), (7, 8), (8, 8), (9, 12), (12, 12), (17, 20)],
)
def test_fitted_step_of_more_than_a_tile_takes_what_whole_tiles_do(tokens, computed):
    by_token = Regime((1, 101), (1e-6, 101e-6), {}, tile_tokens=4)
    fit = replace(FIT, eager=by_token)
    assert computed_tokens(tokens, tile_tokens=4) == computed
    decodes = BatchShape(tokens, 0, 0)
    for shape in (BatchShape(0, 0, 0, ((tokens, 0),)), decodes):
        assert cost(fit).step_ns(shape) == [1000 * computed]
    assert cost(fit).step_ns(BatchShape(1, 0, 0, ((3, 0), (1, 0)))) == [8000]
    assert cost(fit).step_ns(decodes, 2) == [1000 * computed] * 2
    without = replace(fit, eager=replace(by_token, tile_tokens=1))
    assert cost(without).step_ns(decodes) == [1000 * tokens]


@pytest.mark.parametrize(("tokens", "computed"), [(1, 2), (2, 2), (3, 5), (5, 5), (6, 9)])
def test_computed_tokens_of_a_graph_are_its_bucket(tokens, computed):
    assert computed_tokens(tokens, (2, 5, 9)) == computed


def test_fitted_step_of_a_run_takes_the_level_of_its_kind_but_for_swapped_bytes():
    eager = replace(EAGER, coefficients_s={**COEFFICIENTS, "swapped_bytes": 1e-9})
    fit = replace(FIT, eager=eager, graph=GRAPH, run_level=RunLevel(1.5, 2.0))
    mixed, decodes = BatchShape(2, 300, 200, chunks=((4, 10),)), BatchShape(11, 1100, 100)
    alone = replace(fit, run_level=RunLevel())
    assert cost(fit).step_ns(mixed) == [2 * ns for ns in cost(alone).step_ns(mixed)]
    assert cost(fit).step_ns(decodes) == [(20_000 + 3300 + 200 + 1100) * 3 // 2]
    assert cost(fit).step_ns(BatchShape(8, 0, 0)) == [18_000]  # of a graph
    swapped = BatchShape(11, 1100, 100, swapped_bytes=5000)
    assert cost(fit).step_ns(swapped) == [(20_000 + 3300 + 200 + 1100) * 3 // 2 + 5000]


def test_fitted_step_of_a_run_takes_more_by_each_row_that_decodes():
    mixed, decodes = BatchShape(2, 300, 200, chunks=((4, 10),)), BatchShape(11, 1100, 100)
    graphed, padded = BatchShape(8, 0, 0), BatchShape(2, 300, 200, padding_rows=3)
    prompt = BatchShape(0, 0, 0, chunks=((4, 10),))
    fit = replace(FIT, graph=GRAPH)
    at_level = replace(fit, run_level=RunLevel(decode_row_s=2e-6))
    for shape, num_rows in ((mixed, 2), (decodes, 11), (graphed, 8), (padded, 5), (prompt, 0)):
        alone, in_a_run = (cost(one).step_ns(shape)[0] for one in (fit, at_level))
        assert in_a_run - alone == 2000 * num_rows


@pytest.mark.parametrize("row_s", [3e-6, -1e-6])
def test_fitted_step_without_prompts_takes_more_or_less_by_each_row_alone(row_s):
    mixed, decodes = BatchShape(2, 300, 200, chunks=((4, 10),)), BatchShape(11, 1100, 100)
    graphed, padded = BatchShape(8, 0, 0), BatchShape(2, 300, 200, padding_rows=3)
    fit = replace(FIT, graph=GRAPH)
    at_level = replace(fit, run_level=RunLevel(decode_row_s=2e-6, lone_row_s=row_s))
    for shape, more_ns in (
        (mixed, 2 * 2000),
        (decodes, 11 * (2000 + round(row_s * 1e9))),
        (graphed, 8 * (2000 + round(row_s * 1e9))),
        (padded, 5 * (2000 + round(row_s * 1e9))),
    ):
        alone, in_a_run = (cost(one).step_ns(shape)[0] for one in (fit, at_level))
        assert in_a_run - alone == more_ns


def test_fitted_step_whose_rows_take_off_more_than_it_costs_takes_the_least_of_its_curve():
    fit = replace(FIT, graph=GRAPH, run_level=RunLevel(2.0, lone_row_s=-9e-6))
    least_ns = 2 * 1e9 * min(EAGER.knots_s)
    context_ns = 2 * 1e9 * COEFFICIENTS["decode_context_sum_tokens"]
    longest_ns = 2 * 1e9 * COEFFICIENTS["decode_context_max_tokens"]
    decodes = BatchShape(30, 300, 20)
    several = cost(fit).step_ns(decodes, 3)
    assert several == pytest.approx(
        [least_ns + context_ns * (300 + 30 * i) + longest_ns * (20 + i) for i in range(3)], abs=1
    )
    assert cost(fit).step_ns(decodes) == several[:1]
    graphed = cost(fit).step_ns(BatchShape(8, 0, 0))
    assert graphed == [round(2e9 * min(GRAPH.knots_s))]
    assert cost(fit).step_ns(BatchShape(0, 0, 0)) == [1]  # nobody is served
    mixed = BatchShape(2, 300, 200, chunks=((4, 10),))
    without = replace(fit, run_level=RunLevel(2.0))
    assert cost(fit).step_ns(mixed) == cost(without).step_ns(mixed)


def test_fitted_step_of_a_run_takes_more_once_if_it_has_prompts():
    fit = replace(FIT, graph=GRAPH)
    at_level = replace(fit, run_level=RunLevel(prompt_step_s=3e-6))
    one, two = BatchShape(2, 300, 200, chunks=((4, 10),)), BatchShape(0, 0, 0, ((4, 1), (5, 0)))
    for shape, more_ns in ((one, 3000), (two, 3000), (BatchShape(8, 9, 3), 0)):
        alone, in_a_run = (cost(each).step_ns(shape)[0] for each in (fit, at_level))
        assert in_a_run - alone == more_ns


def test_run_level_of_a_profile_is_kept_and_a_wrong_one_named(tmp_path):
    write_fit(tmp_path / "a", META, replace(FIT, run_level=RunLevel(1.05, 1.1, 7e-5, 2e-4)))
    assert read_fit(tmp_path / "a").run_level == RunLevel(1.05, 1.1, 7e-5, 2e-4)
    assert "lone_row_s" not in (tmp_path / "a" / "fit.json").read_text()
    write_fit(tmp_path / "a", META, replace(FIT, run_level=RunLevel(lone_row_s=-3e-6)))
    assert read_fit(tmp_path / "a").run_level == RunLevel(1.0, 1.0, 0.0, 0.0, -3e-6)
    write_fit(tmp_path / "b", META, FIT)
    assert "run_level" not in (tmp_path / "b" / "fit.json").read_text()
    for level, told in (
        ({"decodes": 1}, r"unknown key 'decodes'.*decode_steps"),
        ({"prompt_steps": -1}, r"prompt_steps must be finite and >= 0"),
        ({"prompt_steps": "1"}, r"prompt_steps must be a number"),
    ):
        folder = edited(tmp_path / "c", lambda data, level=level: data.update(run_level=level))
        with pytest.raises(SpecError, match=told):
            read_fit(folder)


def test_fitted_curve_goes_on_as_its_upper_half_does_and_never_falls():
    # The last piece is jagged: from 10 to 40 tokens, the upper half, the curve rises by 1 us each.
    knots, times = (1, 10, 20, 39, 40), (5e-6, 10e-6, 25e-6, 10e-6, 40e-6)
    fit = replace(FIT, eager=Regime(knots, times, {}))
    assert cost(fit).step_ns(BatchShape(0, 0, 0, ((50, 0),))) == [40_000 + 10 * 750]
    falling = replace(FIT, eager=Regime(knots, (*times[:4], 20e-6), {}))
    assert cost(falling).step_ns(BatchShape(0, 0, 0, ((50, 0),))) == [20_000]


@pytest.mark.parametrize(
    ("knots", "times_us", "beyond_ns"),
    [
        # Beyond the last one: the slope from the knot that half of it lies before, or on.
        ((10, 100), (1, 10), 10_000 + 40 * 100),
        ((10, 20, 100), (1, 4, 8), 8_000 + 40 * 50),  # but never that of no length
        ((10, 50, 100), (1, 4, 8), 8_000 + 40 * 80),
        ((10, 60, 100), (1, 4, 8), 8_000 + 40 * 100),
        ((10, 20, 40, 100), (1, 2, 5, 8), 8_000 + 40 * 50),
        ((10, 20, 30, 55, 100), (1, 2, 3, 4, 7), 7_000 + 2_667),
    ],
)
def test_fitted_curve_beyond_the_knots_has_the_slope_of_their_upper_half(
    knots, times_us, beyond_ns
):
    fit = replace(FIT, eager=Regime(knots, tuple(us * 1e-6 for us in times_us), {}))
    assert cost(fit).step_ns(BatchShape(0, 0, 0, ((140, 0),)))[0] == pytest.approx(beyond_ns, abs=1)


@pytest.mark.parametrize(
    ("tokens", "ns"),
    [(1, 10_000), (11, 20_000), (16, 30_000), (21, 40_000), (31, 60_000)],
)
def test_fitted_curve_is_linear_between_and_beyond_the_knots(tokens, ns):
    assert cost().step_ns(BatchShape(0, 0, 0, padding_tokens=tokens)) == [ns]


@pytest.mark.parametrize(
    ("knots_s", "beyond_ns"),
    [((8e-6, 10e-6, 6e-6, 14e-6), 22_000), ((8e-6, 20e-6, 30e-6, 10e-6), 10_000)],
)
def test_fitted_curve_may_fall_between_knots_but_not_beyond_them(knots_s, beyond_ns):
    falling = cost(replace(FIT, eager=Regime((1, 2, 8, 16), knots_s, {})))
    at = [falling.step_ns(BatchShape(0, 0, 0, padding_tokens=n))[0] for n in (1, 2, 8, 16, 24)]
    assert at == [*(round(s * 1e9) for s in knots_s), beyond_ns]


def test_fitted_padding_counts_as_tokens_and_context():
    shape = BatchShape(1, 100, 100, padding_tokens=10, padding_context_tokens=50)
    assert cost().step_ns(shape) == [20_000 + 3 * 150 + 2 * 100 + 100]


def test_fitted_row_of_a_finished_request_costs_what_a_decode_row_does():
    alone = BatchShape(1, 100, 100, padding_tokens=10, padding_context_tokens=50)
    beside = replace(alone, padding_rows=3)
    assert cost().step_ns(beside)[0] - cost().step_ns(alone)[0] == 3 * 100


def test_fitted_swapping_costs_by_the_byte_and_each_chunk_counts():
    coefficients = {**COEFFICIENTS, "swapped_bytes": 2e-9}
    swapping = cost(replace(FIT, eager=replace(EAGER, coefficients_s=coefficients)))
    # 7 + 4 tokens: the knot at 11. Pairs 7 * 8 / 2, and 4 * 10 + 4 * 5 / 2.
    shape = BatchShape(0, 0, 0, chunks=((7, 0), (4, 10)), swapped_bytes=500)
    assert swapping.step_ns(shape) == [20_000 + 28 + 50 + 10 * 4 + 2 * 1000 + 1000]


@pytest.mark.parametrize(
    ("decodes", "ns"),
    [(1, 5000), (3, 8000), (5, 12_000), (8, 12_000), (9, 18_000 + 900)],  # 9: eager, 100 ns a row
)
def test_fitted_decode_only_steps_round_up_to_the_graph_bucket(decodes, ns):
    assert cost(replace(FIT, graph=GRAPH)).step_ns(BatchShape(decodes, 0, 0)) == [ns]


def test_fitted_step_with_a_chunk_is_eager_even_if_small():
    shape = BatchShape(1, 0, 0, chunks=((2, 0),))
    assert cost(replace(FIT, graph=GRAPH)).step_ns(shape) == [12_000 + 3 + 100 + 1000]


def test_fitted_swapping_without_a_measurement_is_refused():
    with pytest.raises(SpecError, match="no coefficient for swapped_bytes"):
        cost().step_ns(BatchShape(0, 0, 0, swapped_bytes=1))


@pytest.mark.parametrize(
    ("shape", "k"),
    [
        (BatchShape(1, 1, 1, chunks=((4, 0),)), 2),
        (BatchShape(1, 1, 1, swapped_bytes=3), 2),
        (BatchShape(1, 1, 1), 0),
        (BatchShape(1, 1, 1), -1),
    ],
)
def test_fitted_several_steps_of_what_cannot_be_repeated_are_refused(shape, k):
    eager = replace(EAGER, coefficients_s={**COEFFICIENTS, "swapped_bytes": 1e-9})
    model = cost(replace(FIT, eager=eager))
    with pytest.raises(ValueError, match=f"k = {k}: only a step without chunks and swapping"):
        model.step_ns(shape, k)


def test_fitted_tells_which_steps_lie_outside_the_box_by_feature():
    fit = replace(FIT, validity={**BOX, "decode_context_sum_tokens": (100.0, 110.0)})
    # Sums 98, 100, ..., 116.
    assert cost(fit).outside(BatchShape(2, 98, 49), 10) == {
        "decode_context_sum_tokens": [0, 7, 8, 9]
    }
    # No decodes: only new_tokens is outside.
    assert cost(fit).outside(BatchShape(0, 0, 0, chunks=((101, 0),))) == {"new_tokens": [0]}
    assert cost(fit).outside(BatchShape(2, 100, 50), 6) == {}


@pytest.mark.parametrize(("feature", "shape"), [
    ("new_tokens", BatchShape(0, 0, 0, padding_tokens=8)),
    ("decode_context_sum_tokens", BatchShape(1, 4, 0, padding_context_tokens=4)),
    ("decode_context_max_tokens", BatchShape(1, 0, 8)),
    ("prefill_attention_pairs", BatchShape(0, 0, 0, chunks=((2, 0), (2, 1)))),
    ("prefill_context_tokens", BatchShape(3, 50, 20, chunks=((2, 3), (1, 0), (2, 5)))),
    ("num_decodes", BatchShape(7, 0, 0, padding_tokens=1, padding_rows=1)),
    ("num_prefills", BatchShape(0, 0, 0, chunks=((1, 0),) * 8)),
    ("swapped_bytes", BatchShape(0, 0, 0, swapped_bytes=8)),
])  # fmt: skip
def test_fitted_step_on_the_edge_of_the_box_is_inside_and_one_beyond_is_not(feature, shape):
    def outside(low, high):
        box = {"new_tokens": (0.0, 1e9)} | {feature: (float(low), float(high))}
        return list(cost(replace(FIT, validity=box)).outside(shape))

    assert (outside(8, 9), outside(7, 8)) == ([], [])
    assert (outside(9, 10), outside(6, 7)) == ([feature], [feature])


def test_scheduling_overhead_of_a_profile_is_read_from_its_meta():
    measured = FittedCostModel(FIT, {**META, "scheduling_overhead": {"base_s": 2e-4}})
    assert measured.scheduling_overhead == SchedulingOverhead(base_s=2e-4)
    assert cost().scheduling_overhead is None


@pytest.mark.parametrize(("stated", "message"), [
    ({"base_ms": 1.0}, "unknown key 'base_ms'; did you mean base_s"),
    ({"base_s": "much"}, "base_s must be a number"),
    ([1.0], "no mapping"),
])  # fmt: skip
def test_malformed_scheduling_overhead_in_a_profile_is_refused(stated, message):
    with pytest.raises(SpecError, match=message):
        FittedCostModel(FIT, {**META, "scheduling_overhead": stated})


def test_fit_written_and_read_is_the_same(tmp_path):
    fit = replace(FIT, graph=GRAPH)
    write_fit(tmp_path / "h200" / "llama", {**META, "driver": "570.1"}, fit)
    assert read_fit(tmp_path / "h200" / "llama") == fit
    assert "tile_tokens" not in (tmp_path / "h200" / "llama" / "fit.json").read_text()
    tiled = replace(fit, eager=replace(EAGER, tile_tokens=64))
    write_fit(tmp_path / "tiled.v2.1", META, tiled)
    assert read_fit(tmp_path / "tiled.v2.1") == tiled
    assert read_meta(tmp_path / "h200" / "llama")["driver"] == "570.1"
    assert sorted(p.name for p in (tmp_path / "h200" / "llama").iterdir()) == [
        "fit.json", "meta.json",
    ]  # fmt: skip


def test_write_fit_without_a_required_key_is_refused(tmp_path):
    with pytest.raises(SpecError, match="'hardware' is missing"):
        write_fit(tmp_path, {"model": "x"}, FIT)


def test_load_of_the_right_profile_describes_its_errors(tmp_path):
    write_fit(tmp_path, META, FIT)
    where = Deployment(model("meta-llama/Meta-Llama-3-8B"), gpu("NVIDIA H200"), dtype="bfloat16")
    described = load_profile(tmp_path, where).describe()
    assert described["calibration"] == "CALIBRATED"
    assert described["error"]["held_out"]["mape"] == 0.04
    assert described["mismatches"] == []
    assert (described["model"], described["hardware"]) == (META["model"], META["hardware"])


def test_fit_that_no_step_was_held_out_of_describes_no_error_on_such(tmp_path):
    write_fit(tmp_path, META, replace(FIT, held_out=FitError(0.0, 0.0, 0.0, 0.0, 0)))
    assert list(load_profile(tmp_path, None).describe()["error"]) == ["train"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"model": model("llama-2-7b")},
            "model is 'llama-3-8b' in the profile, 'llama-2-7b' in the run",
        ),
        ({"gpu": gpu("h100")}, "hardware is 'h200'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 1"),
        ({"weight_dtype": "int4"}, "weight_dtype is 'bf16' in the profile, 'int4' in the run"),
    ],
)
def test_load_of_another_profile_is_refused_unless_allowed(tmp_path, wanted, message):
    write_fit(tmp_path, META, FIT)
    with pytest.raises(SpecError, match=message):
        load_profile(tmp_path, replace(WHERE, **wanted))
    allowed = load_profile(tmp_path, replace(WHERE, **wanted), allow_mismatch=True)
    assert message in allowed.describe()["mismatches"][0]


def negative(data):
    data["regimes"]["eager"]["coefficients_s"]["num_decodes"] = -1e-9


def unknown(data):
    data["regimes"]["eager"]["coefficients_s"]["num_decode"] = 1.0


def no_held_out(data):
    del data["error"]["held_out"]


def beyond_all(data):
    data["regimes"]["eager"]["coefficients_s"]["num_decodes"] = 1e308


def no_bias(data):
    del data["error"]["train"]["bias"]


def text(data):
    data["regimes"]["eager"]["knots_s"][1] = "fast"


def short(data):
    data["regimes"]["eager"]["knots_s"].pop()


def old(data):
    data["schema"] = "schedlab-fit-0"


def box(data):
    data["validity"]["new_tokens"] = [10, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (negative, r"regimes\.eager: coefficients_s\.num_decodes must be finite and >= 0"),
        (beyond_all, r"num_decodes must be finite and >= 0 \(and at most 1e\+100\), got 1e\+308"),
        (unknown, r"unknown key 'num_decode'; did you mean num_decodes\?"),
        (no_held_out, "'held_out' is missing"),
        (no_bias, r"error\.train: key 'bias' is missing"),
        (text, r"knots_s\[1\] must be a number, got 'fast'"),
        (short, "same length"),
        (old, "this version reads 'schedlab-fit-1'"),
        (box, r"validity\.new_tokens: 10.0 > 1.0"),
    ],
)
def test_read_fit_of_a_malformed_file_names_file_and_key(tmp_path, change, message):
    folder = edited(tmp_path, change)
    with pytest.raises(SpecError, match=rf"fit\.json: .*{message}"):
        read_fit(folder)


AT_EAGER = ("regimes", "eager")
SPREAD = {"decode_steps": [1.0], "prompt_steps": [1.0], "num_alike": 1}


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ((*AT_EAGER, "knots_tokens"), [1, 2.5], "knots_tokens must hold whole numbers"),
        ((*AT_EAGER, "knots_tokens"), 7, "knots_tokens must be an array, got 7"),
        ((*AT_EAGER, "knots_tokens"), [2, 2, 3], "must be >= 1 and strictly increasing"),
        ((*AT_EAGER, "knots_tokens"), [0, 2, 3], "must be >= 1 and strictly increasing"),
        ((*AT_EAGER, "knots_tokens"), [1, 2], "same length, at least 2"),
        ((*AT_EAGER, "knots_s"), {"1": 2.0}, "knots_s must be an array"),
        ((*AT_EAGER, "knots_s"), [True, 1.0], r"knots_s\[0\] must be a number, got True"),
        ((*AT_EAGER, "knots_s"), [1.0, -1.0, 1.0], "must be finite and >= 0"),
        ((*AT_EAGER, "knots_s"), None, r"regimes\.eager: key 'knots_s' is missing"),
        ((*AT_EAGER, "coefficients_s"), None, "key 'coefficients_s' is missing"),
        ((*AT_EAGER, "coefficients_s"), [], "'coefficients_s' is missing or is no object"),
        ((*AT_EAGER, "buckets"), [1, 2], "eager: buckets belong to the graph regime"),
        ((*AT_EAGER, "buckets"), [2, 1], "buckets must be >= 1 and strictly increasing"),
        ((*AT_EAGER, "bucket"), [1], r"eager: unknown key 'bucket'; did you mean buckets\?"),
        ((*AT_EAGER, "tile_tokens"), 0, "eager: tile_tokens must be >= 1, got 0"),
        ((*AT_EAGER, "tile_tokens"), 1.5, "eager: tile_tokens: a whole number is needed, got 1.5"),
        ((*AT_EAGER, "tile_tokens"), "64", "eager: tile_tokens must be a number, got '64'"),
        (("regimes", "eager"), None, "key 'eager' is missing or is no object"),
        (("validity", "new_tokens"), [1], r"new_tokens must be \[least, largest\], got \[1\]"),
        (("validity", "new_tokens"), 9, r"must be \[least, largest\], got 9"),
        (("validity", "new_tokens"), [-1, 9], r"validity\.new_tokens must be finite and >= 0"),
        (("validity", "new_tokens"), [1, 1e101], r"validity\.new_tokens must be finite and >= 0"),
        (("validity", "new_tokens"), None, "validity: new_tokens is missing"),
        (("validity", "new_token"), [1, 2], r"unknown key 'new_token'; did you mean new_tokens\?"),
        (("error", "train", "p90"), "much", r"error\.train\.p90 must be a number, got 'much'"),
        (("error", "train", "mean"), 1.0, "unknown key 'mean'"),
        (("step_spread",), {**SPREAD, "num_alike": 1.5}, "num_alike: a whole number is needed"),
        (("step_spread",), {**SPREAD, "decode_steps": 1.0}, "decode_steps: a list of numbers is"),
        (("step_spread",), {**SPREAD, "prompt_steps": ["x"]}, "prompt_steps must be a number"),
        (("step_spread",), {**SPREAD, "prompt_step": [1.0]}, "unknown key 'prompt_step'"),
        (("run_level",), {"prompt_step_s": -1.0}, "takes more than all of the shortest step with"),
    ],
)  # fmt: skip
def test_read_fit_with_one_wrong_value_names_its_place(tmp_path, where, value, message):
    def change(data):
        for key in where[:-1]:
            data = data[key]
        if value is None:
            del data[where[-1]]
        else:
            data[where[-1]] = value

    with pytest.raises(SpecError, match=rf"fit\.json: .*{message}"):
        read_fit(edited(tmp_path, change))


def test_load_of_a_folder_that_is_no_profile_names_the_files_of_one(tmp_path):
    with pytest.raises(SpecError, match=r"no profile, it holds none of fit\.json, table\.json"):
        load_profile(tmp_path)


def test_graph_regime_without_buckets_is_refused():
    with pytest.raises(SpecError, match="graph: buckets are missing"):
        replace(FIT, graph=EAGER)


def test_graph_regime_with_tiles_is_refused():
    with pytest.raises(SpecError, match="tile_tokens: a regime with buckets rounds up to those"):
        replace(GRAPH, tile_tokens=64)


def test_fit_shown_in_the_docs_can_be_loaded(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "cost-models.md").read_text()
    meta, fit = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "meta.json").write_text(meta)
    (tmp_path / "fit.json").write_text(fit)
    assert load_profile(tmp_path).step_ns(BatchShape(1, 100, 100))[0] > 1_000_000
