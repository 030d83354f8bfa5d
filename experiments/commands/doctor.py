"""What of this machine schedlab can use, and what the lack of the rest costs."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer

from schedlab import core
from schedlab.experiments.commands.terminal import print_table

_REQUIRED = (
    "simpy", "numpy", "pyarrow", "scipy", "matplotlib", "pyyaml", "pydantic", "jinja2",
    "typer", "rich", "mypy-extensions", "librt",
)  # fmt: skip
_OPTIONAL = {
    "torch": "the real backend; simulation needs none of it",
    "triton": "GPU kernels of the real backend; simulation needs none of it",
    "tiktoken": "exact token counts of traces that hold only text (they are estimated without)",
    "transformers": "Hugging Face tokenizers for traces that hold only text",
}

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class ReportLine:
    """One line of the report.

    Attributes
    ----------
    subject : str
        What was looked at.
    state : str
        ``ok``, ``missing`` (something optional) or ``broken`` (schedlab cannot work).
    detail : str
        Version, place or size; for what is missing, what that costs.
    """

    subject: str
    state: Literal["ok", "missing", "broken"]
    detail: str


def examine() -> list[ReportLine]:
    """Look at Python, packages, GPU, data folder, working directory and machine.

    Returns
    -------
    list of ReportLine
        In the order of a report; nothing heavy is imported, except torch where it is installed
        (only it can tell whether CUDA works).
    """
    return [
        _python(),
        _core(),
        *(_required(name) for name in _REQUIRED),
        *(_optional(name, cost) for name, cost in _OPTIONAL.items()),
        _cuda(),
        _data_folder(),
        _working_directory(),
        _machine(),
    ]


def _python() -> ReportLine:
    state: Literal["ok", "broken"] = "ok" if sys.version_info >= (3, 11) else "broken"
    return ReportLine(
        "python", state, f"{platform.python_version()} ({sys.executable}); needs 3.11"
    )


def _core() -> ReportLine:
    if core.running() != "python":
        return ReportLine("core", "ok", core.running())
    cost = "simulations take several times as long, with the same results"
    why = core.why_not() or "SCHEDLAB_CORE asks for the Python one"
    return ReportLine("core", "missing", f"Python; of the compiled one: {why}; {cost}")


def _required(name: str) -> ReportLine:
    try:
        return ReportLine(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return ReportLine(name, "broken", f"not installed; run: pip install {name}")


def _optional(name: str, cost: str) -> ReportLine:
    try:
        return ReportLine(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return ReportLine(name, "missing", f"needed for {cost}")


def _cuda() -> ReportLine:
    if importlib.util.find_spec("torch") is None:
        return ReportLine("CUDA", "missing", "cannot be asked without torch; simulation needs none")
    try:
        import torch

        if torch.cuda.is_available():
            return ReportLine(
                "CUDA", "ok", f"{torch.cuda.get_device_name(0)}, {torch.version.cuda}"
            )
    except Exception as error:  # a broken torch is one line of the report, not its end
        return ReportLine(
            "CUDA", "missing", f"torch does not load: {type(error).__name__}: {error}"
        )
    return ReportLine("CUDA", "missing", "torch sees no device; simulation needs none")


def _data_folder() -> ReportLine:
    named = os.environ.get("SCHEDLAB_DATA")
    if named and Path(named).is_dir():
        return ReportLine("data folder", "ok", named)
    reason = f"SCHEDLAB_DATA is {named}, no folder" if named else "SCHEDLAB_DATA is not set"
    return ReportLine(
        "data folder", "missing", f"{reason}; only tests against real traces need it (they skip)"
    )


def _working_directory() -> ReportLine:
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()):
            return ReportLine("working directory", "ok", f"{Path.cwd()} is writable")
    except OSError as error:
        return ReportLine(
            "working directory", "missing", f"not writable ({error}): use run -o FOLDER"
        )


def _machine() -> ReportLine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    detail = f"{cores} cores, {platform.system()} {platform.machine()}"
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return ReportLine("machine", "ok", f"{detail}, memory unknown")
    return ReportLine("machine", "ok", f"{detail}, {memory / 2**30:.0f} GiB memory")


@app.command()
def doctor() -> None:
    """Check packages, GPU, data folder and machine."""
    findings = examine()
    print_table(
        "schedlab doctor",
        ("", "state", ""),
        [(finding.subject, finding.state, finding.detail) for finding in findings],
    )
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    try:
        typer.echo(f"schedlab {metadata.version('schedlab')}")
    except metadata.PackageNotFoundError:
        typer.echo("schedlab (not installed: run from a checkout)")
