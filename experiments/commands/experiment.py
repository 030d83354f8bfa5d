"""The experiment a command is given: its file, modules of its own, where its results go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlab.experiments.commands import completion
from schedlab.experiments.specification.own_modules import find_own_modules

if TYPE_CHECKING:
    from schedlab.experiments.specification.experiment import ExperimentSpec

SpecFile = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC",
        help="Its file, or a name (schedlab examples).",
        autocompletion=completion.experiments,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes, e.g. engine.max_num_seqs=64.",
        autocompletion=completion.changes,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        "-m",
        metavar="METRIC",
        autocompletion=completion.metrics,
        help="A metric, e.g. 'largest(latency=itl)' or my_module:cost; may be repeated.",
    ),
]


_in_hand: list[str] = []


def load_experiment(spec_file: Path, overrides: list[str] | None) -> ExperimentSpec:
    """Return the experiment of a file with its changes; its own modules are found from now on."""
    from schedlab.experiments.specification.loading import load_spec

    find_own_modules(spec_file.absolute().parent)
    _in_hand[:] = [str(spec_file)]
    return load_spec(spec_file, overrides or [])


def with_experiment(message: str) -> str:
    """Return an error message that names the file of the experiment in hand, if there is one.

    What is found out only when a point is resolved or run knows the values, and not their lines.
    """
    known = [name for name in _in_hand if name not in message and "override '" not in message]
    return ": ".join([*known, message])


def known_metrics(names: list[str] | None) -> list[str]:
    """Return the metrics that a command is asked for, each of them known.

    Raises
    ------
    SpecError
        If one is not, before anything is run for it.
    """
    if not names:
        return []
    from schedlab.sim.metrics.registry import metric_named

    find_own_modules()
    return [metric_named(name).name for name in names]


def results_folder(spec: ExperimentSpec, kind: str = "") -> Path:
    """Return where results go if nobody says: results/<name>, or results/<name>-<kind>.

    A folder `results` that is itself a result (``-o results``) is no place for others: they go
    beside it then, below ``schedlab-results``.
    """
    name = "".join(c if c not in '/\\:*?"<>|' else "_" for c in spec.name)
    taken = any((Path("results") / file).exists() for file in ("points.json", "point.json"))
    parent = Path("schedlab-results" if taken else "results")
    return parent / (f"{name}-{kind}" if kind else name)
