"""The house rules that a linter cannot see."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What each package may import, beside itself.
ALLOWED = {
    "sim": set(),
    "policies": {"sim"},
    "traces": {"sim"},
    "gpu_backend": {"core", "sim", "policies"},
    "testing": {"sim", "policies", "traces"},
    # `schedlab.core` is a module: which core runs.
    "experiments": {"core", "sim", "policies", "traces", "gpu_backend", "testing"},
}

# What a policy may know of the simulator: requests, plans, and what they are made of; and a router
# of the engines it chooses among.
POLICY_VIEW = {
    "schedlab.sim.core.plan",
    "schedlab.sim.core.plan_builder",
    "schedlab.sim.core.view",
    "schedlab.sim.request",
    "schedlab.sim.construct",
    "schedlab.sim.errors",
    "schedlab.sim.sums",
    "schedlab.sim.files",
    "schedlab.sim.cost.shape",
    "schedlab.sim.drive.engine_state",
    "schedlab.sim.drive.offer",
    "schedlab.sim.core.draft_length",
    "schedlab.sim.drive.pool_state",
    "schedlab.sim.rng",
}


def folder_of(package):
    """Return the folder of a package: at the top, or a real one (no link) inside `schedlab`."""
    top = ROOT / package
    return top if top.is_dir() else ROOT / "schedlab" / package


def inside(path):
    """Return the parts of a path below `schedlab`, wherever its folder is."""
    parts = path.relative_to(ROOT).parts
    return parts[1:] if parts[0] == "schedlab" else parts


def modules(*folders):
    """Return the files of some packages, of all if none is named."""
    folders = folders or sorted(ALLOWED)
    return [path for folder in folders for path in sorted(folder_of(folder).rglob("*.py"))]


@cache
def imported(path):
    """Return the modules a file imports; names it imports from a package, if they are modules."""
    return list(_imported(path))


def _imported(path):
    for node in _run_at_import_or_later(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if is_ours(whole) else node.module


def _run_at_import_or_later(node):
    """Yield every node but those below ``if TYPE_CHECKING``: a type is no dependency of a run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", None) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.expr):
            continue  # no import is in one
        yield child
        yield from _run_at_import_or_later(child)


@cache
def is_ours(module):
    parts = module.split(".")
    if parts[0] != "schedlab" or len(parts) < 2:
        return False
    path = folder_of(parts[1]).joinpath(*parts[2:])
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_modules_import_only_in_the_allowed_direction(package):
    def is_wrong(name):
        if not is_ours(name):
            return name.partition(".")[0] in ALLOWED  # without schedlab
        other = name.split(".")[1]
        if package == "policies" and other == "sim":
            return name not in POLICY_VIEW
        return other != package and other not in ALLOWED[package]

    paths = modules(package)
    wrong = [(str(path), name) for path in paths for name in imported(path) if is_wrong(name)]
    assert paths
    assert wrong == []


def room_of(parts):
    """Return the room of a module below its package: its folder, or itself where it has none."""
    return parts[0].removesuffix(".py") if parts else "__init__"


@pytest.mark.slow
@pytest.mark.parametrize("package", ["experiments", "policies", "sim", "traces"])
def test_rooms_of_a_package_import_each_other_without_a_cycle(package):
    needs = {}
    for path in modules(package):
        room = room_of(path.relative_to(ROOT / package).parts)
        for name in imported(path):
            if is_ours(name) and name.split(".")[1] == package:
                needs.setdefault(room, set()).add(room_of(name.split(".")[2:]))
    for room, others in needs.items():
        others.discard(room)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(f"rooms of {package} import each other: {' -> '.join(error.args[1])}")


@pytest.mark.slow
def test_simulator_imports_without_the_heavy_and_the_optional():
    code = (
        "import sys, schedlab.experiments.running.run, schedlab.experiments.commands.app;"
        "heavy = {'torch', 'triton', 'pandas', 'matplotlib', 'ray'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_package_list_names_every_folder_with_code():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = {name for name in settings["packages"] if name != "schedlab"}
    found = {".".join(("schedlab", *inside(path.parent))) for path in modules()}
    assert listed - {"schedlab.profiles", "schedlab.regression"} == found


def test_templates_are_in_the_package_data():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    shipped = {
        path
        for package, patterns in data.items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    templates = {path for path in (ROOT / "experiments").rglob("*.jinja")}
    assert templates
    assert templates <= shipped


def test_architecture_page_lists_every_room_with_its_own_words():
    page = (ROOT / "docs/architecture.md").read_text()
    rooms = [path for path in modules() if path.name == "__init__.py"]
    for path in rooms:
        words = ast.get_docstring(ast.parse(path.read_text())).partition("\n")[0]
        folder = path.parent.relative_to(ROOT).as_posix()
        assert f"| `{folder}/` | {words} |" in page.splitlines(), f"docs/architecture.md: {folder}"
    assert page.count("| `") == len(rooms)


def test_policies_tell_apart_which_files_are_policies_and_which_they_stand_on():
    folder = ROOT / "policies"
    words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    policies, others = (
        re.findall(r"^- `(\w+)`: .", part, re.MULTILINE)
        for part in words.split("What all of them stand on:")
    )
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    registering = {path.stem for path in files if "\n@register(" in path.read_text()}
    assert policies == sorted(registering)
    assert sorted(others) == sorted({path.stem for path in files} - registering)


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_named_on_a_page_exist(page):
    text = (ROOT / page).read_text()
    named = re.findall(
        r"`((?:sim|policies|traces|gpu_backend|experiments|tests|docs)/[^`*]*)`", text
    )
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_packages_are_linked_where_tools_look_for_them():
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-dir"
    ]
    for name, folder in folders.items():
        link = ROOT.joinpath(*name.split("."))
        assert link.resolve() == ROOT / folder, f"{link} does not lead to {folder}"
