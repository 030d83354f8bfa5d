"""The command `schedlab`: a command is imported when it is called, and heavy things inside it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from schedlab.experiments.commands.exit_codes import INTERRUPTED, USER_ERROR
from schedlab.experiments.commands.experiment import with_experiment
from schedlab.sim.errors import SchedlabError

_COMMANDS = {
    "run": ("run", "Run an experiment: all points of its sweep."),
    "sweep": ("sweep", "Run a sweep by many workers; run it again and only what is missing runs."),
    "find": (
        "sweep",
        "Find the largest value within bars (the section `find`), e.g. the highest request rate.",
    ),
    "tune": ("sweep", "Find the best values of engine limits within bars (the section `tune`)."),
    "batch-means": ("results", "Say how sure the mean latencies of one long run are."),
    "by-class": (
        "results",
        "Show what each class of requests got: SLO attainment, goodput, longest wait, fairness.",
    ),
    "compare-policies": (
        "results",
        "Say which policy beats which, by how much and how surely, over the seeds they share.",
    ),
    "plot": ("results", "Draw figures of a finished run into its folder."),
    "report": ("results", "Write one HTML page of a finished run or sweep, that needs no network."),
    "compare": (
        "compare",
        "Run an experiment on the real backend and in simulation, and say how far they differ.",
    ),
    "validate": (
        "validate",
        "Predict recorded runs of a real engine, SPEC or a file of load tests: measured, error.",
    ),
    "calibrate": (
        "compare",
        "Measure this machine and fit a cost model to it: a profile that simulations can use.",
    ),
    "claims": ("claims", "Hold what is claimed against simulations: a verdict for each figure."),
    "metrics": (
        "lists",
        "List what can be measured of a run: unit, better, parameters, definition.",
    ),
    "policies": ("lists", "List policies and predictors: purpose, source, knobs."),
    "init": ("starting", "Write an experiment and a policy to start from."),
    "examples": (
        "starting",
        "List the experiments that come with schedlab (run NAME), or print one.",
    ),
    "cost-models": ("lists", "List cost models: what they go by, and their knobs."),
    "models": ("lists", "List known models (a config.json works, too)."),
    "gpus": ("lists", "List known GPUs (a YAML of datasheet numbers works, too)."),
    "doctor": ("doctor", "Check packages, GPU, data folder and machine."),
    "schema": ("starting", "Print the JSON Schema of experiment files, for editors."),
    "version": ("doctor", "Print the version."),
    "trace": ("trace", "Fetch, look at, convert and draw request traces."),
    "profile": (
        "profile",
        "Import performance profiles of other projects, or learn kernels from them.",
    ),
    "predictor": ("predictor", "Train and test predictors of output length."),
    "policy": ("policy", "Prove policies."),
    "regress": (
        "regress",
        "Guard a fixed matrix of policies, workloads and seeds against regressions.",
    ),
}
"""Module that has it in its `app`, and what `schedlab --help` says of it: the first sentence of its
own help. A module of its name is a group of commands."""


class _OnDemand(Mapping[str, Any]):
    """Commands by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - click's
        module, _ = _COMMANDS[name]
        group = get_group(import_module(f"{__package__}.{module}").app)
        group.name = name
        return group.commands.get(name, group)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Commands(TyperGroup):
    """Imports commands on demand; turns errors meant for users into one line and an exit code."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(**settings)
        self.commands = _OnDemand()  # type: ignore[assignment]  # nobody adds to it

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - click's
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in _COMMANDS.items()])

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


def _asked_for_version(asked: bool) -> None:
    if asked:
        from schedlab.experiments.commands.doctor import version

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


if __name__ == "__main__":
    main()
