"""Whether a test notices a mutant: the tests to ask, and asking them in a process of its own."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.mutants.mutation import Mutation, mutations
from tests.mutants.slips import Slip, every_slip

ROOT = Path(__file__).resolve().parents[2]
# Slow, or about something else than what a simulation gives.
LEFT_OUT = {
    "test_cli_report",
    "test_notebooks",
    "test_plots",
    "test_predictor_training",
    "test_predictors_trained",
    "test_report_page",
    "test_sweeping",
    "test_traces_fetch",
    "test_wheel",
}
# As `make unit`: files that import nothing but simulator and policies.
_OTHERS = re.compile(r"schedlab\.(experiments|gpu_backend|traces)|notebook")
# Laws of these policies are asked whatever the mutant; and those of the policy it is in.
LAWFUL = ("fcfs", "srtf", "static", "vtc", "sarathi")
LAWS = "tests/property/test_laws.py"
# The golden tables that know most of a room: asked before anything else, for speed alone.
TABLES = {
    "sim.core": "wild",
    "sim.kv": "wild",
    "sim.cost": "prices or import",
    "sim.hardware": "memory",
    "sim.drive": "fleet or router or front",
    "sim.record": "fleet or metrics",
    "sim.metrics": "metrics",
    "policies.routers": "router",
    "policies.predictors": "predictor",
    "experiments.statistics": "verdicts or intervals",
}
MEMORY_BYTES = 6 << 30


@dataclass(frozen=True)
class Mutant:
    """A bug and its file."""

    path: str
    bug: Mutation | Slip

    @property
    def module(self) -> str:
        """The module's name."""
        return "schedlab." + self.path.removesuffix(".py").replace("/", ".")

    @property
    def room(self) -> str:
        """Its folder."""
        return self.path.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.bug.line}: {self.bug.change}"


@dataclass(frozen=True)
class Fate:
    """What became of a mutant.

    Attributes
    ----------
    caught : bool
        Whether anything failed.
    how : str
        "failed", "hung", "died" or "survived".
    seconds : float
        Wall time.
    """

    caught: bool
    how: str
    seconds: float


class _Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a bug."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.mutant.module:
            return None
        where = str(ROOT / self.mutant.path)
        return importlib.util.spec_from_file_location(name, where, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = (ROOT / self.mutant.path).read_text(encoding="utf-8")
        changed = self.mutant.bug.planted(source)
        exec(compile(changed, str(ROOT / self.mutant.path), "exec"), module.__dict__)


def every_mutant(subjects: list[str]) -> list[Mutant]:
    """Return every mutant of the Python files below folders (or of files), in order."""
    paths = [
        path
        for subject in subjects
        for path in (
            [ROOT / subject] if subject.endswith(".py") else sorted((ROOT / subject).rglob("*.py"))
        )
    ]
    return [
        Mutant(path.relative_to(ROOT).as_posix(), mutation)
        for path in paths
        if path.name != "__init__.py"
        for mutation in mutations(path.read_text(encoding="utf-8"))
    ]


def slip_mutants(subjects: list[str]) -> list[Mutant]:
    """Return the slips planted by hand in files whose path begins with one of `subjects`.

    Those whose line is no longer there are named on standard error, and left out.
    """
    found = []
    for slip in every_slip():
        if slip.path.startswith(tuple(subjects)):
            try:
                slip.place((ROOT / slip.path).read_text(encoding="utf-8"))
                found.append(Mutant(slip.path, slip))
            except (ValueError, FileNotFoundError) as error:
                print(error, file=sys.stderr)
    return found


def asked_of(module: str, briefly: bool) -> list[list[str]]:
    """Return the test files to ask of a module, in turn: its own, golden, the unit layer, laws.

    Its own are those that name it, those named after it first; of a policy, the small golden runs
    of it before them. Of what is neither simulator nor policy only its own and golden are asked,
    and so they are of anything `briefly`; of a policy then its laws as well.
    """
    _, package, *_, subject = module.split(".")
    simulates = package in ("sim", "policies")
    own, others = [], []
    rooms = ["unit", "property", "theory", "torture"]
    rooms += ["gpu"] if package == "gpu_backend" else []
    for path in sorted(p for room in rooms for p in (ROOT / "tests" / room).glob("test_*.py")):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        if name == LAWS or (simulates and path.stem in LEFT_OUT):
            continue
        if module in text or f'"{subject}"' in text or subject in path.stem:
            own.append((subject not in path.stem, "property" in name, len(text), name))
        elif path.parent.name == "unit" and not _OTHERS.search(text):
            others.append(name)
    golden = ["tests/golden/test_golden.py"]
    first = [table for room, table in TABLES.items() if module.startswith(f"schedlab.{room}")]
    turns = [[*golden, "-k", table] for table in first]
    turns += [[name for *_, name in sorted(own)], golden]
    if simulates and not briefly:
        turns += [others, [LAWS, "-k", " or ".join({*LAWFUL, subject})]]
    if package == "policies":
        turns.insert(0, [*golden, "-k", f"small_runs and {subject}"])
        turns += [[LAWS, "-k", subject]] if briefly else []
    return [turn for turn in turns if turn]


def judge(mutant: Mutant | None, limit_s: float) -> Fate:
    """Ask the tests about a mutant, or about no bug at all, in a child process.

    Parameters
    ----------
    mutant : Mutant or None
        The bug.
    limit_s : float
        CPU time after which it hangs.
    """
    start = time.monotonic()
    child = multiprocessing.get_context("fork").Process(target=_ask, args=(mutant, limit_s))
    child.start()
    # Processes that wait for each other take no CPU time.
    child.join(10 * limit_s)
    how = {None: "hung", 0: "survived", 1: "failed", -signal.SIGXCPU: "hung"}.get(
        child.exitcode, "died"
    )
    if child.pid is not None and child.exitcode is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    return Fate(how != "survived", how, time.monotonic() - start)


def _ask(mutant: Mutant | None, limit_s: float) -> None:
    os.setpgid(0, 0)
    os.chdir(ROOT)
    os.environ["SCHEDLAB_DATA"] = str(ROOT / "no-data-folder")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (round(limit_s), round(limit_s) + 5))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import pytest

    module, briefly = "schedlab.sim.core.engine", True
    if mutant is not None:
        sys.meta_path.insert(0, _Hook(mutant))
        module, briefly = mutant.module, isinstance(mutant.bug, Slip)
    options = ["-q", "-x", "-m", "not slow", "--hypothesis-profile=quick", "-p", "no:cacheprovider"]
    for asked in asked_of(module, briefly):
        code = pytest.main([*options, *asked])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            os._exit(1)
    os._exit(0)
