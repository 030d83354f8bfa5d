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
import linecache
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tests.mutants.asking import DEAR, LAWS, Asked, asked_of, in_turn, module_of
from tests.mutants.mutation import Mutation, mutations
from tests.mutants.reaching import Beacons, Reached, Survey
from tests.mutants.slips import LIST, Slip, every_slip

ROOT = Path(__file__).resolve().parents[2]
MEMORY_BYTES = 6 << 30
OPTIONS = ("-q", "--hypothesis-profile=quick", "-p", "no:cacheprovider")
UNDECIDED, UNREACHED = 2, 3


@dataclass(frozen=True)
class Mutant:
    """A bug and its file."""

    path: str
    bug: Mutation | Slip | Beacons

    @property
    def module(self) -> str:
        """The module's name."""
        return module_of(self.path)

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
        "failed", "hung" (a single test did), "died", "survived", "unreached" (no test was seen to
        run its line, and it outlived those asked instead), or "undecided": asking all of them would
        have taken too long.
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
        where = ROOT / self.mutant.path
        inside = [str(where.parent)] if where.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, str(where), loader=self, submodule_search_locations=inside
        )

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
        for mutation in mutations(path.read_text(encoding="utf-8"))
    ]


def slip_mutants(subjects: list[str], written: Path = LIST) -> list[Mutant]:
    """Return the slips of a list in files whose path begins with one of `subjects`.

    Those whose line is no longer there are named on standard error, and left out.
    """
    found = []
    for slip in every_slip(written.read_text(encoding="utf-8")):
        if slip.path.startswith(tuple(subjects)):
            try:
                slip.place((ROOT / slip.path).read_text(encoding="utf-8"))
                found.append(Mutant(slip.path, slip))
            except (ValueError, FileNotFoundError) as error:
                print(error, file=sys.stderr)
    return found


def runs_at_import(mutant: Mutant) -> bool:
    """Whether a bug lies outside the bodies of functions, or in one that its module calls."""
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    line = mutant.bug.line
    around = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.body[0].lineno <= line <= (node.end_lineno or 0)
    }
    called = {
        node.func.id
        for node in _outside_functions(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return not around or not around.isdisjoint(called)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)


def plant(mutant: Mutant) -> list[FunctionType]:
    """Give the functions that a bug changes their new code, wherever they are; return them.

    Of a module that nobody has imported yet there are none: it will be imported with the bug.
    """
    if mutant.module not in sys.modules:
        sys.meta_path.insert(0, _Hook(mutant))
        return []
    path = ROOT / mutant.path
    source = path.read_text(encoding="utf-8")
    changed = mutant.bug.planted(source)
    old, new = (
        {
            (code.co_qualname, code.co_firstlineno): code
            for code in _codes(compile(text, "", "exec"))
        }
        for text in (source, changed)
    )
    planted = []
    gc.unfreeze()  # what was imported by then is kept out of it else (conftest.py)
    for thing in gc.get_objects():
        if type(thing) is not FunctionType:
            continue
        code = thing.__code__
        key = code.co_qualname, code.co_firstlineno
        if key in new and old.get(key) != new[key] and Path(code.co_filename).resolve() == path:
            thing.__code__ = new[key].replace(co_filename=code.co_filename)
            planted.append(thing)
            if "triton" in thing.__globals__:
                _show(thing, changed)
    return planted


def _show(function: FunctionType, planted: ast.Module | str) -> None:
    """Let Triton's interpreter, which runs what it reads in a kernel's file, read the bug."""
    code = function.__code__
    for node in ast.walk(ast.parse(planted) if isinstance(planted, str) else planted):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if decorators and decorators[0].lineno == code.co_firstlineno:
            name = f"{code.co_filename}, {function.__name__} with a bug"
            above = ["\n"] * (code.co_firstlineno - 1)
            lines = [*above, *(f"{line}\n" for line in ast.unparse(node).splitlines())]
            linecache.cache[name] = (0, None, lines, name)
            function.__code__ = code.replace(co_filename=name)


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

    def survey(self, mutants: Sequence[Mutant], path: Path, slow: bool) -> None:
        """Run every test in a child, and write down which lines each runs.

        Parameters
        ----------
        mutants : sequence of Mutant
            Whose lines.
        path : Path
            The file.
        slow : bool
            Whether those marked slow, too, but for the `DEAR`.
        """
        lines: dict[str, list[tuple[int, str]]] = {}
        for mutant in mutants:
            lines.setdefault(mutant.path, []).append((mutant.bug.line, str(mutant)))
        child = os.fork()
        if child == 0:
            try:
                beacons = [Mutant(name, Beacons(tuple(some))) for name, some in lines.items()]
                for one in beacons:
                    plant(one)
                seen = Survey([one.module for one in beacons])
                self._config.pluginmanager.register(seen)
                self._config.get_terminal_writer()._file = io.StringIO()
                is_slow = _slowness(self._items)
                asked = [n for n in is_slow if not is_slow[n] or (slow and not DEAR.search(n))]
                self._run([self._items[node] for node in asked])
                seen.write(path)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError("tests could not be run to see which lines they run")

    def _run(self, items: Sequence[Any], before: Callable[[], None] = lambda: None) -> None:
        for item, after in zip_longest(items, items[1:]):
            before()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)

    def judge(
        self,
        mutant: Mutant,
        limit_s: float,
        planted: bool = True,
        reached: Reached | None = None,
    ) -> Fate:
        """Ask the tests about a mutant in a child.

        Parameters
        ----------
        mutant : Mutant
            The bug, in the body of a function.
        limit_s : float
            CPU time: a test that takes it hangs, and asking stops after as much.
        planted : bool
            Otherwise there is no bug, and its module's own tests and the golden tables are asked:
            one that fails then would count every bug as caught.
        reached : mapping, optional
            What `survey` saw: those that run its line are asked, fastest first; if none is known
            to (kernels in Triton's interpreter, other processes), as without it.
        """
        start = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                os.setpgid(0, 0)
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
                os._exit(self._ask(mutant, folder, planted, writing, limit_s, reached))
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

    def _ask(
        self,
        mutant: Mutant,
        folder: Path,
        planted: bool,
        writing: int,
        limit_s: float,
        reached: Reached | None,
    ) -> int:
        """Run the tests to ask; the first that fails is written down and ends the process."""
        confined = _Confined(limit_s)
        asked = asked_of(mutant.module, isinstance(mutant.bug, Slip))
        if planted:
            plant(mutant)
        else:
            asked = [one for one in asked if one.file != LAWS and not one.slow]
        self._config._tmp_path_factory._basetemp = folder
        self._config.get_terminal_writer()._file = io.StringIO()
        nodes = in_turn(asked, _slowness(self._items))
        seconds = {} if reached is None else reached.get(str(mutant), {})
        if planted and seconds:
            nodes = sorted(seconds, key=seconds.__getitem__)
        self._config.pluginmanager.register(_Quits(writing))

        def before() -> None:
            if planted and _cpu_s() > limit_s:
                os._exit(UNDECIDED)
            confined.begin_anew()

        self._run([self._items[node] for node in nodes], before)
        return 0 if seconds or reached is None else UNREACHED


class _Quits:
    """A plugin of pytest: ends the process at the first failure."""

    def __init__(self, writing: int) -> None:
        self._writing = writing

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self._writing, report.nodeid.encode())
            os._exit(1)


class _Chosen:
    """A plugin of pytest: leaves the tests to ask of a module, in turn, while there is time."""

    def __init__(self, asked: list[Asked], limit_s: float) -> None:
        self._asked = asked
        self._limit_s = limit_s
        self._confined = _Confined(limit_s)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        of_node = {item.nodeid: item for item in items}
        items[:] = [of_node[node] for node in in_turn(self._asked, _slowness(of_node))]

    def pytest_runtest_logstart(self) -> None:
        if _cpu_s() > self._limit_s:
            os._exit(UNDECIDED)
        self._confined.begin_anew()


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
    outlived = {0: "survived", UNDECIDED: "undecided", UNREACHED: "unreached"}
    how = (outlived | {1: "failed", -signal.SIGXCPU: "hung"}).get(status, "died")
    return Fate(status not in outlived, how, time.monotonic() - start_s, by)


def _slowness(items: dict[str, Any]) -> dict[str, bool]:
    return {node: item.get_closest_marker("slow") is not None for node, item in items.items()}


def _cpu_s() -> float:
    """Return the CPU time of this process and of those that it waited for."""
    return sum(os.times()[:4])


class _Confined(threading.Thread):
    """Ends its process, by SIGXCPU, once that takes too much CPU time.

    Ten times as much passes at the most: processes that wait for each other take none.
    RLIMIT_CPU would do it, too; but where a process has that, some kernels tell its CPU time in
    pieces of 4 ms, and tests of steps that are timed by it fail without any bug.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(daemon=True)
        self._limit_s = limit_s
        self.begin_anew()
        self.start()

    def begin_anew(self) -> None:
        """Count from now on."""
        self._until_s = time.process_time() + self._limit_s
        self._late_s = time.monotonic() + 10 * self._limit_s

    def run(self) -> None:
        while time.process_time() < self._until_s and time.monotonic() < self._late_s:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGXCPU)


def _ask_anew(mutant: Mutant, limit_s: float) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.chdir(ROOT)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import pytest

    sys.meta_path.insert(0, _Hook(mutant))
    asked = asked_of(mutant.module, isinstance(mutant.bug, Slip))
    files = list(dict.fromkeys(one.file for one in asked))
    code = pytest.main([*OPTIONS, "-x", *files], plugins=[_Chosen(asked, limit_s)])
    os._exit(code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))
