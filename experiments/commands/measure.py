"""The commands of the real backend: calibrate a device, measure an experiment on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlab.experiments.commands.experiment import (
    Overrides,
    Quiet,
    SpecFile,
    load_experiment,
    results_folder,
)
from schedlab.experiments.commands.running import told_what_is_kept
from schedlab.experiments.commands.terminal import print_lines, print_table, steps_bar
from schedlab.sim.errors import SpecError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def _no_less_than_0(seconds: float) -> float:
    if not seconds >= 0:  # nan, too, which `min` lets pass in older Typers
        raise typer.BadParameter(f"must be >= 0, got {seconds:g}")
    return seconds


@app.command()
def measure(
    spec_file: SpecFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Results folder; results/<name>-compared if absent.",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder to keep measured runs in; those found there are not repeated.",
        ),
    ] = None,
    max_s: Annotated[
        float,
        typer.Option(
            "--time-limit-s",
            metavar="SECONDS",
            callback=_no_less_than_0,
            help="Begin no measured run that would end later than this (seconds); compare what "
            "there is then.",
        ),
    ] = float("inf"),
    check: Annotated[
        bool | None,
        typer.Option(
            help="Also run by the modelled clock: do both backends decide alike? On a CPU by "
            "default."
        ),
    ] = None,
    write_only: Annotated[
        bool, typer.Option(help="Measure nothing: compare the runs in --keep, on any machine.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on the real backend and in simulation, and say how far they differ."""
    from schedlab.experiments.comparing.compare import compare as run_comparison
    from schedlab.experiments.comparing.comparison_files import (
        HEADER,
        agreement_lines,
        point_lines,
        point_rows,
        runs_told,
        write,
    )
    from schedlab.experiments.results.results_folder import check_replaceable, replacing_folder

    spec = load_experiment(spec_file, overrides)
    if write_only and keep is None:
        raise SpecError("--write-only compares runs that were kept: give --keep FOLDER")
    folder = output or results_folder(spec, "compared")
    check_replaceable(folder)
    kept = told_what_is_kept(keep, "runs")
    with kept, replacing_folder(folder) as new, steps_bar(quiet) as progress:
        found = run_comparison(
            spec, progress, keep=keep, max_s=max_s, check=check, write_only=write_only
        )
        write(found, spec, new)
    if not quiet:
        for point in found:
            print_table(point.label, HEADER, point_rows(point))
            print_lines(["", *point_lines(point, spec), ""])
        lines = [f"do both backends rank alike? {line}" for line in agreement_lines(found)]
        print_lines([*lines, "error: simulated / measured - 1; spread: half the range of the "
                     "measured runs; interval: 95 %, a bootstrap over requests",
                     runs_told(found, spec), f"results: {folder}"])  # fmt: skip


@app.command()
def calibrate(
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Profile folder, e.g. profiles/cpu/NAME."
        ),
    ],
    model: Annotated[str, typer.Option(help="A known model or a config.json.")] = "schedlab-small",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:INDEX.")] = "cpu",
    engine: Annotated[
        str, typer.Option(help="Whose steps: schedlab's real backend, or vllm's loop.")
    ] = "schedlab",
    clock: Annotated[
        str,
        typer.Option(
            help="virtual: time as it passes; reference: CPU time, with the drift of a shared "
            "machine's speed taken out. The same as real.clock of what is compared."
        ),
    ] = "virtual",
    hardware: Annotated[
        str | None, typer.Option(help="Name in the GPU table; cpu, or found from the device.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 on a CPU, bf16 on a GPU.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(min=2)] = 256,
    max_model_len: Annotated[int, typer.Option(min=2)] = 1024,
    block_size: Annotated[int, typer.Option(min=1)] = 16,
    num_blocks: Annotated[
        int | None, typer.Option(help="KV blocks; as many as memory allows on a GPU.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Visits of every batch.")] = 5,
    max_s: Annotated[
        float,
        typer.Option(
            "--time-limit-s",
            metavar="SECONDS",
            callback=_no_less_than_0,
            help="Begin no round but the first that would end later than this (seconds).",
        ),
    ] = float("inf"),
    threads: Annotated[int, typer.Option(min=1, help="Of the kernels, on a CPU.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    quiet: Quiet = False,
) -> None:
    """Measure this machine and fit a cost model to it: a profile that simulations can use."""
    from schedlab.experiments.comparing.calibrate import calibrate as run_calibration
    from schedlab.experiments.comparing.calibrate import calibration_config
    from schedlab.experiments.comparing.machine import detected_hardware

    if engine not in ("schedlab", "vllm"):
        raise SpecError(f"--engine {engine}: unknown; schedlab or vllm")
    if clock not in ("virtual", "reference"):
        raise SpecError(f"--clock {clock}: a calibration knows virtual and reference")
    hardware = hardware or detected_hardware(device)
    dtype = dtype or ("fp32" if device == "cpu" else "bf16")
    config = calibration_config(
        model, hardware, dtype,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, block_size=block_size, num_blocks=num_blocks,
    )  # fmt: skip
    with told_what_is_kept(output, "readings"), steps_bar(quiet) as progress:
        found = run_calibration(
            output, model_name=model, hardware=hardware, device=device, dtype=dtype,
            config=config, engine=engine, clock=clock, threads=threads, num_rounds=rounds,
            max_s=max_s, seed=seed, progress=progress,
        )  # fmt: skip
    if not quiet:
        typer.echo(found.verdict)
        typer.echo(f"profile: {output}")
