"""Whether a test notices a mutant: the tests to ask, and asking them in a process of its own.

Two ways lead there. A process that has collected the tests forks, and the child gives functions
other code (`Children`): nothing is imported again. A bug in a line that runs at import is planted
by an import hook in a process that begins anew (`judge_anew`).
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

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
GOLDEN = "tests/golden/test_golden.py"
# The golden tables that know most of a room: asked before anything else, for speed alone.
TABLES = {
    "sim.core": "wild|combined (fcfs|fastserve|hygen|plas|sarathi|vtc)",
    "sim.kv": "wild|combined (fcfs|fastserve|sarathi)",
    "sim.cost": "prices|import",
    "sim.hardware": "memory",
    "sim.drive": "fleet|router|front",
    "sim.record": "fleet|metrics",
    "sim.metrics": "metrics",
    "sim.speculation": "combined (fcfs|sarathi|vtc)",
    "policies.autoscalers": "combined fleets",
    "policies.migrators": "combined fleets",
    "policies.routers": "router|combined fleets",
    "policies.speculation": "combined (fcfs|sarathi|vtc)",
    "policies.predictors": "predictor",
    "experiments.statistics": "verdicts|intervals",
    "experiments.analysis": "compared|figures of runs",
    "experiments.claims": "claim",
    "experiments.comparing": "backends|replay|overheads",
    "experiments.figures": "figure|backends",
    "experiments.regression": "regression|baseline",
    "experiments.report": "report",
    "experiments.results": "tables|report",
    "experiments.running": "resolved|requests|recommendation",
    "experiments.search": "search|tuning|recommendation|bracket",
    "experiments.specification": "keys|resolved|expanded|refused",
    "experiments.sweeps": "planned|times|tables",
    "experiments.training": "learned",
    "gpu_backend": "calibration|pools|clocks|sittings|fit|measured|layouts|tiles|samples",
    "traces": "file|arrivals|draw|classes|turns|load tests",
}
MEMORY_BYTES = 6 << 30
OPTIONS = ("-q", "-m", "not slow", "--hypothesis-profile=quick", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Mutant:
    """A bug and its file."""

    path: str
    bug: Mutation | Slip

    @property
    def module(self) -> str:
        """The module's name."""
        inside = self.path.removeprefix("schedlab/").removesuffix(".py")
        return "schedlab." + inside.replace("/", ".")

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
        "failed", "hung", "died|"survived".
    seconds : float
        Wall time.
    by : str
        The test that failed, if that is known.
    """

    caught: bool
    how: str
    seconds: float
    by: str = ""


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


def asked_of(module: str, briefly: bool) -> list[tuple[str, str]]:
    """Return the tests to ask of a module, in turn: files, and what the names of tests hold.

    First its own, then golden, the unit layer, laws. Its own are those that name it, those named
    after it first; of a policy, the small golden runs of it before them. Of what is neither
    simulator nor policy only its own and golden are asked, and so they are of anything `briefly`;
    of a policy then its laws as well.
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
    asked = [
        (GOLDEN, table) for room, table in TABLES.items() if module.startswith(f"schedlab.{room}")
    ]
    if package == "policies":
        asked.append((GOLDEN, f"(small_runs.*|combined ){subject}"))
    asked += [(name, "") for *_, name in sorted(own)]
    asked.append((GOLDEN, ""))
    if simulates and not briefly:
        asked += [(name, "") for name in others]
        asked.append((LAWS, "|".join({*LAWFUL, subject})))
    elif package == "policies":
        asked.append((LAWS, subject))
    return asked


def in_turn(asked: Sequence[tuple[str, str]], nodes: Sequence[str]) -> list[str]:
    """Return the tests among those collected that are asked for, each once."""
    of_file: dict[str, list[str]] = {}
    for node in nodes:
        of_file.setdefault(node.partition("::")[0], []).append(node)
    found: dict[str, None] = {}
    for file, name in asked:
        for node in of_file.get(file, ()):
            if re.search(name, node):
                found.setdefault(node)
    return list(found)


def runs_at_import(mutant: Mutant) -> bool:
    """Whether a bug lies outside the bodies of functions."""
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    line = mutant.bug.line
    return not any(
        isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(tree)
    )


def plant(mutant: Mutant) -> list[FunctionType]:
    """Give the functions that a bug changes their new code, wherever they are; return them.

    Of a module that nobody has imported yet there are none: it will be imported with the bug.
    """
    if mutant.module not in sys.modules:
        sys.meta_path.insert(0, _Hook(mutant))
        return []
    path = ROOT / mutant.path
    source = path.read_text(encoding="utf-8")
    old, new = (
        {
            (code.co_qualname, code.co_firstlineno): code
            for code in _codes(compile(text, "", "exec"))
        }
        for text in (source, mutant.bug.planted(source))
    )
    planted = []
    for thing in gc.get_objects():
        if type(thing) is not FunctionType:
            continue
        code = thing.__code__
        key = code.co_qualname, code.co_firstlineno
        if key in new and old.get(key) != new[key] and Path(code.co_filename).resolve() == path:
            thing.__code__ = new[key].replace(co_filename=code.co_filename)
            planted.append(thing)
    return planted


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class Children:
    """A plugin of pytest: instead of running the tests that were collected, does `work`.

    Parameters
    ----------
    work : callable
        Called with this object, when all is collected.
    """

    def __init__(self, work: Callable[[Children], None]) -> None:
        self._work = work
        self._items: dict[str, Any] = {}
        self._config: Any = None

    def pytest_runtestloop(self, session: Any) -> bool:
        """Stand in for pytest's own loop."""
        self._items = {item.nodeid: item for item in session.items}
        self._config = session.config
        self._work(self)
        return True

    def judge(self, mutant: Mutant, limit_s: float, planted: bool = True) -> Fate:
        """Ask the tests about a mutant in a child.

        Parameters
        ----------
        mutant : Mutant
            The bug, in the body of a function.
        limit_s : float
            CPU time after which it hangs.
        planted : bool
            Otherwise there is no bug, and its module's own tests are asked: they should pass.
        """
        start = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                _confine(limit_s)
                self._ask(mutant, folder, planted, writing)
                os._exit(0)
            except Exception as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as told:
            by = told.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shutil.rmtree(folder, ignore_errors=True)
        return _fate(status, start, by)

    def _ask(self, mutant: Mutant, folder: Path, planted: bool, writing: int) -> None:
        """Run the tests to ask; the first that fails is written down and ends the process."""
        asked = asked_of(mutant.module, isinstance(mutant.bug, Slip))
        if planted:
            plant(mutant)
        else:
            asked = [(file, name) for file, name in asked if file not in (GOLDEN, LAWS)]
        self._config._tmp_path_factory._basetemp = folder
        self._config.get_terminal_writer()._file = io.StringIO()
        items = [self._items[node] for node in in_turn(asked, list(self._items))]
        self._config.pluginmanager.register(_Quits(writing))
        for item, after in zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


class _Quits:
    """A plugin of pytest: ends the process at the first failure."""

    def __init__(self, writing: int) -> None:
        self._writing = writing

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self._writing, report.nodeid.encode())
            os._exit(1)


class _Chosen:
    """A plugin of pytest: leaves the tests to ask of a module, in turn."""

    def __init__(self, asked: list[tuple[str, str]]) -> None:
        self._asked = asked

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        of_node = {item.nodeid: item for item in items}
        items[:] = [of_node[node] for node in in_turn(self._asked, list(of_node))]


def judge_anew(mutant: Mutant, limit_s: float) -> Fate:
    """Ask the tests about a mutant in a process that imports its module with the bug.

    Parameters
    ----------
    mutant : Mutant
        The bug, anywhere.
    limit_s : float
        CPU time after which it hangs.
    """
    start = time.monotonic()
    child = multiprocessing.get_context("spawn").Process(target=_ask_anew, args=(mutant, limit_s))
    child.start()
    # Processes that wait for each other take no CPU time.
    child.join(10 * limit_s)
    status = child.exitcode
    if child.pid is not None and status is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    return _fate(-signal.SIGXCPU if status is None else status, start)


def _fate(status: int, start_s: float, by: str = "") -> Fate:
    how = {0: "survived", 1: "failed", -signal.SIGXCPU: "hung"}.get(status, "died")
    return Fate(how != "survived", how, time.monotonic() - start_s, by)


def _confine(limit_s: float) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (round(limit_s), round(limit_s) + 5))


def _ask_anew(mutant: Mutant, limit_s: float) -> None:
    _confine(limit_s)
    os.chdir(ROOT)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import pytest

    sys.meta_path.insert(0, _Hook(mutant))
    asked = asked_of(mutant.module, isinstance(mutant.bug, Slip))
    files = list(dict.fromkeys(file for file, _ in asked))
    code = pytest.main([*OPTIONS, "-x", *files], plugins=[_Chosen(asked)])
    os._exit(code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))
