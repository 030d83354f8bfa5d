"""The `profile` commands: import what others measured, learn from it, or fit it anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlab.experiments.commands.terminal import print_lines, print_table
from schedlab.sim.text import percent

if TYPE_CHECKING:
    from schedlab.sim.cost.importers.imported import Imported

app = typer.Typer(
    help="Import profiles of other projects, learn kernels from them, or fit one anew.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
import_app = typer.Typer(
    help="Turn a published profile into a cost model: cost_model: FOLDER.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(import_app, name="import")

Output = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="FOLDER", help="Profile folder to write, e.g. profiles/NAME."
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option("--tensor-parallel-size", "--tp", min=1, help="Devices a layer is split over."),
]
LinkLatency = Annotated[float, typer.Option(min=0, help="Start-up of an all-reduce, microseconds.")]
LinkBandwidth = Annotated[float, typer.Option(min=0.001, help="One direction of a link, GB/s.")]


@import_app.command("llmservingsim")
def llmservingsim_command(
    path: Annotated[Path, typer.Argument(help="A variant's folder: perf/<HW>/<org>/<model>/bf16.")],
    output: Output,
    tensor_parallel_size: TensorParallel = 1,
    model_config: Annotated[
        Path | None, typer.Option(help="config.json of the model; found beside the bundle.")
    ] = None,
    architecture: Annotated[
        Path | None, typer.Option(help="YAML with the layers of a step; found beside the bundle.")
    ] = None,
    link_latency_us: LinkLatency = 10.0,
    link_gb_per_s: LinkBandwidth = 16.0,
    cluster: Annotated[
        Path | None, typer.Option(help="config.json of the cluster: its link, instead of the two.")
    ] = None,
    all_reduce: Annotated[
        Path | None,
        typer.Option(
            help="Measured all-reduces, instead of a ring over the link: num_workers, size_bytes, "
            "time_us, or Vidur's all_reduce.csv."
        ),
    ] = None,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Engines that share the experts (with --expert-parallel).")
    ] = 1,
    expert_parallel: Annotated[bool, typer.Option(help="Split experts over all devices.")] = False,
    skew: Annotated[
        bool | None,
        typer.Option(help="Correct for unequal contexts; meta.yaml decides by default."),
    ] = None,
) -> None:
    """LLMServingSim: kernel timings of vLLM by layer, with an attention grid."""
    from schedlab.sim.cost.importers.llmservingsim import Options, import_bundle, read_link

    link = (link_latency_us * 1e-6, link_gb_per_s * 1e9) if cluster is None else read_link(cluster)
    options = Options(
        tensor_parallel_size=tensor_parallel_size,
        model_config=model_config,
        architecture=architecture,
        link_latency_s=link[0],
        link_bytes_per_s=link[1],
        all_reduce=all_reduce,
        data_parallel_size=data_parallel_size,
        expert_parallel=expert_parallel,
        use_skew=skew,
    )
    imported = import_bundle(path, options)
    _save(imported, output)


@import_app.command("vidur")
def vidur_command(
    path: Annotated[Path, typer.Argument(help="compute/<gpu>/<org>/<model>/mlp.csv.")],
    output: Output,
    hardware: Annotated[str, typer.Option(help="The GPU, for what was not measured.")],
    model: Annotated[str | None, typer.Option(help="The model; the folder's name if absent.")] = (
        None
    ),
    tensor_parallel_size: TensorParallel = 1,
    network: Annotated[
        Path | None, typer.Option(help="network/<machine>/all_reduce.csv, for more than one GPU.")
    ] = None,
) -> None:
    """Vidur: linear layers and all-reduces; attention by roofline."""
    from schedlab.sim.cost.importers.vidur import import_vidur

    imported = import_vidur(path, hardware, model, tensor_parallel_size, network)
    _save(imported, output)


@import_app.command("splitwise")
def splitwise_command(
    path: Annotated[Path, typer.Argument(help="perf_model.csv.")],
    output: Output,
    model: Annotated[str, typer.Option(help="As the file names it, e.g. llama2-70b.")],
    hardware: Annotated[str, typer.Option(help="As the file names it, e.g. a100-80gb.")],
    tensor_parallel_size: TensorParallel = 8,
) -> None:
    """splitwise-sim: whole steps of a whole model."""
    from schedlab.sim.cost.importers.splitwise import import_splitwise

    imported = import_splitwise(path, model, hardware, tensor_parallel_size)
    _save(imported, output)


@import_app.command("aiconfigurator")
def aiconfigurator_command(
    model: Annotated[
        str,
        typer.Argument(
            help="E.g. meta-llama/Meta-Llama-3.1-8B, or a folder with the model's config.json."
        ),
    ],
    output: Output,
    hardware: Annotated[str, typer.Option(help="The GPU, e.g. h100.")],
    tensor_parallel_size: TensorParallel = 1,
    backend: Annotated[str, typer.Option(help="The engine that was measured.")] = "vllm",
    backend_version: Annotated[
        str | None, typer.Option(help="Its version; the package's default if absent.")
    ] = None,
    expert_parallel: Annotated[
        bool, typer.Option(help="Spread whole experts over the devices, instead of slicing each.")
    ] = False,
) -> None:
    """AIConfigurator: operator measurements of many GPUs (optional package)."""
    from schedlab.sim.cost.importers.aiconfigurator import import_aiconfigurator

    imported = import_aiconfigurator(
        model,
        hardware,
        tensor_parallel_size,
        backend,
        backend_version,
        expert_parallel=expert_parallel,
    )
    _save(imported, output)


@app.command("learn")
def learn_command(
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write, for cost_model.kernels."
        ),
    ],
    aiconfigurator: Annotated[
        Path | None,
        typer.Option(help="The folder systems/ of the package aiconfigurator-core."),
    ] = None,
    llmservingsim: Annotated[
        Path | None, typer.Option(help="The folder perf/ of LLMServingSim's profiler.")
    ] = None,
    vidur: Annotated[
        Path | None,
        typer.Option(help="The folder data/profiling/ of Vidur, which is compared and not learnt."),
    ] = None,
) -> None:
    """Learn what kernels reach of their GPUs from public tables, for the roofline."""
    from schedlab.sim.cost.learning.errors import layer_errors, table_errors
    from schedlab.sim.cost.learning.fit import learn
    from schedlab.sim.cost.learning.kernels_file import write_kernels
    from schedlab.sim.cost.learning.tables import (
        aiconfigurator_tables,
        llmservingsim_tables,
        vidur_tables,
    )

    tables = [] if aiconfigurator is None else list(aiconfigurator_tables(aiconfigurator))
    tables += [] if llmservingsim is None else list(llmservingsim_tables(llmservingsim))
    models = [] if vidur is None else list(vidur_tables(vidur))
    learnt = learn(tables)
    errors, layers = table_errors(tables, learnt), layer_errors(models, learnt)
    write_kernels(output, learnt, errors, layers)
    rows = [
        (e.gpu, e.kind, str(e.num_rows), percent(e.error),
         "-" if e.without_gpu is None else percent(e.without_gpu))
        for e in errors
    ]  # fmt: skip
    print_table(
        "mean absolute errors of kernels",
        ("GPU", "kernel", "rows", "learnt", "without this GPU"),
        rows,
    )
    layer_rows = [
        (name, model, percent(each["learnt"]),
         percent(each["other_models"]) if "other_models" in each else "-")
        for name, by_model in layers.items()
        for model, each in by_model.items()
    ]  # fmt: skip
    if layer_rows:
        print_table(
            "products of a layer, in tables that did not teach",
            ("GPU", "model", "learnt", "learnt on the other models"),
            layer_rows,
        )
    print_lines(
        [f"kernels: {output} (use them with cost_model: {{name: roofline, kernels: FILE}})"]
    )


@app.command("refit")
def refit_command(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="What schedlab calibrate wrote.")
    ],
    output: Output,
    level_of: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="A run that measure --keep kept where the profile was measured: it tells the "
            "level of steps. May be repeated.",
        ),
    ] = None,
) -> None:
    """Fit what a calibration measured anew, without its device."""
    from schedlab.experiments.comparing.fitted_profile import RUN_STEPS, refit

    typer.echo(refit(profile, output, level_of or []).verdict)
    if not (output / RUN_STEPS).exists():
        typer.echo("its steps are at the level of single batches; --level-of RUN takes a run's")
    typer.echo(f"profile: {output}")


def _save(imported: Imported, output: Path) -> None:
    """Write the profile; say what was assumed, and how to use it."""
    imported.save(output)
    lines = [f"assumed: {line}" for line in imported.assumptions]
    print_lines([*lines, f"profile: {output} (use it with cost_model: {output})"])
