"""What is measured on a device, in what turn, and what is reckoned of it: by stand-ins for both.

Kernels note what they are given; the first measurement takes a microsecond, the next two.
"""

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

from schedlab.experiments.comparing import compare
from schedlab.experiments.specification.loading import make_spec
from schedlab.gpu_backend import sitting
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.models import model
from tests.golden.rounding import json_digest


def _told(value: Any) -> Any:
    """Tell of a tensor its form, and its numbers if they are whole."""
    import torch

    if isinstance(value, torch.Tensor):
        form = [list(value.shape), str(value.dtype)[6:]]
        if value.is_floating_point():
            return form
        return [*form, value.tolist() if value.numel() <= 12 else json_digest(value.tolist())]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return str(value)
    return value


class _Ops:
    """Kernels that note what they are given."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def noted(*given: Any, **more: Any) -> None:
            self.asked.append([name, *map(_told, given), {k: _told(v) for k, v in more.items()}])

        return noted


class _Timer:
    """Runs work once; each measurement takes a microsecond longer than the one before."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, work: Callable[[], object], calls: int = 1, *, captured: bool = True) -> Any:
        from schedlab.gpu_backend.device_timer import Timing

        work()
        self.calls.append(calls)
        n = len(self.calls)
        return Timing(n * 1e-6, n * 1e-8, n * 9e-7, 10 + n, "paper")


def kernel_benches(_: str) -> dict[str, Any]:
    """Measure attention and the small kernels, and other tiles than the table's."""
    import torch
    from triton.runtime.errors import OutOfResources

    from schedlab.gpu_backend import kernel_bench, tile_search
    from schedlab.gpu_backend.kernels.launch import Device
    from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile

    ops, timer, cpu = _Ops(), _Timer(), torch.device("cpu")
    backends: list[str] = []

    def sdpa(*given: Any, **more: Any) -> None:
        backends.append(json.dumps([*map(_told, given), more]))
        if len(backends) == 2:
            raise RuntimeError("no such kernel\nsecond line")

    where = (timer, cpu, torch.float16)
    tiles: dict[str, Any] = {
        "decode_batches": ((2, 20), (1, 7)), "prefill_lengths": (17, 18), "rotation": 2,
        "decode_tiles": (DecodeTile(32, 8, 8, 2, 5), DecodeTile(64, 4, 8, 4, 5)),
        "prefill_tiles": (PrefillTile(64, 128, 4, 3),),
    }  # fmt: skip
    with (
        mock.patch.object(kernel_bench, "triton_ops", ops),
        mock.patch.object(kernel_bench, "_ROTATED_BYTES", 2**18),
        mock.patch.object(kernel_bench.F, "scaled_dot_product_attention", sdpa),
        mock.patch.object(tile_search, "device_of", return_value=Device(90, 100)),
        mock.patch.object(torch, "randperm", lambda n, **_: torch.arange(n - 1, -1, -1)),
    ):
        batches = (("B=3", (33, 16, 20)), ("B=2", (1, 40)))
        figures = [
            *kernel_bench.decode_figures(*where, 3e9, batches),
            kernel_bench.single_decode_figure(*where, 5e9, 24),
            kernel_bench.single_decode_figure(*where, 5e9, 40, rotation=2),
            kernel_bench.paged_decode_figure(*where, batches[0]),
            *kernel_bench.prefill_figures(*where, (5, 18)),
            *kernel_bench.elementwise_figures(*where, 7e9, rows=3),
        ]
        asked, ops.asked = ops.asked, []
        times = list(tile_search.search_tiles(*where, **tiles))
        searched, ops.asked = ops.asked, []
        timer.calls.append(0)
        with mock.patch.object(
            _Ops, "__getattr__", side_effect=OutOfResources(9, 8, "shared memory"), create=True
        ):
            times += tile_search.search_tiles(*where, **tiles)
    return {
        "figures": [list(one) for one in figures],
        "calls": timer.calls,
        "asked": [" ".join(map(str, one)) for one in asked],
        "backends": backends,
        "tiles": [list(one) for one in times],
        "searched": [len(searched), json_digest([str(one) for one in searched])],
    }


def ceilings_of_paper(_: str) -> dict[str, Any]:
    """Measure what a device can do at best."""
    import torch

    from schedlab.gpu_backend import ceilings

    timer, cpu, asked = _Timer(), torch.device("cpu"), []
    mm = torch.mm

    def noted(*given: Any, **more: Any) -> Any:
        asked.append([_told(one) for one in (*given, *more.values())])
        return mm(*given, **more)

    with mock.patch.object(torch, "mm", noted):
        found = [
            ceilings.device_copy(cpu, timer, 64),
            ceilings.matrix_product(cpu, timer, torch.float32, 3),
            *ceilings.layer_products(
                cpu, timer, model("schedlab-tiny"), (1, 3), torch.float32, 2**16
            ),
            *ceilings.host_copies(cpu, timer, 96),
        ]
    return {
        "found": [[one.name, one.rate, one.unit] for one in found],
        "calls": timer.calls,
        "asked": [len(asked), json_digest(asked), str(asked[0]), str(asked[1])],
    }


# -- the self-check -------------------------------------------------------------------------------


class _Noting:
    """A module's functions: each notes its name and what it is given, and gives `answers`."""

    def __init__(self, asked: list[Any], **answers: Callable[[], Any]) -> None:
        self._asked, self._answers = asked, answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def noted(*given: Any, **more: Any) -> Any:
            shown = [
                one if isinstance(one, int | float | str | tuple) else type(one).__name__
                for one in (*given, *more.values())
            ]
            self._asked.append([name, *map(str, shown), *more])
            return self._answers[name]()

        return noted


def self_check(_: str) -> dict[str, Any]:
    """Run every part on sizes that all differ, with stand-ins for what measures."""
    import torch
    from rich.console import Console

    from schedlab.gpu_backend import selfcheck, selfcheck_parts
    from schedlab.gpu_backend.ceilings import Ceiling
    from schedlab.gpu_backend.device_timer import Timing
    from schedlab.gpu_backend.kernel_bench import BenchResult
    from schedlab.gpu_backend.kernel_check import Check
    from schedlab.gpu_backend.selfcheck_parts import PARTS, REHEARSAL, Subject
    from schedlab.gpu_backend.tile_search import TileTime

    asked: list[Any] = []
    timing = Timing(2e-6, 1e-7, 1.5e-6, 12, "paper")

    def ceiling(name: str = "a copy") -> Ceiling:
        return Ceiling(name, 2.5e12, "B/s", timing)

    def figures() -> list[BenchResult]:
        return [
            BenchResult("some", 0.75, "", 0.7, 0.85), BenchResult("less", 9.5, "us", 9.0, None,
            True, "told"), BenchResult("none", float("nan"), "x", 0.5),
        ]  # fmt: skip

    def checks() -> list[Check]:
        return [Check("one", 1e-7, 2e-6), Check("two", 3e-6, 2e-6), Check("three", float("nan"), 1)]

    def too_small() -> Check:
        raise MemoryError("pools of 9 GB do not fit")

    stand_ins = {
        "ceilings": _Noting(
            asked, device_copy=ceiling, matrix_product=ceiling,
            host_copies=lambda: (ceiling("up"), ceiling("down")),
            layer_products=lambda: [ceiling()],
        ),
        "kernel_check": _Noting(
            asked, kernel_checks=lambda: [("first", checks), ("second", lambda: [1 / 0])],
            check_repeatable=checks, check_high_block_ids=too_small,
        ),
        "kernel_bench": _Noting(
            asked, decode_figures=figures, prefill_figures=figures, elementwise_figures=figures,
            single_decode_figure=lambda: figures()[0], paged_decode_figure=lambda: figures()[1],
        ),
        "step_bench": _Noting(
            asked, bench_config=lambda: "config", host_gap_figure=lambda: figures()[1],
            launch_figures=lambda: figures()[2:],
            decode_step_figures=figures, prefill_step_figures=figures,
        ),
    }  # fmt: skip
    more = _Noting(
        asked, open_runner=lambda: SimpleNamespace(graph_buckets=(1, 2), decoder="decoder"),
        ModelRunner=lambda: SimpleNamespace(eager=True, is_cuda=True),
        search_tiles=lambda: [TileTime("c", "t", True, 1.25), TileTime("c", "u", False, None)],
    )  # fmt: skip
    freed = _Noting(asked, empty_cache=int, collect=int)
    sizes = REHEARSAL._replace(
        dtypes=(torch.float16, torch.float32), copy_bytes=800, matrix_size=7, product_rows=(3, 5),
        repetitions=11, decode_batches=(("B=2", (20, 4)), ("B=1", (6,))), single_context=13,
        prompts=(21, 22), elementwise_rows=14, gap_batch=15, searched_batches=((1, 16), (2, 17)),
        searched_prompts=(18, 19), num_searched=2, num_shapes=4, large_batches=(9, 10),
        rotated_bytes=23, rotation=24,
    )  # fmt: skip
    out = io.StringIO()
    console = Console(file=out, width=400, highlight=False, markup=False, soft_wrap=True)
    files, failed = {}, []
    patched = [mock.patch.object(selfcheck_parts, name, one) for name, one in stand_ins.items()]
    patched += [
        mock.patch.object(selfcheck_parts, name, getattr(more, name))
        for name in ("open_runner", "ModelRunner", "search_tiles")
    ]
    patched += [
        mock.patch.object(module, "time", SimpleNamespace(perf_counter=iter(range(999)).__next__))
        for module in (selfcheck, selfcheck_parts)
    ]
    patched += [
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(
            name="card", major=9, minor=1, multi_processor_count=5, total_memory=6,
            L2_cache_size=7)),
        mock.patch.object(torch.cuda, "empty_cache", freed.empty_cache),
        mock.patch.object(selfcheck_parts.gc, "collect", freed.collect),
        mock.patch.object(selfcheck, "kernel_hash", return_value="hash"),
    ]  # fmt: skip
    with TemporaryDirectory() as folder:
        for patch in patched:
            patch.start()
        try:
            for kind in ("cuda", "cpu"):
                asked.append([kind])
                subject = Subject(torch.device(kind), _Timer(), sizes)
                names = [name for name in PARTS if name != "versions"]
                failed.append(selfcheck.run_parts(names, subject, Path(folder), console))
                files |= {f"{kind} {name}": (Path(folder) / f"{name}.json").read_text()
                          for name in names}  # fmt: skip
                failed.append(selfcheck.run_parts(["ceilings"], subject, None, console))
            rows = [
                row.cells
                for case in selfcheck_parts.versions(Subject(torch.device("cuda"), _Timer(), sizes))
                for row in case.rows()
            ]
        finally:
            for patch in reversed(patched):
                patch.stop()
    return {
        "failed": failed,
        "asked": [" ".join(one) for one in asked],
        "printed": out.getvalue().splitlines(),
        "files": {name: json_digest(json.loads(text)) for name, text in files.items()},
        "versions": [row[0] for row in rows] + [row[1] for row in rows[5:-2]],
    }


# -- a sitting ------------------------------------------------------------------------------------


class _Process:
    """Takes its seconds by the clock, and writes a file by the first look at it."""

    def __init__(self, clock: "_Clock", file: Path, takes_s: float, status: int) -> None:
        self._clock, self._file, self._status = clock, file, status
        self._end_s = clock.now_s + takes_s

    def poll(self) -> int | None:
        self._file.write_text(self._file.name)
        return self._status if self._clock.now_s >= self._end_s else None

    def wait(self) -> int:
        return self._status

    def kill(self) -> None:
        self._clock.told.append(f"killed at {self._clock.now_s:g}")
        self._end_s = self._clock.now_s


class _Clock:
    """A clock of seconds that only who waits moves, and who notes what happens when."""

    def __init__(self) -> None:
        self.now_s, self.told = 1000.0, list[str]()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


# What each command takes, and how it ends; those that follow end well at once.
SITTINGS: dict[str, Any] = {
    "all well": (["--budget", "2h"], [(3.0, 0), (7.25, 0), (5.0, 0), (2.5, 0)]),
    "rehearsed": (["--pieces", "versions,tests,smoke"], [(3.0, 0), (0.75, 0), (5.0, 0)]),
    "one fails": (["--budget", "50m", "--pieces", "versions,ceilings,bench"], [(1.0, 0), (2.0, 3)]),
    "one hangs": (["--budget", "50m", "--pieces", "versions,tiles,bench"], [(1.0, 0), (1e9, 0)]),
    "no time": (["--budget", "61s", "--pieces", "versions,correctness,calibrate"], [(5.0, 0)]),
    "no versions": (["--pieces", "versions,bench"], [(1.0, 2)]),
    "packages missing": (["--pieces", "versions"], []),
}


def sat(name: str) -> dict[str, Any]:
    """Run a sitting whose processes take known times; go on from what it leaves."""
    words, ends = SITTINGS[name]
    clock, out = _Clock(), io.StringIO()
    device = "cpu" if name == "rehearsed" else "cuda"
    with TemporaryDirectory() as folder, _sitting(clock, Path(folder), ends, name):
        kept, statuses, names = Path(folder) / "kept.tar.gz", [], list[str]()
        for more in ([], ["--resume", str(kept)]):
            where = ["-o", f"{folder}/out", "--work", f"{folder}/work{len(more)}"]
            with redirect_stdout(out), redirect_stderr(out), suppress(SystemExit):
                statuses.append(sitting.main([*where, *words, "--device", device, *more]))
            if (archive := Path(folder) / "out" / sitting.ARCHIVE).exists():
                archive.rename(kept)
        if kept.exists():
            with tarfile.open(kept) as tar:
                names = tar.getnames()
        told, said = (
            [line.replace(folder, "F").replace(str(sitting.ROOT), "ROOT") for line in lines]
            for lines in (clock.told, out.getvalue().splitlines())
        )
    return {"statuses": statuses, "archive": names, "told": told, "said": said}


@contextmanager
def _sitting(clock: _Clock, folder: Path, ends: list[Any], name: str) -> Iterator[None]:
    """Let a sitting's processes be stand-ins."""
    from schedlab.gpu_backend import sitting_pieces

    remaining = iter([*ends, *[(0.0, 0)] * 99])

    def popen(
        command: list[str], *, stdout: int, stderr: int, env: dict[str, str], cwd: Path
    ) -> Any:
        takes_s, status = next(remaining)
        extra = [env[key] for key in ("PYTHONUNBUFFERED", "COLUMNS")]
        extra.append(env.get("TRITON_INTERPRET", "-"))
        here = env["PYTHONPATH"].split(":")[0]
        words = " ".join(command[1:])
        clock.told.append(
            f"at {clock.now_s:g}: {words} ({here}, {' '.join(extra)}, {cwd}, {stderr})"
        )
        results = next(folder.glob("work*/kernels-hash"))
        (results / "profile").mkdir(exist_ok=True)
        rows = [{"name": "memory_bytes", "value": 2**37 if name == "all well" else 2**34}]
        (results / "versions.json").write_text(json.dumps({"rows": rows}))
        for made in ("profile/fit.json", "profile/meta.json", "smoke/profile/meta.json"):
            (results / made).parent.mkdir(parents=True, exist_ok=True)
            (results / made).write_text('{"hardware": "l4"}')
        if "-o" in words and words.endswith("capacity"):
            (results / "capacity").mkdir()
            (results / "capacity" / "result.json").write_text('{"request_throughput": 10.4567}')
        (results / ".half.new").write_text("x")
        return _Process(clock, results / f"{len(clock.told)}.txt", takes_s, status)

    def packed(at: Any) -> None:
        clock.told.append(f"packed at {clock.now_s:g}")
        pack(at)

    pack = sitting.pack
    missing = ["torch"] if name == "packages missing" else []
    patches = [
        mock.patch.object(sitting, "time", clock),
        mock.patch.object(sitting_pieces, "time", clock),
        mock.patch.object(sitting_pieces, "kernel_hash", return_value="hash"),
        mock.patch.object(sitting.subprocess, "Popen", popen),
        mock.patch.object(sitting.shutil, "which", return_value=None),
        mock.patch.object(sitting.signal, "signal"),
        mock.patch.object(sitting, "missing_packages", return_value=missing),
        mock.patch.object(sitting, "pack", packed),
        mock.patch.dict("os.environ", {"PYTHONPATH": "there"}),
    ]
    for patch in patches:
        patch.start()
    os.environ.pop("TRITON_INTERPRET", None)  # other tests of this process may need it
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


# -- a comparison ---------------------------------------------------------------------------------

_COMPARED: dict[str, Any] = {
    "all": {},
    "checked": {"check": True},
    "kept": {"keep": Path("kept")},
    "of what is kept": {"keep": Path("kept"), "write_only": True},
    "of what is kept, checked": {"keep": Path("kept"), "write_only": True, "check": True},
    "in time": {"max_s": 16.0},
    "with other machines": {"keep": Path("others")},
    "of nothing": {"keep": Path("none"), "write_only": True},
    "nowhere": {"write_only": True},
}


def compared(name: str) -> dict[str, Any]:
    """Compare points whose runs, some of which are kept, take longer and longer."""
    more = _COMPARED[name]
    clock, told, waits = _Clock(), list[Any](), iter(range(1, 99))
    spec = make_spec({
        "name": "c", "seed": 3, "hardware": "a100-80gb",
        "workload": {"trace": "fixed", "num_requests": 4},
        "sweep": {"policy": ["fcfs", "vtc"], "workload.request_rate": [2.0, 5.0]},
        "real": {"repeats": 2, "device": "cuda", "level_requests_per_client": 7},
    })  # fmt: skip

    def said(of: Any) -> str:
        modelled = of.real.clock if of.real is not None else "-"
        return f"{of.policy.name} at {of.workload.request_rate} by {of.backend}, {modelled}"

    class Kept:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def find(self, wanted: Any, repeat: int) -> Any:
            is_there = repeat == (wanted.policy.name == "vtc") and self.folder.name != "none"
            machine = "other" if self.folder.name == "others" else "m"
            return SimpleNamespace(machine=machine, kept=True) if is_there else None

        def keep(self, wanted: Any, repeat: int, found: Any) -> None:
            told.append(f"keeps {said(wanted)}, {repeat}")

        def describe(self) -> str:
            return f"{self.folder} holds some"

    def measured(wanted: Any, repeat: int, beside: Any) -> Any:
        told.append(f"measures {said(wanted)}, {repeat}, {beside}")
        clock.now_s += next(waits)
        return SimpleNamespace(machine="m", kept=False)

    def at_level(wanted: Any, beside: Any, repeat: int) -> int:
        told.append(f"level of {said(wanted)}, {repeat}, {beside}")
        return 5

    def one(point: Any, runs: Any, checked: Any, levels: Any, seed: int, tell: Any) -> str:
        tell(f"simulating {point.label}")
        of = {repeat: run.kept for repeat, run in runs.items()}
        return f"{point.label}: {of}, {checked and checked.kept}, {levels}, {seed}"

    stand_ins: dict[str, Any] = {
        "time": clock, "MeasuredRuns": Kept, "measure": measured, "_compared": one,
        "check_level": lambda of: told.append(f"level {said(of)}"),
        "machine_name": lambda device: told.append(f"machine of {device}") or "m",
        "load_beside": lambda of, at=None: f"beside {of.workload.request_rate} at {at}",
        "steps_at_level": at_level,
        "warm_up": lambda of: told.append(f"warms up {said(of)}"),
        "_profile_of": lambda point: f"profile of {point.label}",
        "level_of": lambda profile, steps: f"level of {steps} by {profile}",
        "_check_profiles": lambda todo, machine: told.append(f"profiles of {len(todo)}, {machine}"),
        "_levels": lambda todo, runs: told.append([sorted(some) for some in runs]) or {},
    }  # fmt: skip
    with mock.patch.multiple(compare, **stand_ins):
        try:
            found: Any = compare.compare(spec, lambda *what: told.append(what), **more)
        except SpecError as error:
            found = str(error)
    return {"found": found, "told": told}


CASES: dict[str, Any] = {
    **{f"sitting {name}": (sat, name) for name in SITTINGS},
    **{f"compared {name}": (compared, name) for name in _COMPARED},
}
NEED_TRITON: dict[str, Any] = {
    "kernel benches": (kernel_benches, ""),
    "ceilings": (ceilings_of_paper, ""),
    "self-check": (self_check, ""),
}
if find_spec("torch") is not None and find_spec("triton") is not None:
    CASES |= NEED_TRITON
