"""The self-check and its measurements, rehearsed: tiny sizes, the interpreter, a stand-in clock."""

import gc
import io
import json
import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from rich.console import Console  # noqa: E402

from schedlab.gpu_backend import ceilings, kernel_bench, kernel_check, selfcheck  # noqa: E402
from schedlab.gpu_backend.device_timer import Timing, cuda_timer  # noqa: E402
from schedlab.gpu_backend.kernel_bench import BenchResult  # noqa: E402
from schedlab.gpu_backend.kernel_cases import attention_case, decode_rows  # noqa: E402
from schedlab.gpu_backend.kernel_check import Check  # noqa: E402
from schedlab.gpu_backend.kernels import launch  # noqa: E402
from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile  # noqa: E402
from schedlab.gpu_backend.reference import worst_row_error  # noqa: E402
from schedlab.gpu_backend.selfcheck_parts import (  # noqa: E402
    PARTS,
    REHEARSAL,
    CheckCase,
    ResultLine,
    Subject,
)
from schedlab.gpu_backend.tile_search import search_tiles  # noqa: E402
from schedlab.sim.errors import SpecError  # noqa: E402
from schedlab.sim.hardware.models import model as find_model  # noqa: E402

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="triton is not in interpreter mode here"
)


def ten_us(work, calls=1, captured=True):
    """Run the work once; claim that it took 10 us."""
    work()
    return Timing.of([1e-5] * 10, "stand-in")


def test_selfcheck_without_cuda_says_what_is_missing_and_exits_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert selfcheck.main([]) == 2
    message = capsys.readouterr().err
    assert "nothing was measured" in message
    assert "CUDA" in message or "GPU" in message


def test_ceilings_count_both_directions_of_a_copy_and_two_operations_a_product():
    assert ceilings.device_copy(CPU, ten_us, 1024).rate == pytest.approx(2048 / 1e-5)

    def copies_slowly(work, calls=1, captured=True):
        return ten_us(work)._replace(median_s=1e-5 if captured else 3e-5)

    assert ceilings.device_copy(CPU, copies_slowly, 1024).rate == pytest.approx(2048 / 1e-5)
    assert ceilings.matrix_product(CPU, ten_us, torch.float32, 16).rate == pytest.approx(
        2 * 16**3 / 1e-5
    )
    down, up = ceilings.host_copies(CPU, ten_us, 1024)
    assert down.rate == up.rate == pytest.approx(1024 / 1e-5)


def test_layer_products_rotate_over_more_weights_than_a_cache_holds():
    shape = replace(
        find_model("schedlab-tiny"), hidden_size=64, intermediate_size=32, vocab_size=100
    )
    calls = []

    def counting(work, calls_in=1):
        calls.append(calls_in)
        return ten_us(work)

    found = list(
        ceilings.layer_products(
            CPU, counting, shape, (1, 3), torch.float32, rotated_bytes=3 * 32 * 64 * 4
        )
    )
    assert [c.name.split()[0] for c in found[::2]] == ["qkv", "o", "gate_up", "down", "head"]
    down = found[6]
    assert down.name == "down 64x32 M=1"
    assert down.rate == pytest.approx(64 * 32 * 4 / 1e-5)
    assert calls[6:8] == [3, 3]


def test_timing_summarises_by_median_and_quartiles():
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0], "graph")
    assert timing[:4] == (3.0, 2.0, 1.0, 5)


def test_figure_is_held_against_its_goals_in_the_right_direction():
    assert BenchResult("ratio", 0.7, "", 0.7, 0.85).meets(0.7)
    assert not BenchResult("ratio", 0.7, "", 0.7, 0.85).meets(0.85)
    assert BenchResult("time", 30.0, "us", 31.0, 20.0, smaller_is_better=True).meets(31.0)
    assert not BenchResult("time", 30.0, "us", 31.0, 20.0, smaller_is_better=True).meets(20.0)
    assert BenchResult("told", 1.0, "s").meets(None) is None


def test_paged_cache_rotates_over_disjoint_shuffled_blocks():
    cache = kernel_bench.paged_cache(CPU, torch.float16, (33, 16), rotation=3)
    used = [set(table.flatten().tolist()) - {0} for table in cache.tables]
    assert [len(blocks) for blocks in used] == [4, 4, 4]
    assert set.union(*used) == set(range(1, 13))
    order = [b for table in cache.tables for b in table.flatten().tolist() if b]
    assert order != sorted(order)


def test_paged_cache_rotates_over_more_than_a_cache_holds_by_default():
    # 512 tokens are 2 MiB of keys and values.
    assert len(kernel_bench.paged_cache(CPU, torch.float16, (512,)).tables) == 16


@pytest.fixture
def few_heads(monkeypatch):
    """One KV head of four query heads: the interpreter takes its time over each."""
    monkeypatch.setattr(kernel_bench, "NUM_HEADS", 4)
    monkeypatch.setattr(kernel_bench, "NUM_KV_HEADS", 1)
    monkeypatch.setattr(kernel_bench, "_KV_BYTES_PER_TOKEN", 512)


@interpreted
@pytest.mark.slow
def test_bench_runs_every_case_and_holds_the_goals_table_against_it(few_heads):
    # With 10 us a call and a copy rate that makes 8 tokens' cache take 10 us, shares are counts.
    copy_rate = 8 * 512 / 1e-5
    batch, half = ("B=2", (20, 4)), torch.float16
    decode = [
        *kernel_bench.decode_figures(ten_us, CPU, half, copy_rate, (batch,)),
        kernel_bench.single_decode_figure(ten_us, CPU, half, copy_rate, 16, rotation=1),
        kernel_bench.paged_decode_figure(ten_us, CPU, half, batch),
    ]
    assert [f.value for f in decode] == pytest.approx([24 / 8, 10.0, 1.0])
    assert decode[1].required == pytest.approx(2.5 * 20 + 12)
    prefill = list(kernel_bench.prefill_figures(ten_us, CPU, torch.float32, lengths=(20,)))
    assert [f.name for f in prefill] == [
        "prefill S=20", "prefill S=20 vs torch flash", "prefill S=20 vs torch cuDNN",
        "prefill S=20 paged vs contiguous",
    ]  # fmt: skip
    # cuDNN does not run on a CPU: told, not left out and not called a success.
    assert math.isnan(prefill[2].value)
    assert prefill[2].detail.startswith("not measured")
    assert not prefill[2].meets(prefill[2].required)
    small = list(kernel_bench.elementwise_figures(ten_us, CPU, torch.float16, copy_rate, rows=2))
    assert len(small) == 3


@interpreted
@pytest.mark.slow
def test_tile_search_times_the_table_and_the_others(few_heads):
    times = list(
        search_tiles(
            ten_us, CPU, torch.float16, ((1, 16),), (16,),
            (DecodeTile(16, 1, 1, 4, 2),), (PrefillTile(16, 16, 4, 2),), rotation=1,
        )
    )  # fmt: skip
    assert [t.in_table for t in times] == [True, False, True, False]
    assert all(t.median_us == pytest.approx(10) for t in times)


@interpreted
@pytest.mark.slow
def test_kernel_check_decodes_at_both_sides_of_the_edge_of_a_block(monkeypatch):
    class AskedError(Exception):
        pass

    def case(rows, **_):
        raise AskedError(rows)

    monkeypatch.setattr(kernel_check, "attention_case", case)
    with pytest.raises(AskedError) as asked:
        next(kernel_check._check_attention(CPU, torch.float16, 64, 4, 32))
    assert {length for _, length in asked.value.args[0]} >= {1, 32, 33}


def test_kernel_check_of_a_large_batch_passes_in_half_precision():
    # The others pass where a sitting is rehearsed. More rows than a program has threads.
    groups = dict(kernel_check.kernel_checks(CPU, torch.float16, large_batches=(130,)))
    (check,) = groups["decode of large batches"]()
    assert check.passed, check


@pytest.mark.slow
def test_kernel_check_fails_on_wrong_and_on_unwritten_output(monkeypatch):
    def nothing(*args, **kwargs):
        return torch.full((9, 4096), 0.5), torch.full((9, 4096), 0.5)

    names = ("paged_decode", "paged_prefill", "rope_and_cache", "add_rms_norm")
    broken = SimpleNamespace(
        **dict.fromkeys(names, nothing), silu_and_mul=lambda x: torch.full((9, 1400), 0.5)
    )
    monkeypatch.setattr(kernel_check, "triton_ops", broken)
    groups = kernel_check.kernel_checks(CPU, torch.float16)
    assert not any(c.passed for _, checks in groups for c in checks())


def test_worst_row_error_sees_the_newest_token_left_out_of_one_row():
    case = attention_case(
        decode_rows(1, 16, 17, 300, 65), head_dim=128, num_kv_heads=2, dtype=torch.bfloat16
    )
    expected = case.expected()
    case.context_lens[3] -= 1
    wrong = case.expected()
    tolerance = kernel_check.TOLERANCES[torch.bfloat16]
    over_all_rows = float((wrong - expected).norm() / expected.norm())
    assert over_all_rows < tolerance < worst_row_error(wrong, expected)


def test_worst_row_error_of_rows_of_zeros_and_of_nan():
    zeros = torch.zeros(2, 3)
    assert worst_row_error(zeros, zeros.double()) == 0.0
    assert worst_row_error(zeros + 1e-9, zeros.double()) == math.inf
    assert math.isnan(worst_row_error(torch.tensor([[math.nan], [1.0]]), torch.ones(2, 1).double()))


def test_repeatable_fails_if_a_single_run_moves_a_bit(monkeypatch):
    runs = []

    def decode(*args):
        runs.append(args)
        args[6].fill_(1.0 if len(runs) != 3 else 1.0 + 2**-10)

    def prefill(*args):
        args[8].fill_(1.0)

    monkeypatch.setattr(
        kernel_check, "triton_ops", SimpleNamespace(paged_decode=decode, paged_prefill=prefill)
    )
    checks = list(
        kernel_check.check_repeatable(
            CPU, torch.float16, repetitions=5, prompt_tokens=4, decode_contexts=(3, 2)
        )
    )
    assert [c.passed for c in checks] == [True, False]
    assert checks[1].error == pytest.approx(1 / 4)


def test_cuda_timer_waits_once_for_all_repetitions(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 2.0

    class Stream:
        def wait_stream(self, other):
            pass

    graph = SimpleNamespace(replay=lambda: log.append("replay"))
    fakes = {
        "Event": Event, "Stream": Stream, "current_stream": Stream,
        "stream": lambda _: nullcontext(), "graph": lambda _: nullcontext(),
        "CUDAGraph": lambda: graph, "synchronize": lambda: log.append("wait"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake, raising=False)
    timing = cuda_timer(lambda: log.append("work"), calls=2)
    assert timing.mode == "graph"
    assert timing.repetitions == 50  # 100 ms of 2 ms
    assert timing.median_s == pytest.approx(1e-3)
    # Warmed up, captured, and run once to see how often.
    assert log[:9] == ["work"] * 3 + ["wait", "work", "replay", "event", "replay", "event"]
    measured = log[-(3 * 50 + 1) :]
    assert measured == ["event", "replay", "event"] * 50 + ["wait"]


def subject():
    return Subject(CPU, ten_us, REHEARSAL)


def row(name, failed=False):
    return ResultLine((name, "1"), {"name": name, "value": float("nan")}, failed)


@pytest.mark.slow
def test_run_parts_writes_each_row_as_it_comes_and_goes_on_after_a_case_that_raises(
    tmp_path, monkeypatch
):
    path = tmp_path / "correctness.json"
    seen = []

    def rows():
        yield row("first")
        seen.append(json.loads(path.read_text()))
        raise RuntimeError("no such kernel\nand more")

    def part(_):
        yield CheckCase("attention", rows)
        yield CheckCase("norm", lambda: [row("last", failed=True)])

    monkeypatch.setitem(PARTS, "correctness", part)
    console = Console(file=io.StringIO(), width=200)
    assert selfcheck.run_parts(["versions", "correctness"], subject(), tmp_path, console) == 2
    assert [r["name"] for r in seen[0]["rows"]] == ["first"]
    assert not seen[0]["complete"]
    record = json.loads(path.read_text())
    assert [(r["name"], r["failed"]) for r in record["rows"]] == [
        ("first", False), ("attention", True), ("last", True),
    ]  # fmt: skip
    assert record["rows"][1]["error"] == "RuntimeError: no such kernel\nand more"
    assert record["rows"][0]["value"] is None
    assert (record["complete"], record["failed"]) == (True, 2)
    assert record["kernels"] == selfcheck.kernel_hash()
    printed = console.file.getvalue()
    assert torch.__version__ in printed
    assert "attention | RAISED | RuntimeError: no such kernel" in printed


@pytest.mark.slow
def test_run_parts_collects_the_garbage_of_a_part_before_the_next(tmp_path, monkeypatch):
    class Heavy:
        pass

    kept = []

    def part(_):
        heavy = Heavy()
        heavy.itself = heavy  # a cycle, as runners are in
        kept.append(weakref.ref(heavy))
        yield CheckCase("one", lambda: [row("one")])

    monkeypatch.setitem(PARTS, "steps", part)
    gc.disable()
    try:
        selfcheck.run_parts(["steps"], subject(), None, Console(file=io.StringIO()))
        assert kept[0]() is None
    finally:
        gc.enable()


def test_selfcheck_on_a_cpu_without_the_interpreter_says_what_to_set(monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert selfcheck.main(["--device", "cpu"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err


def test_correctness_part_marks_failed_checks(monkeypatch):
    checks = [Check("good", 0.0, 1e-3), Check("bad", 1.0, 1e-3), Check("nan", math.nan, 1e-3)]
    monkeypatch.setattr(kernel_check, "kernel_checks", lambda *_: [("all", lambda: checks)])
    monkeypatch.setattr(kernel_check, "check_repeatable", lambda *_, **__: [])
    found = [r for case in PARTS["correctness"](subject()) for r in case.rows()]
    assert [r.failed for r in found] == [False, True, True]
    assert found[1].cells[-1] == "FAILED"


def test_parts_asked_for_are_run_or_all_but_the_search_for_tiles(monkeypatch):
    asked = []

    def run_parts(names, subject, output, console):
        asked.append((names, subject.device, output))
        return len(asked) - 1

    monkeypatch.setattr(selfcheck, "run_parts", run_parts)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert selfcheck.main(["--device", "cpu"]) == 0
    assert selfcheck.main(["--device", "cpu", "--only", "tiles", "--only", "bench"]) == 1
    assert selfcheck.main(["--device", "cpu", "-o", "x", "--only", "bench"]) == 1
    assert asked == [
        ([name for name in selfcheck.PARTS if name != "tiles"], CPU, None),
        (["tiles", "bench"], CPU, None), (["bench"], CPU, Path("x")),
    ]  # fmt: skip
    assert "tiles" in selfcheck.PARTS


@pytest.mark.parametrize("is_asked", [False, True])
def test_files_of_a_part_are_written_where_they_are_asked_for_and_nowhere_else(
    tmp_path, monkeypatch, is_asked
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    case = CheckCase("norm", lambda: [row("one"), row("two", failed=True)])
    monkeypatch.setitem(PARTS, "bench", lambda subject: [case])
    arguments = ["-o", str(tmp_path / "x")] if is_asked else []
    assert selfcheck.main(["--device", "cpu", "--only", "bench", *arguments]) == 1
    found = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")]
    assert found == ["x/bench.json"] * is_asked


def test_paged_kernel_that_takes_longer_has_a_share_below_one():
    contiguous, paged = (Timing(s, 1e-6, s, 5, "graph") for s in (3e-6, 4e-6))
    found = kernel_bench._paged_share("decode", contiguous, paged)
    assert found.value == pytest.approx(0.75)
    assert found.detail.startswith("contiguous 3.0 us")


def test_operations_of_a_prefill_are_four_a_pair_under_the_diagonal(monkeypatch):
    monkeypatch.setattr(kernel_bench, "paged_cache", lambda *_, **__: None)
    monkeypatch.setattr(
        kernel_bench, "time_prefill", lambda timer, cache, length: Timing(1e-6, 0, 0, 5, "graph")
    )
    found = next(kernel_bench.prefill_figures(None, None, None, (7,)))
    pairs = sum(position + 1 for position in range(7))
    per_pair = 4 * kernel_bench.NUM_HEADS * kernel_bench.HEAD_DIM
    assert found.value == pytest.approx(pairs * per_pair / 1e-6 / 1e12)


@pytest.mark.parametrize(("major", "minor", "arch"), [(7, 5, None), (8, 0, 80), (9, 1, 91)])
def test_device_of_kernels_is_told_by_its_compute_capability(monkeypatch, major, minor, arch):
    card = SimpleNamespace(name="card", major=major, minor=minor, multi_processor_count=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    launch._cuda_device.cache_clear()
    try:
        if arch is None:
            with pytest.raises(SpecError, match=r"card has compute capability 7\.5; the kernels"):
                launch._cuda_device(0)
        else:
            assert launch._cuda_device(0) == (arch, 5)
    finally:
        launch._cuda_device.cache_clear()
