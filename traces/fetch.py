"""Download a published trace: taken up again where it was cut off, and checked before it counts."""

from __future__ import annotations

import errno
import hashlib
import http.client
import ipaddress
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Literal, NamedTuple
from urllib.parse import urlsplit

from schedlab.sim.errors import TraceError
from schedlab.traces.published import PublishedTrace

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes of the whole file."""

_CHUNK_BYTES = 1 << 16
_TIMEOUT_S = 15.0
_FRUITLESS_ATTEMPTS = 3
_LEAST_BYTES_PER_S = 4096
"""Fewer, on average over `_TIMEOUT_S`, and a server only keeps us waiting."""
_SCHEMES = ("https", "http", "file")


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
        If the server cannot be reached, has no such file or sends us where we should not go, the
        connection is cut again and again or brings next to nothing (what has come is kept: the
        next call goes on from there), the disk is full, the checksum is wrong, or another process
        is fetching the same file.

    Notes
    -----
    The file appears under its name only when it is whole and its SHA-256 is right. Until then it
    is ``<name>.part`` beside it.
    """
    if trace.path.is_file() and _sha256(trace.path) == trace.sha256:
        return Fetched(trace.path, "already there")
    url = url or trace.url
    _check_url(url)
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


def _check_url(url: str) -> None:
    """Raise for what is no address of a file."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise TraceError(f"{url!r} is no URL: {error}") from None
    if scheme not in _SCHEMES:
        raise TraceError(f"{url!r} is no URL: it must begin with {', '.join(_SCHEMES)} and ://")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise TraceError(f"{url!r} is no URL: write what is not plain ASCII as %XX")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Goes where a server sends us, but not into our own network, nor to less than it promised."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme != before.scheme and after.scheme != "https":
            raise urllib.error.URLError(f"it sends us on to {newurl}, which is not {before.scheme}")
        if _is_private(after.hostname) and not _is_private(before.hostname):
            raise urllib.error.URLError(f"it sends us on to {newurl}, a private address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_private(host: str | None) -> bool:
    """Return whether a name stands for a machine that the world cannot reach."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False  # unknown here: at most a proxy knows it
    return any(
        not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global
        for *_, address in found
    )


class _CutOffError(OSError):
    """The connection ended before the file did."""


class _TooSlowError(OSError):
    """The connection goes on, and brings next to nothing."""


class _OtherFileError(OSError):
    """More came than the file has, or all of a file that has less."""


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
    opener = urllib.request.build_opener(_Redirects)
    with opener.open(request, timeout=_TIMEOUT_S) as response:
        begins = f"bytes {size}-"
        if size and not response.headers.get("Content-Range", "").startswith(begins):
            size = file.truncate(0)  # The server gives the whole file, whatever was asked.
        begun_s, begun_size = time.monotonic(), size
        # What is there, not all that was asked for: a chunk may come byte by byte.
        while chunk := response.read1(_CHUNK_BYTES):
            size += len(chunk)
            if size > num_bytes:
                file.truncate(0)
                raise _OtherFileError(
                    f"more than the {num_bytes:,} bytes of the published file came"
                )
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
            if progress is not None:
                progress(size, num_bytes)
            if (passed_s := time.monotonic() - begun_s) > _TIMEOUT_S:
                rate = (size - begun_size) / passed_s
                if rate < _LEAST_BYTES_PER_S:
                    raise _TooSlowError(f"no more than {rate:,.0f} bytes a second came")
                begun_s, begun_size = time.monotonic(), size
    if size < num_bytes and url.startswith("file:"):
        file.truncate(0)
        raise _OtherFileError(f"{size:,} bytes, not the {num_bytes:,} published")
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
    if isinstance(error, _OtherFileError):
        return f"{url}: {error}: it is another file"
    return f"{url}: {error}{kept}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
