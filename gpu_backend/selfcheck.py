"""Everything that has to be measured on a GPU, in one command.

``python -m schedlab.gpu_backend.selfcheck``.

Each part takes less than eight minutes, prints a table and writes a JSON file of its own;
``--calibrate`` and ``--compare`` go on to the laboratory's own commands. Without a CUDA device
nothing is measured, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from schedlab.gpu_backend import ceilings, kernel_bench, step_bench
from schedlab.gpu_backend.device import open_device
from schedlab.gpu_backend.device_timer import Timer, cuda_timer
from schedlab.gpu_backend.kernel_bench import Figure
from schedlab.gpu_backend.kernel_check import Check, check_high_block_ids, check_kernels
from schedlab.gpu_backend.kernel_hash import kernel_hash
from schedlab.gpu_backend.runner import ModelRunner, open_runner
from schedlab.gpu_backend.tile_search import search_tiles
from schedlab.sim.errors import SpecError
from schedlab.sim.files import write_text
from schedlab.sim.text import json_text

_SITTING_S = 300
"""No run of a comparison begins later, so that a sitting takes less than eight minutes."""

Part = Callable[[torch.device, Timer, Console], Mapping[str, Any]]


def versions(device: torch.device, timer: Timer, console: Console) -> Mapping[str, Any]:
    """Tell what a measurement depends on besides this project."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": kernel_hash(),
        "processor": platform.processor() or platform.machine(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    _print(console, "versions", ("what", "value"), found.items())
    return found


def limits(device: torch.device, timer: Timer, console: Console) -> Mapping[str, Any]:
    """Measure the device's ceilings: memory, matrix products, both ways over PCIe."""
    found = [
        ceilings.device_copy(device, timer),
        ceilings.matrix_product(device, timer),
        *ceilings.host_copies(device, timer),
    ]
    rows = [
        (c.name, f"{c.rate / 1e12:.3f} T{c.unit}", f"{c.timing.median_s * 1e3:.3f} ms",
         f"{c.timing.iqr_s * 1e3:.3f} ms", c.timing.mode)
        for c in found
    ]  # fmt: skip
    _print(console, "ceilings", ("what", "rate", "median", "IQR", "timed as"), rows)
    return {c.name: {"rate": c.rate, "unit": c.unit, "timing": c.timing._asdict()} for c in found}


def correctness(device: torch.device, timer: Timer, console: Console) -> Mapping[str, Any]:
    """Compare every kernel with float64, in bf16 and fp16, and beyond 31-bit offsets."""
    found: dict[str, list[Check]] = {}
    for dtype in (torch.bfloat16, torch.float16):
        found[str(dtype).removeprefix("torch.")] = list(check_kernels(device, dtype))
    skipped = {}
    try:
        found["bfloat16"].append(check_high_block_ids(device, torch.bfloat16))
    except MemoryError as error:
        skipped["block ids beyond 31-bit offsets"] = str(error)
    rows = [
        (dtype, c.name, f"{c.error:.2e}", f"{c.tolerance:.0e}", "ok" if c.passed else "FAILED")
        for dtype, checks in found.items()
        for c in checks
    ]
    rows += [("", name, "", "", f"not run: {why}") for name, why in skipped.items()]
    _print(console, "correctness", ("format", "what", "error", "allowed", ""), rows)
    checks = {
        dtype: [{**c._asdict(), "passed": c.passed} for c in checks]
        for dtype, checks in found.items()
    }
    failed = sum(not c.passed for several in found.values() for c in several)
    return {"checks": checks, "not_run": skipped, "failed": failed}


def bench(device: torch.device, timer: Timer, console: Console) -> Mapping[str, Any]:
    """Measure the kernels against a device copy and torch's attention, all in this run."""
    copy = ceilings.device_copy(device, timer)
    dtype = torch.bfloat16
    figures: list[Figure] = [
        *kernel_bench.decode_figures(timer, device, dtype, copy.rate),
        *kernel_bench.prefill_figures(timer, device, dtype),
        *kernel_bench.elementwise_figures(timer, device, dtype, copy.rate),
    ]
    return _figures_part(console, "kernels", copy.rate, figures)


def tiles(device: torch.device, timer: Timer, console: Console) -> Mapping[str, Any]:
    """Time other tiles than the table's."""
    found = list(search_tiles(timer, device, torch.bfloat16))
    rows = [
        (t.case, t.tile, "table" if t.in_table else "",
         "does not fit" if t.median_us is None else f"{t.median_us:.1f} us")
        for t in found
    ]  # fmt: skip
    _print(console, "tiles", ("case", "tile", "", "median"), rows)
    return {"times": [t._asdict() for t in found]}


def steps(device: torch.device, timer: Timer, console: Console) -> Mapping[str, Any]:
    """Time whole decode steps of Llama-3-8B against the bytes they read, and the host's share."""
    return step_part(device, timer, console, "llama-3-8b", step_bench.CASES)


def step_part(
    device: torch.device,
    timer: Timer,
    console: Console,
    model: str,
    cases: Sequence[tuple[int, int]],
    gap_batch: int = 64,
) -> Mapping[str, Any]:
    """Time decode steps of a model; see `schedlab.gpu_backend.step_bench`."""
    copy = ceilings.device_copy(device, timer, 2**31 if device.type == "cuda" else 2**24)
    config = step_bench.bench_config(cases)
    runner = open_runner(model, config, device=str(device))
    gap = step_bench.host_gap_figure(runner, config, min(gap_batch, config.max_num_seqs))
    eager = None
    if runner.graph_buckets:
        eager = ModelRunner(runner.decoder, config, use_graphs=False)
    figures = [*step_bench.decode_step_figures(runner, eager, config, copy.rate, cases), gap]
    return _figures_part(console, "decode steps", copy.rate, figures)


def _figures_part(
    console: Console, title: str, copy_rate: float, figures: Sequence[Figure]
) -> Mapping[str, Any]:
    rows = [
        (f.name, f"{f.value:.3g} {f.unit}", _goal(f, f.required), _goal(f, f.stretch), f.detail)
        for f in figures
    ]
    _print(console, title, ("what", "measured", "required", "stretch", "how"), rows)
    return {
        "device_copy_bytes_per_s": copy_rate,
        "figures": [
            {**f._asdict(), "meets_required": f.meets(f.required),
             "meets_stretch": f.meets(f.stretch)}
            for f in figures
        ],
    }  # fmt: skip


PARTS: dict[str, Part] = {
    "versions": versions,
    "ceilings": limits,
    "correctness": correctness,
    "bench": bench,
    "steps": steps,
    "tiles": tiles,
}


def run_parts(
    names: Sequence[str],
    device: torch.device,
    timer: Timer,
    folder: Path | None,
    console: Console,
) -> int:
    """Run parts of the check, in the order given.

    Parameters
    ----------
    names : sequence of str
        Keys of `PARTS`.
    device : torch.device
    timer : Timer
        How to measure on it.
    folder : Path or None
        Where each part's ``NAME.json`` goes, as soon as the part is done.
    console : Console
        Where the tables go.

    Returns
    -------
    int
        0, or 1 if a correctness check failed.
    """
    failed = 0
    for name in names:
        start_s = time.perf_counter()
        result = PARTS[name](device, timer, console)
        took_s = time.perf_counter() - start_s
        failed += result.get("failed", 0)
        console.print(f"{name}: {took_s:.0f} s")
        if folder is not None:
            record = {"part": name, "kernels": kernel_hash(), "took_s": took_s, **result}
            write_text(folder / f"{name}.json", json_text(record))
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m schedlab.gpu_backend.selfcheck", description=__doc__.splitlines()[0]
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder for JSON files")
    parser.add_argument(
        "--only", action="append", choices=[*PARTS], metavar="PART",
        help=f"run this part ({', '.join(PARTS)}); may be repeated. Default: all but tiles",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate", action="store_true", help="then calibrate Llama-3-8B into DIR/profile"
    )
    parser.add_argument(
        "--compare", metavar="SPEC.yaml", type=Path,
        help="then run a comparison into DIR/comparison, by the profile in DIR if there is one, in "
        "sittings of less than eight minutes: repeat the command with --only versions to go on",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if (options.calibrate or options.compare) and options.output is None:
        parser.error("--calibrate and --compare write files: give -o DIR")
    if options.compare and not options.compare.is_file():
        parser.error(f"--compare: there is no file {options.compare}")
    try:
        device = open_device("cuda")
    except SpecError as error:
        print(f"selfcheck: nothing was measured. {error}", file=sys.stderr)
        return 2
    names = options.only or [name for name in PARTS if name != "tiles"]
    status = run_parts(names, device, cuda_timer, options.output, Console())
    for command in laboratory_commands(options.output, options.calibrate, options.compare):
        # A process of its own: it finds the whole memory of the device free.
        torch.cuda.empty_cache()
        status = max(status, subprocess.run([sys.executable, "-m", *command]).returncode)
    return status


def laboratory_commands(
    folder: Path, with_calibration: bool, comparison: Path | None
) -> list[list[str]]:
    """Return the commands of the laboratory that go on where the check ends.

    Parameters
    ----------
    folder : Path
        For ``profile`` and ``comparison``.
    with_calibration : bool
    comparison : Path or None
        Specification of the comparison.
    """
    commands = []
    profile = folder / "profile"
    if with_calibration:
        commands.append([
            "schedlab", "calibrate", "--device", "cuda", "--model", "llama-3-8b",
            "--max-num-seqs", "256", "--max-num-batched-tokens", "8192",
            "--max-model-len", "8192", "-o", str(profile),
        ])  # fmt: skip
    if comparison is not None:
        command = [
            "schedlab", "compare", str(comparison), "-o", str(folder / "comparison"),
            "--keep", str(folder / "measured"), "--max-s", str(_SITTING_S),
        ]  # fmt: skip
        if with_calibration or (profile / "fit.json").is_file():
            command.append(f"cost_model={profile}")
        commands.append(command)
    return commands


def _goal(figure: Figure, goal: float | None) -> str:
    if goal is None:
        return ""
    sign = "<=" if figure.smaller_is_better else ">="
    if math.isnan(figure.value):
        return f"{sign} {goal:.3g}: ?"
    return f"{sign} {goal:.3g}: {'yes' if figure.meets(goal) else 'NO'}"


def _print(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
