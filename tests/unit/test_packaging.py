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
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pins.items()}


@pytest.mark.parametrize("group", ["dependencies", "dev"])
def test_lock_pins_every_dependency_at_its_floor_or_above(group, locked):
    wanted = PROJECT["dependencies"] if group == "dependencies" else None
    wanted = wanted or PROJECT["optional-dependencies"][group]
    for name, floor in names_and_floors(wanted).items():
        assert name in locked, f"{name} is not in requirements.lock: make lock"
        assert release(locked[name]) >= release(floor or "0"), f"{name}: make lock"


def test_every_dependency_says_its_oldest_version():
    # `make oldest` installs exactly these.
    assert [d for d in PROJECT["dependencies"] if names_and_floors([d]).popitem()[1] is None] == []


def test_doctor_asks_for_every_dependency():
    from schedlab.experiments.commands.doctor import examine

    examined = {canonical(finding.subject) for finding in examine()}
    assert set(names_and_floors(PROJECT["dependencies"])) - examined == set()
