"""Whole decode steps against the bytes they read, rehearsed on the CPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from schedlab.gpu_backend import selfcheck_parts, step_bench  # noqa: E402
from schedlab.gpu_backend.calibration_design import BatchPoint  # noqa: E402
from schedlab.gpu_backend.kernel_bench import BenchResult  # noqa: E402
from schedlab.gpu_backend.runner import open_runner  # noqa: E402
from schedlab.gpu_backend.selfcheck_parts import PARTS, REHEARSAL, Subject  # noqa: E402
from schedlab.gpu_backend.step_bench import (  # noqa: E402
    bench_config,
    decode_step_figures,
    host_gap_figure,
    launch_figures,
    prefill_step_figures,
)
from schedlab.gpu_backend.step_timer import WARM_UPS, StepTimer  # noqa: E402
from schedlab.gpu_backend.stopwatch import ElapsedTime  # noqa: E402
from tests.gpu.test_selfcheck import ten_us  # noqa: E402

CASES = ((1, 64), (4, 32))


@pytest.fixture(scope="module")
def tiny():
    config = bench_config(CASES)
    return open_runner("schedlab-tiny", config), config


def test_bench_config_holds_every_case(tiny):
    _, config = tiny
    for batch, context in CASES:
        assert BatchPoint("decode", (context - 1,) * batch, ()).fits(config)
    assert BatchPoint("prefill", (), ((900, 0),)).fits(bench_config(CASES, (900,)))


def test_decode_step_floor_counts_weights_without_embeddings_and_all_kv(tiny, monkeypatch):
    runner, config = tiny
    monkeypatch.setattr(StepTimer, "time", lambda *_: ((), (0.001, 0.002, 0.003)))
    shape = runner.decoder.config.shape
    weights = 4 * shape.num_parameters
    if not shape.tied_embeddings:
        weights -= 4 * shape.vocab_size * shape.hidden_size
    figures = list(decode_step_figures(runner, runner, config, 1e9, CASES))
    floor_s = (weights + 64 * shape.kv_bytes_per_token("fp32")) / 1e9
    assert figures[0].value == pytest.approx(floor_s / 0.002)
    assert figures[0].required == 0.60
    large = [(127, 20), (128, 20), (129, 20)]
    told = list(decode_step_figures(runner, None, config, 1e9, large))
    assert [(one.required, one.stretch) for one in told] == [(0.60, 0.72), *[(0.70, 0.85)] * 2]
    assert figures[1].name.endswith("eager / graph")
    assert figures[1].value == pytest.approx(1.0)


def test_prefill_step_floor_counts_layers_for_all_tokens_and_the_head_for_one(tiny, monkeypatch):
    runner, config = tiny
    monkeypatch.setattr(StepTimer, "time", lambda *_: ((), (0.001, 0.002, 0.003)))
    shape = runner.decoder.config.shape
    head = shape.vocab_size * shape.hidden_size
    assert shape.tied_embeddings
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * 20 * 21
    flops = 2 * 20 * (shape.num_parameters - head) + 2 * head + attention
    (figure,) = prefill_step_figures(runner, config, 1e12, (20,))
    assert figure.value == pytest.approx(flops / 1e12 / 0.002)


def test_step_floors_count_an_output_head_that_is_not_the_embedding_once(tiny, monkeypatch):
    runner, config = tiny
    monkeypatch.setattr(StepTimer, "time", lambda *_: ((), (0.001, 0.002, 0.003)))
    own = replace(runner.decoder.config.shape, tied_embeddings=False)
    told = replace(runner.decoder.config, shape=own)
    monkeypatch.setattr(runner.decoder, "config", told)
    head = own.vocab_size * own.hidden_size
    (figure,) = prefill_step_figures(runner, config, 1e12, (20,))
    attention = 2 * own.num_layers * own.num_heads * own.head_dim * 20 * 21
    flops = 2 * 20 * (own.num_parameters - 2 * head) + 2 * head + attention
    assert figure.value == pytest.approx(flops / 1e12 / 0.002)
    step = next(iter(decode_step_figures(runner, runner, config, 1e9, CASES)))
    read = 4 * (own.num_parameters - head) + 64 * own.kv_bytes_per_token("fp32")
    assert step.value == pytest.approx(read / 1e9 / 0.002)


def test_host_gap_is_the_part_of_a_step_without_the_device(tiny):
    runner, config = tiny
    figure = host_gap_figure(runner, config, batch=4, prompt=8, output=16)
    assert 0 < figure.value < 1
    assert figure.smaller_is_better
    assert "0 of 15 batches laid out ahead" in figure.detail


def test_launch_figures_leave_out_the_wait_for_the_device_and_meet_new_sizes_once(
    tiny, monkeypatch
):
    runner, config = tiny
    clock, ran, sizes = [0], [], []

    def launch(batch):
        ran.append("launch")
        sizes.append((batch.num_seqs, batch.num_tokens, batch.decode_only))
        clock[0] += 3 * 10**6

    def wait():
        ran.append("wait")
        clock[0] += 50 * 10**6

    monkeypatch.setattr(runner, "launch", launch)
    monkeypatch.setattr(runner, "wait", wait)
    monkeypatch.setattr(ElapsedTime, "__call__", lambda self: clock[0])
    monkeypatch.setattr(step_bench, "_PROMPT_TOKENS", 8)
    for _ in range(2):  # blocks are given back
        figures = list(launch_figures(runner, config, batch=4, context=32))
        assert [figure.name for figure in figures] == [
            "launching a step of B=4 eagerly, host ms", "launching a step of B=1 eagerly, host ms",
            "launching a prompt of 8 tokens, host ms",
            "launching prompts of sizes not met before, host ms",
        ]  # fmt: skip
        assert [figure.value for figure in figures] == [3.0] * 4
        assert {figure.detail for figure in figures} == {"3.00 to 3.00 ms"}
        assert all(figure.smaller_is_better for figure in figures)
    alike, total = WARM_UPS + 20, 3 * (WARM_UPS + 20) + 20
    assert ran == ["launch", "wait"] * (2 * total)
    assert sizes[:total] == [
        *[(4, 4, True)] * alike, *[(1, 1, True)] * alike, *[(1, 8, False)] * alike,
        *[(1, 9 + i, False) for i in range(20)],
    ]  # fmt: skip
    assert sizes[total:] == sizes[:total]


def test_launch_times_leave_out_the_first_launches_of_the_first_batch(tiny, monkeypatch):
    runner, config = tiny
    clock, took_ms = [0], iter(range(1, 9))

    def launch(batch):
        clock[0] += next(took_ms) * 10**6

    monkeypatch.setattr(runner, "launch", launch)
    monkeypatch.setattr(runner, "wait", lambda: None)
    monkeypatch.setattr(ElapsedTime, "__call__", lambda self: clock[0])
    timer = StepTimer(runner, config, seed=0)
    batches = [[(2, 3), (1, 4)], [(5, 0)]]
    assert timer.launch_times(batches, 3) == pytest.approx((0.004, 0.005))
    assert timer.launch_times(batches) == pytest.approx((0.006, 0.007))
    assert timer.launch_times([]) == ()


def test_on_a_gpu_the_steps_part_tells_what_launching_costs_at_the_shortest_context(monkeypatch):
    asked = []
    figures = [BenchResult(name, 1.0, "") for name in ("launching", "again")]
    monkeypatch.setattr(step_bench, "launch_figures", lambda *given: asked.append(given) or figures)
    subject = Subject(torch.device("cpu"), ten_us, REHEARSAL)
    for is_cuda in (False, True):
        eager = SimpleNamespace(is_cuda=is_cuda)
        cases = list(selfcheck_parts._step_cases(subject, "limits", "runner", eager))
        assert len(cases) == 4 + is_cuda
    assert [row.data["name"] for row in cases[1].rows()] == ["launching", "again"]
    assert asked == [(eager, "limits", 4, 32)]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_steps_part_asks_for_each_figure_and_compares_with_eager_steps_where_there_are_graphs(
    monkeypatch, has_graphs
):
    asked = []

    def figure_of(name, several):
        def made(*given):
            asked.append((name, *given))
            one = BenchResult(name, 1.0, "")
            return iter([one, one]) if several else one

        return made

    for name, several in (
        ("host_gap_figure", False), ("decode_step_figures", True), ("prefill_step_figures", True),
    ):  # fmt: skip
        monkeypatch.setattr(step_bench, name, figure_of(name, several))
    subject = SimpleNamespace(
        sizes=SimpleNamespace(gap_batch=5, step_cases=[(1, 64), (4, 32)], step_prompts=(48,)),
        copy=SimpleNamespace(rate=7.0), product=SimpleNamespace(rate=9.0),
    )  # fmt: skip
    runner = SimpleNamespace(is_cuda=False)
    eager = SimpleNamespace(is_cuda=False) if has_graphs else runner
    cases = list(selfcheck_parts._step_cases(subject, "limits", runner, eager))
    assert [len(list(case.rows())) for case in cases] == [1, 2, 2, 2]
    other = eager if has_graphs else None
    assert asked == [
        ("host_gap_figure", runner, "limits", 5),
        ("decode_step_figures", runner, other, "limits", 7.0, ((1, 64),)),
        ("decode_step_figures", runner, other, "limits", 7.0, ((4, 32),)),
        ("prefill_step_figures", runner, "limits", 9.0, (48,)),
    ]


@pytest.mark.slow
def test_steps_part_tells_decode_and_prefill_steps_and_the_host_gap():
    found = [
        row.data["name"]
        for case in PARTS["steps"](Subject(torch.device("cpu"), ten_us, REHEARSAL))
        for row in case.rows()
    ]
    assert [name.split(",")[0] for name in found] == [
        "open", "host gap of a decode step B=4", "decode step B=1 ctx=64",
        "decode step B=4 ctx=32", "prefill step S=48",
    ]  # fmt: skip


def test_steps_part_whose_model_does_not_open_asks_for_nothing_more(monkeypatch):
    monkeypatch.setattr(selfcheck_parts, "open_runner", lambda *_, **__: 1 / 0)
    cases = PARTS["steps"](Subject(torch.device("cpu"), ten_us, REHEARSAL))
    with pytest.raises(ZeroDivisionError):
        list(next(cases).rows())
    assert list(cases) == []


def test_batch_is_warmed_up_the_first_time_it_is_timed_and_not_again(tiny, monkeypatch):
    timer, ran = StepTimer(*tiny, seed=0), []
    monkeypatch.setattr(timer, "_run", lambda *_, **__: ran.append(1) or 10**9 * len(ran))
    one, other = BatchPoint("decode", (5,), ()), BatchPoint("decode", (6,), ())
    seconds = [timer.time(point, 2)[0] for point in (one, one, other)]
    cold = WARM_UPS
    assert seconds == [
        (cold + 1, cold + 2), (cold + 3, cold + 4), (2 * cold + 5, 2 * cold + 6)
    ]  # fmt: skip
