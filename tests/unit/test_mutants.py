"""The list of slips planted by hand still fits the files it is about."""

import ast
import builtins
import inspect
import os
import signal
import time
from types import SimpleNamespace

import pytest

from schedlab.sim.metrics.fairness import jain_index
from tests.mutants.__main__ import SUBJECTS
from tests.mutants.asking import GOLDEN, Asked, asked_of, in_turn, module_of, names
from tests.mutants.judging import (
    Mutant,
    _Confined,
    every_mutant,
    plant,
    runs_at_import,
    slip_mutants,
)
from tests.mutants.reaching import CALL, Beacons, Survey
from tests.mutants.slips import ROOT, Slip, every_slip


def test_slips_change_what_they_say_of_a_file_and_few_are_older_than_it(capsys):
    slips = every_slip()
    assert len(slips) > 200
    assert len({(slip.path, slip.was) for slip in slips}) == len(slips)
    mutants = slip_mutants([""])
    outlived = len(slips) - len(mutants)
    assert outlived <= len(slips) / 10, capsys.readouterr().err
    for mutant in mutants:
        slip, source = mutant.bug, (ROOT / mutant.path).read_text(encoding="utf-8")
        changed = slip.planted(source)
        pairs = zip(source.splitlines(), changed.splitlines(), strict=True)
        differing = [(a.strip(), b.strip()) for a, b in pairs if a != b]
        was, now = slip.was.splitlines(), slip.now.splitlines()
        told = zip(was, now + [""] * (len(was) - len(now)), strict=True)
        assert differing == [(a.strip(), b.strip()) for a, b in told if a != b]


@pytest.mark.parametrize(("source", "times"), [("a = 1\n", 0), ("b = 1\nif a:\n    b = 1\n", 2)])
def test_slip_whose_line_is_gone_or_is_there_twice_is_refused_by_name(source, times):
    slip = Slip("sim/rng.py", "one too many", "b = 1", "b = 2")
    with pytest.raises(ValueError, match=rf"sim/rng\.py has this line {times} times, not once"):
        slip.planted(source)


def test_slips_written_wrongly_are_refused_with_their_heading():
    with pytest.raises(ValueError, match=r"'-' and '\+': sim/rng\.py: no new line"):
        every_slip("head\n\n@@ sim/rng.py: no new line\n-a = 1\n")
    first = "@@ sim/rng.py: the first of a list without a head\n-a = 1\n+a = 2\n"
    assert every_slip(first * 2) == every_slip(f"head\n\n{first * 2}")
    assert len(every_slip(first * 2)) == 2


def test_slip_of_several_lines_keeps_the_lines_behind_it_where_they_are():
    text = "@@ sim/rng.py: never\n-    if a:\n-        b = 1\n-    c = 2\n+    c = 2\n+    b = 1\n"
    [slip] = every_slip(text)
    source = "def f(a):\n    if a:\n        b = 1\n    c = 2\n    return b\n"
    assert slip.place(source) == 2
    assert slip.planted(source) == "def f(a):\n    c = 2\n    b = 1\n\n    return b\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("-a = 1\n+a = 2\n+b = 2\n", "no more lines than there were"),
        ("-  a = 1\n-  b = 1\n+a = 2\n", "indented less than the first line"),
        ("-a = 1\n+a = 2\n-b = 1\n", "write '@@ file: what is wrong', '-' and '.'"),
    ],
)
def test_slip_of_several_lines_that_cannot_be_planted_is_refused_with_its_cause(change, told):
    with pytest.raises(ValueError, match=told):
        every_slip(f"@@ sim/rng.py: odd\n{change}")


FAIRNESS = "sim/metrics/fairness.py"
BELOW = "below = len(x) * float(np.sum(x**2))"


@pytest.mark.slow
def test_bug_is_planted_in_functions_that_are_there_and_changes_what_they_give():
    mutant = Mutant(FAIRNESS, Slip(FAIRNESS, "no shares", BELOW, "below = 1.0"))
    code = jain_index.__code__
    try:
        assert jain_index in plant(mutant)
        assert jain_index([3.0, 1.0]) == 16.0
    finally:
        jain_index.__code__ = code
    assert jain_index([3.0, 1.0]) == 0.8


@pytest.mark.slow
def test_bug_in_a_kernel_is_in_what_is_read_of_its_source():
    pytest.importorskip("triton")
    from schedlab.gpu_backend.kernels.activation import silu_and_mul_kernel

    path, line = "gpu_backend/kernels/activation.py", "mask = columns < WIDTH"
    kernel = silu_and_mul_kernel.fn
    code, read = kernel.__code__, inspect.getsource(kernel)
    try:
        assert plant(Mutant(path, Slip(path, "masks one", line, "mask = columns > 1"))) == [kernel]
        said = inspect.getsource(kernel)
        assert "mask = columns > 1" in said
        assert line not in said
        assert said.startswith("@triton.jit\ndef silu_and_mul_kernel(")
        assert said.endswith(", mask=mask)\n"), "to its end"
    finally:
        kernel.__code__ = code
    assert inspect.getsource(kernel) == read


@pytest.mark.parametrize(
    ("line", "at_import"),
    [
        (BELOW, False),
        ("waits_ms = run.latencies.queue_time[run.completed]", False),
        ("def longest_wait(run: Observation) -> float:", True),
        ("import numpy as np", True),
    ],
)
def test_line_outside_the_bodies_of_functions_runs_at_import(line, at_import):
    assert runs_at_import(Mutant(FAIRNESS, Slip(FAIRNESS, "", line, "pass"))) is at_import


def test_line_of_a_function_that_its_module_calls_runs_at_import():
    path, line = (
        "gpu_backend/sitting_pieces.py",
        '"sweep.policy=[fcfs, prefill_first]", "real.repeats=1",',
    )
    assert runs_at_import(Mutant(path, Slip(path, "", line, "pass")))


def test_tests_are_asked_in_turn_and_each_once():
    nodes = {"a.py::one": False, "a.py::two[x]": False, "b.py::three": True, "c.py::four": False}
    asked = [Asked("a.py", "two"), Asked("b.py"), Asked("a.py"), Asked("d.py")]
    assert in_turn(asked, nodes) == ["a.py::two[x]", "a.py::one"]
    assert in_turn([*asked, Asked("b.py", slow=True)], nodes)[2:] == ["b.py::three"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("from schedlab.sim.cost import roofline, table", True),
        ("from schedlab.sim.cost import (\n    roofline,\n    table,\n)", True),
        ("import schedlab.sim.cost.table", True),
        ("import schedlab.sim.cost.tables", False),
        ("from schedlab.sim.cost import roofline\ntable = 1", False),
    ],
)
def test_module_is_named_whole_or_by_what_is_imported_from_its_package(text, named):
    assert names(text, "schedlab.sim.cost.table") is named


@pytest.mark.parametrize("briefly", [False, True])
def test_unit_tests_of_a_module_are_asked_before_golden_tables_and_broad_suites(briefly):
    asked = [one.file for one in asked_of("schedlab.sim.kv.tier", briefly)]
    first = asked[: asked.index(GOLDEN)]
    assert sorted(first[:2]) == ["tests/unit/test_kv_tiers.py", "tests/unit/test_shared_tier.py"]
    assert all(file.startswith("tests/unit/") for file in first)


def test_unit_tests_that_import_a_module_come_before_those_that_have_its_name_alone():
    asked = [one.file for one in asked_of("schedlab.sim.cost.table", True)]
    assert asked[0] == "tests/unit/test_table.py"
    assert asked.index("tests/unit/test_text_table.py") > 0
    first = [one.file for one in asked_of("schedlab.policies.hrrn", True)[:2]]
    of_it = ("tests/unit/test_policies_edges.py", "tests/unit/test_policies_ordering.py")
    assert first == sorted(of_it, key=lambda file: len((ROOT / file).read_text(encoding="utf-8")))


@pytest.mark.slow
def test_package_is_asked_for_and_planted_in_by_its_own_name():
    path = "traces/readers/__init__.py"
    assert module_of(path) == "schedlab.traces.readers"
    assert module_of("schedlab/__init__.py") == "schedlab"
    assert any(mutant.path == path for mutant in every_mutant([path]))
    assert GOLDEN in {one.file for one in asked_of("schedlab", True)}


def test_beacon_stands_before_the_innermost_statement_of_its_line():
    source = "def f(a):\n    if a:\n        a = [\n            1]\n    elif g(a):\n        h()\n"
    planted = ast.unparse(Beacons(((4, "list"), (5, "elif"))).planted(source))
    assert planted.splitlines() == [
        "def f(a):",
        "    if a:",
        f"        {CALL}('list')",
        "        a = [1]",
        "    else:",
        f"        {CALL}('elif')",
        "        if g(a):",
        "            h()",
    ]
    with pytest.raises(ValueError, match="line 9 is in no statement"):
        Beacons(((9, ""),)).planted(source)


def test_call_of_a_beacon_is_a_name_that_no_module_has():
    paths = [path for subject in SUBJECTS for path in (ROOT / subject).rglob("*.py")]
    assert len(paths) > 400
    assert not [path.name for path in paths if CALL in path.read_text(encoding="utf-8")]


class Fixture:
    def __init__(self, scope):
        self.scope = scope


def drive(steps, *during):
    """Run a hook that wraps something, and what it wraps."""
    next(steps)
    for one in during:
        one()
    with pytest.raises(StopIteration):
        steps.send(None)


@pytest.mark.slow
def test_survey_counts_what_a_shared_fixture_runs_for_each_test_that_uses_it(monkeypatch):
    monkeypatch.setattr(builtins, CALL, None, raising=False)
    seen = Survey([])
    shared, own = Fixture("module"), Fixture("function")

    def light(name):
        return lambda: getattr(builtins, CALL)(name)

    def set_up(fixture, name):
        return lambda: drive(seen.pytest_fixture_setup(fixture), light(name))

    def test(name, *fixtures):
        info = SimpleNamespace(name2fixturedefs={str(i): [f] for i, f in enumerate(fixtures)})
        return seen.pytest_runtest_protocol(SimpleNamespace(nodeid=name, _fixtureinfo=info))

    drive(test("first", shared), set_up(shared, "dear"), light("body"))
    drive(test("second", shared, own), set_up(own, "cheap"))
    drive(test("third"), light("body"))
    failed = lambda: seen.pytest_runtest_logreport(SimpleNamespace(failed=True))  # noqa: E731
    drive(test("fourth"), light("body"), failed)
    found = {line: list(tests) for line, tests in seen.reached.items()}
    assert found == {"dear": ["first", "second"], "body": ["first", "third"], "cheap": ["second"]}


def test_process_that_takes_too_much_cpu_time_is_ended_by_what_says_so():
    child = os.fork()
    if child == 0:
        confined = _Confined(0.2)
        begun_s = time.process_time()
        while time.process_time() < begun_s + 0.1:
            pass
        confined.begin_anew()
        while True:
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGXCPU
