"""The command `schedlab`: thin commands over the library; heavy imports inside them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from experiments.trace_commands import trace_app
from sim.errors import SchedlabError

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.run_all import Outcome, Progress

INTERRUPTED = 130
USER_ERROR = 2


class _Commands(TyperGroup):
    """Turns errors meant for users into one line and an exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except SchedlabError as error:
            _complain(f"error: {error}")
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


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A laboratory for LLM-serving request scheduling.",
    epilog="Start with: schedlab run experiments/quickstart.yaml",
)
app.add_typer(trace_app, name="trace")


@app.command()
def run(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="The experiment.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes, e.g. engine.max_num_seqs=64."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Results folder; results/<name> if not given."),
    ] = None,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Also write trace.json for ui.perfetto.dev.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")
    ] = False,
) -> None:
    """Run an experiment: all points of its sweep."""
    import json

    from experiments.loading import load_spec
    from experiments.results_folder import check_replaceable, replacing_folder
    from experiments.run_all import run_all, summary

    # Policies given as module:Class live beside the experiment or in the working directory.
    sys.path += [str(Path.cwd()), str(spec_file.absolute().parent)]
    spec = load_spec(spec_file, overrides or [])
    folder = output or Path("results") / "".join(
        c if c not in '/\\:*?"<>|' else "_" for c in spec.name
    )
    check_replaceable(folder)
    with replacing_folder(folder) as new, _progress_bar(quiet) as progress:
        outcome = run_all(spec, new, perfetto=perfetto, progress=progress)
    if as_json:
        typer.echo(json.dumps(summary(spec, outcome), indent=1))
    elif not quiet:
        _print_outcome(outcome, spec.name, folder)


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder.")],
) -> None:
    """Draw figures of a finished run into its folder."""
    from experiments.figures import draw

    for path in draw(folder):
        typer.echo(path)


@app.command()
def compare(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="The experiment.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes, e.g. real.repeats=2."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Results folder; results/<name>-compared if absent."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Run an experiment on the real backend and in simulation, and say how far they differ."""
    from experiments.compare import compare as run_comparison
    from experiments.compare import markdown, write
    from experiments.loading import load_spec
    from experiments.results_folder import check_replaceable, replacing_folder

    sys.path += [str(Path.cwd()), str(spec_file.absolute().parent)]
    spec = load_spec(spec_file, overrides or [])
    folder = output or Path("results") / f"{spec.name}-compared"
    check_replaceable(folder)
    with replacing_folder(folder) as new, _steps_bar(quiet) as progress:
        found = run_comparison(spec, progress)
        write(found, spec, new)
    if not quiet:
        typer.echo(markdown(found, spec))
        typer.echo(f"results: {folder}")


@app.command()
def calibrate(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Profile folder, e.g. profiles/cpu/NAME.")
    ],
    model: Annotated[str, typer.Option(help="A known model or a config.json.")] = "schedlab-small",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:INDEX.")] = "cpu",
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
    seed: Annotated[int, typer.Option(min=0)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Measure this machine and fit a cost model to it: a profile that simulations can use."""
    from experiments.calibrate import calibrate as run_calibration
    from experiments.calibrate import calibration_config, detected_hardware

    hardware = hardware or detected_hardware(device)
    dtype = dtype or ("fp32" if device == "cpu" else "bf16")
    config = calibration_config(
        model, hardware, dtype,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, block_size=block_size, num_blocks=num_blocks,
    )  # fmt: skip
    with _steps_bar(quiet) as progress:
        found = run_calibration(
            output, model_name=model, hardware=hardware, device=device, dtype=dtype,
            config=config, num_rounds=rounds, seed=seed, progress=progress,
        )  # fmt: skip
    if not quiet:
        typer.echo(found.verdict)
        typer.echo(f"profile: {output}")


@app.command()
def policies() -> None:
    """List policies and predictors: purpose, source, knobs."""
    from policies import registry
    from policies.predictors import registry as predictors

    _print_table(
        "policies (policy: NAME, or policy: {name: NAME, knob: value})",
        ("name", "purpose", "source", "knobs"),
        [
            (name, _purpose(cls) + _needs(cls.needs_prediction), cls.source, _knobs(cls.knobs()))
            for name, cls in ((name, registry.policy_class(name)) for name in registry.names())
        ],
    )
    _print_table(
        "predictors (policy: {name: NAME, predictor: NAME})",
        ("name", "purpose", "source", "knobs"),
        [
            (name, _purpose(cls), cls.source, _knobs(cls.knobs()))
            for name, cls in ((n, predictors.predictor_class(n)) for n in predictors.names())
        ],
    )


@app.command()
def models() -> None:
    """List known models (a config.json works, too)."""
    from sim.models import model, model_names

    _print_table(
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
    from sim.hardware import gpu, gpu_names

    _print_table(
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
    from experiments.doctor import examine

    findings = examine()
    _print_table(
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
    import json

    from experiments.schema import json_schema, key_table

    typer.echo(key_table() if markdown else json.dumps(json_schema(), indent=2), nl=not markdown)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib import metadata

    try:
        typer.echo(f"schedlab {metadata.version('schedlab')}")
    except metadata.PackageNotFoundError:
        typer.echo("schedlab (not installed: run from a checkout)")


def main() -> None:
    """Run the command line."""
    # Being terminated cleans up half-written results just as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app(prog_name="schedlab")


def _complain(text: str) -> None:
    typer.echo(text, err=True)


def _console() -> Console:
    from rich.console import Console

    # Files and pipes have no width of their own: wide enough for every column of the tables.
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=180 if wide else None)


def _print_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, no_wrap=i == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _console().print(table)


def _print_outcome(outcome: Outcome, name: str, folder: Path) -> None:
    from rich.text import Text

    from experiments import report

    console = _console()
    console.print(report.table(outcome.rows, name))
    for line in report.notes(outcome.cost_models, outcome.warnings):
        console.print(Text(line))
    console.print(Text(f"results: {folder}"))


@contextmanager
def _progress_bar(quiet: bool) -> Iterator[Progress | None]:
    """Give a callback that draws a bar on stderr; None where nobody would see it."""
    with _bar(quiet) as update:
        if update is None:
            yield None
            return

        def show(done: int, points: int, label: str, requests_done: int, requests: int) -> None:
            part = requests_done / requests if requests else 0.0
            update(f"[{done + 1}/{points}] {label}", (done + part) / points)

        yield show


@contextmanager
def _steps_bar(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Give a callback (done, total, what comes next) that draws a bar on stderr, or None."""
    with _bar(quiet) as update:
        if update is None:
            yield None
        else:
            yield lambda done, total, what: update(f"[{done}/{total}] {what}", done / total)


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[str, float], None] | None]:
    """Give a callback (description, share done); None where nobody would see a bar."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(
            task, description=text.replace("[", "\\["), completed=share
        )


def _purpose(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


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
