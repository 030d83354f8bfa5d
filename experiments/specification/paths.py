"""Which keys of a specification are paths, and what they are relative to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from schedlab.experiments.specification.cost_model import key_of
from schedlab.experiments.specification.shipped import shipped_frontends, shipped_profiles
from schedlab.experiments.specification.swept import swept_keys
from schedlab.sim.errors import SpecError
from schedlab.sim.files import irregular
from schedlab.sim.yaml_lines import Value

Change = Callable[[str, str], str | None]
"""Takes a path and the key it stands at; returns what stands there instead, None for no key."""

SCRATCH = "engine.kv_offload.tiers.path"
"""Where something lies while an experiment runs: no file of it, nor anything that its result
depends on."""


def is_preset(trace: str) -> bool:
    """Say whether a trace is named as a preset: a path has a folder or a suffix.

    Parameters
    ----------
    trace : str
        The value of `workload.trace`.

    Returns
    -------
    bool
        True for ``azure-conv``, False for ``azure-conv.csv`` and ``./azure-conv``.
    """
    return not any(mark in trace for mark in "/\\.") and not is_published(trace)


def is_published(trace: str) -> bool:
    """Say whether a trace is named as one that `schedlab trace fetch` knows.

    Parameters
    ----------
    trace : str
        The value of `workload.trace`.

    Returns
    -------
    bool
        True for ``azure-2023-conv``.
    """
    from schedlab.traces.published import PUBLISHED

    return trace in PUBLISHED


# Names of models hold dots and slashes (Qwen/Qwen2.5-7B), so what is on disk decides. One that is
# too long for a path is none to `os.path`, and an error to `Path`.
_IS_PATH: dict[str, Callable[[str, Path], bool]] = {
    "model": lambda value, folder: value.endswith(".json") or os.path.isdir(folder / value),
    "frontend": lambda *_: True,
    "frontend.file": lambda *_: True,
    SCRATCH: lambda *_: True,
    "engine.speculation.acceptance.recording": lambda *_: True,
    "engine.speculation.model": lambda value, folder: (
        value.endswith(".json") or os.path.isdir(folder / value)
    ),
    "hardware": lambda value, _: value.endswith((".yaml", ".yml", ".json")),
    "cost_model": lambda value, _: key_of(value) == "profile",
    "cost_model.profile": lambda *_: True,
    "real.weights": lambda *_: True,
    "policy.serving_time": lambda *_: True,
    "policy.predictor.model": lambda *_: True,
    "policy.predictor.path": lambda *_: True,
    "validation.measured": lambda *_: True,
    "workload.load_test": lambda *_: True,
    "workload.load_test.file": lambda *_: True,
    "workload.trace": lambda value, _: not (is_preset(value) or is_published(value)),
}

_TIERS = SCRATCH.rpartition(".")[0]
_OF_POOL = re.compile(r"^cluster\.pools\.[^.]+\.")  # what stands there stands in for the key

# A profile that comes with the program goes by its name, from any folder.
_PROFILES = ("cost_model", "cost_model.profile")
_FRONTENDS = ("frontend", "frontend.file")


def absolute_paths(value: Value, folder: Path, key: str = "") -> Value:
    """Return specification data with its relative paths made absolute.

    Parameters
    ----------
    value : Value
        What stands at `key`; not changed.
    folder : Path
        What relative paths in it are relative to.
    key : str
        Dotted key of `value`; empty for the whole specification.

    Returns
    -------
    Value
        The same data, with values that are paths, swept ones included, made absolute, and
        names of shipped profiles replaced by their folders.
    """

    def absolute(value: str, key: str) -> str:
        try:
            path = folder / Path(os.path.expandvars(value)).expanduser()
            if key in _PROFILES and not path.exists():
                path = shipped_profiles().get(value, path)
            if key in _FRONTENDS and not path.exists():
                path = shipped_frontends().get(value, path)
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                path.stat()  # whatever is missing is told by who needs it; a name may be too long
            # What a pipe resolves to (/proc/7/fd/pipe:[1]) is no name of anything.
            return str(path.absolute() if irregular(path) else path.resolve())
        except (OSError, RuntimeError, ValueError) as error:
            raise SpecError(f"{key}: {value!r} is no path: {error}") from None

    return changed_paths(value, folder, absolute, key)


def changed_paths(
    value: Value, folder: Path, change: Change, key: str = "", known: Container[str] = ()
) -> Value:
    """Return specification data with every path in it replaced.

    Parameters
    ----------
    value : Value
        What stands at `key`; not changed.
    folder : Path
        What relative paths in it are relative to: of some keys what is there decides whether
        their value is a path.
    change : callable
        Takes a path and its dotted key, and returns what is to stand there; None takes the key out.
    key : str
        Dotted key of `value`; empty for the whole specification.
    known : container of str
        What is a path wherever a path may stand.
    """
    inside = partial(changed_paths, folder=folder, change=change, known=known)
    if key == "sweep" and isinstance(value, dict):
        return {
            swept: [_swept_paths(item, swept, inside) for item in items]
            if isinstance(items, list)
            else items
            for swept, items in value.items()
        }
    if key == "claim":
        return _paths_in_changes(value, inside)
    if isinstance(value, dict):
        changed = {
            name: inside(item, key=f"{key}.{name}" if key else name) for name, item in value.items()
        }
        return {
            name: new for name, new in changed.items() if new is not None or value[name] is None
        }
    key = _OF_POOL.sub("", key)
    if isinstance(value, list) and key == _TIERS:
        return [inside(item, key=key) for item in value]
    if not isinstance(value, str) or not value or key not in _IS_PATH:
        return value
    return change(value, key) if value in known or _IS_PATH[key](value, folder) else value


def relative_paths(value: object) -> object:
    """Return plain data as results tell it: files relative to the working directory.

    Parameters
    ----------
    value : object
        Nested plain data; absolute paths of what exists are paths.

    Returns
    -------
    object
        The same data; neither the user's name nor where the project lies is in its paths, as long
        as what they name lies below or beside the working directory.
    """
    if isinstance(value, Mapping):
        return {key: relative_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [relative_paths(item) for item in value]
    if isinstance(value, str) and os.path.isabs(value) and os.path.exists(value):
        return os.path.relpath(value)
    return value


def _paths_in_changes(value: Value, inside: Callable[..., Value]) -> Value:
    """Return a claim with the paths replaced that the variations of its figures change."""
    if isinstance(value, list):
        return [_paths_in_changes(part, inside) for part in value]
    if not isinstance(value, dict):
        return value
    found = {name: _paths_in_changes(item, inside) for name, item in value.items()}
    if isinstance(changes := found.get("change"), dict):
        for name, item in changes.items():
            swept = name.removeprefix("sweep.")
            if swept == name:
                changes[name] = inside(item, key=name)
            elif isinstance(item, list):
                changes[name] = [_swept_paths(each, swept, inside) for each in item]
    return found


def _swept_paths(item: Value, key: str, inside: Callable[..., Value]) -> Value:
    keys = swept_keys(key)
    if len(keys) > 1 and isinstance(item, list) and len(item) == len(keys):
        return [inside(part, key=k) for k, part in zip(keys, item, strict=True)]
    return inside(item, key=key)
