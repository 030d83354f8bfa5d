"""Calibration: what is measured, how it is fitted, and what is left when it is interrupted."""

import itertools
import json
import shutil
from dataclasses import asdict, astuple, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from schedlab.experiments.comparing import calibrate as laboratory  # noqa: E402
from schedlab.experiments.comparing import calibrated_engine, fitted_profile, machine  # noqa: E402
from schedlab.experiments.comparing.calibrated_engine import overhead_of  # noqa: E402
from schedlab.experiments.comparing.machine import check_profile  # noqa: E402
from schedlab.experiments.comparing.measured_runs import _write_steps  # noqa: E402
from schedlab.experiments.running.resolved import make_cost_model  # noqa: E402
from schedlab.experiments.running.run import run  # noqa: E402
from schedlab.experiments.specification.cost_model import CostModelSpec  # noqa: E402
from schedlab.experiments.specification.loading import make_spec  # noqa: E402
from schedlab.gpu_backend import (  # noqa: E402
    calibration,
    calibration_design,
    calibration_fit,
    stopwatch,
)
from schedlab.gpu_backend.calibration_design import (  # noqa: E402
    BatchPoint,
    batch_kind,
    design,
    sentinels,
    token_knots,
)
from schedlab.gpu_backend.calibration_fit import (  # noqa: E402
    MeasuredBatch,
    SwapTime,
    coefficient_intervals,
    error_by_kind,
    fit_profile,
    judge,
    lone_row,
    predictions,
    run_level,
    sustained_level,
    swapped_byte_s,
    with_swapping,
)
from schedlab.gpu_backend.step_timer import StepTimer  # noqa: E402
from schedlab.gpu_backend.stopwatch import ReferenceSpeed  # noqa: E402
from schedlab.gpu_backend.swap_timing import swap_times  # noqa: E402
from schedlab.sim.config import EngineConfig  # noqa: E402
from schedlab.sim.core.plan_log import RecordedStep  # noqa: E402
from schedlab.sim.cost.fitted import FittedCostModel  # noqa: E402
from schedlab.sim.cost.profile import Fit, FitError, Regime, RunLevel, read_fit  # noqa: E402
from schedlab.sim.cost.shape import BatchShape  # noqa: E402
from schedlab.sim.errors import SpecError  # noqa: E402
from tests.gpu.backend import CONFIG, tiny_runner  # noqa: E402

LIMITS = EngineConfig(
    num_blocks=400, max_model_len=1024, block_size=16, max_num_seqs=16, max_num_batched_tokens=256
)
NONE = FitError(0.0, 0.0, 0.0, 0.0, 0)
COEFFICIENTS = {
    "decode_context_sum_tokens": 2e-6,
    "decode_context_max_tokens": 1e-6,
    "prefill_attention_pairs": 3e-7,
    "prefill_context_tokens": 8e-6,
    "num_decodes": 5e-4,
    "num_prefills": 6e-4,
}


OF_CACHE = ("decode_context_sum_tokens", "decode_context_max_tokens")


def truth(buckets=(), tile_tokens=1):
    """Return a cost model with a jagged curve, as kernels with tiles have."""
    knots = token_knots(1, 256)
    eager = Regime(
        tuple(knots), tuple(0.01 + 5e-4 * n + (0.002 if n % 2 else 0) for n in knots), COEFFICIENTS,
        tile_tokens=tile_tokens,
    )  # fmt: skip
    graph = None
    if buckets:
        times = tuple(0.004 + 1e-4 * b for b in buckets)
        of_cache = {name: COEFFICIENTS[name] for name in OF_CACHE}
        graph = Regime(tuple(buckets), times, of_cache, tuple(buckets))
    return FittedCostModel(Fit(eager, graph, {"new_tokens": (1.0, 256.0)}, NONE, NONE), {})


def measured_by(model, points):
    return [MeasuredBatch(p.shape, model.step_ns(p.shape)[0] / 1e9) for p in points]


def test_token_knots_are_every_small_count_and_then_two_a_doubling():
    assert token_knots(1, 20) == [*range(1, 17), 20]
    assert token_knots(1, 130)[15:] == [16, 24, 32, 48, 64, 96, 128, 130]
    assert token_knots(3, 3) == [3]


def test_design_visits_every_knot_and_stays_within_the_limits():
    points = design(LIMITS, 30, seed=0)
    assert all(point.fits(LIMITS) for point in points)
    assert all(point.fits(LIMITS) for point in sentinels(LIMITS))
    tokens = {len(p.decodes) + sum(n for n, _ in p.chunks) for p in points}
    assert set(token_knots(1, 256)) <= tokens
    assert {len(p.decodes) for p in points if p.kind == "decode"} == set(range(1, 17))
    assert design(LIMITS, 30, seed=0) == points
    assert design(LIMITS, 30, seed=1) != points


def test_fit_of_a_known_cost_model_finds_it_again():
    model = truth()
    train = measured_by(model, design(LIMITS, 60, seed=0))
    test = measured_by(model, design(LIMITS, 60, seed=1)[-60:])
    fit = fit_profile(train, test)
    assert fit.held_out.mape < 1e-3
    assert abs(fit.held_out.bias) < 1e-3
    for name, value in COEFFICIENTS.items():
        assert fit.eager.coefficients_s[name] == pytest.approx(value, rel=0.05), name


@pytest.mark.slow
def test_fit_of_noisy_times_states_the_noise_and_narrow_intervals():
    model, rng = truth(), np.random.default_rng(0)
    train, test = (
        [
            MeasuredBatch(m.shape, m.seconds * rng.lognormal(0, 0.03))
            for m in measured_by(model, points)
        ]
        for points in (design(LIMITS, 60, seed=0), design(LIMITS, 60, seed=1)[-60:])
    )
    fit = fit_profile(train, test)
    assert 0.01 < fit.held_out.mape < 0.05
    low, high = coefficient_intervals(train, (), seed=0)["decode_context_sum_tokens"]
    assert 1.7e-6 < low < high < 2.5e-6


def test_fit_prices_decode_steps_by_the_bucket_of_their_graph():
    buckets = (1, 2, 4, 8, 16)
    model = truth(buckets)
    points = measured_by(model, design(LIMITS, 60, seed=0))
    fit = fit_profile(points, points, buckets)
    assert fit.graph is not None
    assert fit.graph.buckets == buckets
    assert fit.held_out.mape < 1e-3


def test_design_and_fit_have_a_knot_at_every_bucket():
    limits = replace(LIMITS, max_num_seqs=14, num_blocks=1000)
    buckets = (1, 5, 9, 14)
    points = design(limits, 10, seed=0, buckets=(*buckets, 99))
    assert {len(p.decodes) for p in points if p.kind == "decode"} >= {5, 9, 14}
    fit = fit_profile(measured_by(truth(buckets), points), [], buckets)
    assert fit.graph.knots_tokens == buckets


def test_error_by_kind_tells_a_bad_kind_from_good_ones_and_weighs_by_time():
    train = measured_by(truth(), design(LIMITS, 60, seed=0))
    fit = fit_profile(train, [])
    decode, prefill = BatchPoint("held_out", (64,) * 4, ()), BatchPoint("held_out", (), ((128, 0),))
    mixed = BatchPoint("held_out", (64,), ((8, 0),))
    held_out = measured_by(truth(), [decode, prefill, mixed])
    held_out[1] = held_out[1]._replace(seconds=2 * held_out[1].seconds)
    found = error_by_kind(fit, held_out)
    assert set(found) == {"decode", "mixed", "prefill", "by_time"}
    assert found["decode"]["mape"] < 0.01
    assert found["prefill"]["mape"] == pytest.approx(0.5, abs=0.01)
    assert found["prefill"]["num_points"] == 1
    share = 0.5 * held_out[1].seconds / sum(m.seconds for m in held_out)
    assert found["by_time"]["mape"] == pytest.approx(share, abs=0.01)
    assert found["by_time"]["bias"] == pytest.approx(-share, abs=0.01)
    assert error_by_kind(fit, []) == {}


@pytest.mark.slow
def test_held_out_batches_are_a_third_of_each_kind():
    found = laboratory.replayed_points(LIMITS, "schedlab-small", "cpu", "fp32", 30, seed=0)
    kinds = [batch_kind(point.shape) for point in found]
    assert kinds == ["decode"] * 10 + ["mixed"] * 10 + ["prefill"] * 10
    assert all(point.fits(LIMITS) for point in found)
    every = laboratory.replayed_points(LIMITS, "schedlab-small", "cpu", "fp32", 100_000, seed=0)
    assert len(every) > 300
    assert len({id(point) for point in every}) == len(every)  # drawn once each
    assert found == laboratory.replayed_points(LIMITS, "schedlab-small", "cpu", "fp32", 30, seed=0)


@pytest.mark.parametrize(
    ("point", "fits"),
    [
        (BatchPoint("decode", (16, 15), ()), True),
        (BatchPoint("decode", (16, 16), ()), False),  # 17 tokens each: 4 blocks of 3
        (BatchPoint("decode", (31,), ()), True),
        (BatchPoint("decode", (32,), ()), False),  # the next token is one too many
        (BatchPoint("prefill", (), ((8, 24),)), True),
        (BatchPoint("prefill", (), ((8, 25),)), False),
        (BatchPoint("mixed", (1,), ((8, 0),)), False),  # nine new tokens of eight
        (BatchPoint("mixed", (1,), ((7, 0),)), True),
        (BatchPoint("decode", (1, 1, 1, 1), ()), False),
        (BatchPoint("decode", (), ()), False),
    ],
)
def test_batch_fits_the_limits_up_to_their_edges(point, fits):
    limits = EngineConfig(
        num_blocks=3, max_model_len=32, block_size=16, max_num_seqs=3, max_num_batched_tokens=8
    )
    assert point.fits(limits) is fits


@pytest.mark.parametrize("tile", [1, 64, 128])
def test_fit_of_a_gpu_rounds_tokens_up_to_the_tile_that_its_steps_show(tile):
    buckets = (1, 2, 4, 8, 16)
    model, rng = truth(buckets, tile), np.random.default_rng(5)
    noisy, test = (
        [
            MeasuredBatch(m.shape, m.seconds * rng.normal(1, 0.01))
            for m in measured_by(model, points)
        ]
        for points in (
            design(LIMITS, 60, seed=0, buckets=buckets), design(LIMITS, 60, seed=1)[-60:],
        )
    )  # fmt: skip
    fit = fit_profile(noisy, test, buckets)
    assert (fit.eager.tile_tokens, fit.graph.tile_tokens) == (tile, 1)
    assert fit.held_out.mape < 0.02
    beyond = [n for n in fit.eager.knots_tokens if n > tile]
    assert all(n % tile == 0 for n in beyond)
    assert beyond[-1] == 256
    # What a chunk has in the cache is told from what it attends to, and that from its decodes'.
    for name in ("prefill_context_tokens", "prefill_attention_pairs", "decode_context_sum_tokens"):
        assert fit.eager.coefficients_s[name] == pytest.approx(COEFFICIENTS[name], rel=0.1), name
    # Without graphs it is no GPU.
    assert fit_profile(noisy, test).eager.tile_tokens == 1


def test_fit_of_batches_no_larger_than_a_tile_rounds_nothing():
    buckets = (1, 2, 4, 8, 16)
    limits = replace(LIMITS, max_num_batched_tokens=128)
    points = measured_by(truth(buckets, 64), design(limits, 30, seed=0, buckets=buckets))
    assert fit_profile(points, points, buckets).eager.tile_tokens == 1


def test_design_fills_the_memory_beside_prompts_too():
    def full(config, least):
        return {
            (len(p.decodes), p.decodes[0], p.chunks[0][0])
            for p in design(config, 0, seed=0)
            if p.kind == "mixed" and p.decodes[0] >= least
        }

    # No request gets longer than 1,024 tokens, of which the next is the last.
    assert full(LIMITS, 1000) == {
        (b, 1023, n) for b in (1, 4) for n in (2, 16, 128, 256) if n + b <= 256
    }
    # 64 blocks: less one for 2 or 16 tokens, eight for 128 and sixteen for 256, shared by all rows.
    small = replace(LIMITS, num_blocks=64)
    assert full(small, 150) == {
        *((1, 1007, n) for n in (2, 16)), (1, 895, 128),
        *((4, 239, n) for n in (2, 16)), (4, 223, 128),
    }  # fmt: skip


def test_design_for_a_gpu_has_batches_that_need_one_tile_more_than_a_knot():
    def lone(points):
        return {p.chunks[0] for p in points if not p.decodes and len(p.chunks) == 1}

    without, having = (design(LIMITS, 0, seed=0, buckets=some) for some in ((), (1, 2)))
    assert lone(having) - lone(without) == {(129, 0), (193, 0)}  # 257 are too many
    assert lone(without) <= lone(having)


def level_steps(model, level, points):
    """Return steps of a run at a level, a hundredth of them stalled by the host."""
    at_level = FittedCostModel(replace(model.fit, run_level=level), {})
    steps = measured_by(at_level, points)
    return [
        MeasuredBatch(s.shape, s.seconds * (3.0 if i % 100 == 50 else 1.0))
        for i, s in enumerate(steps)
    ]


@pytest.mark.parametrize("more_s", [-0.004, 0.0, 0.003])
def test_sustained_level_is_found_through_stalls_of_the_host(more_s):
    model, level = truth(), RunLevel(1.02, 1.15, 0.0, more_s)
    points = design(LIMITS, 200, seed=3)
    found = sustained_level(model.fit, measured_by_level(model, level, points))
    assert found.decode_steps == pytest.approx(1.02, rel=1e-6)
    assert found.prompt_steps == pytest.approx(1.15, rel=1e-3)
    assert found.prompt_step_s == pytest.approx(more_s, abs=2e-5)
    stalled = level_steps(model, level, points)
    found = sustained_level(model.fit, stalled)
    # A run takes as long as its steps together, the stalled ones among them.
    at_found = FittedCostModel(replace(model.fit, run_level=found), {})
    for has_prompts in (False, True):
        of_kind = [s for s in stalled if bool(s.shape.chunks) == has_prompts]
        total_s = sum(at_found.step_ns(s.shape)[0] for s in of_kind) / 1e9
        assert total_s == pytest.approx(sum(s.seconds for s in of_kind), rel=1e-6)
    ratio = more_s / 1.15
    assert found.prompt_step_s / found.prompt_steps == pytest.approx(ratio, abs=2e-4)


def measured_by_level(model, level, points):
    return measured_by(FittedCostModel(replace(model.fit, run_level=level), {}), points)


def test_sustained_level_of_no_steps_and_of_one_kind_leaves_the_rest_alone():
    model = truth()
    assert sustained_level(model.fit, []) == RunLevel()
    decode = BatchPoint("decode", (10, 20), ())
    prompt = BatchPoint("prefill", (), ((9, 0),))
    slow = [MeasuredBatch(p.shape, 2 * m.seconds) for p in (decode, prompt)
            for m in measured_by(model, [p])]  # fmt: skip
    for some, levels in ((slow[:1], (2.0, 1.0)), (slow[1:], (1.0, 2.0))):
        found = sustained_level(model.fit, some)
        assert (found.decode_steps, found.prompt_steps) == pytest.approx(levels)
        assert (found.decode_row_s, found.prompt_step_s) == (0.0, 0.0)


def test_sustained_level_never_lets_the_shortest_step_take_nothing():
    model = truth()
    points = [BatchPoint("prefill", (), ((n, 0),)) for n in (16, 256)]
    first, last = measured_by(model, points)
    steep = [MeasuredBatch(first.shape, 1e-4), MeasuredBatch(last.shape, 3 * last.seconds)]
    found = sustained_level(model.fit, steep)
    assert found.prompt_step_s < 0
    assert replace(model.fit, run_level=found).run_level == found


def test_sustained_level_of_steps_of_one_size_adds_no_more_than_the_shortest_step_takes():
    model = truth()
    points = [BatchPoint("prefill", (), ((256, 10 * i),)) for i in range(9)]
    # Those that take longest by the fit took no longer: a constant would explain it all.
    alike = [MeasuredBatch(m.shape, 0.2) for m in measured_by(model, points)]
    found = sustained_level(model.fit, alike)
    assert 0 < found.prompt_step_s <= 1.1 * min(model.fit.eager.knots_s)
    at_found = FittedCostModel(replace(model.fit, run_level=found), {})
    total_s = sum(at_found.step_ns(s.shape)[0] for s in alike) / 1e9
    assert total_s == pytest.approx(9 * 0.2, rel=1e-6)


def test_coefficients_lie_within_the_middle_95_percent_of_what_is_drawn(monkeypatch):
    drawn = iter(range(200))

    def regime(points):
        return Regime((1, 2), (0.0, 0.0), {"num_decodes": float(next(drawn))})

    monkeypatch.setattr(calibration_fit, "_fit_regime", regime)
    point = MeasuredBatch(BatchPoint("decode", (8,), ()).shape, 0.01)
    found = coefficient_intervals([point], (), seed=0)
    assert found["num_decodes"] == pytest.approx((199 * 0.025, 199 * 0.975))
    assert found["num_prefills"] == (0.0, 0.0)


def test_validity_of_a_feature_is_from_the_least_to_the_most_there_was_of_it():
    points = [BatchPoint("decode", (8, 20), ()), BatchPoint("prefill", (), ((32, 0),))]
    fit = fit_profile(measured_by(truth(), points), [])
    assert fit.validity["new_tokens"] == (2.0, 32.0)
    assert fit.validity["decode_context_sum_tokens"] == (28.0, 28.0)
    assert fit.validity["num_prefills"] == (1.0, 1.0)


def test_fit_of_one_batch_size_is_flat():
    point = MeasuredBatch(BatchPoint("decode", (8, 8), ()).shape, 0.01)
    fit = fit_profile([point], [point])
    assert fit.eager.knots_tokens == (2, 3)
    assert judge(fit, [point]).mape < 1e-6


def test_swapped_byte_costs_the_mean_of_both_directions():
    times = [SwapTime("out", 1, 1000, 1e-6), SwapTime("in", 1, 1000, 1e-6)]
    assert swapped_byte_s(times) == pytest.approx(1e-9)
    # Relative errors (x - 1) and (x - 2) / 2, in ns a byte, are least squares at x = 1.2.
    uneven = [times[0], SwapTime("in", 1, 1000, 2e-6)]
    assert swapped_byte_s(uneven) == pytest.approx(1.2e-9)
    fit = fit_profile(measured_by(truth(), design(LIMITS, 20, seed=0)), [])
    swapping = FittedCostModel(with_swapping(fit, times), {})
    shape = BatchPoint("decode", (64,), ()).shape
    difference = swapping.step_ns(replace(shape, swapped_bytes=1_000_000))[0]
    assert difference - swapping.step_ns(shape)[0] == pytest.approx(1_000_000, rel=1e-3)


def test_swap_times_are_of_growing_numbers_of_blocks_both_ways():
    times = swap_times(tiny_runner())
    block_bytes = times[0].num_bytes
    assert [t.direction for t in times[:4]] == ["out", "in", "out", "in"]
    assert [t.num_blocks for t in times[::2]] == [1, 4, 16, 64]
    assert all(t.num_bytes == t.num_blocks * block_bytes and t.seconds > 0 for t in times)


def measure(log, config=CONFIG, rounds=1, progress=None, about="tiny", **options):
    points = design(config, 0, seed=0)[:4]
    return points, calibration.measure(
        StepTimer(tiny_runner(), config, 0), config, points, log,
        about=about, num_rounds=rounds, repetitions=1, progress=progress, **options,
    )  # fmt: skip


def test_measure_visits_every_point_once_a_round_with_sentinels(tmp_path):
    seen = []
    log = tmp_path / "points.jsonl"
    points, taken = measure(log, rounds=2, progress=lambda *told: seen.append(told))
    visits = [(r.round, r.point) for r in taken.readings if r.point >= 0]
    assert sorted(visits) == [(r, i) for r in range(2) for i in range(len(points))]
    assert {r.point for r in taken.readings if r.point < 0} == {-1, -2, -3}
    assert seen[-1] == (8, 8, "done")
    assert all(taken.median_s(i) > 0 for i in range(len(points)))
    assert len(taken.drift) == 2


def test_drift_is_the_largest_deviation_of_a_sentinel_whichever_way():
    def visits(number, *seconds):
        return [calibration.Visit(number, -1 - k, (s,), (s,)) for k, s in enumerate(seconds)]

    readings = [*visits(0, 1.0, 2.0), *visits(1, 0.9, 2.0), *visits(2, 1.0, 2.1)]
    readings.append(calibration.Visit(0, 0, (9.0,), (9.0,)))
    assert calibration._drift(readings, 2, 3) == pytest.approx([0.0, 0.1, 0.05])


def test_measure_that_runs_out_of_time_ends_after_a_whole_round_and_goes_on_later(tmp_path):
    log, told = tmp_path / "points.jsonl", []
    points, taken = measure(log, rounds=3, max_s=0.0, on_round=told.append)
    assert len(taken.drift) == len(told) == 1
    assert sorted(r.point for r in taken.readings if r.point >= 0) == list(range(len(points)))
    _, taken = measure(log, rounds=3, on_round=told.append)
    # The round that was there already is not told again.
    assert len(taken.drift) == len(told) == 3
    assert told[1].median_s(0) > 0


@pytest.mark.parametrize(
    ("max_s", "rounds"),
    [(0.0, 1), (19.9, 1), (20.0, 2), (23.9, 2), (24.0, 3), (33.9, 3), (34.0, 4)],
)
def test_no_round_begins_that_would_end_too_late_if_it_took_as_long_as_the_longest(
    tmp_path, monkeypatch, max_s, rounds
):
    """Rounds of 10, 4, 10 and 4 s: they may begin at 0, 10, 14 and 24 s."""
    now_s = [100.0]

    class Timer:
        def time(self, point, repetitions):
            asked.append((point, repetitions))
            if point is points[0]:
                now_s[0] += 10.0 if next(longer) else 4.0
            return (1.0,) * repetitions, (2.0,) * repetitions

    longer = itertools.cycle([True, False])
    points, asked, told = design(CONFIG, 0, seed=0)[:2], [], []
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    taken = calibration.measure(
        Timer(), CONFIG, points, tmp_path / "log.jsonl", about="paper", num_rounds=4,
        repetitions=3, max_s=max_s, on_round=told.append,
    )  # fmt: skip
    assert len(taken.drift) == len(told) == rounds
    assert [len(one.drift) for one in told] == list(range(1, rounds + 1))
    visits = [(r.round, r.point) for r in taken.readings]
    sentinels_of = [-1, -2, -3]
    assert [number for number, _ in visits] == sorted(number for number, _ in visits)
    for number in range(rounds):
        of_round = [point for at, point in visits if at == number]
        assert of_round[:3] == sentinels_of
        assert sorted(of_round[3:]) == [0, 1]
    assert {repetitions for _, repetitions in asked} == {3}
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines[1:]] == [
        {"round": at, "point": point, "host_s": [1.0] * 3, "device_s": [2.0] * 3}
        for at, point in visits
    ]


def test_measure_goes_on_after_an_interruption_in_the_middle_of_a_line(tmp_path):
    log = tmp_path / "points.jsonl"

    class StopError(Exception):
        pass

    def stop(done, total, what):
        if done == 2:
            raise StopError

    with pytest.raises(StopError):
        measure(log, progress=stop)
    kept = log.read_text()
    log.write_text(kept + '{"round": 0, "poi')
    before = [json.loads(line) for line in kept.splitlines()[1:]]
    points, taken = measure(log)
    assert [r._asdict()["host_s"] for r in taken.readings[: len(before)]] == [
        tuple(row["host_s"]) for row in before
    ]
    visits = [r.point for r in taken.readings if r.point >= 0]
    assert sorted(visits) == list(range(len(points)))


@pytest.mark.parametrize("left", ["", '{"calibr'])
def test_measure_into_a_log_that_lost_its_first_line_begins_anew(tmp_path, left):
    log = tmp_path / "points.jsonl"
    log.write_text(left)
    points, taken = measure(log)
    assert sorted(r.point for r in taken.readings if r.point >= 0) == list(range(len(points)))
    again = measure(log)[1]
    assert again.readings == taken.readings


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        ('{"round": 0, "poi', r"points\.jsonl:3: not valid JSON"),
        ('{"round": 0}', r"points\.jsonl:3: no reading of a calibration; delete that line"),
        ("[1]", r"points\.jsonl:3: no reading of a calibration; delete that line"),
    ],
)
def test_measure_into_a_log_with_a_spoiled_line_names_it(tmp_path, spoiled, message):
    log = tmp_path / "points.jsonl"
    measure(log)
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], spoiled, *lines[3:], ""]))
    with pytest.raises(SpecError, match=message):
        measure(log)


@pytest.mark.parametrize("header", ["[]", '{"calibration": 3}'])
def test_measure_into_a_log_with_another_header_is_refused(tmp_path, header):
    log = tmp_path / "points.jsonl"
    log.write_text(header + "\n")
    with pytest.raises(SpecError, match="another calibration"):
        measure(log)


def test_measure_into_the_log_of_another_calibration_says_what_to_do(tmp_path):
    log = tmp_path / "points.jsonl"
    measure(log)
    with pytest.raises(SpecError, match=r"another calibration .*choose another folder, or delete"):
        measure(log, about="another device")


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """A whole calibration of the tiny model, small, called as somebody may type it."""
    folder = tmp_path_factory.mktemp("profile")
    found = laboratory.calibrate(
        folder,
        model_name="Schedlab/SCHEDLAB-tiny",
        hardware="cpu",
        device="cpu",
        dtype="fp32",
        config=CONFIG,
        num_rounds=1,
        num_random=10,
        num_held_out=10,
    )
    return folder, found


@pytest.mark.slow
def test_calibrate_writes_a_profile_that_a_simulation_can_use(profile):
    folder, found = profile
    names = {path.name for path in folder.iterdir()}
    assert {"points.jsonl", "meta.json", "fit.json", "residuals.json", "residuals.png"} <= names
    assert found.verdict.startswith(("GOOD", "POOR"))
    assert "held-out error" in found.verdict
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["model"], meta["hardware"]) == ("schedlab-tiny", "cpu")
    assert meta["kernels"]
    assert meta["machine"]["threads"] == 1
    assert set(meta["held_out_error_by_kind"]) == {"decode", "mixed", "prefill", "by_time"}
    assert meta["rounds"] == 1
    assert len(json.loads((folder / "residuals.json").read_text())["points"]) > 20
    result = run(spec_with(folder))
    assert result.provenance["cost_model"]["calibration"] == "CALIBRATED"
    assert result.metrics()["completed"] == 4


def test_refit_of_a_profile_gives_its_fit_again_and_a_run_tells_its_level(profile, tmp_path):
    folder, found = profile
    again = fitted_profile.refit(folder, tmp_path / "again")
    assert again == found
    for name in ("fit.json", "residuals.json", "points.jsonl", "meta.json"):
        assert (tmp_path / "again" / name).read_text() == (folder / name).read_text(), name
    kept = tmp_path / "kept" / "run"
    kept.mkdir(parents=True)
    slow = [
        RecordedStep(0, {}, (), p.shape, round(2e9 * s) + 50, 50)
        for p, s in zip(STEPPED, predictions(found.fit, measured_by(truth(), STEPPED)), strict=True)
    ]
    _write_steps(kept / "plan_log.jsonl.gz", [slow[0], *slow])
    fitted_profile.refit(folder, tmp_path / "level", [kept])
    level = read_fit(tmp_path / "level").run_level
    assert level.decode_steps == pytest.approx(2.0, rel=1e-6)
    assert level.prompt_steps == pytest.approx(2.0, rel=0.05)
    assert json.loads((tmp_path / "level" / "meta.json").read_text())["level_of_runs"] == ["run"]
    # Their steps are kept with it: fitted anew it stays at their level, until they are gone.
    fitted_profile.refit(tmp_path / "level", tmp_path / "level")
    assert read_fit(tmp_path / "level").run_level == level
    assert json.loads((tmp_path / "level" / "meta.json").read_text())["level_of_runs"] == ["run"]
    (tmp_path / "level" / "run_steps.jsonl").unlink()
    fitted_profile.refit(tmp_path / "level", tmp_path / "level")
    assert read_fit(tmp_path / "level").run_level == RunLevel()
    assert "level_of_runs" not in json.loads((tmp_path / "level" / "meta.json").read_text())
    assert not (tmp_path / "level" / "run_steps.jsonl").exists()


@pytest.mark.parametrize("what", ["no run", "no profile", "no readings", "a broken one"])
def test_refit_without_what_it_needs_names_the_file_and_writes_nothing(profile, tmp_path, what):
    folder, _ = profile
    output, runs = tmp_path / "new", []
    if what == "no run":
        runs = [tmp_path / "gone"]
    elif what == "no profile":
        folder = tmp_path
    elif what == "no readings":
        gone = tmp_path / "gone"
        shutil.copytree(folder, gone)
        (gone / "points.jsonl").unlink()
        folder = gone
    else:
        broken = tmp_path / "broken"
        shutil.copytree(folder, broken)
        (broken / "residuals.json").write_text('{"points": [{"kind": "decode"}]}')
        folder = broken
    with pytest.raises(SpecError, match=r"gone|meta\.json|broken is no profile"):
        fitted_profile.refit(folder, output, runs)
    assert not output.exists()


STEPPED = [
    BatchPoint("decode", (5, 9), ()),
    BatchPoint("decode", (3,), ()),
    BatchPoint("prefill", (), ((9, 0),)),
    BatchPoint("prefill", (), ((20, 0),)),
    BatchPoint("prefill", (), ((30, 0),)),
]


def spec_with(folder, **real):
    return make_spec(
        {
            "name": "tiny",
            "model": "schedlab-tiny",
            "hardware": "cpu",
            "cost_model": str(folder),
            "engine": {
                "dtype": "fp32", "max_num_seqs": 4, "max_num_batched_tokens": 32,
                "max_model_len": 64, "num_gpu_blocks_override": 32,
            },
            "workload": {"prompt_tokens": 8, "output_tokens": 4, "num_requests": 4},
            "real": real,
        }
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "real", "said"),
    [
        ({}, {"threads": 2}, "threads is 1 in the profile, 2 here"),
        ({"kernels": "0123"}, {}, "kernels is '0123' in the profile"),
        ({"machine": {"processor": "Z80", "threads": 1}}, {}, "processor is 'Z80' in the profile"),
    ],
)
def test_profile_of_something_else_is_refused_with_what_to_do(
    profile, tmp_path, change, real, said
):
    folder, _ = profile
    meta = json.loads((folder / "meta.json").read_text()) | change
    (tmp_path / "fit.json").write_bytes((folder / "fit.json").read_bytes())
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    spec = spec_with(tmp_path, **real)
    cost_model = make_cost_model(spec)
    with pytest.raises(SpecError, match=said) as error:
        check_profile(spec, cost_model)
    assert "schedlab calibrate --device cpu --model schedlab-tiny" in str(error.value)
    chosen = {"profile": spec.cost_model.profile, "allow_mismatch": True}
    allowed = spec.model_copy(update={"cost_model": CostModelSpec(**chosen)})
    check_profile(allowed, cost_model)


def test_run_by_the_reference_clock_tells_raw_seconds_and_drift(tmp_path):
    known = Path(__file__).parents[2] / "profiles" / "cpu" / "schedlab-small" / "fp32-tp1"
    shutil.copytree(known, tmp_path, dirs_exist_ok=True)
    ReferenceSpeed(1e3).write(tmp_path)  # a machine a million times slower than this one
    cost_model = {"profile": str(tmp_path), "allow_mismatch": True}
    spec = spec_with(tmp_path, clock="reference").model_copy(
        update={"backend": "real", "cost_model": CostModelSpec(**cost_model)}
    )
    result = run(spec)
    told = result.provenance["real"]
    assert told["clock"] == "reference"
    assert told["sentinel_reference_s"] == 1e3
    assert told["reference_s"] > 1e3 * told["cpu_s"] > 0
    steps = result.log.steps()
    # In its seconds, that is: on a busy machine a good part of the time passes between steps.
    in_steps_s = (steps["end_ns"] - steps["start_ns"]).sum() / 1e9
    assert 0.01 * told["reference_s"] < in_steps_s < 1.01 * told["reference_s"]


@pytest.mark.slow
def test_profile_of_this_machine_is_accepted(profile):
    spec = spec_with(profile[0])
    check_profile(spec, make_cost_model(spec))


def test_detected_hardware_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.detected_hardware("cpu") == "cpu"
    with pytest.raises(SpecError, match="CUDA"):
        machine.detected_hardware("cuda")


def test_log_that_is_cut_in_a_line_is_mended_whole_or_not_at_all(tmp_path, monkeypatch):
    points = design(CONFIG, num_random=0, seed=0)[:3]
    log = tmp_path / "points.jsonl"

    class Timer:
        def time(self, point, repetitions):
            return (1e-3,) * repetitions, (1e-3,) * repetitions

    def measure():
        return calibration.measure(Timer(), CONFIG, points, log, about="", num_rounds=1)

    measure()
    whole = log.read_bytes()
    log.write_bytes(whole[:-4])
    with monkeypatch.context() as dying:
        dying.setattr("os.replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            measure()
    assert log.read_bytes() == whole[:-4]
    measure()
    assert log.read_bytes().startswith(whole[: whole.rindex(b"\n", 0, -1)])


def test_error_of_a_fit_has_a_bias_with_its_sign(monkeypatch):
    measured = [SimpleNamespace(seconds=2.0)] * 4
    monkeypatch.setattr(
        calibration_fit, "predictions", lambda fit, points: np.array([2.2, 1.2, 1.6, 2.0])
    )
    found = judge(None, measured)
    assert (found.mape, found.bias) == pytest.approx(((0.1 + 0.4 + 0.2) / 4, -0.5 / 4))
    assert (found.max, found.num_points) == (pytest.approx(0.4), 4)


def test_prompts_of_a_calibration_have_more_tokens_than_a_decode():
    config = EngineConfig(num_blocks=4000, max_model_len=512, max_num_batched_tokens=256)
    chunks = [n for point in design(config, num_random=1, seed=0) if point.kind == "prefill"
              for n, _ in point.chunks]  # fmt: skip
    assert min(chunks) == 2


def test_time_outside_of_the_model_is_told_apart_by_who_runs_and_who_waits_and_if_anybody_does():
    rng = np.random.default_rng(0)
    shapes = [
        BatchShape(1, 1, 1, num_running=int(runs), num_waiting=int(waits))
        for runs, waits in rng.integers((1, -20), 50, (60, 2)).clip(0)
    ]
    shapes = [replace(one, chunks=((9, 0),)) if i % 3 else one for i, one in enumerate(shapes)]
    spent = [
        90_000
        + 2_000 * one.num_running
        + 50 * one.num_waiting
        + 700_000 * bool(one.chunks)
        + 40_000 * (one.num_waiting > 0)
        for one in shapes
    ]
    assert overhead_of(shapes, spent) == pytest.approx({
        "base_s": 90e-6, "per_running_s": 2e-6, "per_waiting_s": 50e-9,
        "per_prefill_step_s": 700e-6, "per_queued_step_s": 40e-6,
    })  # fmt: skip


def a_run(model):
    """Return batches of 1, 4 and 16 rows, of which prompts come beside two."""
    decodes = measured_by(model, [BatchPoint("decode", (50,) * n, ()) for n in (1, 4, 16)])
    points = [BatchPoint("mixed", (9,) * rows, ((n, 0),)) for n, rows in ((8, 1), (9, 9), (100, 0))]
    return decodes, measured_by(model, points)


def slower(some, level, row_s, more_s=0.0):
    """Return steps as a run at such a level has them."""
    return [
        one._replace(seconds=level * one.seconds + row_s * one.shape.num_decodes + more_s)
        for one in some
    ]


def test_run_level_tells_kinds_of_steps_and_what_each_decoding_row_adds():
    model = truth()
    decodes, prompts = a_run(model)
    run = slower(decodes, 0.9, 7e-5) + slower(prompts, 1.2, 7e-5)
    level = run_level(replace(model.fit, run_level=RunLevel(3.0, 2.0, 1.0, 0.5)), run)
    assert astuple(level) == pytest.approx((0.9, 1.2, 7e-5, 0.0, 0.0), rel=1e-5)
    at_level = replace(model.fit, run_level=level)
    assert predictions(at_level, run) == pytest.approx([one.seconds for one in run], rel=1e-5)


def test_run_level_where_rows_are_known_tells_what_each_step_with_prompts_takes_longer():
    model = truth()
    decodes, prompts = a_run(model)
    run = slower(decodes, 0.9, 7e-5) + slower(prompts, 1.2, 7e-5, 3e-4)
    level = run_level(model.fit, run, decode_row_s=7e-5)
    assert astuple(level) == pytest.approx((0.9, 1.2, 7e-5, 3e-4, 0.0), rel=1e-5)
    at_level = replace(model.fit, run_level=level)
    assert predictions(at_level, run) == pytest.approx([one.seconds for one in run], rel=1e-5)
    assert run_level(model.fit, run, decode_row_s=0.0).decode_row_s == 0.0
    none_longer = slower(prompts, 1.2, 7e-5, -1e-6)
    assert run_level(model.fit, none_longer, decode_row_s=7e-5).prompt_step_s == 0.0


@pytest.mark.parametrize("row_s", [4e-5, -4e-5])
def test_lone_row_is_told_by_all_rounds_together_each_at_a_level_of_its_own(row_s):
    model = truth()
    decodes, prompts = a_run(model)
    rounds = [
        slower(decodes, level, 7e-5 + row_s) + slower(prompts, 1.2, 7e-5, 3e-4)
        for level in (0.9, 1.5, 1.1)
    ]
    # Of a round of one kind of step each, only both together tell the level from the rows.
    assert lone_row(model.fit, rounds, 7e-5) == pytest.approx(row_s, rel=1e-5)
    assert lone_row(model.fit, [*rounds, prompts], 7e-5) == pytest.approx(row_s, rel=1e-5)
    assert lone_row(model.fit, [decodes[:1], decodes[2:]], 7e-5) == 0.0
    assert lone_row(model.fit, [prompts], 7e-5) == 0.0
    assert lone_row(model.fit, [], 7e-5) == 0.0
    for level, steps in zip((0.9, 1.5, 1.1), rounds, strict=True):
        found = run_level(model.fit, steps, 7e-5, row_s)
        assert astuple(found) == pytest.approx((level, 1.2, 7e-5, 3e-4, row_s), rel=1e-5)
        priced = predictions(replace(model.fit, run_level=found), steps)
        assert priced == pytest.approx([step.seconds for step in steps], rel=1e-5)


def test_run_level_lets_no_more_than_half_of_steps_with_prompts_cost_the_same_whatever_they_are():
    model = truth()
    decodes, prompts = a_run(model)
    flat = [one._replace(seconds=5e-3) for one in prompts]
    level = run_level(model.fit, [*decodes, *flat], decode_row_s=0.0)
    assert level.prompt_step_s == pytest.approx(2.5e-3)
    at_level = replace(model.fit, run_level=level)
    assert predictions(at_level, flat).sum() == pytest.approx(5e-3 * len(flat))


def test_run_level_keeps_how_long_the_steps_of_a_kind_take_together():
    model = truth()
    decodes, prompts = a_run(model)
    # By the mean of ratios a step that takes 3 times as long would count like any other.
    run = [*decodes[:2], decodes[2]._replace(seconds=3 * decodes[2].seconds), *prompts]
    at_level = replace(model.fit, run_level=run_level(model.fit, run))
    for some in (run[:3], run[3:]):
        total_s = sum(one.seconds for one in some)
        assert predictions(at_level, some).sum() == pytest.approx(total_s, rel=1e-6)


def test_run_level_of_kinds_that_were_not_met_is_one():
    model = truth()
    decodes, prompts = a_run(model)
    assert run_level(model.fit, []) == RunLevel(1.0, 1.0)
    assert run_level(model.fit, decodes).prompt_steps == 1.0
    assert run_level(model.fit, prompts).decode_steps == 1.0
    alike = [one._replace(seconds=2 * one.seconds) for one in (decodes[1], decodes[1])]
    level = run_level(model.fit, alike)
    assert astuple(level) == pytest.approx((2.0, 1.0, 0.0, 0.0, 0.0), rel=1e-5)


@pytest.mark.parametrize(
    ("mape", "bias", "by_kind", "good"),
    [
        (0.0, 0.0, {}, True),
        (fitted_profile.MAPE_BAR, fitted_profile.BIAS_BAR, {}, True),
        (fitted_profile.MAPE_BAR, -fitted_profile.BIAS_BAR, {}, True),
        (fitted_profile.MAPE_BAR * 1.01, 0.0, {}, False),
        (0.0, fitted_profile.BIAS_BAR * 1.01, {}, False),
        (0.0, -fitted_profile.BIAS_BAR * 1.01, {}, False),
        (0.0, 0.0, {"decode": {"mape": 0.0, "bias": -fitted_profile.BIAS_BAR * 1.01}}, False),
        (0.0, 0.0, {"mixed": {"mape": fitted_profile.MAPE_BAR * 1.01, "bias": 0.0}}, False),
        (0.0, 0.0, {"by_time": {"mape": 9.0, "bias": 9.0}}, True),
    ],
)
def test_profile_is_good_if_errors_of_all_kinds_are_small_in_size_and_sign(
    mape, bias, by_kind, good
):
    held_out = SimpleNamespace(mape=mape, p90=0.2, bias=bias, num_points=5)
    fit = SimpleNamespace(held_out=held_out)
    said = fitted_profile.verdict(fit, by_kind, [])
    assert said.startswith("GOOD" if good else "POOR")
    assert "sentinels" not in said
    assert "20.0% at the 90th percentile" in said
    assert "over 5 replayed batches" in said
    for kind in by_kind.keys() - {"by_time"}:
        assert f"{kind} {by_kind[kind]['mape']:.1%} {by_kind[kind]['bias']:+.1%}" in said
    assert "moved by up to 50.0%" in fitted_profile.verdict(fit, by_kind, [0.004, 0.5, 0.001])


class MeasuringBeginsError(Exception):
    """Stands for the rounds, which need a device."""


def test_time_that_a_calibration_took_before_its_rounds_is_taken_off(monkeypatch, tmp_path):
    opened = SimpleNamespace(
        buckets=(), kernels="none", overhead={}, swapping=(), about={}, timer=None, repetitions=1
    )
    times_s = iter((100.0, 130.0))
    clock = SimpleNamespace(
        monotonic=lambda: next(times_s), strftime=lambda *_: "today", gmtime=lambda: None
    )
    given = {}

    def measure(*args, **options):
        given.update(options)
        raise MeasuringBeginsError

    monkeypatch.setattr(laboratory, "replayed_points", lambda *_: [])
    monkeypatch.setattr(laboratory, "_stopwatch", lambda *_: None)
    monkeypatch.setattr(laboratory, "open_ours", lambda *_: opened)
    monkeypatch.setattr(laboratory, "describe_machine", lambda device: {})
    monkeypatch.setattr(laboratory, "time", clock)
    monkeypatch.setattr("schedlab.gpu_backend.calibration_design.design", lambda *_: [])
    monkeypatch.setattr(calibration, "measure", measure)
    with pytest.raises(MeasuringBeginsError):
        laboratory.calibrate(
            tmp_path,
            model_name="llama-3-8b",
            hardware="a100",
            device="cpu",
            dtype="bf16",
            config=EngineConfig(num_blocks=8, max_model_len=64),
            max_s=70.0,
        )
    assert given["max_s"] == 40.0


class PaperTimer:
    """Tells times that are known: fitted batches scatter, held-out ones and sentinels do not."""

    def __init__(self, base_s):
        self.base_s = base_s  # by batch

    def time(self, point, repetitions):
        seconds = self.base_s.get(point, 1.0)
        times = (seconds, 2 * seconds, 4 * seconds)[:repetitions]
        if point.kind == "held_out":
            times = (seconds,) * repetitions
        return times, tuple(9 * s for s in times)


@pytest.mark.parametrize("swaps", [False, True])
def test_calibration_fits_some_batches_is_judged_by_the_others_and_writes_all_of_it_down(
    monkeypatch, tmp_path, swaps
):
    fitted = [BatchPoint("decode", (10, 12), ()), BatchPoint("prefill", (), ((8, 0), (4, 3)))]
    held_out = [
        BatchPoint("held_out", (4, 6), ()),
        BatchPoint("held_out", (5,), ((7, 2),)),
        BatchPoint("held_out", (), ((9, 0),)),
    ]
    points = [*fitted, *held_out]
    timer = PaperTimer({point: float(i) for i, point in enumerate(points, 3)})
    swapping = [SwapTime("out", 1, 4096, 0.5), SwapTime("in", 4, 16384, 0.25)] if swaps else []
    level_of = "run_level" if swaps else "sustained_level"
    of_run = [
        MeasuredBatch(BatchPoint("mixed", (7, 5), ((3, 1), (2, 0))).shape, 0.25),
        MeasuredBatch(BatchPoint("decode", (9,), ()).shape, 0.125),
    ]
    opened = SimpleNamespace(
        timer=timer, buckets=(2, 4), kernels="k1", overhead={"base_s": 0.5}, swapping=swapping,
        about={"version": 7} if swaps else {}, repetitions=3, run_steps=of_run,
    )  # fmt: skip
    asked = []

    def noted(name, give):
        def call(*given):
            asked.append((name, *given))
            return give

        return call

    fit, level = truth().fit, RunLevel(0.9, 1.1, 5e-5)
    swapped_fit = replace(fit, validity={"new_tokens": (1.0, 99.0)})
    errors = {"decode": {"mape": 0.01, "bias": 0.0}}
    for name, give in {
        "fit_profile": fit, level_of: level, "with_swapping": swapped_fit,
        "error_by_kind": errors, "predictions": np.array([1.5, 2.5, 3.5, 4.5, 5.5]),
        "coefficient_intervals": {"num_decodes": (0.1, 0.2)}, "step_spread": "spread",
    }.items():  # fmt: skip
        monkeypatch.setattr(calibration_fit, name, noted(name, give))
    monkeypatch.setattr(calibration_design, "design", noted("design", fitted))
    monkeypatch.setattr(laboratory, "replayed_points", noted("replayed_points", held_out))
    monkeypatch.setattr(laboratory, "_stopwatch", noted("_stopwatch", PaperWatch()))
    monkeypatch.setattr(laboratory, "open_ours", noted("open_ours", opened))
    monkeypatch.setattr(laboratory, "open_vllm", noted("open_vllm", opened))
    monkeypatch.setattr(laboratory, "describe_machine", lambda device: {"on": device})
    monkeypatch.setattr(fitted_profile, "fit_texts", noted("fit_texts", {"fit.json": "{}"}))
    monkeypatch.setattr(laboratory, "save_residuals", noted("save_residuals", None))
    paper = SimpleNamespace(monotonic=lambda: 0.0, strftime=lambda f, at: (f, at), gmtime=lambda: 0)
    monkeypatch.setattr(laboratory, "time", paper)
    engine, clock = ("vllm", "reference") if swaps else ("schedlab", "virtual")
    told = []
    found = laboratory.calibrate(
        tmp_path, model_name="llama-3-8b", hardware="a100", device="cpu", dtype="bf16",
        config=LIMITS, engine=engine, clock=clock, threads=6, num_rounds=2, num_random=11,
        num_held_out=13, seed=17, progress=lambda *given: told.append(given),
    )  # fmt: skip

    rows = [
        MeasuredBatch(p.shape, s) for p, s in zip(points, (6.0, 8.0, 5.0, 6.0, 7.0), strict=True)
    ]
    use = swapped_fit if swaps else fit
    at_level = replace(use, run_level=level)
    of_round = [
        ("fit_profile", rows[:2], rows[2:], [2, 4]),
        (level_of, fit, of_run),
        *([("with_swapping", fit, swapping)] if swaps else []),
        ("error_by_kind", use, rows[2:]),
        ("predictions", use, rows),
        ("coefficient_intervals", rows[:2], [2, 4], 17),
        ("step_spread", at_level, of_run),
    ]
    opening = {False: "open_ours", True: "open_vllm"}[swaps]
    assert asked[:4] == [
        ("replayed_points", LIMITS, "llama-3-8b", "a100", "bf16", 13, 17),
        ("_stopwatch", tmp_path, clock, "llama-3-8b", "cpu", 6),
        (opening, "llama-3-8b", LIMITS, "cpu", "bf16", 6, 17, asked[2][-1]),
        ("design", LIMITS, 11, 17, (2, 4)),
    ]
    assert isinstance(asked[2][-1], PaperWatch)
    written = [one for one in asked if one[0] == "fit_texts"]
    residuals = json.loads((tmp_path / "residuals.json").read_text())
    *calls, (_, rows_drawn, where) = asked[4:]
    assert calls == [
        *of_round, written[0],  # after each of two rounds, and of all of them
        *of_round, written[1],
        *of_round, written[2],
    ]  # fmt: skip
    assert where == tmp_path
    assert json.loads(json.dumps(rows_drawn)) == residuals["points"]

    _, meta, of_runs = written[-1]
    assert of_runs == replace(at_level, step_spread="spread")
    assert (tmp_path / "fit.json").read_text() == "{}"
    assert meta == {
        "model": "llama-3-8b", "hardware": "a100-80gb", "dtype": "bf16", "tensor_parallel_size": 1,
        "scheduling_overhead": {"base_s": 0.5}, "date": ("%Y-%m-%d", 0),
        "engine": asdict(LIMITS), "graph_buckets": [2, 4],
        "swap_times": [one._asdict() for one in swapping], "seed": 17, "kernels": "k1",
        **({"engine_measured": {"version": 7}} if swaps else {}), "machine": {"on": "cpu"},
        "clock": {"name": clock, "watch": "paper"}, "rounds": 2,
        "sentinel_drift_by_round": [0.0, 0.0], "held_out_error_by_kind": errors,
        "median_repeat_spread": 0.0,  # three of five do not scatter
    }  # fmt: skip
    assert [one[1]["rounds"] for one in written] == [1, 2, 2]
    assert residuals == {
        "coefficient_intervals_s": {"num_decodes": [0.1, 0.2]},
        "points": [
            {"kind": "decode", "features": [2, 22, 12], "chunks": [],
             "measured_s": 6.0, "predicted_s": 1.5},
            {"kind": "prefill", "features": [0, 0, 0], "chunks": [[8, 0], [4, 3]],
             "measured_s": 8.0, "predicted_s": 2.5},
            {"kind": "held_out", "features": [2, 10, 6], "chunks": [],
             "measured_s": 5.0, "predicted_s": 3.5},
            {"kind": "held_out", "features": [1, 5, 5], "chunks": [[7, 2]],
             "measured_s": 6.0, "predicted_s": 4.5},
            {"kind": "held_out", "features": [0, 0, 0], "chunks": [[9, 0]],
             "measured_s": 7.0, "predicted_s": 5.5},
        ],
    }  # fmt: skip
    lines = (tmp_path / "run_steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"features": [2, 12, 7], "chunks": [[3, 1], [2, 0]], "measured_s": 0.25},
        {"features": [1, 9, 9], "chunks": [], "measured_s": 0.125},
    ]
    assert (found.fit, found.overhead, found.drift) == (use, {"base_s": 0.5}, [0.0, 0.0])
    assert found.held_out == errors
    assert found.verdict == fitted_profile.verdict(use, errors, [])
    assert told[-1] == (10, 10, "done")
    header = json.loads((tmp_path / "points.jsonl").read_text().splitlines()[0])
    about = "llama-3-8b a100 cpu bf16 kernels k1 threads 6" + (" clock reference" if swaps else "")
    assert header == {"calibration": calibration.design_hash(points, LIMITS, about)}


class PaperWatch:
    """Stands for a stopwatch, of which a profile tells what it says of itself."""

    def describe(self):
        return {"watch": "paper"}


def test_reading_is_on_disk_before_the_next_one_is_taken(tmp_path):
    log, there = tmp_path / "points.jsonl", []

    class Timer:
        def time(self, point, repetitions):
            there.append(len(log.read_text().splitlines()))
            return (1.0,) * repetitions, (1.0,) * repetitions

    points = [BatchPoint("decode", (5,) * n, ()) for n in (1, 2, 3)]
    calibration.measure(Timer(), CONFIG, points, log, about="this", num_rounds=1)
    assert there == list(range(1, len(there) + 1)), "a line says what it is a calibration of"
    assert len(there) > 3


@pytest.mark.parametrize("kept_s", [None, 0.002])
def test_clock_of_a_calibration_that_goes_on_keeps_its_speed(tmp_path, monkeypatch, kept_s):
    asked = []

    class Reference:
        def __init__(self, sentinel, reference_ns):
            asked.append((sentinel, reference_ns))
            self.reference_ns = reference_ns or 3_000_000.0

    monkeypatch.setattr(stopwatch, "ReferenceTime", Reference)
    monkeypatch.setattr(stopwatch, "sentinel_of", lambda *given: given)
    if kept_s is not None:
        ReferenceSpeed(kept_s).write(tmp_path)
    laboratory._stopwatch(tmp_path, "reference", "a model", "cpu", 5)
    assert asked == [(("a model", 5), 0 if kept_s is None else 2_000_000.0)]
    assert ReferenceSpeed.read(tmp_path).sentinel_s == (kept_s or 0.003)
    assert isinstance(
        laboratory._stopwatch(tmp_path, "virtual", "a model", "cuda", 5), stopwatch.ElapsedTime
    )
    assert len(asked) == 1


@pytest.mark.parametrize("is_cuda", [False, True])
def test_steps_of_a_gpu_that_tell_its_level_are_of_requests_at_once_and_of_a_few_clients(
    monkeypatch, is_cuda
):
    asked = []

    class Executor:
        def __init__(self, *given, seed):
            self.given, self.steps = (*given, seed), []

    def serve(engine, requests, clients):
        asked.append((engine, requests, clients))
        engine[-1].steps += [("first", clients), ("step", clients)]

    monkeypatch.setattr("schedlab.gpu_backend.executor.TorchExecutor", Executor)
    monkeypatch.setattr(calibrated_engine, "Engine", lambda *given: given)
    monkeypatch.setattr(calibrated_engine, "simulate", serve)
    monkeypatch.setattr(calibrated_engine, "chat", lambda config, n, seed: ("chat", n, seed))
    runner, limits = SimpleNamespace(is_cuda=is_cuda), replace(LIMITS, max_num_seqs=27)
    steps = calibrated_engine.chat_steps(runner, limits, 7, "watch")
    loads = [None, 3] if is_cuda else [None]
    assert steps == [("step", clients) for clients in loads]
    assert [one[1:] for one in asked] == [(("chat", 54, 7), clients) for clients in loads]
    executors = [engine[-1] for engine, *_ in asked]
    assert len(set(map(id, executors))) == len(loads)
    for engine, *_ in asked:
        config, policy, executor = engine
        assert type(policy).__name__ == "FirstComeFirstServed"
        assert (config, executor.given[:2]) == (limits, (runner, limits))
        assert (executor.given[2].stopwatch, executor.given[3]) == ("watch", 7)
    monkeypatch.setattr(calibrated_engine, "chat", lambda config, n, seed: n)
    for seats, num in ((4, 8), (64, 128), (99, 128)):
        asked.clear()
        calibrated_engine.chat_steps(runner, replace(LIMITS, max_num_seqs=seats), 7)
        assert [one[1] for one in asked] == [num] * len(loads)
        assert [one[2] for one in asked] == [None, max(1, seats // 8)][: len(loads)]


@pytest.mark.parametrize(
    ("shape", "point"),
    [
        (BatchShape(3, 70, 40), {"features": [3, 70, 40], "chunks": []}),
        (
            BatchShape(0, 0, 0, ((5, 0), (7, 9))),
            {"features": [0, 0, 0], "chunks": [[5, 0], [7, 9]]},
        ),
        (BatchShape(2, 11, 8, ((6, 1),)), {"features": [2, 11, 8], "chunks": [[6, 1]]}),
    ],
)
def test_batch_of_a_profile_is_read_back_with_as_many_rows_as_it_has(shape, point):
    row = MeasuredBatch(shape, 0.25)
    written = json.loads(json.dumps(fitted_profile._row_json(row)))
    assert written == {**point, "measured_s": 0.25}
    rows = shape.num_decodes + len(shape.chunks)
    whole = replace(shape, rows_sampled=rows, num_running=rows)
    assert fitted_profile._row(written, "here") == MeasuredBatch(whole, 0.25)


def test_fit_is_judged_by_sizes_of_errors_their_mean_and_how_many_there_are(monkeypatch):
    predicted = np.array([1.1, 0.8, 1.0, 1.5, 2.0])
    monkeypatch.setattr(calibration_fit, "predictions", lambda fit, points: predicted)
    points = [SimpleNamespace(seconds=1.0)] * 5
    found = calibration_fit.judge(None, points)
    expected = (1.8 / 5, 0.5 + 0.6 * 0.5, 1.0, 1.4 / 5, 5)  # mean, nine tenths, largest, bias
    assert astuple(found) == pytest.approx(expected)
    assert astuple(calibration_fit.judge(None, [])) == (0.0, 0.0, 0.0, 0.0, 0)
