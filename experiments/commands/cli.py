"""The command `schedlab`: what it offers, told without importing any of it.

Help is asked for far more often than anything is run, and should be there at once: the overview
is written here, and `app`, with the library that parses command lines, imported for all else.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Callable

from schedlab.experiments.commands.exit_codes import INTERRUPTED, USER_ERROR

COMMANDS = {
    "run": ("run", "Run an experiment: all points of its sweep."),
    "check": (
        "check",
        "Check an experiment, every point of its sweep included, and run nothing.",
    ),
    "sweep": ("sweep", "Run a sweep by many workers; run it again and only what is missing runs."),
    "find": (
        "sweep",
        "Find the largest or least value within constraints: the highest rate, the fewest engines.",
    ),
    "tune": (
        "sweep",
        "Find the best values within constraints: of engine limits, policies, fleets.",
    ),
    "recommend": (
        "recommend",
        "Search how to serve a model within latency targets: a vllm serve line, what to expect.",
    ),
    "batch-means": ("results", "Say how sure the mean latencies of one long run are."),
    "by-class": (
        "results",
        "Show what each class of requests got: SLO attainment, goodput, longest wait, fairness.",
    ),
    "compare": (
        "results",
        "Say which policy beats which, by how much and how surely, over the seeds they share.",
    ),
    "plot": (
        "results",
        "Draw figures of finished runs and searches: all that suit, or those asked for.",
    ),
    "report": (
        "results",
        "Write one HTML page of finished runs or a search, that needs no network.",
    ),
    "log": ("results", "Send finished runs to MLflow or Weights & Biases."),
    "measure": (
        "measure",
        "Run an experiment on the real backend and in simulation, and say how far they differ.",
    ),
    "validate": (
        "validate",
        "Predict recorded runs of a real engine, SPEC or a file of load tests: measured, error.",
    ),
    "calibrate": (
        "measure",
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
        "Import profiles of other projects, learn kernels from them, or fit one anew.",
    ),
    "predictor": ("predictor", "Train and test predictors of output length."),
    "policy": ("policy", "Prove policies."),
    "regress": (
        "regress",
        "Guard a fixed matrix of policies, workloads and seeds against regressions.",
    ),
}
"""Module that has it in its `app`, and what the overview says of it: the first sentence of its own
help. A module of its name is a group of commands."""

_OPTIONS = {
    "--version": "Print the version.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the "
    "installation.",
    "-h, --help": "Show this message and exit.",
}
_LEAST_COLUMNS, _MOST_COLUMNS = 50, 78


def overview(width: int | None = None) -> str:
    """Return what `schedlab --help` says, in lines of so many columns; of the terminal if None."""
    import textwrap

    if width is None:
        width = max(min(_terminal_columns() - 2, _MOST_COLUMNS), _LEAST_COLUMNS)

    def table(rows: dict[str, str]) -> str:
        indent = 4 + max(map(len, rows))
        return "\n".join(
            textwrap.fill(
                text,
                width,
                initial_indent=f"  {name}".ljust(indent),
                subsequent_indent=" " * indent,
            )
            for name, text in rows.items()
        )

    return f"""\
Usage: schedlab [OPTIONS] COMMAND [ARGS]...

  A laboratory for LLM-serving request scheduling.

Options:
{table(_OPTIONS)}

Commands:
{table({name: told for name, (_, told) in COMMANDS.items()})}

  Start with: schedlab run quickstart
"""


def main() -> None:
    """Run the command line."""
    # Being terminated cleans up half-written results just as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _buffer_output()
    warnings.formatwarning = _told(warnings.formatwarning)
    if sys.argv[1:] in (["--help"], ["-h"]):
        try:
            print(overview(), end="", flush=True)
        except BrokenPipeError:
            drop_output()
            sys.exit(1)
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            drop_what_has_no_room()
            sys.exit(USER_ERROR)
        return
    try:
        from schedlab.experiments.commands.app import app
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    app(prog_name="schedlab")


def _told(otherwise: Callable[..., str]) -> Callable[..., str]:
    """Return what writes each of our warnings once, as all else is told: no line of source."""
    seen: set[str] = set()

    def text(
        message: Warning | str, category: type[Warning], *where: object, **more: object
    ) -> str:
        if category.__module__.partition(".")[0] == "schedlab":
            line = "" if str(message) in seen else f"warning: {message}\n"
            seen.add(str(message))
            return line
        return otherwise(message, category, *where, **more)

    return text


def drop_output() -> None:
    """Let Python flush into nothing at its exit: who read our output is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def drop_what_has_no_room() -> None:
    """Let Python not try again at its exit to write what a full disk did not take."""
    try:
        if sys.stdout is not None:  # None: closed by the caller
            sys.stdout.flush()
    except OSError:
        drop_output()


def _buffer_output() -> None:
    """Give Python's stdout a buffer where it has none (PYTHONUNBUFFERED), flushed after each line.

    What the system takes only a part of, Python writes on only from a buffer: without one, output
    ends where a disk is full, and nobody is told.
    """
    own = sys.__stdout__
    if own is None or sys.stdout is not own or not isinstance(own.buffer, io.RawIOBase):
        return
    sys.stdout = open(  # noqa: SIM115 - for as long as this process lives
        own.fileno(), "w", buffering=1, encoding=own.encoding, errors=own.errors, closefd=False
    )


def _terminal_columns() -> int:
    """Return how wide the terminal is, as `shutil.get_terminal_size` does, which imports much."""
    try:
        return int(os.environ.get("COLUMNS", "")) or 80
    except ValueError:
        pass
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        return 80


if __name__ == "__main__":
    main()
