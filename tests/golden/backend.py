"""What the real backend plans, lays out, times and fits, on the CPU and by clocks of paper."""

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from schedlab.experiments.comparing.recorded_engines import RecordedRouter
from schedlab.experiments.comparing.vllm_recording import Timeline
from schedlab.gpu_backend.block_pool import BlockPool
from schedlab.gpu_backend.calibration_design import BatchPoint, design, sentinels, token_knots
from schedlab.gpu_backend.clock import VirtualClock
from schedlab.gpu_backend.sequences import Sequences
from schedlab.gpu_backend.sitting import _numbers, seconds
from schedlab.gpu_backend.sitting_pieces import GPU, PIECES, REHEARSAL, Sitting
from schedlab.gpu_backend.stopwatch import ReferenceTime
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.files import write_text
from schedlab.sim.request import Request
from tests.golden import drawn as figures
from tests.golden.defaults_of_code import defaults
from tests.golden.rounding import json_digest, rounded

_LIMITS = {
    "small": EngineConfig(num_blocks=40, max_model_len=128, block_size=16, max_num_seqs=6,
                          max_num_batched_tokens=48),
    "large": EngineConfig(num_blocks=400, max_model_len=1024, block_size=16, max_num_seqs=16,
                          max_num_batched_tokens=256),
}  # fmt: skip


def designs(name: str) -> dict[str, Any]:
    """Choose the batches of a calibration."""
    limits = _LIMITS[name]
    points = design(limits, 12, 3, (1, 2, 4, 8, 24))
    kinds = [point.kind for point in points]
    return {
        "num": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "points": json_digest(points),
        "random": points[-12:],
        "sentinels": sentinels(limits),
        "knots": [token_knots(1, 1), token_knots(2, 17), token_knots(1, 100)],
        "shapes": [list(astuple(point.shape)) for point in points[-3:]],
    }


def memory(_: str) -> dict[str, Any]:
    """Seat requests, give them blocks, let them leave and come back."""
    told: list[Any] = []
    for shuffled in (None, 3):
        pool = BlockPool(9, 4, 3, 16, shuffled)
        for request, tokens in ((7, 4), (8, 5), (7, 5), (9, 1), (8, 8), (7, 8)):
            seat = pool.grow(request, tokens)
            told.append([request, seat, pool.blocks(request).tolist(), pool.num_used])
        pool.release(8)
        told.append([pool.grow(5, 16), pool.tables.tolist(), pool.holds(8), pool.num_used])
    rows = Sequences(2, 12, lambda request: np.arange(request.prompt_tokens) + 10 * request.id)
    for number, max_tokens, output in ((1, 9, 5), (2, 3, 5)):
        request = Request(number, 0, 4, max_tokens)
        rows.add(request, output)
        rows.sit(request, number - 1)
    told.append([rows.tokens.tolist(), rows.last_index.tolist(), rows.ids.tolist()])
    rows.tokens[0, 4:7] = (91, 92, 93)
    first = Request(1, 0, 4, 9)
    rows.leave(first, 0, 7)
    rows.sit(first, 1)
    rows.forget(first)
    told.append([rows.tokens.tolist(), rows.last_index.tolist(), rows.generated(1).tolist()])
    return {"told": told}


def clocks(_: str) -> dict[str, Any]:
    """Read a stopwatch whose machine slows down, and clock steps by it."""
    cpu_ns = iter(range(0, 10**9, 1_000))
    sentinels_ns = iter([100, 110, 90, 100, 105, 200, 210, 190, 100, 400, 150] * 20)
    told: list[Any] = []
    for reference_ns in (0, 100):
        watch = ReferenceTime(lambda: next(sentinels_ns), reference_ns, lambda: next(cpu_ns))
        for _step in range(12):
            told.append(watch())
            watch.between_steps()
        told.append(rounded(watch.describe()))
    clock = VirtualClock(SimpleNamespace(__call__=None), "m")
    clock.stopwatch = _Watch()
    shape = BatchShape(1, 5, 5)
    for _step in range(3):
        clock.step_begins(0)
        told.append(clock.step_ends(shape))
    return {"told": told}


class _Watch:
    """Advances by more each time it is read, and by nothing between steps."""

    def __init__(self) -> None:
        self._now_ns, self._reads = 0, 0

    def __call__(self) -> int:
        self._reads += 1
        self._now_ns += 100 * self._reads
        return self._now_ns

    def between_steps(self) -> None:
        self._reads += 10


def sittings(_: str) -> dict[str, Any]:
    """Write down what a sitting runs, on a GPU and rehearsed, and how long each may take."""
    found: dict[str, Any] = {}
    for setup in (GPU, REHEARSAL):
        with TemporaryDirectory() as folder:
            end_s = 1e12
            sitting = Sitting(setup, Path("/spec.yaml"), Path(folder), Path("/out"), end_s)
            (sitting.results / "capacity").mkdir(parents=True)
            result = sitting.results / "capacity" / "result.json"
            result.write_text('{"request_throughput": 10.4567}')
            for profile in ("profile", "smoke/profile"):
                write_text(sitting.results / profile / "meta.json", '{"hardware": "l4"}')
            for name, piece in PIECES.items():
                commands = [" ".join(words) for words in piece.commands(sitting, 300.0)]
                told = [line.replace(str(sitting.results), "R") for line in commands]
                told = [line.replace(str(Path(__file__).parents[2]), "ROOT") for line in told]
                # How long is left depends on the clock.
                told = [line.partition("--time-limit-s 2")[0] for line in told]
                found[f"{setup.device} {name}"] = [piece.limit_s, piece.least_s, piece.needs, told]
    found["durations"] = [seconds(text) for text in ("90", "90s", "1.5m", "2h")]
    found["versions"] = [_numbers(text) for text in ("2.13.0+cpu", "3.1", "1.2.3.4", "1.0rc2")]
    return found


def engines(_: str) -> dict[str, Any]:
    """Tell engines apart by recorded times: equal ones are of one step, near ones of two."""
    first_s = np.array([1.0, 1.0, 1.001, 1.5, 1.5015, 1.5, 2.0, 2.003])
    last_s = np.array([3.0, 3.0, 3.0019, 2.5, 2.5, 2.502, 2.5, 4.0])
    recording = Timeline(np.full(8, 9), np.full(8, 3), np.zeros(8), first_s, last_s)
    found = {}
    for num_engines in (2, 3):
        router = RecordedRouter(recording, num_engines)
        states = [SimpleNamespace(num_waiting=i, num_running=2 - i, index=i, requests=())
                  for i in range(num_engines)]  # fmt: skip
        router._vllm = SimpleNamespace(route=lambda request, _: request.id % 2, turn=0)
        placed = [router.route(Request(i, 0, 9, 3), states) for i in range(8)]
        found[f"{num_engines} engines"] = [
            placed, router.num_asked, router.num_doubtful, router._shared, router._apart
        ]  # fmt: skip
    return found


CASES: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    **{f"calibration of {name}": (designs, name) for name in _LIMITS},
    "block pools": (memory, ""),
    "clocks": (clocks, ""),
    "sittings": (sittings, ""),
    "recorded engines": (engines, ""),
}

# -- what needs torch -----------------------------------------------------------------------------


def fits(buckets: str) -> dict[str, Any]:
    """Fit a profile to times of a known law with a ripple, and judge it."""
    from schedlab.gpu_backend import calibration_fit
    from schedlab.gpu_backend.calibration_fit import SwapTime, swapped_byte_s
    from schedlab.gpu_backend.swap_timing import _counts

    graphs = tuple(int(one) for one in buckets.split())
    rows = []
    points = design(_LIMITS["small"], 12, 3, graphs)
    for i, point in enumerate(points):
        shape = point.shape
        tokens = shape.num_decodes + sum(n for n, _ in shape.chunks)
        pairs = sum(n * (n + 1) / 2 + n * c for n, c in shape.chunks)
        time_s = 1e-3 + 2e-5 * tokens + 3e-8 * shape.decode_context_sum_tokens + 1e-8 * pairs
        time_s *= 0.7 if graphs and not shape.chunks else 1.0
        rows.append(calibration_fit.MeasuredBatch(shape, time_s * (1 + 0.02 * ((i * 7) % 5 - 2))))
    train = rows if graphs else rows[::2]
    fit = calibration_fit.fit_profile(train, rows[1::2], graphs)
    times = [SwapTime("out", 1, 1000, 1e-6), SwapTime("in", 4, 4000, 3e-6)]
    swapping = calibration_fit.with_swapping(fit, times)
    with mock.patch.object(calibration_fit, "_RESAMPLES", 8):
        intervals = calibration_fit.coefficient_intervals(rows[:60], graphs, 2)
    return _short({
        "eager": asdict(fit.eager),
        "graph": asdict(fit.graph) if fit.graph else None,
        "validity": fit.validity,
        "train": asdict(fit.train),
        "held out": asdict(fit.held_out),
        "by kind": calibration_fit.error_by_kind(fit, rows[1::2]),
        "swapping": [swapping.validity["swapped_bytes"],
                     swapping.eager.coefficients_s["swapped_bytes"], swapped_byte_s(times)],
        "counts": [list(_counts(n)) for n in (1, 2, 16, 40, 256)],
        "intervals": intervals,
    })  # fmt: skip


def _short(value: Any) -> Any:
    """Round to five digits: a solver ends where it may."""
    if isinstance(value, dict):
        return {str(key): _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    if isinstance(value, float):
        return f"{0.0 if abs(value) < 1e-12 else value:.5g}"
    return value


class _Timer:
    """Batches take what their tokens do, a little more each time."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def time(self, point: BatchPoint, repetitions: int) -> Any:
        self.asked.append([point.kind, len(point.decodes), point.chunks])
        tokens = len(point.decodes) + sum(n for n, _ in point.chunks)
        base = 1e-3 * tokens * (1 + 0.001 * (len(self.asked) % 7))
        return tuple(base * (1 + k / 10) for k in range(repetitions)), (base,) * repetitions


def measured(_: str) -> dict[str, Any]:
    """Measure a design in rounds; go on; how far sentinels moved."""
    from schedlab.gpu_backend import calibration
    from schedlab.gpu_backend.calibration import measure

    limits, timer, told = _LIMITS["small"], _Timer(), []
    points = design(limits, 2, 1)[::4]
    with TemporaryDirectory() as folder, mock.patch.object(calibration, "SENTINEL_EVERY", 10):
        log = Path(folder) / "log.jsonl"
        options: dict[str, Any] = {"about": "a", "seed": 4}
        measure(timer, limits, points, log, num_rounds=1, **options)
        taken = measure(timer, limits, points, log, num_rounds=3, **options,
                        progress=lambda *what: told.append(what))  # fmt: skip
        lines = log.read_text().splitlines()
    return {
        "asked": [len(timer.asked), json_digest(timer.asked)],
        "told": [told[0], told[-1], len(told)],
        "lines": len(lines),
        "drift": taken.drift,
        "medians": [taken.median_s(i) for i in (0, 1, len(points) - 1, -1, -3)],
        "spreads": [taken.spread(i) for i in (0, 2)],
        "rows": json_digest(rounded([[list(astuple(r.shape)), r.seconds]
                                for r in calibration.measured(taken, points)])),
    }  # fmt: skip


def batches(_: str) -> dict[str, Any]:
    """Lay out batches of every kind, padded ones too, and the order of launches."""
    from schedlab.gpu_backend.graphs import graph_buckets
    from schedlab.gpu_backend.step_batch import StepBatch, StepLayout, launch_order

    layout = StepLayout(20, 5, 3)
    history = np.arange(5 * 12, dtype=np.int32).reshape(5, 12)
    tables = (np.arange(15, dtype=np.int32).reshape(5, 3) * 7) % 16
    seats, contexts = np.array([3, 0, 2]), np.array([4, 0, 7])
    found: dict[str, Any] = {
        "bytes": [layout.num_bytes, layout.used_bytes(0), layout.used_bytes(3)],
        "places": {name: [start, *size] for name, (start, size, _) in layout._parts.items()},
        "order": launch_order(np.array([5, 9, 2, 9, 0]), np.array([1, 1, 3, 1, 2])).tolist(),
        "buckets": [graph_buckets(n) for n in (1, 3, 17, 100, 300)],
    }
    for name, more in {
        "decodes": {},
        "chunks": {"num_new": np.array([1, 5, 2])},
        "padded": {"num_new": np.array([1, 5, 2]), "padding_tokens": 3},
    }.items():
        batch = StepBatch(layout, pinned=False)
        batch.fill(history, tables, 4, seats, contexts, **more)
        batch.sample(np.array([0, 2]), np.array([11, 13]))
        if name == "decodes":
            batch.pad_sequences(5)
        found[name] = {
            **{key: view.tolist() for key, view in batch.views.items()},
            **{key: value for key, value in vars(batch).items() if isinstance(value, int)},
        }
    return found


def tiled(_: str) -> dict[str, Any]:
    """Choose tiles for devices and formats."""
    import torch

    from schedlab.gpu_backend.kernels.launch import Device
    from schedlab.gpu_backend.kernels.tiles import decode_tile, prefill_tile

    return {
        f"{arch} {head_dim} {dtype}": [
            decode_tile(Device(arch, 100), head_dim, dtype),
            *(prefill_tile(Device(arch, 100), head_dim, group, dtype, queries)
              for group, queries in ((1, 64), (4, 16), (4, 17), (8, 2048))),
        ]
        for arch in (80, 86, 89, 90, 100, 120)
        for head_dim in (32, 64, 128, 256)
        for dtype in (torch.float32, torch.bfloat16)
    }  # fmt: skip


def drawn(_: str) -> dict[str, Any]:
    """Draw tokens by keys; hold them against the likeliest."""
    import torch

    from schedlab.gpu_backend.sampling import sample

    logits = torch.tensor([[(i * 7 + row * 3) % 11 / 4 for i in range(50)] for row in range(12)])
    keys = torch.arange(12, dtype=torch.int64) * 1_000_003 + 5
    heats = (0.0, 0.5, 1.0, 3.0)
    return {f"{heat:g}": sample(logits, keys, heat).tolist() for heat in heats}


def overheads(_: str) -> dict[str, Any]:
    """Fit the scheduling overhead of steps, the slowest left out."""
    from schedlab.experiments.comparing.calibrated_engine import overhead_of, vllm_config
    from schedlab.gpu_backend.step_bench import bench_config

    sizes = [(i % 7, (i * 5) % 11) for i in range(40)]
    shapes = [BatchShape(1, 1, 1, num_running=n, num_waiting=m) for n, m in sizes]
    times = [10_000 + 300 * n + 70 * m + 10**7 * (i > 38) for i, (n, m) in enumerate(sizes)]
    return _short({
        "overhead": overhead_of(shapes, times),
        "as vLLM": {key: value for key, value in asdict(vllm_config(_LIMITS["small"])).items()
                    if isinstance(value, int)},
        "benches": [str(bench_config(((1, 100), (8, 33)), prompts)) for prompts in ((), (900,))],
    })  # fmt: skip


def profiles(_: str) -> dict[str, Any]:
    """Choose what a calibration holds out, runs beside it, and says of what it found."""
    from schedlab.experiments.comparing import calibrate, calibrated_engine, fitted_profile
    from schedlab.sim.cost.profile import Fit, FitError, Regime

    small = _LIMITS["small"]
    seats = {"max_num_seqs": 3, "max_num_batched_tokens": 33, "max_model_len": 31}
    cpu = calibrate.calibration_config(
        "schedlab-tiny", "cpu", "fp32", **seats, block_size=4, num_blocks=None
    )
    card = calibrate.calibration_config(
        "llama-3-8b", "a100-80gb", "bf16", **seats, block_size=16, num_blocks=None
    )
    held_out = calibrate.replayed_points(small, "schedlab-tiny", "cpu", "fp32", 12, 3)
    works = {
        "chat": calibrated_engine.chat(small, 9, 3), "short": calibrated_engine.short(small, 9, 3),
        "long": calibrated_engine.long(_LIMITS["large"], 3), "none": calibrated_engine.long(cpu, 3),
    }  # fmt: skip
    sent = {
        name: [len(work), json_digest([[a.request.prompt_tokens, a.output_tokens] for a in work])]
        for name, work in works.items()
    }
    said = []
    for mape, bias, kinds, drift in (
        (0.05, 0.01, {}, []), (0.9, 0.01, {}, [0.01]), (0.05, -0.9, {}, [0.5, 0.01]),
        (0.05, 0.01, {"mixed": {"mape": 0.9, "bias": 0.0}, "by_time": {"mape": 9, "bias": 9}}, []),
        (
            fitted_profile.MAPE_BAR, -fitted_profile.BIAS_BAR,
            {"mixed": {"mape": 0.01, "bias": 0.02}}, [],
        ),
    ):  # fmt: skip
        error, box = FitError(mape, 0.12, 0.3, bias, 17), {"new_tokens": (1.0, 8.0)}
        fit = Fit(Regime((1, 8), (1e-6, 2e-6), {}), None, box, train=error, held_out=error)
        said.append(fitted_profile.verdict(fit, kinds, drift))
    points = held_out[::4]
    residuals = [
        {"kind": point.kind, "measured_s": 0.01 * (i + 1), "predicted_s": 0.011 * (i + 1) ** 0.9}
        for i, point in enumerate(points)
    ]
    return {
        "limits": [[config.num_blocks, config.max_num_seqs] for config in (cpu, card)],
        "held out": [len(held_out), json_digest([list(astuple(p.shape)) for p in held_out])],
        "sent": sent, "said": said,
        "figure": figures.seen(fitted_profile.residual_figure(residuals, "title")),
    }  # fmt: skip


NEED_TORCH: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "fit": (fits, ""),
    "fit with graphs": (fits, "1 2 4 8"),
    "measured batches": (measured, ""),
    "layouts": (batches, ""),
    "tiles": (tiled, ""),
    "samples": (drawn, ""),
    "overheads": (overheads, ""),
    "profiles": (profiles, ""),
    "defaults of gpu_backend": (defaults, "gpu_backend"),
}
if importlib.util.find_spec("torch") is not None:
    CASES |= NEED_TORCH
