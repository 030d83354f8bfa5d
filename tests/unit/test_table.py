import json
import math
import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from schedlab.sim.cost.attention import AttentionGrid, RooflineAttention, Skew
from schedlab.sim.cost.registry import load_profile
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.table import TableCostModel, TableReading
from schedlab.sim.cost.table_profile import (
    SCHEMA,
    Curve,
    RingAllReduce,
    TableProfile,
    read_table,
    write_table,
)
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model as find_model
from schedlab.sim.rng import stream

META = {"model": "llama-3-8b", "hardware": "a100", "dtype": "bf16", "tensor_parallel_size": 1}
# A plane over all four axes, 1 + chunk + 2 kv + 3 n + 4 context, which interpolation must hit.
POINTS = [
    (chunk, kv, n, context, 1.0 + chunk + 2 * kv + 3 * n + 4 * context)
    for chunk in (0, 16, 64)
    for kv in ((0,) if chunk == 0 else (0, 100))
    for n in (0, 1, 4)
    for context in ((0,) if n == 0 else (16, 128, 1024))
    if chunk or n
]
GRID = dict(
    zip(
        ("prefill_chunk", "kv_prefill", "num_decodes", "kv_decode", "us"),
        map(list, zip(*POINTS, strict=True)),
        strict=True,
    )
)
PROFILE = TableProfile(
    by_tokens=(Curve("dense", 2, (1.0, 101.0), (10.0, 110.0)),),
    by_requests=(Curve("head", 1, (1.0, 10.0), (5.0, 23.0)),),
    attention=GRID,
    attention_calls=3,
)
SKEW = Skew((2.0, 8.0), (0.5, 1.0), (100.0, 1e9), (0.0, 1e9), {(0, 0, 1, 0, 0): 0.5}, 0.1)
SKEW_DATA = {
    "decode_bins": [2, 8], "rate_bins": [0.5, 1], "context_bins": [100], "kv_bins": [],
    "default": 0.1, "cells": [[0, 0, 1, 0, 0, 0.5]],
}  # fmt: skip


def model(**changes):
    return TableCostModel(replace(PROFILE, **changes), META)


def test_table_of_a_profile_with_overhead_tells_it():
    stated = {"scheduling_overhead": {"base_s": 2e-6, "per_running_s": 3e-6}}
    found = TableCostModel(model().profile, stated).scheduling_overhead
    assert (found.base_s, found.per_running_s, found.per_waiting_s) == (2e-6, 3e-6, 0.0)
    assert TableCostModel(model().profile, {}).scheduling_overhead is None


@pytest.mark.parametrize(
    ("chunks", "n", "context"),
    [
        (((40, 30),), 2, 500),
        (((10, 50), (20, 30)), 3, 20),
        ((), 2, 700),
        (((64, 100),), 4, 1024),
        (((20, 0),), 0, 0),
    ],
)
def test_attention_between_measured_points_is_linear_on_every_axis(chunks, n, context):
    chunk, kv = sum(q for q, _ in chunks), sum(c for _, c in chunks)
    expected = 1 + chunk + 2 * kv + 3 * n + 4 * context
    assert AttentionGrid(*GRID.values()).call_us(chunks, n, context) == pytest.approx(expected)


def test_attention_of_separate_prefills_counts_no_pairs_of_different_prompts():
    points = [(q, 0, n, 0, 1.0 + q * q + n) for q in (0, 10, 20) for n in (0, 2) if q or n]
    grid = AttentionGrid(*map(list, zip(*points, strict=True)), separate_prefills=True)
    chunks = ((10, 0), (20, 0))
    assert grid.call_us(chunks, 2, 0) == (1 + 400 + 2) + (1 + 100), "decodes go with the longest"
    pooled = AttentionGrid(*map(list, zip(*points, strict=True)))
    assert pooled.call_us(chunks, 2, 0) == pooled.call_us(((30, 0),), 2, 0)


def test_prefills_cannot_be_pooled_by_rates():
    rates = replace(PROFILE, attention={"us_per_pair": 1.0, "us_per_kv_token": 1.0})
    with pytest.raises(SpecError, match="none are pooled"):
        TableCostModel(rates, META, reading=TableReading(separate_prefills=False))
    told = TableCostModel(rates, META, reading=TableReading(separate_prefills=True)).describe()
    assert told["several_prefills"] == "priced one by one"


def test_description_of_a_table_tells_what_it_was_measured_on_and_how_it_is_read():
    meta = {**META, "published_error": "3 %", "source": "there"}
    cost = TableCostModel(PROFILE, meta, reading=TableReading(profiling_overhead_s=2e-6))
    told = cost.describe()
    assert {key: told[key] for key in ("name", "calibration", "model", "hardware")} == {
        "name": cost.name, "calibration": "MEASURED OPERATORS", "model": "llama-3-8b",
        "hardware": "a100",
    }  # fmt: skip
    assert (told["meta"], told["published_error"]) == (meta, "3 %")
    assert (told["profile"], told["mismatches"]) == (cost.source, list(cost.mismatches))
    assert told["validity"] == {key: list(both) for key, both in cost.validity.items()}
    assert told["profiling_overhead_s"] == 2e-6


def test_attention_below_an_axis_is_its_first_value_and_beyond_it_the_last_line():
    grid = AttentionGrid(*GRID.values())
    assert grid.call_us((), 1, 3) == grid.call_us((), 1, 16)
    assert grid.call_us((), 1, 2000) == pytest.approx(1 + 3 + 4 * 2000)
    assert grid.call_us((), 8, 100) == pytest.approx(1 + 24 + 400)


def test_attention_of_a_slice_that_was_not_measured_takes_the_nearest():
    kept = [p for p in POINTS if p[0] != 64 or p[2] != 4]
    grid = AttentionGrid(*map(list, zip(*kept, strict=True)))
    assert grid.call_us(((64, 0),), 4, 16) == grid.call_us(((64, 0),), 1, 16)


def test_attention_row_of_decodes_equals_single_calls():
    grid = AttentionGrid(*GRID.values())
    row = grid.decodes_us(3, 2000)
    assert row.tolist() == pytest.approx([grid.call_us((), 3, x) for x in range(2000)], abs=1e-9)


def test_attention_row_of_decodes_of_any_grid_equals_single_calls_and_is_never_negative():
    # Times that rise and fall by chance: lines through the last two points end below zero.
    floors = 0
    for seed in range(30):
        draw = Random(seed)
        chunks, decodes, contexts = (
            draw.sample(range(most), draw.randint(1, 3)) for most in (9, 7, 20)
        )
        points = [
            (chunk, kv, n, context, draw.randint(1, 50))
            for chunk in chunks for n in decodes for kv in draw.sample(range(9), draw.randint(1, 2))
            for context in draw.sample(contexts, draw.randint(1, len(contexts)))
        ]  # fmt: skip
        grid = AttentionGrid(*map(list, zip(*points, strict=True)))
        for n in range(9):
            row = grid.decodes_us(n, 40).tolist()
            assert row == pytest.approx([grid.call_us((), n, x) for x in range(40)], abs=1e-9)
            assert min(row) >= 0.0
            floors += 0.0 in row
    assert floors


def test_attention_by_two_rates_counts_causal_pairs_and_cached_tokens():
    rates = RooflineAttention(us_per_pair=2.0, us_per_kv_token=3.0, us_per_call=1.0)
    # A chunk of 4 after 10: 4*10 + 4*5/2 = 50 pairs against 14 tokens read.
    assert rates.call_us(((4, 10),), 2, 9) == 1 + 100 + 3.0 * 2 * 10
    assert rates.decodes_us(2, 10).tolist() == [rates.call_us((), 2, n) for n in range(10)]


def test_step_is_the_sum_of_its_operators():
    # 2 decodes with contexts 100 and 300, one chunk of 20 after 10: 22 tokens, 3 requests.
    shape = BatchShape(2, 400, 300, ((20, 10),), rows_sampled=3, decode_context_min_tokens=100)
    dense, head = 2 * 31, 9
    attention = 1 + 20 + 2 * 10 + 3 * 2 + 4 * 200
    assert model().step_ns(shape) == [1000 * (dense + head + 3 * attention)]


def test_request_with_one_token_counts_as_a_decode():
    as_chunk = BatchShape(1, 100, 100, ((1, 300),), rows_sampled=2, decode_context_min_tokens=100)
    as_decode = BatchShape(2, 400, 300, rows_sampled=2, decode_context_min_tokens=100)
    for profile in (model(), model(skew=SKEW)):
        assert profile.step_ns(as_chunk) == profile.step_ns(as_decode)


def test_mean_context_is_rounded_down():
    whole = BatchShape(2, 400, 200, rows_sampled=2, decode_context_min_tokens=200)
    assert model().step_ns(replace(whole, decode_context_sum_tokens=401)) == model().step_ns(whole)


def test_unequal_contexts_cost_a_share_of_the_way_to_the_longest():
    # Mean 60, largest 90, least 10: rate 0.625 is bucket 1 of (0.5, 1), so alpha is 0.5.
    shape = BatchShape(2, 120, 90, rows_sampled=2, decode_context_min_tokens=10)
    base = 2 * 11 + 7 + 3 * (1 + 6 + 4 * 60)
    assert model(skew=SKEW).step_ns(shape) == [1000 * (base + 3 * 0.5 * 4 * 30)]
    longer = replace(shape, decode_context_max_tokens=110)  # another bucket: the default
    assert model(skew=SKEW).step_ns(longer) == [1000 * (base + 3 * 0.1 * 4 * 50)]


def test_nearest_skew_takes_the_alpha_of_the_nearest_measured_chunk():
    cells = {(0, 0, 1, 0, 0): 0.5, (16, 0, 1, 0, 0): 0.2, (64, 0, 1, 0, 0): 0.4}
    published = replace(SKEW, cells=cells)
    nearest = replace(published, nearest=True)
    step = {"kv": 0, "num_decodes": 2, "rate": 0.7, "largest": 90}
    assert [published.alpha(chunk, **step) for chunk in (16, 30, 60)] == [0.2, 0.1, 0.1]
    assert [nearest.alpha(chunk, **step) for chunk in (16, 30, 60)] == [0.2, 0.2, 0.4]
    assert nearest.alpha(0, **step) == 0.5, "a step without prompts is measured as such"


def test_nearest_skew_without_a_correction_is_refused():
    with pytest.raises(SpecError, match="nearest_skew needs a correction"):
        TableCostModel(PROFILE, META, reading=TableReading(nearest_skew=True))


@pytest.mark.parametrize("skew", [None, SKEW])
@pytest.mark.parametrize("k", [2, 15, 16, 40, 500])
def test_steps_priced_at_once_equal_steps_priced_one_by_one(skew, k):
    rng, cost = np.random.default_rng(k), model(skew=skew)
    for _ in range(8):
        contexts = rng.integers(1, 400, rng.integers(1, 5)).tolist()
        n = len(contexts)
        shape = BatchShape(
            n, sum(contexts), max(contexts), rows_sampled=n, decode_context_min_tokens=min(contexts)
        )
        one_by_one = [
            cost.step_ns(
                replace(
                    shape,
                    decode_context_sum_tokens=sum(contexts) + n * j,
                    decode_context_max_tokens=max(contexts) + j,
                    decode_context_min_tokens=min(contexts) + j,
                )
            )[0]
            for j in range(k)
        ]
        assert model(skew=skew).step_ns(shape, k) == one_by_one, "a fresh model, no cached rows"


def decodes(mean, longest):
    return BatchShape(
        2, 2 * mean, longest, rows_sampled=2, decode_context_min_tokens=2 * mean - longest
    )


def test_steps_priced_at_once_find_every_bin_that_the_longest_context_grows_into():
    cells = {(0, 0, 0, at, 0): alpha for at, alpha in enumerate((0.1, 0.9, 0.3, 0.7))}
    skew = replace(SKEW, rate_bins=(1.0,), context_bins=(100.0, 103.0, 110.0, 1e9), cells=cells)
    at_once = model(skew=skew).step_ns(decodes(50, 90), 40)
    assert at_once == [model(skew=skew).step_ns(decodes(50 + j, 90 + j))[0] for j in range(40)]


@pytest.mark.parametrize("skew", [None, SKEW])
def test_steps_priced_at_once_go_on_behind_the_end_of_a_row_that_is_kept(skew):
    at_once = model(skew=skew).step_ns(decodes(2000, 2010), 3000)
    assert len(at_once) == 3000
    assert at_once[-1:] == model(skew=skew).step_ns(decodes(4999, 5009))


def test_all_reduce_adds_latency_and_ring_traffic():
    reduce = RingAllReduce(
        calls=4, num_workers=2, bytes_per_token=100, latency_s=1e-6, bytes_per_s=1e9
    )
    shape = BatchShape(2, 400, 200, rows_sampled=2, decode_context_min_tokens=200)
    # 2 * 1/2 * 2 tokens * 100 bytes at 1 GB/s are 200 ns.
    extra = model(all_reduce=reduce).step_ns(shape)[0] - model().step_ns(shape)[0]
    assert extra == 4 * (1000 + 200)


def test_all_reduce_of_any_number_of_workers_sends_twice_all_parts_but_one():
    # Of a call with w workers, each sends 2 (w - 1) parts of a w-th; so many bytes are so many ns.
    for workers, tokens in ((1, 9), (2, 5), (3, 9), (4, 6), (8, 24)):
        reduce = RingAllReduce(5, workers, bytes_per_token=48, latency_s=7e-9, bytes_per_s=1e9)
        sent_bytes = 2 * (workers - 1) * tokens * 48 / workers
        assert reduce.ns(tokens) == pytest.approx(5 * (7 + sent_bytes))


def test_profiling_overhead_is_taken_off_but_no_step_is_free():
    shape = BatchShape(1, 16, 16, rows_sampled=1, decode_context_min_tokens=16)
    plain = model().step_ns(shape)[0]
    less = TableCostModel(PROFILE, META, reading=TableReading(profiling_overhead_s=1e-6))
    assert less.step_ns(shape) == [plain - 1000]
    assert (
        TableCostModel(PROFILE, META, reading=TableReading(profiling_overhead_s=1.0)).step_ns(
            shape, 20
        )
        == [1] * 20
    )


@pytest.mark.parametrize(
    "shape",
    [
        BatchShape(0, 0, 0, padding_tokens=5),
        BatchShape(1, 16, 16, rows_sampled=1, decode_context_min_tokens=16),
        BatchShape(0, 0, 0, ((8, 0),), rows_sampled=1),
    ],
)
def test_step_whose_overhead_takes_all_or_more_of_it_lasts_a_nanosecond(shape):
    plain = model().step_ns(shape)[0]
    assert plain > 1000
    for left, expected in ((plain, plain), (2, 2), (1, 1), (0, 1), (-1, 1), (-plain, 1)):
        reading = TableReading(profiling_overhead_s=(plain - left) / 1e9)
        cost = TableCostModel(PROFILE, META, reading=reading)
        assert cost.step_ns(shape) == [expected], left
        if not shape.chunks:
            later = model().step_ns(shape, 3)
            assert cost.step_ns(shape, 3) == [max(ns - plain + left, 1) for ns in later], left


def test_steps_beyond_the_tables_are_told_by_feature():
    cost = model()
    inside = BatchShape(2, 400, 200, rows_sampled=2, decode_context_min_tokens=200)
    assert cost.outside(inside, 5) == {}
    far = BatchShape(1, 2000, 2000, rows_sampled=1, decode_context_min_tokens=2000)
    assert cost.outside(far, 2) == {"decode_context_tokens": range(2)}
    assert cost.outside(BatchShape(0, 0, 0, ((200, 0),), rows_sampled=1)) == {
        "new_tokens": range(1), "prefill_chunk_tokens": range(1),
    }  # fmt: skip
    assert cost.describe()["published_error"] == "none published"


@pytest.mark.parametrize(("shape", "feature"), [
    (BatchShape(0, 0, 0, padding_tokens=101), "new_tokens"),
    (BatchShape(0, 0, 0, rows_sampled=10), "num_requests"),
    (BatchShape(3, 30, 10, ((1, 5),), decode_context_min_tokens=10), "num_decodes"),
    (BatchShape(1, 1024, 1024, decode_context_min_tokens=1024), "decode_context_tokens"),
    (BatchShape(0, 0, 0, ((60, 1), (4, 1))), "prefill_chunk_tokens"),
    (BatchShape(0, 0, 0, ((8, 60), (8, 40))), "prefill_context_tokens"),
])  # fmt: skip
def test_step_at_the_end_of_a_table_is_inside_and_one_beyond_is_not(shape, feature):
    cost = model()
    assert cost.outside(shape) == {}
    low, high = cost.validity[feature]
    cost.validity[feature] = (low, high - 1)
    assert cost.outside(shape) == {feature: range(1)}


def test_tokens_of_all_engines_decide_where_they_meet_and_own_ones_elsewhere():
    dense, experts = (
        Curve(name, 1, (1.0, end), (1.0, 2.0)) for name, end in (("a", 50), ("b", 80))
    )
    cost = model(by_tokens=(dense, replace(experts, shared=True)))
    assert cost.validity["new_tokens"] == (1, 50)
    assert cost.validity["gathered_tokens"] == (1, 80)

    def outside(own, gathered=0):
        return set(cost.outside(BatchShape(0, 0, 0, padding_tokens=own, gathered_tokens=gathered)))

    assert outside(50, 80) == set()
    assert outside(30, 81) == {"gathered_tokens"}
    assert outside(51, 80) == {"new_tokens"}
    assert outside(90) == {"new_tokens", "gathered_tokens"}
    assert "gathered_tokens" not in model().validity


@pytest.mark.parametrize("n", [1, 2])
def test_decode_steps_leave_the_table_one_by_one(n):
    shape = BatchShape(n, n * 1020, 1020, rows_sampled=n, decode_context_min_tokens=1020)
    assert model().outside(shape, 5) == {}
    assert model().outside(shape, 8) == {"decode_context_tokens": range(5, 8)}


def test_swapping_and_impossible_repeats_are_refused():
    with pytest.raises(SpecError, match="swapping"):
        model().step_ns(BatchShape(1, 1, 1, swapped_bytes=5))
    with pytest.raises(ValueError, match=r"only a step"):
        model().step_ns(BatchShape(0, 0, 0, ((4, 0),)), 2)


def test_curve_of_a_profile_is_not_shared_unless_it_says_so(tmp_path):
    write_table(tmp_path, META, PROFILE)
    path = tmp_path / "table.json"
    data = json.loads(path.read_text())
    for row in data["by_tokens"]:
        row.pop("shared", None)  # as in profiles of early versions
    path.write_text(json.dumps(data))
    assert [curve.shared for curve in read_table(tmp_path).by_tokens] == [False]


def test_written_profile_reads_back_and_is_found_by_its_schema(tmp_path):
    reduce = RingAllReduce(4, 2, 100.0, 1e-6, 1e9)
    profile = replace(PROFILE, skew=SKEW, all_reduce=reduce)
    write_table(tmp_path, META, profile)
    back = read_table(tmp_path)
    assert back.by_tokens == profile.by_tokens
    assert (back.skew, back.all_reduce) == (SKEW, reduce)
    loaded = load_profile(tmp_path, Deployment(find_model("Meta-Llama-3-8B"), gpu("a100-80gb")))
    shape = BatchShape(3, 400, 300, ((20, 10),), rows_sampled=4, decode_context_min_tokens=9)
    assert isinstance(loaded, TableCostModel)
    assert loaded.step_ns(shape) == TableCostModel(profile, META).step_ns(shape)
    with pytest.raises(
        SpecError, match="hardware is 'a100' in the profile, 'h100-80gb' in the run"
    ):
        load_profile(tmp_path, Deployment(find_model("llama-3-8b"), gpu("h100")))


def test_profile_that_is_written_is_of_this_schema_whatever_it_was_read_from(tmp_path):
    write_table(tmp_path, {"schema": "an older one", **META}, PROFILE)
    assert json.loads((tmp_path / "meta.json").read_text()) == {**META, "schema": SCHEMA}
    assert json.loads((tmp_path / "table.json").read_text())["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("recorded", "deployed", "told"),
    [
        ({}, {"data_parallel_size": 2}, "data_parallel_size is 1 in the profile, 2 in the run"),
        (
            {"data_parallel_size": 2, "expert_parallel": True},
            {},
            "data_parallel_size is 2 in the profile, 1 in the run",
        ),
        (
            {"tensor_parallel_size": 2, "expert_parallel": True},
            {"tensor_parallel_size": 2, "enable_expert_parallel": False},
            "expert_parallel is True in the profile, False in the run",
        ),
        (
            {"tensor_parallel_size": 2},
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "expert_parallel is False in the profile, True in the run",
        ),
    ],
)
def test_profile_of_another_sharing_of_experts_is_refused(tmp_path, recorded, deployed, told):
    shape, device = find_model("mixtral-8x7b"), gpu("a100-80gb")
    write_table(tmp_path, META | {"model": shape.name} | recorded, PROFILE)
    with pytest.raises(SpecError, match=told):
        load_profile(tmp_path, Deployment(shape, device, **deployed))


def test_profile_of_the_runs_sharing_of_experts_is_taken(tmp_path):
    shape, device = find_model("mixtral-8x7b"), gpu("a100-80gb")
    sharing = {"model": shape.name, "data_parallel_size": 2, "expert_parallel": True}
    write_table(tmp_path, META | sharing, PROFILE)
    for stated in (None, True):
        load_profile(
            tmp_path,
            Deployment(shape, device, data_parallel_size=2, enable_expert_parallel=stated),
        )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"by_token": []}, "unknown key 'by_token'; did you mean by_tokens"),
        ({"schema": "x"}, "schema 'x'"),
        ({"by_tokens": None}, "NoneType"),
        ({"by_tokens": [{"name": "a", "calls": 1, "at": [2, 1], "us": [1, 1]}]}, "increasing"),
        ({"by_tokens": [{"name": "a", "calls": 1, "at": [1], "us": [-1]}]}, "a: us must be fin"),
        ({"by_tokens": [{"name": "a", "calls": 1e308, "at": [1], "us": [1]}]}, "a: calls must be"),
        ({"by_tokens": [{"name": "a", "calls": 1, "at": [-math.inf], "us": [1]}]}, "a: at must be"),
        ({"attention": {"us_per_pear": 1}}, "did you mean us_per_pair"),
        ({"attention_calls": 1e308}, "attention_calls must be a whole number up to 1000000"),
        ({"attention_calls": 2.5}, "attention_calls must be a whole number"),
        ({"attention_calls": "3"}, "attention_calls must be a number"),
        ({"attention": {"us_per_pair": "1"}}, "us_per_pair must be a number, got '1'"),
        ({"attention": {"us_per_pair": [], "us_per_kv_token": 1}}, "us_per_pair must be a number"),
        ({"attention": {**GRID, "us": [0.0] * len(GRID["us"])}}, "positive"),
        (
            {"attention": {key: [*values, values[0]] for key, values in GRID.items()}},
            r"point \(0, 0, 1, 16\) is there twice",
        ),
        (
            {"skew": {**SKEW_DATA, "rate_bins": [3, 2, 1]}},
            r"bounds of buckets must rise, got \[3.0, 2.0, 1.0\]",
        ),
        ({"skew": {**SKEW_DATA, "kv_bins": [1, 1]}}, "bounds of buckets must rise"),
        (
            {"skew": {**SKEW_DATA, "cells": [[0, 0, 1, 0, 0, 0.5], [0, 0, 1, 0, 0, 0.7]]}},
            "skew: cells has a bucket twice",
        ),
        ({"skew": {**SKEW_DATA, "cells": [[0, 0]]}}, "index out of range"),
    ],
)
def test_broken_table_is_refused_with_its_name(tmp_path, change, told):
    write_table(tmp_path, META, PROFILE)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecError, match=f"{re.escape(str(tmp_path))}.*{told}"):
        load_profile(tmp_path)


def test_table_of_several_layers_is_valid_as_far_as_each_of_them_was_measured():
    long, short = Curve("a", 1, (1.0, 200.0), (1.0, 2.0)), Curve("b", 1, (1.0, 50.0), (1.0, 2.0))
    for curves in ((long, short), (short, long)):
        cost = model(by_tokens=curves, by_requests=curves)
        assert cost.validity["new_tokens"] == cost.validity["num_requests"] == (1, 50.0)


def test_attention_grid_prices_the_same_in_whatever_order_its_points_are_given():
    points = [
        (chunk, kv, n, context, 1.0 + chunk / 8 + kv / 64 + n * (1 + context) / 16)
        for chunk in (0, 16, 64) for kv in ((0, 32, 128) if chunk else (0,))
        for n in (0, 1, 4) for context in ((0, 64, 512) if n else (0,)) if chunk or n
    ]  # fmt: skip
    shuffled = [points[i] for i in stream(0, "points").permutation(len(points))]
    grids = [AttentionGrid(*map(list, zip(*some, strict=True)))
             for some in (points, points[::-1], shuffled)]  # fmt: skip
    for chunks, n, context in (
        ((), 1, 32), ((), 3, 100), (((16, 32),), 0, 0), (((40, 80),), 2, 300), (((64, 128),), 4, 9),
        (((90, 200),), 6, 900),
    ):  # fmt: skip
        chunk, kv = sum(q for q, _ in chunks), sum(c for _, c in chunks)
        expected = 1.0 + chunk / 8 + kv / 64 + n * (1 + context) / 16  # linear on every axis
        for grid in grids:
            assert grid.call_us(chunks, n, context) == pytest.approx(expected)
            assert grid.bounds == grids[0].bounds
    for grid in grids:
        expected = [1.0 + 2 * (1 + context) / 16 for context in range(600)]
        assert grid.decodes_us(2, 600) == pytest.approx(expected)
    for times in ([], [0.0], [float("nan")], [float("inf")], [-1.0]):
        size = [0] * len(times)
        with pytest.raises(ValueError, match="positive and finite, and there must be some"):
            AttentionGrid(size, size, size, size, times)


BUCKETS = Skew(
    decode_bins=(2.0, 8.0), rate_bins=(0.25, 0.5), context_bins=(10.0, 20.5), kv_bins=(100.0,),
    cells={
        (chunk, decodes, rate, context, kv): chunk + decodes / 10 + rate / 100 + context / 1e3
        + kv / 1e4
        for chunk in (0, 16, 64) for decodes in range(3) for rate in range(3)
        for context in range(3) for kv in range(2)
    },
    default=-1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("chunk", "kv", "num_decodes", "rate", "largest", "alpha"),
    [
        (0, 0, 1, 0.0, 1, 0.0),
        (0, 0, 2, 0.0, 1, 0.0),  # at a bound: still below it
        (0, 0, 3, 0.0, 1, 0.1),
        (0, 0, 9, 0.0, 1, 0.2),
        (0, 0, 1, 0.25, 1, 0.0),
        (0, 0, 1, 0.26, 1, 0.01),
        (0, 0, 1, 1.0, 1, 0.02),
        (0, 0, 1, 0.0, 10, 0.0),
        (0, 0, 1, 0.0, 11, 0.001),
        (0, 0, 1, 0.0, 21, 0.002),
        (16, 100, 1, 0.0, 1, 16.0),
        (64, 101, 8, 0.5, 20, 64.1111),
        (40, 0, 1, 0.0, 1, -1.0),  # that chunk was not measured
        (8, 0, 1, 0.0, 1, -1.0),
    ],
)
def test_skew_is_that_of_the_first_buckets_whose_bounds_are_not_exceeded(
    chunk, kv, num_decodes, rate, largest, alpha
):
    assert BUCKETS.alpha(chunk, kv, num_decodes, rate, largest) == pytest.approx(alpha)
    near = replace(BUCKETS, nearest=True)
    wanted = {40: 16.0, 8: 16.0}.get(chunk, alpha)  # of two as near the smaller
    assert near.alpha(chunk, kv, num_decodes, rate, largest) == pytest.approx(wanted)
    assert near.alpha(41, kv, 1, 0.0, 1) == pytest.approx(64.0 + (kv > 100) / 1e4)


@pytest.mark.parametrize("largest", range(1, 24))
def test_skew_stays_for_as_many_steps_as_it_says_and_no_longer(largest):
    steps = BUCKETS.steps_to_next_bin(largest)
    found = [BUCKETS.alpha(0, 0, 1, 0.0, largest + more) for more in range(min(steps, 50))]
    assert len(set(found)) == 1
    assert steps >= 1
    if largest > 20:
        assert steps == 1 << 60
    else:
        assert BUCKETS.alpha(0, 0, 1, 0.0, largest + steps) != found[0]


def test_contexts_beyond_those_priced_before_cost_what_they_do_at_first():
    # Rows of a table are kept, and made anew for longer contexts: whatever was asked before, a
    # step costs the same.
    for skew in (None, SKEW):
        before = model(skew=skew)
        before.step_ns(decodes(10, 15))
        for longest in (4095, 4096, 8193, 50):
            for k in (1, 2):
                shape = decodes(longest - 20 if skew else longest, longest)
                assert before.step_ns(shape, k) == model(skew=skew).step_ns(shape, k)
