"""What comes with the program and goes by name: experiments to start from, measured profiles."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from schedlab.sim.errors import SpecError, look_alike
from schedlab.sim.files import irregular

_EARLIER_NAMES = {"azure-conv": "azure-replay"}
"""What experiments were called before; azure-conv is a preset, which draws and replays nothing."""


@cache
def shipped_experiments() -> dict[str, Path]:
    """Return the experiments that come with the program.

    Returns
    -------
    dict of str to Path
        By name, the file's without its suffix: first those to start from, then those that hold
        systems and claims against their papers.
    """
    folder = shipped_folder("experiments")
    papers = [
        f"papers/{room}/*.yaml"
        for room in ("policies", "fleets", "claims", "speculation", "sessions", "pipelines")
    ]
    patterns = ("*.yaml", *papers)
    return {path.stem: path for pattern in patterns for path in sorted(folder.glob(pattern))}


@cache
def shipped_profiles() -> dict[str, Path]:
    """Return the measured profiles that come with the program.

    Returns
    -------
    dict of str to Path
        Folders by name, such as ``profiles/cpu/schedlab-small/fp32-tp1``.
    """
    folder = shipped_folder("profiles")
    found = sorted(path.parent for path in folder.glob("*/*/*/meta.json"))
    return {f"profiles/{path.relative_to(folder).as_posix()}": path for path in found}


@cache
def shipped_frontends() -> dict[str, Path]:
    """Return the measured front ends that come with the program, by name, such as `vllm-0.15`."""
    folder = shipped_folder("profiles") / "frontends"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def shipped_folder(package: str) -> Path:
    """Return where a package of data lies, in a checkout or installed.

    Parameters
    ----------
    package : {"experiments", "profiles", "regression"}
        A name below `schedlab`.

    Returns
    -------
    Path
        The folder, links resolved.
    """
    found = find_spec(f"schedlab.{package}")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))).resolve()


def experiment_file(named: str | Path) -> Path:
    """Return the file of an experiment: a path, or the name of one that comes with the program.

    Parameters
    ----------
    named : str or Path
        What stands on disk wins; ``quickstart`` or ``sarathi`` otherwise.

    Returns
    -------
    Path
        An existing file, or a path that nothing shipped goes by and that looks like one.

    Raises
    ------
    SpecError
        If it is neither a file nor a name; says the nearest name.
    """
    path = Path(named)
    if path.is_file():
        return path
    known = shipped_experiments()
    name = _EARLIER_NAMES.get(str(named), str(named))
    if name in known:
        return known[name]
    if path.is_dir():
        inside = path / "spec.yaml"
        hint = f"; that of these results is {inside}" if inside.is_file() else ""
        raise SpecError(f"{path} is a folder, and an experiment is a file{hint}")
    if told := irregular(path):
        raise SpecError(told)
    beside = {other.stem: other.name for other in path.parent.glob("*.y*ml")}
    if path.suffix and (stem := look_alike(path.stem, beside)):
        raise SpecError(f"{path}: no such file; did you mean {path.with_name(beside[stem])}?")
    near = look_alike(path.stem, known)
    hint = f"; {near} comes with schedlab, by that name" if near else ""
    raise SpecError(f"{path}: no such file{hint} (schedlab examples lists all)")


def title(experiment: Path) -> str:
    """Return what an experiment asks: the first sentence of the comment it begins with.

    Parameters
    ----------
    experiment : Path
        Its file.

    Returns
    -------
    str
        Empty if it begins with no comment.
    """
    lines = experiment.read_text(encoding="utf-8").splitlines()
    begin = 1 if lines[0].startswith("# yaml-language-server:") else 0  # a line for editors
    comment = [
        line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines[begin:])
    ]
    sentence = re.split(r"(?<=\?)\s|\.\s|:\n|\.$", "\n".join(comment), maxsplit=1)[0]
    return " ".join(sentence.split())
