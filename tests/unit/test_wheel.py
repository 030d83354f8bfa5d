"""What is installed from a wheel works elsewhere, beside a user's files of any name."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import schedlab

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Folders of data: everything in them that git keeps has to be in the wheel.
DATA = ("experiments", "profiles", "regression")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a source distribution of the checkout, and a wheel of nothing but that."""
    pytest.importorskip("setuptools", "77", reason="builds the wheel")
    built = tmp_path_factory.mktemp("built")
    source = built / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for name in {"schedlab", *folders["package-dir"].values()}:
        skipped = shutil.ignore_patterns("__pycache__", *(["imported"] if name in DATA else []))
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skipped)
    run(
        [sys.executable, "-c", "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])",
         built],
        cwd=source,
    )  # fmt: skip
    (archive,) = built.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "wheel", *options, "--wheel-dir", built, archive], cwd=built)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """Install the wheel into an environment of its own that sees the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], cwd=folder)
    # A path in a .pth file is searched, but .pth files in it are not read: that is how the
    # dependencies are found, and an editable installation beside them is not.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture
def elsewhere(tmp_path):
    """Make a working directory with files that are named as our packages, and must not be run."""
    for name in ("sim.py", "policies.py", "traces.py", "gpu_backend.py", "experiments/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise RuntimeError('this file is the user\\'s')\n")
    return tmp_path


def run(command, cwd):
    """Run a command without this checkout in sight, and return what it prints."""
    ours = ("PYTHONPATH", "PYTHONHOME", "PIP_CONSTRAINT", "SCHEDLAB_CORE")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_wheel_holds_all_data_that_git_keeps(wheel):
    listed = subprocess.run(
        ["git", "ls-files", *DATA], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    kept = {f"schedlab/{name}" for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert len(kept) > 100
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert kept - held == set()
    assert "schedlab/py.typed" in held


def test_version_is_that_of_the_project(clean, elsewhere):
    say = [clean / "bin/python", "-c", "import schedlab; print(schedlab.__version__)"]
    assert run(say, elsewhere).strip() == VERSION
    assert run([clean / "bin/schedlab", "version"], elsewhere).split() == ["schedlab", VERSION]
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        _ = schedlab.version


def test_installed_package_lies_in_the_clean_environment(clean, elsewhere):
    say = [clean / "bin/python", "-c", "import schedlab.sim as s; print(s.__file__)"]
    assert Path(run(say, elsewhere).strip()).is_relative_to(clean)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--help"], "Usage"), (["regress", "check", "--help"], "--baseline"), (["doctor"], "simpy")],
)
def test_module_runs_commands_beside_files_of_the_user(arguments, says, clean, elsewhere):
    assert says in run([clean / "bin/python", "-m", "schedlab", *arguments], elsewhere)


def test_quick_start_runs_by_name_with_a_policy_of_the_user(clean, elsewhere):
    (elsewhere / "mine.py").write_text(
        "from schedlab.policies import ContinuousBatching\n\n\n"
        "class Lifo(ContinuousBatching):\n"
        '    """Serve the youngest first."""\n\n'
        "    def key(self, state, now_ns):\n"
        "        return -state.request.arrival_ns\n"
    )
    command = [clean / "bin/schedlab", "run", "quickstart", "-o", "out", "policy=mine:Lifo"]
    small = ["workload.num_requests=30", "workload.request_rate=4", "replications=1"]
    run([*command, *small], elsewhere)
    assert list((elsewhere / "out").rglob("requests.parquet"))


def test_shipped_profile_and_paper_load_by_name(clean, elsewhere):
    code = (
        "from schedlab.experiments.specification.loading import load_spec, make_spec\n"
        "print(load_spec('compare-cpu').cost_model.profile)\n"
        "print(load_spec('quickstart', ['cost_model=profiles/cpu/schedlab-small/fp32-tp1'])"
        ".cost_model.profile)\n"
        "print(load_spec('sarathi').name)\n"
    )
    *profiles, name = run([clean / "bin/python", "-c", code], elsewhere).splitlines()
    for folder in profiles:
        assert (Path(folder) / "meta.json").is_file()
        assert Path(folder).resolve().is_relative_to(clean.resolve())
    assert name == "sarathi"
