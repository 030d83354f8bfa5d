"""Download a published trace: taken up again where it was cut off, and checked before it counts."""

from __future__ import annotations

import errno
import hashlib
import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from schedlab.sim.errors import TraceError
from schedlab.traces.published import PublishedTrace

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes of the whole file."""

_CHUNK_BYTES = 1 << 16
_TIMEOUT_S = 30.0
_FRUITLESS_ATTEMPTS = 3


class Fetched(NamedTuple):
    """A trace file that is on this machine.

    Attributes
    ----------
    path : Path
        The file, its checksum verified.
    how : {"downloaded", "resumed", "already there"}
        Whether anything, or only the rest, came over the network.
    """

    path: Path
    how: Literal["downloaded", "resumed", "already there"]


def fetch(
    trace: PublishedTrace, url: str | None = None, progress: Progress | None = None
) -> Fetched:
    """Bring a published trace onto this machine.

    Parameters
    ----------
    trace : PublishedTrace
        What to fetch; `trace.path` is where it goes.
    url : str, optional
        A mirror; its file must have the same checksum.
    progress : callable, optional
        Told how far it is.

    Returns
    -------
    Fetched
        Where it is.

    Raises
    ------
    TraceError
        If the server cannot be reached or has no such file, the connection is cut again and again
        (what has come is kept: the next call goes on from there), the disk is full, the checksum
        is wrong, or another process is fetching the same file.

    Notes
    -----
    The file appears under its name only when it is whole and its SHA-256 is right. Until then it
    is ``<name>.part`` beside it.
    """
    if trace.path.is_file() and _sha256(trace.path) == trace.sha256:
        return Fetched(trace.path, "already there")
    url = url or trace.url
    with _part_file(trace) as (part, file):
        size = file.seek(0, 2)
        if size > trace.size_bytes:
            size = file.truncate(0)
        resumed = size > 0
        _check_space(part.parent, trace.size_bytes - size)
        try:
            _download(url, file, trace.size_bytes, progress)
        except OSError as error:
            raise TraceError(_explained(error, url, trace, part)) from error
        found = _sha256(part)
        if found != trace.sha256:
            part.unlink()
            raise TraceError(
                f"{url}: wrong checksum: SHA-256 {found}, published as {trace.sha256}; the "
                "download was thrown away. Either it was damaged (try again), or the publisher's "
                "file has changed"
            )
        part.replace(trace.path)
    return Fetched(trace.path, "resumed" if resumed else "downloaded")


class _CutOffError(OSError):
    """The connection ended before the file did."""


class _TooLongError(OSError):
    """More came than the file has."""


@contextmanager
def _part_file(trace: PublishedTrace) -> Iterator[tuple[Path, BinaryIO]]:
    """Open the unfinished file of a trace, for this process alone."""
    part = trace.path.with_name(f"{trace.path.name}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that a full disk is met where it is handled and not on closing.
        file = part.open("ab", buffering=0)
    except OSError as error:
        raise TraceError(
            f"{part}: cannot write: {error.strerror} (SCHEDLAB_CACHE names another folder)"
        ) from error
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # Windows: two at once spoil the file, and the checksum tells.
        except BlockingIOError:
            raise TraceError(f"{trace.name} is being fetched by another process") from None
        try:
            yield part, file
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()


def _check_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise TraceError(
            f"{folder}: {num_bytes / 1e6:.1f} MB to fetch, but {free / 1e6:.1f} MB free "
            "(SCHEDLAB_CACHE names another folder)"
        )


def _download(url: str, file: BinaryIO, num_bytes: int, progress: Progress | None) -> None:
    """Append what is missing; cut connections are made anew as long as something comes."""
    fruitless = 0
    while (size := file.seek(0, 2)) < num_bytes:
        try:
            _append(url, file, num_bytes, progress)
        except (_CutOffError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            fruitless = 0 if file.seek(0, 2) > size else fruitless + 1
            if fruitless == _FRUITLESS_ATTEMPTS:
                raise _CutOffError(str(error) or type(error).__name__) from error


def _append(url: str, file: BinaryIO, num_bytes: int, progress: Progress | None) -> None:
    """Ask once for what is missing, and write it as it comes."""
    size = file.seek(0, 2)
    request = urllib.request.Request(url, headers={"User-Agent": "schedlab"})
    if size:
        request.add_header("Range", f"bytes={size}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        begins = f"bytes {size}-"
        if size and not response.headers.get("Content-Range", "").startswith(begins):
            size = file.truncate(0)  # The server gives the whole file, whatever was asked.
        while chunk := response.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > num_bytes:
                file.truncate(0)
                raise _TooLongError(f"more than the {num_bytes:,} bytes of the published file came")
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
            if progress is not None:
                progress(size, num_bytes)
    if size < num_bytes:
        raise _CutOffError(f"the connection ended after {size:,} of {num_bytes:,} bytes")


def _explained(error: OSError, url: str, trace: PublishedTrace, part: Path) -> str:
    """Return what went wrong in words, with what to do."""
    size = part.stat().st_size
    kept = f"; {size:,} bytes are kept, the same command goes on from there" if size else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{part.parent}: disk full{kept} (SCHEDLAB_CACHE names another folder)"
    by_hand = f"or download it elsewhere and put it at {trace.path}"
    if isinstance(error, urllib.error.HTTPError):
        return (
            f"{url}: the server answers {error.code} {error.reason}{kept}; "
            f"give a mirror with --url, {by_hand}"
        )
    if isinstance(error, urllib.error.URLError):
        return (
            f"{url}: cannot be reached: {error.reason}{kept}; try again with a network, {by_hand}"
        )
    if isinstance(error, _TooLongError):
        return f"{url}: {error}: it is another file"
    return f"{url}: {error}{kept}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
