"""The `predictor` commands: train a predictor, and test one on other data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from schedlab.experiments.commands.terminal import print_lines, print_table
from schedlab.sim.text import json_text

app = typer.Typer(
    help="Train and test predictors of output length.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Kind = Literal["listmle", "pointwise", "buckets", "random_forest", "knn"]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON instead.")]
Tokenizer = Annotated[
    str, typer.Option(help="Who counts the tokens of text: auto, estimate, or a tokenizer's name.")
]


@app.command("train")
def train_command(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help="Answered prompts (a trace with text); for knn a results folder."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Model folder to write.")
    ],
    kind: Annotated[
        Kind,
        typer.Option(
            help="listmle ranks; pointwise and buckets for comparison; random_forest and knn are "
            "those of Magnus."
        ),
    ] = "listmle",
    encoder: Annotated[
        str,
        typer.Option(help="Who reads the text: hashed, minilm, or hf:FOLDER (not random_forest)."),
    ] = "hashed",
    num_buckets: Annotated[int, typer.Option(min=2, help="Classes of buckets.")] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    learning_curve: Annotated[
        bool, typer.Option(help="Also train on 1,000, 3,000 and 8,000 prompts.")
    ] = True,
    tokenizer: Tokenizer = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a predictor and report its rank correlation, latency and cost of learning."""
    from schedlab.experiments.results.results_folder import check_replaceable, replacing_folder
    from schedlab.experiments.training.dataset import read_dataset
    from schedlab.experiments.training.train import Training, train, train_estimator
    from schedlab.sim.errors import SpecError, nearest

    if kind in ("random_forest", "knn") and encoder != "hashed":
        raise SpecError(f"--encoder: {kind} has no encoder to choose")
    if encoder.startswith("hf:"):
        encoder = f"hf:{Path(encoder.removeprefix('hf:')).expanduser().resolve()}"
    elif encoder not in ("hashed", "minilm"):
        choices = ["hashed", "minilm", "hf:FOLDER"]
        raise SpecError(f"--encoder: unknown encoder {encoder!r}; {nearest(encoder, choices)}")
    check_replaceable(output)
    with replacing_folder(output) as folder:
        if kind == "knn":
            report = train_estimator(data, folder, seed=seed)
        else:
            training = Training(kind, encoder, num_buckets, seed)
            report = train(
                training,
                read_dataset(data, seed=seed, tokenizer=tokenizer),
                folder,
                learning_curve=learning_curve,
                progress=None if quiet else _say,
            )
    if as_json:
        typer.echo(json_text(report))
    elif not quiet:
        _print_report(report)
        typer.echo(f"model: {output}")


@app.command("evaluate")
def evaluate_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Answered prompts; for knn a results folder.")
    ],
    tokenizer: Tokenizer = "auto",
    as_json: AsJson = False,
) -> None:
    """Test a model: on the prompts kept out of its training, or on all of another file."""
    from schedlab.experiments.training.evaluate import evaluate

    report = evaluate(model, data, tokenizer=tokenizer)
    if as_json:
        typer.echo(json_text(report))
    else:
        _print_report(report)


@app.command("held-out")
def held_out_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="The file it was trained on.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Ends in .jsonl or .jsonl.gz.")
    ],
    tokenizer: Tokenizer = "auto",
) -> None:
    """Write the prompts a model did not learn from, as a trace to run experiments on."""
    from schedlab.experiments.training.evaluate import write_held_out

    written = write_held_out(model, data, output, tokenizer=tokenizer)
    typer.echo(f"wrote {written:,} prompts to {output}")


def _say(done: int, total: int, what: str) -> None:
    typer.echo(f"[{done + 1}/{total}] {what}", err=True)


def _print_report(report: Mapping[str, Any]) -> None:
    test = report["test"]
    typer.echo()
    if report["kind"] == "knn":
        times = [
            (name.replace("_", " "), "-" if value is None else f"{value:,.4g}")
            for name, value in test.items()
        ]
        print_table("", ("serving times", ""), times)
    else:
        _print_quality(test)
        if len(report.get("learning_curve", ())) > 1:
            typer.echo()
            _print_curve(report["learning_curve"])
    latency = report["latency_s"]
    tail = f", P99 {latency['p99'] * 1e3:.2f} ms" if "p99" in latency else ""
    print_lines(
        [
            "",
            f"a prediction takes {latency['median'] * 1e3:.2f} ms{tail} on this machine",
            *report.get("notes", ()),
        ]
    )


def _print_quality(test: Mapping[str, Any]) -> None:
    found = {"overall": test}
    if "application_mean" in test:
        found["mean of the application"] = test["application_mean"]
    if "gain" in test:
        found["gain over that mean"] = test["gain"]
    for name, inside in test["by_application"].items():
        found[f"within {name or '(none)'}"] = inside
    rows = []
    for name, one in found.items():
        error = one.get("mean_absolute_error_tokens")
        rows.append(
            (
                name,
                f"{one['num_prompts']:,}" if "num_prompts" in one else "",
                _estimate(one, "kendall_tau", "interval"),
                _estimate(one, "pairs_right", "pairs_right_interval"),
                "" if error is None else f"{error:,.1f}",
            )
        )
    print_table("", ("", "prompts", "Kendall's tau-b", "pairs right", "mean error, tokens"), rows)


def _print_curve(curve: list[Mapping[str, Any]]) -> None:
    print_table(
        "",
        ("learned from prompts", "tokens generated for it", "Kendall's tau-b", "CPU s"),
        [
            (
                f"{point['num_prompts']:,}",
                f"{point['generated_tokens']:,}",
                _estimate(point, "kendall_tau", "interval"),
                f"{point['training_cpu_s']:.1f}",
            )
            for point in curve
        ],
    )


def _estimate(found: Mapping[str, Any], value: str, interval: str) -> str:
    if found[value] is None:
        return "-"
    low, high = found[interval] or (float("nan"), float("nan"))
    return f"{found[value]:.3f} [{low:.3f}, {high:.3f}]"
