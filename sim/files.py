"""Files: written whole or not at all, read through one door with errors that name them."""

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from schedlab.sim.environment import environment_number
from schedlab.sim.errors import SpecError

MAX_TEXT_MIB = 64
"""No text that is read as a whole (YAML, JSON, a model's configuration) may be larger, unless the
environment's ``SCHEDLAB_MAX_TEXT_MIB`` says so."""


def check_writable(path: Path) -> None:
    """Make sure, before long work, that what comes of it can be written to a file.

    Parameters
    ----------
    path : Path
        The file; its folder need not be there yet.

    Raises
    ------
    SpecError
        If it is a folder, something above it is a file, or nothing may be written there.
    """
    if path.is_dir():
        raise SpecError(f"{path} is a folder: a file is to be written there")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise SpecError(f"{path} cannot be written: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise SpecError(f"{path} cannot be written: nothing may be written in {above}")


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write text files that belong together: where one cannot be written, all stay as they were.

    Parameters
    ----------
    folder : Path
        Made if need be; other files in it are left alone.
    texts : mapping of str to str
        Name of a file to what it holds.
    """
    with ExitStack() as written:
        for name, text in texts.items():
            temporary = written.enter_context(replacing(folder / name))
            temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; move it there if the block ends well.

    Parameters
    ----------
    path : Path
        The file to write. Its folder is made if need be.

    Yields
    ------
    Path
        Where to write. It is removed if the block raises, and an older `path` stays as it was.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replacing(target) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    if not path.name or path.is_dir():  # "." or "/"; found before the rename, and before all others
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a full disk
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise_as_called(error, temporary, path)
        raise


def raise_as_called(error: BaseException, temporary: Path, path: Path) -> None:
    """Raise an error of the system that names a temporary file by what this was to be called.

    Parameters
    ----------
    error : BaseException
        What happened; nothing is raised if it names no such file.
    temporary, path : Path
        A file or folder as it was written, and as it would have been called in the end.
    """
    if not (isinstance(error, OSError) and error.errno and isinstance(error.filename, str)):
        return
    named = Path(error.filename)
    if named.is_relative_to(temporary):
        meant = path / named.relative_to(temporary)
        raise OSError(error.errno, os.strerror(error.errno), str(meant)) from error


@contextmanager
def alone(path: Path, who: str) -> Iterator[None]:
    """Keep a second process from doing the same work at the same time.

    Parameters
    ----------
    path : Path
        A file or folder that the work is about; it must be there.
    who : str
        What the message calls the other one, e.g. ``sweep``.

    Raises
    ------
    SpecError
        If another process is at it. A lock ends with its process, however that ends.
    """
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    number = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            folder = path if path.is_dir() else path.parent
            raise SpecError(f"another {who} is at work in {folder}") from None
        yield
    finally:
        os.close(number)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; a pipe or a device would keep its reader waiting for ever.

    Raises
    ------
    SpecError
        If there is none of this name, it may not be read, or it is something else; names it.
    """
    try:
        # Opening a pipe without a writer would block, too.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except ValueError as error:
        raise SpecError(f"{str(path)!r} is no name of a file: {error}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise SpecError(irregular(path) or f"{path}: cannot be read: it is not a file but a folder")
    return os.fdopen(number, "rb")


def irregular(path: Path) -> str | None:
    """Say of a pipe, a socket or a device that it cannot be read; None of all else, and nothing."""
    if not path.exists() or path.is_file() or path.is_dir():
        return None
    return f"{path}: cannot be read: it is not a file but a pipe, a socket or a device"


def read_text(path: Path) -> str:
    """Return the whole of a text file in UTF-8.

    Raises
    ------
    SpecError
        If it cannot be read, is no UTF-8, or is larger than `MAX_TEXT_MIB`; names the file.
    """
    most_bytes = _max_text_bytes()
    with open_regular(path) as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as error:
            raise SpecError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    if len(content) > most_bytes:
        raise SpecError(
            f"{path}: larger than {most_bytes >> 20} MiB, which no text of this kind is; "
            "SCHEDLAB_MAX_TEXT_MIB raises the limit"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None


def _max_text_bytes() -> int:
    mib = environment_number(
        "SCHEDLAB_MAX_TEXT_MIB", MAX_TEXT_MIB, "a number of MiB", lambda m: 0 < m < 1 << 20
    )
    return int(mib * 2**20)


def parse_json(text: str, source: str) -> Any:  # noqa: ANN401
    """Return what a JSON text holds.

    Parameters
    ----------
    text : str
        One JSON value.
    source : str
        How error messages name the text.

    Raises
    ------
    SpecError
        If it is not JSON, is nested too deeply, or holds an integer beyond 64 bits.
    """
    try:
        return json.loads(text, parse_int=_int64)
    except RecursionError:
        raise SpecError(f"{source}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"{source}: not valid JSON: {error}") from None


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**63:
        raise ValueError(f"the integer {digits} does not fit 64 bits")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that is the whole of a file.

    Raises
    ------
    SpecError
        If the file cannot be read, is not JSON, or holds something else; names the file.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.json"
    >>> _ = path.write_text('{"vocab_size": 32000}')
    >>> read_json_object(path)
    {'vocab_size': 32000}
    """
    data = parse_json(read_text(path), str(path))
    if not isinstance(data, dict):
        raise SpecError(f"{path}: must hold a JSON object, that is {{...}}")
    return data
