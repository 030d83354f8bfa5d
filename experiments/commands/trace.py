"""The `trace` commands: fetch a trace, describe it, convert it, draw a synthetic one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlab.experiments.commands import completion
from schedlab.experiments.commands.terminal import print_table
from schedlab.experiments.commands.trace_fetch import fetch_command
from schedlab.experiments.specification.own_modules import find_own_modules
from schedlab.sim.text import json_text

if TYPE_CHECKING:
    from schedlab.traces import Trace

app = typer.Typer(
    help="Fetch, look at, convert and draw request traces.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("fetch")(fetch_command)

Format = Annotated[
    str,
    typer.Option(
        "--format", "-f", help="Format of the file, or module:READER; recognised by default."
    ),
]
Tokenizer = Annotated[
    str,
    typer.Option(help="Who counts the tokens of text: auto, estimate, or a tokenizer's name."),
]
OutputTokens = Annotated[
    int | None, typer.Option(help="Output length of prompts whose file gives none.")
]
DropEmpty = Annotated[
    bool, typer.Option("--drop-empty", help="Leave rows with 0 tokens out instead of failing.")
]
Source = Annotated[
    Path, typer.Argument(metavar="FILE", help="A trace file, plain or gzip, or a fetched one.")
]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="Ends in .csv, .csv.gz or .parquet.")]


@app.command("describe")
def describe_command(
    file: Source,
    format: Format = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
    tokenizer: Tokenizer = "auto",
    default_output_tokens: OutputTokens = None,
    drop_empty: DropEmpty = False,
    sessions: Annotated[
        bool,
        typer.Option("--sessions", help="Let requests wait for the answers before them."),
    ] = False,
) -> None:
    """Show what a trace holds: rate, burstiness, lengths, correlation, prefixes, sessions."""
    from schedlab import traces

    find_own_modules()
    trace = traces.read(
        file,
        format,
        tokenizer=tokenizer,
        default_output_tokens=default_output_tokens,
        drop_empty=drop_empty,
        sessions=sessions,
    )
    _print_description(trace, as_json)


@app.command("convert")
def convert_command(
    source: Source,
    out: Target,
    format: Format = "auto",
    tokenizer: Tokenizer = "auto",
    default_output_tokens: OutputTokens = None,
    drop_empty: DropEmpty = False,
    to: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="schedlab, or burstgpt: CSV that vllm bench serve and AIPerf replay.",
        ),
    ] = "schedlab",
) -> None:
    """Write any readable trace as schedlab's own table, or as load generators read it."""
    from schedlab import traces

    find_own_modules()
    trace = traces.read(
        source,
        format,
        tokenizer=tokenizer,
        default_output_tokens=default_output_tokens,
        drop_empty=drop_empty,
    )
    traces.write(trace, out, to)
    _print_report(trace)
    typer.echo(f"wrote {len(trace):,} requests to {out}")


@app.command("synth")
def synth_command(
    out: Target,
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="See `trace presets`.", autocompletion=completion.presets
        ),
    ] = "azure-conv",
    num_requests: Annotated[
        int, typer.Option("--num-requests", "-n", min=1, max=100_000_000)
    ] = 1000,
    rate: Annotated[
        float | None,
        typer.Option(help="Mean requests a second (the preset's by default); inf: all at once."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Draw a synthetic trace from a preset and write it."""
    from schedlab import traces

    trace = traces.synthesize(num_requests, preset=preset, rate=rate, seed=seed)
    traces.write(trace, out)
    _print_report(trace)
    typer.echo(f"wrote {len(trace):,} requests to {out}")


@app.command("presets")
def presets_command() -> None:
    """List the workloads that can be drawn without a file; `synth` prints their sources."""
    from schedlab import traces

    print_table(
        "",
        ("preset", "req/s", "arrivals", "what it is"),
        [
            (one.name, "-" if one.process == "all_at_once" else f"{one.rate:g}", one.process,
             one.summary)
            for one in traces.PRESETS.values()
        ],
    )  # fmt: skip


@app.command("formats")
def formats_command() -> None:
    """List the file formats that can be read."""
    from schedlab import traces

    readers = traces.READERS.values()
    print_table("", ("format", "what it is"), [(one.name, one.summary) for one in readers])


def _print_report(trace: Trace) -> None:
    """Print what the reader or the generator did."""
    for line in trace.report.lines():
        typer.echo(line)


def _print_description(trace: Trace, as_json: bool) -> None:
    """Print the statistics of a trace, for people or for programs."""
    from schedlab.traces.statistics import describe

    stats = describe(trace)
    if as_json:
        typer.echo(json_text({"report": trace.report.lines(), **stats}, indent=2))
        return
    _print_report(trace)
    print_table(f"{stats['num_requests']:,} requests", *_lengths_table(stats))
    for title in ("arrivals", "correlation", "prefix", "sessions"):
        if stats.get(title) is not None:
            typer.echo()
            print_table("", (title, ""), _number_rows(stats[title]))


def _lengths_table(stats: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the table of prompt and output lengths."""
    columns = (stats["prompt_tokens"], stats["output_tokens"])
    rows = [
        (name, *(f"{column[name]:,.1f}" for column in columns))
        for name in ("mean", "std", "p50", "p90", "p99", "max")
    ]
    for family in ("lognormal", "gamma"):
        for parameter in columns[0][family]:
            values = (column[family][parameter] for column in columns)
            cells = ("-" if value is None else f"{value:,.3f}" for value in values)
            rows.append((f"{family} {parameter}", *cells))
    return ("tokens", "prompt", "output"), rows


_MEANINGS = {
    "duration_s": "first to last arrival, s",
    "rate": "mean rate, requests/s",
    "rate_per_minute_min": "slowest minute, requests/s",
    "rate_per_minute_max": "fastest minute, requests/s",
    "cv": "coefficient of variation of gaps",
    "gamma_shape_from_cv": "as bursty as gamma of shape",
    "zero_gap_share": "gaps of nothing, share",
    "gamma_shape": "gamma of the other gaps: shape",
    "gamma_scale_s": "its scale, s",
    "gamma_ks": "its distance (KS)",
    "exponential_ks": "distance of an exponential (KS)",
    "fano_10s": "variance / mean of counts in 10 s",
}
"""What the numbers of arrivals are called in a table; JSON keeps their names."""


def _number_rows(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of named numbers."""
    rows = []
    for key, value in numbers.items():
        name = _MEANINGS.get(key, key)
        if isinstance(value, dict):
            rows += [(f"{name} {at:,}", f"{part:.4g}") for at, part in value.items()]
        elif isinstance(value, int):
            rows.append((name, f"{value:,}"))
        else:
            rows.append((name, "-" if value is None else f"{value:.4g}"))
    return rows
