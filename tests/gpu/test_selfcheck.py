"""The self-check and its measurements, rehearsed: tiny sizes, the interpreter, a stand-in clock."""

import io
import json
import math

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from rich.console import Console  # noqa: E402

from schedlab.gpu_backend import ceilings, kernel_bench, kernel_check, selfcheck  # noqa: E402
from schedlab.gpu_backend.device_timer import Timing  # noqa: E402
from schedlab.gpu_backend.kernel_bench import Figure  # noqa: E402
from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile  # noqa: E402
from schedlab.gpu_backend.tile_search import search_tiles  # noqa: E402

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="triton is not in interpreter mode here"
)


def ten_us(work, calls=1):
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
    assert ceilings.matrix_product(CPU, ten_us, torch.float32, 16).rate == pytest.approx(
        2 * 16**3 / 1e-5
    )
    down, up = ceilings.host_copies(CPU, ten_us, 1024)
    assert down.rate == up.rate == pytest.approx(1024 / 1e-5)


def test_timing_summarises_by_median_and_quartiles():
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0], "graph")
    assert timing[:4] == (3.0, 2.0, 1.0, 5)


def test_figure_is_held_against_its_goals_in_the_right_direction():
    assert Figure("ratio", 0.7, "", 0.7, 0.85).meets(0.7)
    assert not Figure("ratio", 0.7, "", 0.7, 0.85).meets(0.85)
    assert Figure("time", 30.0, "us", 31.0, 20.0, smaller_is_better=True).meets(31.0)
    assert not Figure("time", 30.0, "us", 31.0, 20.0, smaller_is_better=True).meets(20.0)
    assert Figure("told", 1.0, "s").meets(None) is None


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


@interpreted
@pytest.mark.slow
def test_bench_runs_every_case_and_holds_the_goals_table_against_it():
    # With 10 us a call and a copy rate that makes 8 tokens' cache take 10 us, shares are counts.
    copy_rate = 8 * 4096 / 1e-5
    decode = list(
        kernel_bench.decode_figures(
            ten_us, CPU, torch.float16, copy_rate, (("B=2", (20, 4)),), single_context=16
        )
    )
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
def test_tile_search_times_the_table_and_the_others():
    times = list(
        search_tiles(
            ten_us, CPU, torch.float16, ((1, 16),), (16,),
            (DecodeTile(16, 1, 1, 4, 2),), (PrefillTile(16, 16, 4, 2),),
        )
    )  # fmt: skip
    assert [t.in_table for t in times] == [True, False, True, False]
    assert all(t.median_us == pytest.approx(10) for t in times)


@interpreted
@pytest.mark.slow
def test_kernel_check_passes_in_half_precision():
    checks = list(kernel_check.check_kernels(CPU, torch.float16))
    assert len(checks) == 18
    assert [c for c in checks if not c.passed] == []


def test_kernel_check_fails_on_wrong_and_on_unwritten_output(monkeypatch):
    from types import SimpleNamespace

    def nothing(*args, **kwargs):
        return torch.full((9, 4096), 0.5), torch.full((9, 4096), 0.5)

    names = ("paged_decode", "paged_prefill", "rope_and_cache", "add_rms_norm")
    broken = SimpleNamespace(
        **dict.fromkeys(names, nothing), silu_and_mul=lambda x: torch.full((9, 1400), 0.5)
    )
    monkeypatch.setattr(kernel_check, "triton_ops", broken)
    assert not any(c.passed for c in kernel_check.check_kernels(CPU, torch.float16))


def test_run_parts_writes_json_and_fails_when_a_check_failed(tmp_path, monkeypatch):
    monkeypatch.setitem(
        selfcheck.PARTS, "correctness", lambda *_: {"failed": 1, "error": float("nan")}
    )
    console = Console(file=io.StringIO(), width=200)
    status = selfcheck.run_parts(["versions", "correctness"], CPU, ten_us, tmp_path, console)
    assert status == 1
    assert torch.__version__ in console.file.getvalue()
    record = json.loads((tmp_path / "correctness.json").read_text())
    assert record["error"] is None
    assert record["kernels"] == selfcheck.kernel_hash()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["correctness.json", "versions.json"]
