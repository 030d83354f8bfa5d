"""YAML 1.2 read strictly: every value remembers the line it was written in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_text

try:
    from yaml import CSafeDumper as FastDumper
    from yaml import CSafeLoader as FastLoader
except ImportError:  # PyYAML built without libyaml: the same values, in eight times the time
    from yaml import SafeDumper as FastDumper  # type: ignore[assignment]
    from yaml import SafeLoader as FastLoader  # type: ignore[assignment]

Value = Any
"""What YAML holds: nested dicts and lists of strings, numbers, booleans and None."""

KeyPath = tuple[str | int, ...]
"""Where a value sits in nested mappings and lists, e.g. ``("sweep", "policy", 0)``."""


_DEEPEST = 100
_MOST_VALUES = 200_000
"""More than any experiment, matrix or profile holds; aliases of aliases could make it billions."""


@dataclass
class Located:
    """Plain data, and for every key and list item in it the place that wrote it.

    Attributes
    ----------
    data : Value
        Nested dicts, lists and scalars.
    places : dict of KeyPath to str
        ``"file.yaml:12"`` or ``"override 'engine.max_num_seqs=64'"``.
    """

    data: Value
    places: dict[KeyPath, str]

    def place(self, path: KeyPath) -> str | None:
        """Return the place of the innermost known key on `path`, or None."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return None


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2: `on` is a string, `1e3` a number."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _FastLoader(FastLoader):
    """The same on libyaml, whose errors do not name the character or the alias."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_SCALARS = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
]
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def read_yaml(path: Path) -> Located:
    """Read a YAML file and the line of every key in it.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    Located
        Its data; an empty file gives an empty mapping.

    Raises
    ------
    SpecError
        If the file cannot be read, is not YAML, or says one key twice; names file and line.
    """
    return parse_yaml(read_text(path), str(path), numbered=True)


def parse_yaml(text: str, source: str, numbered: bool = False) -> Located:
    """Parse YAML text.

    Parameters
    ----------
    text : str
        One YAML document.
    source : str
        How error messages name the text.
    numbered : bool
        Whether places get a line number, ``source:12``, or are `source` alone.

    Returns
    -------
    Located
        The data; an empty text gives an empty mapping.

    Raises
    ------
    SpecError
        If the text is not one YAML document, says one key twice, or is beyond measure: nested too
        deeply, too many values (aliases count as what they stand for), or an integer beyond 64
        bits.
    """
    try:
        try:
            return _parse(text, source, numbered, _FastLoader)
        except (yaml.YAMLError, UnicodeEncodeError):
            return _parse(text, source, numbered, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark and numbered else ""
        raise SpecError(f"{source}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: not valid YAML: {error}") from None


def dump_yaml(data: Value) -> str:
    """Return `data` as YAML text that `parse_yaml` reads back to the same values.

    Parameters
    ----------
    data : Value
        Nested dicts, lists and scalars.

    Returns
    -------
    str
        Block style, keys in their given order.
    """
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _parse(text: str, source: str, numbered: bool, kind: type[_Loader | _FastLoader]) -> Located:
    # Composing nodes is recursive, in C too: too deep a text would take the process with it.
    depth = 0
    for event in yaml.parse(text, Loader=kind):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise SpecError(f"{source}: nested deeper than {_DEEPEST} levels")
    located = Located({}, {(): source})
    loader = kind(text)
    node = loader.get_single_node()
    if node is not None:
        located.data = _Reader(loader, source, numbered, located.places).value(node, ())
    return located


class _Reader:
    """Turns composed nodes into data, writing down where each came from."""

    def __init__(
        self,
        loader: _Loader | _FastLoader,
        source: str,
        numbered: bool,
        places: dict[KeyPath, str],
    ) -> None:
        self.loader = loader
        self.source = source
        self.numbered = numbered
        self.places = places
        self.open_nodes: set[int] = set()
        self.num_values = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Value:
        self.num_values += 1
        if self.num_values > _MOST_VALUES:
            raise SpecError(f"{self.where(node)}: more than {_MOST_VALUES:,} values")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if id(node) in self.open_nodes:
            raise SpecError(f"{self.where(node)}: a YAML alias that contains itself")
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.child(item, item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path)
        finally:
            self.open_nodes.remove(id(node))

    def scalar(self, node: yaml.ScalarNode) -> Value:
        if node.tag == "tag:yaml.org,2002:int":
            digits = node.value.replace("_", "")
            if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
                raise SpecError(f"{self.where(node)}: the integer {digits} does not fit 64 bits")
        return self.loader.construct_object(node)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key, str):
                raise SpecError(f"{self.where(key_node)}: a key must be a plain word")
            if key in data:
                before = self.places[(*path, key)]
                raise SpecError(
                    f"{self.where(key_node)}: {dotted((*path, key))}: key given twice"
                    f" (first at {before})"
                )
            data[key] = self.child(key_node, value_node, (*path, key))
        return data

    def child(self, place: yaml.Node, node: yaml.Node, path: KeyPath) -> Value:
        self.places[path] = self.where(place)
        return self.value(node, path)

    def where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.numbered else self.source


def dotted(path: KeyPath) -> str:
    """Return the path as users write it: ``workload.slice[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class _Dumper(FastDumper):
    """SafeDumper that quotes what `_Loader` would not read as a string, and nothing else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_float(dumper: _Dumper, value: float) -> yaml.Node:
    if math.isfinite(value):
        return dumper.represent_scalar("tag:yaml.org,2002:float", repr(value))
    text = ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _represent_float)
