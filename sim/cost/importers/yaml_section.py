"""Mappings of other projects' YAML files: values by key, errors that name file, line and key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from schedlab.sim.errors import SpecError
from schedlab.sim.yaml_lines import KeyPath, Located, dotted, read_yaml


@dataclass(frozen=True, slots=True)
class YamlSection:
    """A mapping in a YAML file; a key that is absent and one without a value are the same.

    Attributes
    ----------
    file : Path
        Where it was read from.
    located : Located
        The whole file.
    path : tuple of str
        Keys that lead to the mapping.
    data : dict
        The mapping.
    """

    file: Path
    located: Located
    path: KeyPath
    data: dict[str, Any]

    def error(self, key: str, what: str) -> SpecError:
        """Return what to raise about the value of a key."""
        path = (*self.path, key)
        return SpecError(f"{self.located.place(path) or self.file}: {dotted(path)} {what}")

    def section(self, key: str) -> YamlSection:
        """Return the mapping under a key, empty if there is none."""
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, f"must be a mapping, got {value!r}")
        return YamlSection(self.file, self.located, (*self.path, key), value)

    def names(self, key: str) -> list[str]:
        """Return the list of names under a key, empty if there is none."""
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(key, f"must be a list of names, got {value!r}")
        return list(value)

    def rising(self, key: str) -> list[float]:
        """Return the numbers under a key, of which there must be two or more, each above the last.

        Raises
        ------
        SpecError
            If they are not.
        """
        values = self.data.get(key)
        if (
            not isinstance(values, list)
            or len(values) < 2
            or not all(map(_is_number, values))
            or any(a >= b for a, b in pairwise(values))
        ):
            raise self.error(key, f"must be a list of two or more rising numbers, got {values!r}")
        return [float(value) for value in values]

    def number(self, key: str, default: float) -> float:
        """Return the finite number under a key."""
        value = self.data.get(key)
        if value is None:
            return default
        if not _is_number(value):
            raise self.error(key, f"must be a number, got {value!r}")
        return float(value)

    def truth(self, key: str) -> bool:
        """Return the true or false under a key, false if there is none."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return bool(value)

    def text(self, key: str) -> str | None:
        """Return the text under a key; a number, such as a version's, is read as one."""
        value = self.data.get(key)
        if value is None or isinstance(value, str):
            return value
        if not _is_number(value):
            raise self.error(key, f"must be a text, got {value!r}")
        return str(value)


def read_section(path: Path) -> YamlSection:
    """Return the mapping that a YAML file holds; raises `SpecError` if it holds another thing."""
    located = read_yaml(path)
    if not isinstance(located.data, dict):
        raise SpecError(f"{path}: must hold a mapping")
    return YamlSection(path, located, (), located.data)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]
