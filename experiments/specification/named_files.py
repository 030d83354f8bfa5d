"""Files of an experiment: named without where they lie, found again by what they hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from schedlab.experiments.specification.fields import Data
from schedlab.experiments.specification.paths import SCRATCH, changed_paths
from schedlab.experiments.specification.shipped import shipped_frontends, shipped_profiles
from schedlab.sim.errors import SpecError
from schedlab.sim.files import open_regular

_MOST_FILES = 2000


def content_hash(path: Path) -> str:
    """Return the SHA-256 (hex) of what a file holds, or a folder with all that is in it.

    Raises
    ------
    OSError
        If something in it cannot be read.
    SpecError
        If it is neither, or a folder of more than 2,000 files.
    """
    if path.is_dir():
        found = list(islice(path.rglob("*"), _MOST_FILES + 1))
        if len(found) > _MOST_FILES:
            raise SpecError(
                f"{path}: holds more than {_MOST_FILES:,} files: no model, profile or recording "
                "does; name the folder itself"
            )
        inside = sorted(p for p in found if p.is_file())
        lines = [f"{p.relative_to(path).as_posix()} {content_hash(p)}" for p in inside]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    with open_regular(path) as file:  # a device would never end
        return hashlib.file_digest(file, "sha256").hexdigest()


def name_files(data: Data) -> Data:
    """Return an experiment as a result keeps it: no path tells whose machine it was.

    Parameters
    ----------
    data : dict
        What `ExperimentSpec.to_data` returns, all paths absolute; not changed.

    Returns
    -------
    dict
        The same with files named from the nearest folder above the working directory that holds
        them, and ``files``: each such name with the SHA-256 of what it holds, by which
        `found_files` finds it. What comes with the program goes by its name, and where a tier lay
        on a disk is left out.
    """
    shipped = {str(path): name for name, path in (shipped_profiles() | shipped_frontends()).items()}
    files: dict[str, str] = {}

    def named(text: str, key: str) -> str | None:
        if key == SCRATCH:
            return None
        if text in shipped:
            return shipped[text]
        path = Path(text)
        name = _name(path)
        if os.path.exists(text):  # which a name too long for a path is none to, and no error
            files[name] = content_hash(path)
        return name

    changed = changed_paths(data, Path.cwd(), named)
    assert isinstance(changed, dict)
    return {**changed, "files": files} if files else changed


def _name(path: Path) -> str:
    """Return a path from the nearest folder that it shares with the working directory.

    Where they share none but one above the home folder, from the home folder, or the root.
    """
    home = Path.home()
    shared = [base for base in _upwards(Path.cwd()) if base not in home.parents]
    base = next((b for b in [*shared, home] if path.is_relative_to(b)), Path(path.anchor))
    return path.relative_to(base).as_posix()


def _upwards(folder: Path) -> tuple[Path, ...]:
    return (folder, *folder.parents)


def found_files(data: Data, folder: Path, place: str) -> Data:
    """Return an experiment that a result kept with its files where they are now.

    Parameters
    ----------
    data : dict
        What `name_files` returned; not changed.
    folder : Path
        Where that lies.
    place : str
        How messages name it.

    Returns
    -------
    dict
        The same without ``files``. A file is looked for in `folder`, in the working directory, in
        the folders above both, and in the home folder: it is the one that holds what it held. One
        that is nowhere keeps its name.

    Raises
    ------
    SpecError
        If ``files`` is no mapping of names to hashes, or what has the name holds something else
        wherever there is one.
    """
    data = dict(data)
    files = data.pop("files")
    if not isinstance(files, Mapping) or not all(
        isinstance(text, str) for pair in files.items() for text in pair
    ):
        raise SpecError(f"{place}: files: must map names of files to the SHA-256 of their content")
    found = {name: _found(name, digest, folder, place) for name, digest in files.items()}
    changed = changed_paths(data, folder, lambda text, _: found.get(text, text), known=found)
    assert isinstance(changed, dict)
    return changed


def _found(name: str, digest: str, folder: Path, place: str) -> str:
    others = []
    for path in _candidates(name, folder):
        try:
            if content_hash(path) == digest:
                return str(path)
        except (OSError, SpecError):  # a folder of thousands of files that has the name by chance
            pass
        others.append(path)
    if others:
        raise SpecError(
            f"{place}: files: {others[0]} does not hold what it held when this was written; "
            f"take {name} out of `files` to use it as it is"
        )
    return name


def _candidates(name: str, folder: Path) -> Iterator[Path]:
    for base in dict.fromkeys((*_upwards(folder.absolute()), *_upwards(Path.cwd()), Path.home())):
        try:
            path = base / name
            if path.exists():
                yield path
        except (OSError, ValueError):  # no name of a file at all
            return
