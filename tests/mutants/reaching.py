"""Which tests run the line of a bug at all: seen once, so that those are asked and no others.

Beacons are planted as bugs are: a call before the statement that a bug is in. What runs in fixtures
that tests share counts for each that uses them. What another process runs is not seen.
"""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import importlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CALL = "_beacon_is_lit"
"""What a beacon calls: a name that no module has for something of its own."""
Reached = dict[str, dict[str, float]]
"""By bug, the tests that run its line, with their seconds."""


@dataclass(frozen=True)
class Beacons:
    """What is planted in a file: by line, the name that its call gives."""

    lines: tuple[tuple[int, str], ...]

    @property
    def line(self) -> int:
        """The first line."""
        return self.lines[0][0]

    @property
    def change(self) -> str:
        """What it is, for people."""
        return "beacons"

    def planted(self, source: str) -> ast.Module:
        """Return the file with its beacons."""
        tree = ast.parse(source)
        for line, name in self.lines:
            block, at = _statement(tree, line)
            call = ast.parse(f"{CALL}({name!r})").body[0]
            for node in ast.walk(call):
                ast.copy_location(node, block[at])
            block.insert(at, call)
        return tree


def _statement(tree: ast.Module, line: int) -> tuple[list[ast.stmt], int]:
    """Return the innermost statement that has a line, as a place in its block."""
    found: tuple[list[ast.stmt], int] | None = None
    for node in ast.walk(tree):  # outer ones come first
        for _, block in ast.iter_fields(node):
            if not (isinstance(block, list) and block and isinstance(block[0], ast.stmt)):
                continue
            for i, one in enumerate(block):
                if one.lineno <= line <= (one.end_lineno or one.lineno):
                    found = block, i
    if found is None:
        raise ValueError(f"line {line} is in no statement")
    return found


class Survey:
    """A plugin of pytest: notes which beacons each test lights.

    Parameters
    ----------
    modules : sequence of str
        Those with beacons: imported at once, if they can be.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.reached: Reached = defaultdict(dict)
        self._lit: set[str] = set()
        self._failed = False
        self._by_fixture: dict[object, set[str]] = defaultdict(set)
        setattr(builtins, CALL, lambda name: self._lit.add(name))
        for module in modules:
            with suppress(ImportError):  # vLLM's: a test may put a stand-in there
                importlib.import_module(module)
        # A result that is kept from an earlier test would hide who asks for it.
        self._caches = [
            thing
            for thing in gc.get_objects()
            if type(thing) is functools._lru_cache_wrapper
            and str(thing.__module__).startswith("schedlab.")
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Keep apart what is run for a fixture that tests share."""
        if fixturedef.scope == "function":
            return (yield)
        before, self._lit = self._lit, self._by_fixture[fixturedef]
        try:
            return (yield)
        finally:
            self._lit = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        """Note what a test runs."""
        for cached in self._caches:
            cached.cache_clear()
        self._lit, self._failed = set(), False
        start = time.process_time()
        told = yield
        if self._failed:  # whatever is planted
            return told
        seconds = time.process_time() - start
        fixtures = [one[-1] for one in item._fixtureinfo.name2fixturedefs.values()]
        for name in self._lit.union(*(self._by_fixture[one] for one in fixtures)):
            self.reached[name][item.nodeid] = seconds
        return told

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Leave out tests that fail without any bug."""
        self._failed |= report.failed

    def write(self, path: Path) -> None:
        """Write down what was seen."""
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(self.reached, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
