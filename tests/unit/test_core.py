"""Which core runs, and that the compiled one gives what the Python source does."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedlab import build_core, core
from tests.golden import small_runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for compiled modules, and the choice of them left open."""
    monkeypatch.setattr(core, "FOLDER", tmp_path)
    monkeypatch.delenv("SCHEDLAB_CORE", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(core, "_running", "python")
    return tmp_path


def write_manifest(folder, **changed):
    made_of = {name: core.checksum(name) for name in core.MODULES} | changed
    lines = ["mypyc 1.0", *(f"{made} {name}" for name, made in made_of.items())]
    (folder / core.MANIFEST).write_text("\n".join(lines) + "\n")


def test_core_that_is_not_built_says_how_to_build_it(folder):
    assert core.why_not() == "it is not built; run: make core"


def test_core_that_a_wheel_lacks_is_not_to_be_made(folder, monkeypatch):
    monkeypatch.setattr(core, "__file__", str(folder / "schedlab" / "core.py"))
    assert core.why_not() == "this wheel brings none"


def test_core_built_for_another_python_is_not_used(folder):
    write_manifest(folder)
    assert core.why_not() == (f"it is built for another Python, not {sys.implementation.cache_tag}")


def write_libraries(folder):
    for name in (core.GROUP, *(f"schedlab.{module}" for module in core.MODULES)):
        core.library(name).touch()


def test_core_of_which_modules_are_gone_is_not_used(folder):
    write_manifest(folder)
    write_libraries(folder)
    core.library("schedlab.sim.core.step").unlink()
    assert core.why_not() == "sim.core.step of it are gone; run: make core"


def test_core_of_this_source_is_used(folder):
    write_manifest(folder)
    write_libraries(folder)
    assert core.why_not() is None
    core.choose()
    assert core.running() == "compiled (mypyc 1.0)"
    found = sys.meta_path[0].find_spec("schedlab.sim.core.engine")
    assert found.origin == str(core.library("schedlab.sim.core.engine"))
    assert sys.meta_path[0].find_spec("sim.core.engine") is None, "a user's own module"
    assert sys.meta_path[0].find_spec("schedlab.policies.fcfs") is None


def test_core_of_older_source_is_refused_by_name_with_a_warning(folder):
    write_manifest(folder, **{"sim.core.step": "00000000"})
    write_libraries(folder)
    with pytest.warns(
        RuntimeWarning, match=r"Python core runs.*not made of sim\.core\.step as now"
    ):
        core.choose()
    assert core.running() == "python"


@pytest.mark.parametrize(("asked", "told"), [
    ("compiled", "SCHEDLAB_CORE is 'compiled', but of the compiled core: it is not built"),
    ("rust", "SCHEDLAB_CORE is 'rust', expected one of auto, python, compiled"),
])  # fmt: skip
def test_core_asked_for_that_is_not_there_is_an_error(folder, monkeypatch, asked, told):
    monkeypatch.setenv("SCHEDLAB_CORE", asked)
    with pytest.raises(ImportError, match=told):
        core.choose()


def test_python_core_asked_for_runs_whatever_is_built(folder, monkeypatch):
    write_manifest(folder, **{"sim.core.step": "00000000"})
    monkeypatch.setenv("SCHEDLAB_CORE", "python")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        core.choose()
    assert core.running() == "python"


def test_compiled_core_is_given_up_before_it_is_imported_and_not_after(folder, monkeypatch):
    write_manifest(folder)
    write_libraries(folder)
    core.choose()
    with pytest.raises(ImportError, match="start Python with SCHEDLAB_CORE=python"):
        core.use_python()
    for module in core.MODULES:
        monkeypatch.delitem(sys.modules, f"schedlab.{module}", raising=False)
    core.use_python()
    assert core.running() == "python"
    assert not any(type(finder).__name__ == "_Finder" for finder in sys.meta_path)
    core.use_python()  # there is nothing left to give up


def test_every_module_of_the_core_has_its_source():
    assert all(core.source(name).exists() for name in core.MODULES)


def test_doctor_and_results_say_which_core_runs():
    from schedlab.experiments.commands.doctor import examine
    from schedlab.experiments.running.run import run
    from schedlab.experiments.specification.loading import make_spec

    (finding,) = [found for found in examine() if found.subject == "core"]
    assert finding.state == ("missing" if core.running() == "python" else "ok")
    python = ("Python; of the compiled one: it is", "Python; of the compiled one: SCHEDLAB_CORE")
    assert finding.detail.startswith(("compiled (mypyc", *python))
    spec = make_spec({"name": "one", "workload": {"trace": "fixed", "num_requests": 1}})
    assert run(spec).provenance["core"] == core.running()


_DIGESTS = """
from schedlab import core
from tests.golden import small_runs
for case in small_runs.CASES:
    print(case, *(small_runs.digest(case, limits) for limits in small_runs.LIMITS))
print(core.running())
"""


def digests(which):
    done = subprocess.run(
        [sys.executable, "-c", _DIGESTS], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "SCHEDLAB_CORE": which, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    *lines, running = done.stdout.splitlines()
    assert running.startswith(which)
    return lines


@pytest.mark.slow
@pytest.mark.skipif(core.why_not() is not None, reason=f"compiled core: {core.why_not()}")
def test_both_cores_give_the_same_bytes_for_every_policy():
    python = digests("python")
    assert len(python) == len(small_runs.CASES)
    assert digests("compiled") == python


def test_doctor_finds_no_fault_with_a_compiled_core_and_says_what_a_python_one_costs(monkeypatch):
    from schedlab.experiments.commands import doctor

    for running, why, state, detail in (
        ("compiled (mypyc 9)", "old", "ok", "compiled (mypyc 9)"),
        ("python", "it is old", "missing", "of the compiled one: it is old; simulations take"),
        ("python", "", "missing", "of the compiled one: SCHEDLAB_CORE asks for the Python one; "),
    ):
        told = SimpleNamespace(running=lambda: running, why_not=lambda: why)  # noqa: B023
        monkeypatch.setattr(doctor, "core", told)
        found = doctor._core()
        assert (found.subject, found.state) == ("core", state)
        assert detail in found.detail


@pytest.mark.parametrize("fails", [False, True])
def test_build_leaves_nothing_beside_the_core_it_makes_and_the_old_one_where_it_fails(
    tmp_path, monkeypatch, fails
):
    seen = []

    class Command:
        def ensure_finalized(self):
            pass

        def run(self):
            seen.append((Path.cwd(), Path(self.build_lib), Path(self.build_temp)))
            for name in (core.GROUP, *(f"schedlab.{module}" for module in core.MODULES)):
                suffix = core.library(name).name.removeprefix(name)
                path = Path(self.build_lib, name.replace(".", "/") + suffix)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(name)
            if fails:
                sys.exit("no compiler")

    def compile_all(paths, target_dir, **options):
        seen.append((paths, Path(target_dir)))
        return []

    command = Command()
    made = SimpleNamespace(get_command_obj={"build_ext": command}.__getitem__)
    monkeypatch.setitem(sys.modules, "mypyc", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mypyc.build", SimpleNamespace(mypycify=compile_all))
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(Distribution=lambda given: made))
    version = SimpleNamespace(version={"mypy": "7.5"}.__getitem__)
    monkeypatch.setattr(build_core, "metadata", version)
    monkeypatch.setattr(core, "FOLDER", tmp_path / "compiled")
    core.FOLDER.mkdir()
    (core.FOLDER / "old").write_text("as it was")
    before = Path.cwd()
    if fails:
        with pytest.raises(SystemExit, match="no compiler"):
            build_core.build()
        assert [path.name for path in core.FOLDER.iterdir()] == ["old"]
    else:
        assert build_core.build() == core.FOLDER
        names = {core.GROUP, *(f"schedlab.{module}" for module in core.MODULES)}
        assert {path.name for path in core.FOLDER.iterdir()} == {
            core.MANIFEST, *(core.library(name).name for name in names)
        }  # fmt: skip
        assert all(core.library(name).read_text() == name for name in names)
        assert (core.FOLDER / core.MANIFEST).read_text().startswith("mypyc 7.5\n")
        assert core.why_not() is None
    (paths, c_folder), (there, *built) = seen
    assert there == Path(core.__file__).parents[1]
    assert Path.cwd() == before
    assert all((there / path).is_file() for path in paths)
    (scratch,) = {folder.parent for folder in (c_folder, *built)}
    assert not scratch.is_relative_to(there)
    assert not scratch.exists()


def test_core_without_a_compiler_says_what_to_install(monkeypatch):
    there = {
        "mypyc": SimpleNamespace(), "mypyc.build": SimpleNamespace(mypycify=None),
        "setuptools": SimpleNamespace(Distribution=None),
    }  # fmt: skip
    for name in ("mypyc.build", "setuptools"):
        with monkeypatch.context() as without:
            for module, stand_in in (there | {name: None}).items():
                without.setitem(sys.modules, module, stand_in)
            with pytest.raises(SystemExit, match=r"without \S+: pip install 'mypy\[mypyc\]'"):
                build_core.build()
