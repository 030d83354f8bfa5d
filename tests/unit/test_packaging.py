"""What is promised to those who install: dependencies, and versions known to work together."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[\w+\])?(>=(?P<floor>[0-9.]+))?")


def names_and_floors(requirements):
    found = [REQUIREMENT.match(text) for text in requirements]
    return {canonical(match["name"]): match["floor"] for match in found}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def release(version):
    return tuple(int(part) for part in re.findall(r"\d+", version))


@pytest.fixture(scope="module")
def locked():
    """Return the releases of each package: one, or several that depend on Python's."""
    pins = re.findall(r"^([\w.-]+)==([\w.+]+)", (ROOT / "requirements.lock").read_text(), re.M)
    return {canonical(name): {v for n, v in pins if n == name} for name, _ in pins}


@pytest.mark.parametrize("group", ["dependencies", "dev"])
def test_lock_pins_every_dependency_at_its_floor_or_above(group, locked):
    wanted = PROJECT["dependencies"] if group == "dependencies" else None
    wanted = wanted or PROJECT["optional-dependencies"][group]
    for name, floor in names_and_floors(wanted).items():
        assert name in locked, f"{name} is not in requirements.lock: make lock"
        assert all(release(v) >= release(floor or "0") for v in locked[name]), f"{name}: make lock"


def test_lock_has_checksums_of_every_package():
    # What pip asks for with --require-hashes, which the workflow gives.
    entries = re.split(r"^(?=\w)", (ROOT / "requirements.lock").read_text(), flags=re.M)[1:]
    assert len(entries) > 50
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "--require-hashes -r requirements.lock" in (ROOT / "Makefile").read_text()
    assert "run: make locked" in (ROOT / ".github/workflows/ci.yml").read_text()


def test_every_dependency_says_its_oldest_version():
    # `make oldest` installs exactly these.
    assert [d for d in PROJECT["dependencies"] if names_and_floors([d]).popitem()[1] is None] == []


def test_doctor_asks_for_every_dependency():
    from schedlab.experiments.commands.doctor import examine

    examined = {canonical(finding.subject) for finding in examine()}
    assert set(names_and_floors(PROJECT["dependencies"])) - examined == set()
