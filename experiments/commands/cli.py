"""The command `schedlab`: thin commands over the library; heavy imports inside them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from schedlab.experiments.commands.claims import claims
from schedlab.experiments.commands.compare import calibrate, compare
from schedlab.experiments.commands.experiment import (
    AsJson,
    Metrics,
    Overrides,
    Quiet,
    SpecFile,
    known_metrics,
    load_experiment,
    results_folder,
    with_experiment,
)
from schedlab.experiments.commands.policy import policy_app
from schedlab.experiments.commands.predictor import predictor_app
from schedlab.experiments.commands.profile import profile_app
from schedlab.experiments.commands.regress import regress_app
from schedlab.experiments.commands.running import (
    INTERRUPTED,
    NumWorkers,
    check_backend,
    points_bar,
    print_results,
)
from schedlab.experiments.commands.sweep import add_sweep_commands
from schedlab.experiments.commands.terminal import print_lines, print_table
from schedlab.experiments.commands.trace import trace_app
from schedlab.experiments.commands.validate import validate
from schedlab.sim.errors import SchedlabError
from schedlab.sim.text import json_text

USER_ERROR = 2


class _Commands(TyperGroup):
    """Turns errors meant for users into one line and an exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except SchedlabError as error:
            _complain(f"error: {with_experiment(str(error))}")
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            _complain("interrupted; nothing was written")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output is gone; stop quietly, also when Python flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            _complain(f"error: {error}")
            raise typer.Exit(USER_ERROR) from None
        except MemoryError as error:
            _complain(f"error: {with_experiment(f'not enough memory: {error}')}")
            raise typer.Exit(USER_ERROR) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Start with: schedlab run quickstart",
)
app.add_typer(trace_app, name="trace")
app.add_typer(profile_app, name="profile")
app.add_typer(predictor_app, name="predictor")
app.add_typer(policy_app, name="policy")
app.add_typer(regress_app, name="regress")


@app.command()
def run(
    spec_file: SpecFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Results folder; results/<name> if not given."),
    ] = None,
    jobs: NumWorkers = 1,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Also write trace.json for ui.perfetto.dev.")
    ] = False,
    metric: Metrics = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: all points of its sweep."""
    from schedlab.experiments.figures.figures import draw_throughput
    from schedlab.experiments.results.results_folder import (
        add_to_marker,
        check_replaceable,
        replacing_folder,
    )
    from schedlab.experiments.results.saved_results import read_results, summary
    from schedlab.experiments.sweeps.sweep_all import run_into
    from schedlab.experiments.sweeps.workers import InProcess, Processes

    spec = load_experiment(spec_file, overrides)
    check_backend(spec, jobs, None)
    asked = known_metrics(metric)
    folder = output or results_folder(spec)
    check_replaceable(folder)
    with replacing_folder(folder) as new, points_bar(quiet) as progress:
        with InProcess(progress.requests_done, True) if jobs == 1 else Processes(jobs) as workers:
            results = run_into(spec, new, workers, progress.point_ended)
        draw_throughput(results)
        for point in results.runs if perfetto else ():
            point.load().to_perfetto(point.folder / "trace.json")
            add_to_marker(point.folder, ["trace.json"])
    if as_json:
        typer.echo(json_text(summary(spec, results)))
    elif not quiet:
        # Further metrics are computed from the tables, which are at their place now.
        print_results(read_results(folder) if asked else results, spec.name, asked)
        print_lines([f"results: {folder}"])


add_sweep_commands(app)


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder.")],
) -> None:
    """Draw figures of a finished run into its folder."""
    from schedlab.experiments.figures.figures import draw

    for path in draw(folder):
        typer.echo(path)


@app.command("report")
def report_page(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.html", help="DIR/report.html if not given."),
    ] = None,
) -> None:
    """Write one HTML page of a finished run or sweep, that needs no network."""
    from schedlab.experiments.report.page import write_page

    typer.echo(write_page(folder, output))


for _command in (compare, validate, calibrate, claims):
    app.command()(_command)


@app.command("metrics")
def list_metrics(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/metrics.md.")
    ] = False,
) -> None:
    """List what can be measured of a run: unit, better, parameters, definition."""
    from schedlab.experiments.results.metric_table import metric_rows, metric_tables

    if markdown:
        typer.echo(metric_tables(), nl=False)
        return
    print_table(
        "metrics (NAME, NAME(parameter=value), or module:function)",
        ("name", "unit", "better", "definition"),
        [row for rows in metric_rows().values() for row in rows],
    )


@app.command()
def policies() -> None:
    """List policies and predictors: purpose, source, knobs."""
    from schedlab.policies import registry
    from schedlab.policies.predictors import registry as predictors

    print_table(
        "policies (policy: NAME, or policy: {name: NAME, knob: value})",
        ("name", "purpose", "source", "knobs"),
        [
            (name, _purpose(cls) + _needs(cls.needs_prediction), cls.source, _knobs(cls.knobs()))
            for name, cls in ((name, registry.policy_class(name)) for name in registry.names())
        ],
    )
    print_table(
        "predictors (policy: {name: NAME, predictor: NAME})",
        ("name", "purpose", "source", "knobs"),
        [
            (name, _purpose(cls), cls.source, _knobs(cls.knobs()))
            for name, cls in ((n, predictors.predictor_class(n)) for n in predictors.names())
        ],
    )


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Made if need be.")] = Path("."),
) -> None:
    """Write an experiment and a policy to start from."""
    from schedlab.experiments.specification.starter import write_starter

    for path in write_starter(folder):
        typer.echo(path)
    there = "" if folder == Path(".") else f"cd {folder} && "
    typer.echo(f"next: {there}schedlab run spec.yaml")
    typer.echo(
        "then: schedlab run spec.yaml policy=longest_first:LongestPromptFirst -o longest-first"
    )


@app.command()
def examples(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this one, to change it.")
    ] = None,
) -> None:
    """List the experiments that come with schedlab (run NAME), or print one."""
    from schedlab.experiments.specification.shipped import (
        experiment_file,
        shipped_experiments,
        title,
    )

    if name is not None:
        path = experiment_file(name)
        typer.echo(f"# A copy of {path}; files it names are relative to that folder.")
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
        return
    print_table(
        "experiments (schedlab run NAME)",
        ("name", "what it asks"),
        [(name, title(path)) for name, path in shipped_experiments().items()],
    )


@app.command("cost-models")
def cost_models() -> None:
    """List cost models: what they go by, and their knobs."""
    from schedlab.sim.cost import registry

    print_table(
        "cost models (cost_model: NAME, or {name: NAME, knob: value}; those read from a profile: "
        "cost_model: FOLDER, or {profile: FOLDER, knob: value})",
        ("name", "purpose", "profile", "knobs"),
        [
            (
                name,
                _purpose(registry.maker(name)),
                registry.profile_files().get(name, "-"),
                _knobs(registry.knobs(name)),
            )
            for name in registry.names()
        ],
    )


@app.command()
def models() -> None:
    """List known models (a config.json works, too)."""
    from schedlab.sim.hardware.models import model, model_names

    print_table(
        "models (model: NAME)",
        ("name", "parameters", "layers", "KV B/token (bf16)", "max_model_len", "source"),
        [
            (
                name,
                f"{shape.num_parameters / 1e9:.2f} B",
                str(shape.num_layers),
                f"{shape.kv_bytes_per_token('bf16'):,}",
                f"{shape.max_model_len:,}",
                shape.source,
            )
            for name, shape in ((name, model(name)) for name in model_names())
        ],
    )


@app.command()
def gpus() -> None:
    """List known GPUs (a YAML of datasheet numbers works, too)."""
    from schedlab.sim.hardware.gpus import gpu, gpu_names

    print_table(
        "GPUs (hardware: NAME)",
        ("name", "memory GiB", "bandwidth TB/s", "dense bf16 TFLOP/s", "source"),
        [
            (
                name,
                f"{device.memory_bytes / 2**30:.1f}",
                f"{device.memory_bytes_per_s / 1e12:.2f}",
                f"{device.flops_per_s['bf16'] / 1e12:.0f}" if "bf16" in device.flops_per_s else "-",
                device.source,
            )
            for name, device in ((name, gpu(name)) for name in gpu_names())
        ],
    )


@app.command()
def doctor() -> None:
    """Check packages, GPU, data folder and machine."""
    from schedlab.experiments.commands.doctor import examine

    findings = examine()
    print_table(
        "schedlab doctor",
        ("", "state", ""),
        [(finding.subject, finding.state, finding.detail) for finding in findings],
    )
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table of all keys instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from schedlab.experiments.specification.schema import json_schema, key_table

    typer.echo(key_table() if markdown else json_text(json_schema(), indent=2), nl=not markdown)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib import metadata

    try:
        typer.echo(f"schedlab {metadata.version('schedlab')}")
    except metadata.PackageNotFoundError:
        typer.echo("schedlab (not installed: run from a checkout)")


def _asked_for_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_asked_for_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """A laboratory for LLM-serving request scheduling."""  # noqa: D401 - the help's first line


def main() -> None:
    """Run the command line."""
    # Being terminated cleans up half-written results just as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app(prog_name="schedlab")


def _complain(text: str) -> None:
    typer.echo(text, err=True)


def _purpose(maker: object) -> str:
    return (maker.__doc__ or "").strip().partition("\n")[0]


def _needs(prediction: bool) -> str:
    return " Needs a predictor." if prediction else ""


def _knobs(parameters: dict[str, Any]) -> str:
    shown = []
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty
        shown.append(name if required else f"{name}={parameter.default}")
    return ", ".join(shown) or "-"


if __name__ == "__main__":
    main()
