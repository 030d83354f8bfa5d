"""The house rules that a linter cannot see."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"sim", "policies", "gpu_backend", "traces", "experiments"}
ALLOWED = {
    "sim": {"sim"},
    "policies": {"policies", "sim"},
    "gpu_backend": {"gpu_backend", "sim"},
    "traces": {"traces", "sim"},
    "experiments": PACKAGES,
}
# What a policy may know of the simulator: requests, plans, and what they are made of.
POLICY_VIEW = {
    "sim.plan",
    "sim.plan_builder",
    "sim.request",
    "sim.view",
    "sim.errors",
    "sim.files",
    "sim.cost.shape",
}


def modules():
    return [p for package in sorted(PACKAGES) for p in sorted((ROOT / package).rglob("*.py"))]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_module_imports_only_in_the_allowed_direction(path):
    package = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        top = name.split(".")[0]
        if top in PACKAGES:
            assert top in ALLOWED[package], f"{path} imports {name}"
        if package == "policies" and top == "sim":
            assert name in POLICY_VIEW, f"{path} imports {name}"


def test_simulator_imports_without_the_heavy_and_the_optional():
    code = (
        "import sys, experiments.run, experiments.cli;"
        "heavy = {'torch', 'triton', 'pandas', 'matplotlib', 'ray'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_package_list_names_every_folder_with_code():
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in modules()}
    assert set(listed) == found
