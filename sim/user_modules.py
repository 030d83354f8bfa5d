"""Modules that a user writes: where they are looked for, and what was loaded of them.

Python keeps a module once it is loaded: whoever edits it in a notebook, or has two of one name
beside two experiments, goes on with the first. Here the source of each is kept as it was loaded,
and a module that a fresh process would load otherwise is dropped, so that its next import does.

IPython's %autoreload patches a module and its classes where they are, and tells nobody what it has
executed (nor are they all that a fresh process would have: a new base class is left out). Where it
was loaded, a module that would be dropped is executed anew in place, as by `importlib.reload`, so
that the notebook and IPython go on with the one that is imported; and a class stands for its name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple
from weakref import WeakSet

_began = time.time()
_OURS = __name__.partition(".")[0]
_PYTHONS = os.path.join(os.path.dirname(os.path.realpath(os.__file__)), "")
_AUTORELOAD = "IPython.extensions.autoreload"
_OF_IMPORT = {"__name__", "__loader__", "__package__", "__spec__", "__path__", "__file__"}
_OF_INSTALLED = ("site-packages", "dist-packages")  # whoever installed it: with --user, or a .pth


class Places(NamedTuple):
    """Folders that modules of the user's are looked for in.

    Attributes
    ----------
    beside : str, optional
        Goes before any other module of the user's.
    working : str, optional
        Is searched last.
    """

    beside: str | None = None
    working: str | None = None


class _Module(NamedTuple):
    file: Path
    source: bytes | None  # None if nobody knows what was loaded


_places = Places()
_asked: set[str] = set()
_outdated: WeakSet[type] = WeakSet()
_held: dict[str, ModuleType] = {}
"""What notebooks with autoreload hold of modules that were dropped."""


def places() -> Places:
    """Return where modules of the user's are looked for now."""
    return _places


def look_in(where: Places) -> None:
    """Look for modules of the user's there from now on; one that was loaded from elsewhere goes.

    Neither folder hides what is installed, Python's own or ours.
    """
    global _places
    if where != _places:
        _places = where
        refresh()


def import_own(name: str) -> ModuleType:
    """Import a module of the user's, as a fresh process would where nothing was asked of it yet."""
    _ask(name)
    return importlib.import_module(name)


def refresh() -> None:
    """Drop all modules asked for, or imported by those, that a fresh process would load otherwise.

    Their next import loads them anew. One that was loaded before this one counts as changed if its
    file was changed since.
    """
    _refresh(_asked)


def is_outdated(cls: type) -> bool:
    """Say whether a class is of a module that was dropped: its name now means another one.

    With autoreload none is that was only edited.
    """
    _ask(cls.__module__)
    return cls in _outdated


def sources(names: Iterable[str]) -> dict[str, bytes]:
    """Return the sources of modules, and of those they import, that are the user's.

    Parameters
    ----------
    names : iterable of str
        Modules; one that is installed, Python's own or ours is left out.

    Returns
    -------
    dict of str to bytes
        Module to its source: as it was loaded, or if it is not loaded, as it would be.
    """
    return {name: one.source or b"" for name, one in _reached(names).items()}


def _ask(name: str) -> None:
    if name not in _asked:
        _asked.add(name)
        _refresh([name])


def _refresh(names: Iterable[str]) -> None:
    importlib.invalidate_caches()
    known = _reached(names)
    fresh = {name: _fresh(name) for name in known.keys() & sys.modules.keys()}
    dropped = {name for name, one in fresh.items() if one != known[name]}
    uses = {name: _uses(name, one) for name, one in known.items()} if dropped else {}
    while more := {name for name in uses.keys() - dropped if not dropped.isdisjoint(uses[name])}:
        dropped |= more
    for name in dropped & sys.modules.keys():
        module = sys.modules.pop(name)
        now = fresh[name]
        if _AUTORELOAD in sys.modules and now is not None and now.file == known[name].file:
            _held[name] = module
            continue
        _outdated.update(
            one for one in vars(module).values() if isinstance(one, type) and one.__module__ == name
        )
    for name in _held.keys() - sys.modules.keys():
        with suppress(Exception, SystemExit):  # whoever asks for it is told
            importlib.import_module(name)


def _reached(names: Iterable[str]) -> dict[str, _Module]:
    found: dict[str, _Module] = {}
    seen, todo = {"", "__main__"}, list(names)
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        if name in seen or top == _OURS or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        one = _loaded(name) if name in sys.modules else _fresh(name)
        if one is not None:
            found[name] = one
            todo += _uses(name, one)
    return found


def _loaded(name: str) -> _Module | None:
    spec = getattr(sys.modules[name], "__spec__", None)
    file = _own_file(spec)
    if spec is None or file is None:
        return None
    if isinstance(spec.loader, _Loader):
        return _Module(file, spec.loader.source)
    # Loaded before this module, or by somebody else's loader.
    try:
        return _Module(file, None if file.stat().st_mtime > _began else file.read_bytes())
    except OSError:
        return _Module(file, None)


def _fresh(name: str) -> _Module | None:
    """Return what an import would load were it not loaded yet."""
    try:
        if name in sys.modules:
            parent = sys.modules.get(name.rpartition(".")[0])
            spec = _FINDER.find_spec(name, getattr(parent, "__path__", None))
        else:
            spec = importlib.util.find_spec(name)
        file = _own_file(spec)
        return None if file is None else _Module(file, file.read_bytes())
    except Exception:  # of packages above it, which are imported to look: any they like
        return None


def _uses(name: str, module: _Module) -> frozenset[str]:
    """Return what a module may import, and the package that it is in."""
    above = name.rpartition(".")[0]
    package = name if module.file.name == "__init__.py" else above
    return _imports(module.source or b"", package) | {above}


@lru_cache(maxsize=1000)
def _imports(source: bytes, package: str) -> frozenset[str]:
    import ast

    found = set()
    with suppress(SyntaxError, ValueError, ImportError):  # whoever imports it is told
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                path = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(path, package) if node.level else path
                found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def _own_file(spec: ModuleSpec | None) -> Path | None:
    """Return the source file of a module that is the user's."""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    if spec.name.partition(".")[0] == _OURS or not _is_own(spec.origin):
        return None
    return Path(spec.origin).resolve()


def _is_own(place: str) -> bool:
    """Say whether a file or folder is neither installed nor Python's own."""
    return not any(
        name.startswith(_PYTHONS) or any(folder in Path(name).parts for folder in _OF_INSTALLED)
        for name in (place, os.path.realpath(place))
    )


class _Loader(SourceFileLoader):
    """Loads a module from its source, and keeps that."""

    source: bytes | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        held = _held.get(spec.name)
        same = held is not None and getattr(held, "__file__", None) == self.path
        return held if same else super().create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if _held.get(module.__name__) is not module:
            super().exec_module(module)
            return
        before = dict(vars(module))
        for name in before.keys() - _OF_IMPORT:
            delattr(module, name)  # what the edit took away is gone
        try:
            super().exec_module(module)
        except BaseException:
            vars(module).update(before)
            raise

    def get_code(self, fullname: str) -> CodeType | None:
        self.source = self.get_data(self.path)
        if _may_be_outdated(self.path):
            code: CodeType = self.source_to_code(self.source, self.path)
            return code
        return super().get_code(fullname)


def _may_be_outdated(path: str) -> bool:
    """Say whether what was compiled of a file before may be of an earlier edit.

    Python tells edits apart by length and full seconds: one in the second of the other is not.
    """
    try:
        compiled_at = os.stat(importlib.util.cache_from_source(path)).st_mtime
    except (OSError, NotImplementedError):
        return False
    return int(compiled_at) <= int(os.stat(path).st_mtime)


class _OwnFinder:
    """Finds modules as all others do, those of the user's in `_places` besides."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module; None if there is none."""
        others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        tried = (one.find_spec(name, path, target) for one in others)
        found = next((spec for spec in tried if spec is not None), None)
        if path is None:
            found = _nearer(name, found)
        if found is not None and type(found.loader) is SourceFileLoader and _own_file(found):
            found.loader = _Loader(name, found.loader.path)
        return found


def _nearer(name: str, found: ModuleSpec | None) -> ModuleSpec | None:
    """Return a module of the user's that goes before one found elsewhere."""
    if found is None:
        return PathFinder.find_spec(name, [folder for folder in _places if folder is not None])
    if _places.beside is None or not _gives_way(found):
        return found
    beside = PathFinder.find_spec(name, [_places.beside])
    return found if _own_file(beside) is None else beside


def _gives_way(found: ModuleSpec) -> bool:
    if found.origin is None:  # a folder without __init__.py
        return all(map(_is_own, found.submodule_search_locations or []))
    return _own_file(found) is not None


_FINDER = _OwnFinder()
sys.meta_path.insert(0, _FINDER)
