"""The command that answers an operator: how to serve a model on the GPUs at hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from schedlab.experiments.commands import completion
from schedlab.experiments.commands.experiment import AsJson, Quiet
from schedlab.experiments.commands.running import AllCores, local_workers, opened_runs
from schedlab.experiments.commands.terminal import print_lines, print_table
from schedlab.sim.errors import SpecError
from schedlab.sim.text import json_text, number

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def recommend(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="A known model (schedlab models), or config.json.",
            autocompletion=completion.models,
        ),
    ],
    gpu: Annotated[
        str,
        typer.Option(
            metavar="GPU",
            help="A known GPU (schedlab gpus), or YAML.",
            autocompletion=completion.gpus,
        ),
    ],
    gpus: Annotated[
        int, typer.Option(metavar="N", min=1, max=1024, help="How many are at hand.")
    ] = 1,
    workload: Annotated[
        str,
        typer.Option(
            metavar="TRACE",
            autocompletion=completion.presets,
            help="A trace, a preset, or what vllm bench serve --save-detailed or GuideLLM saved.",
        ),
    ] = "azure-conv",
    ttft_ms: Annotated[
        float | None, typer.Option(metavar="MS", min=0, help="Target: time to the first token.")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(metavar="MS", min=0, help="Target: time for each later token.")
    ] = None,
    e2el_ms: Annotated[
        float | None, typer.Option(metavar="MS", min=0, help="Target: time to the last token.")
    ] = None,
    attainment: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0.01, max=1.0, help="Share of requests that must hold them."
        ),
    ] = 0.9,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            min=0,
            help="Requests/s to serve, on as few GPUs as do; else as many as can.",
        ),
    ] = None,
    vllm: Annotated[str, typer.Option(metavar="RELEASE", help="Of vLLM.")] = "0.32",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy to try, may be repeated; a few by default.",
            autocompletion=completion.policies,
        ),
    ] = None,
    cost_model: Annotated[
        str, typer.Option(metavar="PROFILE", help="Folder of a measured profile, or roofline.")
    ] = "roofline",
    dtype: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        typer.Option(help="Of weights and arithmetic, where a profile is of another than bf16."),
    ] = None,
    usd_per_hour: Annotated[
        float | None,
        typer.Option(metavar="USD", min=0, help="Price of a GPU; the table's by default."),
    ] = None,
    num_requests: Annotated[
        int,
        typer.Option(
            metavar="N", min=10, help="Of a run to begin with; the answer asks for longer ones."
        ),
    ] = 500,
    serve_as: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What vllm serve calls the model; its name on huggingface.co by default.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Folder for all of it; results/recommend-MODEL-GPU.",
        ),
    ] = None,
    jobs: AllCores = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search how to serve a model within latency targets: a vllm serve line, what to expect."""
    from schedlab.experiments.report.search_page import write_search_page
    from schedlab.experiments.search.recommend import Question, serve_line
    from schedlab.experiments.search.recommend import recommend as search
    from schedlab.experiments.search.recommend_report import (
        HEADER,
        expected_rows,
        recommend_data,
        recommend_lines,
        tried_rows,
    )
    from schedlab.experiments.search.search_report import write_json
    from schedlab.sim.files import write_text
    from schedlab.sim.hardware.gpus import canonical_gpu
    from schedlab.sim.hardware.models import model as known_model
    from schedlab.sim.hardware.models import repository

    targets = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2el_ms": e2el_ms}
    slo = {key: value for key, value in targets.items() if value is not None}
    for key, value in {**slo, "rate": rate, "usd_per_hour": usd_per_hour}.items():
        if value is not None and not 0 < value < math.inf:
            raise SpecError(
                f"--{key.replace('_', '-')} is {value:g}; it must be finite and more than 0"
            )
    if not slo:
        raise SpecError("say what is fast enough: --ttft-ms, --tpot-ms or --e2el-ms")
    shape = known_model(model)
    hardware = gpu if Path(gpu).suffix else canonical_gpu(gpu)
    asked = Question(
        model=model, hardware=hardware, num_gpus=gpus, workload=_workload(workload, num_requests),
        slo=slo, attainment=attainment, vllm=vllm, policies=tuple(policy or ()),
        cost_model=cost_model, rate=rate, usd_per_hour=usd_per_hour,
        served=serve_as or repository(model), dtype=dtype or "",
    )  # fmt: skip
    folder = output or Path("results") / f"recommend-{shape.name}-{Path(hardware).stem}"
    with opened_runs(folder, local_workers(jobs, []), quiet, light=True) as runs:
        found = search(asked, runs)
    data = recommend_data(found, runs.cost_models, runs.num_asked)
    write_json(data, folder / "recommend.json")
    write_text(folder / "serve.sh", serve_line(found) + "\n")
    page = write_search_page(folder)
    if as_json:
        typer.echo(json_text(data))
    elif not quiet:
        print_table("", HEADER, tried_rows(found), num_keys=6)
        typer.echo(f"\n{serve_line(found)}\n")
        title = f"expected at {number(found.at_rate)} requests/s"
        print_table(title, ("metric", "mean"), expected_rows(found))
        print_lines(["", *recommend_lines(found, runs.cost_models)])
        print_lines([f"{runs.num_asked} runs in {folder}; the page: {page}"])


def _workload(trace: str, num_requests: int) -> dict[str, Any]:
    """Return the workload section of a preset, or of a file whose rows are drawn again."""
    if Path(trace).exists():
        return {"trace": trace, "num_requests": num_requests, "resample": True}
    return {"trace": trace, "num_requests": num_requests}
