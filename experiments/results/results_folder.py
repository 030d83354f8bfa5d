"""A folder of results that is complete or not there at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schedlab.sim.errors import SpecError
from schedlab.sim.files import raise_as_called, read_json_object, write_text

MARKER = ".schedlab.json"
"""Lists what schedlab wrote into a folder: such a folder, and nothing else in it, is replaced."""

SWEEP_FILE = ".schedlab-sweep.json"
"""Marks a folder that a sweep adds to: it is never replaced."""


def check_replaceable(folder: Path) -> None:
    """Make sure that writing results into `folder` destroys nothing else.

    Parameters
    ----------
    folder : Path
        Where results are to go.

    Raises
    ------
    SpecError
        If it is a file, or holds anything that an earlier run did not write there.
    """
    if not folder.exists():
        if folder.is_symlink():
            raise SpecError(f"{folder} is a link to where nothing is; choose another with -o")
        return
    if not folder.is_dir():
        raise SpecError(f"{folder} is not a folder; choose another with -o")
    strangers: list[str] = []
    known: set[str] | None = None
    while known != (known := _written(folder)):  # unless another run replaces it meanwhile
        try:
            strangers = sorted(_files(folder) - known)
        except FileNotFoundError:  # another run has moved it aside
            return
    if strangers:
        inside = [folder / where for where in Path(strangers[0]).parents]
        others = next((one for one in inside if one != folder and (one / MARKER).exists()), None)
        if others is not None:
            told = f"other results, in {others.relative_to(folder)}, which"
        elif SWEEP_FILE in strangers:
            told = "the points of a sweep, which"
        else:
            told = f"{strangers[0]}, which is no result of schedlab; it"
        raise SpecError(f"{folder} holds {told} would be lost: choose another folder with -o")


@contextmanager
def replacing_folder(
    folder: Path, is_as_good: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Give a new folder to write to, which takes the place of `folder` at the end.

    If the block raises (an error, Ctrl-C, a full disk), the new folder is removed and what was
    there before stays as it was. What a process left that was killed is removed by the next that
    writes there; if it was killed between moving the older result aside and the new one in, the
    older is put back.

    Parameters
    ----------
    folder : Path
        Where the results are to be in the end.
    is_as_good : callable, optional
        Whether what is there at the end is kept, since another process was faster.

    Yields
    ------
    Path
        An empty folder on the same file system.

    Raises
    ------
    SpecError
        As `check_replaceable`, or if nothing can be written there.
    """
    folder = folder.resolve() if folder.is_dir() else folder.absolute()  # links are followed
    tidy_up_after_the_killed(folder.parent, folder.name)
    check_replaceable(folder)
    is_first = not folder.parent.exists()
    new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
    except OSError as error:
        files = (f"{one} is a file" for one in folder.parents if one.is_file())
        raise SpecError(f"{folder}: cannot be written: {next(files, error.strerror)}") from error
    lock = _locked(new)
    try:
        yield new
        _write_marker(new, _files(new) - {MARKER})
        while not _moved(new, folder):  # another run may be faster, and this one's older result
            check_replaceable(folder)
            if is_as_good is not None and is_as_good(folder):
                shutil.rmtree(new)
                break
            _discard(old)
            with suppress(FileNotFoundError):
                folder.rename(old)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if is_first:
            with suppress(OSError):  # another run has begun to use it
                folder.parent.rmdir()
        if old.exists() and not _moved(old, folder):
            _discard(old)
        raise_as_called(error, new, folder)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    _discard(old)


def _moved(new: Path, folder: Path) -> bool:
    """Rename a folder unless there is one of that name with something in it."""
    try:
        new.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _discard(folder: Path) -> None:
    """Remove a folder under another name, so that no half of it is ever put back for the whole."""
    gone = folder.with_name(f"{folder.name}.new-{os.getpid()}")
    try:
        folder.rename(gone)
    except OSError:  # it is not there, or that name is too long
        gone = folder
    shutil.rmtree(gone, ignore_errors=True)


def tidy_up_after_the_killed(parent: Path, name: str = "") -> None:
    """Remove unfinished results of processes that are gone, and put back what they moved aside.

    Parameters
    ----------
    parent : Path
        The folder that results are in.
    name : str
        Of one result; all if empty.
    """
    if os.name != "posix" or not parent.is_dir():
        return
    left = re.compile(rf"\.+({re.escape(name) or '.+?'})(?:\.(?:new|old)-(\d+))+")
    for path in sorted(parent.iterdir()):
        found = left.fullmatch(path.name)
        if found is None or path.is_symlink() or _is_alive(int(found[2])):
            continue
        lock = _locked(path)
        if lock is None:  # its process is alive elsewhere, or nobody can tell
            continue
        try:
            folder = parent / found[1]
            is_whole = path.name == f".{folder.name}.old-{found[2]}"
            if not (is_whole and _moved(path, folder)):
                _discard(path)
        finally:
            os.close(lock)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # somebody else's
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"  # one that ended, and whom nobody asked


def _locked(folder: Path) -> int | None:
    """Lock a folder for as long as what is returned is open; None where that cannot be."""
    try:
        import fcntl

        number = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


def add_to_marker(folder: Path, names: Iterable[str]) -> None:
    """Note files written into a results folder after the run, so that it stays replaceable.

    Parameters
    ----------
    folder : Path
        A results folder.
    names : iterable of str
        Files in it.
    """
    if (folder / MARKER).exists():
        _write_marker(folder, _written(folder) - {MARKER} | set(names))


def _write_marker(folder: Path, names: Iterable[str]) -> None:
    write_text(folder / MARKER, json.dumps({"files": sorted(names)}, indent=1) + "\n")


def _files(folder: Path) -> set[str]:
    inside = (p for p in folder.rglob("*") if not p.is_dir() or p.is_symlink())
    return {p.relative_to(folder).as_posix() for p in inside}


def _written(folder: Path) -> set[str]:
    try:
        listed = read_json_object(folder / MARKER).get("files")
    except SpecError:
        return set()
    return {*map(str, listed), MARKER} if isinstance(listed, list) else set()
