"""Open a trace file: plain or gzip, CSV or JSON, with every record's line number kept."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from schedlab.sim.errors import TraceError, look_alike
from schedlab.sim.files import irregular
from schedlab.traces.published import PUBLISHED
from schedlab.traces.row_error import RowError

# A prompt may be longer than the 128 KiB that the csv module allows by default.
MAX_CELL_CHARS = 1 << 27
# A JSON array may be one line of many megabytes, a JSON Lines record is not.
MAX_OPENING_CHARS = 1 << 24
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
# Thousands of nested brackets, as in a damaged file, exhaust the parser's stack.
JSON_ERRORS = (ValueError, RecursionError)


class Peek(NamedTuple):
    """The beginning of a file, enough to recognise its format."""

    kind: str
    """``"csv"``, ``"jsonl"``, ``"json"`` (an array) or ``"parquet"``."""
    names: tuple[str, ...]
    """Column names, or the keys of the first record."""


@dataclass
class Records:
    """Some consecutive records of a file."""

    path: Path
    lines: list[int] = field(default_factory=list)
    """Line number of each record (or number of the entry), counted from 1."""
    values: list[Any] = field(default_factory=list)
    separator: str = ":"
    """What stands between path and number; files without lines say ``": row "``."""

    def at(self, index: int) -> str:
        """Return ``file:line`` of a record, for an error message."""
        return f"{self.path}{self.separator}{self.lines[index]}"

    def blame(self, error: RowError) -> TraceError:
        """Return the error of a row as the error of its line."""
        return TraceError(f"{self.at(error.row)}: {error.problem}")


def existing(path: str | Path) -> Path:
    """Return `path` if it is a file, or that of the published trace of this name.

    Raises
    ------
    TraceError
        If there is none; the message names the nearest file name of that folder, or how to fetch
        a published trace.
    """
    path = Path(path)
    if path.is_file():
        return path
    if str(path) in PUBLISHED:
        return PUBLISHED[str(path)].fetched()
    if path.is_dir():
        raise TraceError(f"{path} is a folder, not a trace file")
    if told := irregular(path):
        raise TraceError(told)
    if path.is_symlink():
        raise TraceError(f"{path} is a link to {path.readlink()}, where no file is")
    message = f"no such trace file: {path}"
    there = (p.name for p in path.parent.iterdir()) if path.parent.is_dir() else ()
    if near := look_alike(path.name, [*there, *PUBLISHED]):
        message += f"; did you mean {near}?"
    raise TraceError(message)


def open_text(path: Path) -> TextIO:
    """Open a text file, through gzip if it starts like one, skipping a byte-order mark."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == GZIP_MAGIC
    if zipped:
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig", newline=""))
    return path.open(encoding="utf-8-sig", newline="")


def peek(path: Path) -> Peek:
    """Return the kind of a file and the names its first record uses.

    Raises
    ------
    TraceError
        If the file is empty or is no text.
    """
    with path.open("rb") as raw:
        if raw.read(4) == PARQUET_MAGIC:
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                return Peek("parquet", tuple(pq.read_schema(path).names))
            except (pa.ArrowInvalid, OSError) as error:
                raise TraceError(f"{path}: not readable as Parquet ({error!s:.200})") from None
    with open_text(path) as text, readable(path, [0]):
        opening = text.readline(MAX_OPENING_CHARS)
        while opening and not opening.strip():
            opening = text.readline(MAX_OPENING_CHARS)
        if not opening:
            raise TraceError(f"{path}: the file is empty")
        if opening.lstrip().startswith("["):
            return Peek("json", _first_element_keys(opening, text))
        if opening.lstrip().startswith("{"):
            try:
                # A .json file may be one object over many lines.
                rest = text.read() if ".json" in path.suffixes and opening.strip() == "{" else ""
                return Peek("jsonl", tuple(json.loads(opening + rest)))
            except JSON_ERRORS as error:
                raise TraceError(f"{path}:1: no complete JSON object ({error})") from None
        return Peek("csv", tuple(name.strip() for name in next(csv.reader([opening]))))


def _first_element_keys(opening: str, text: TextIO) -> tuple[str, ...]:
    """Return the keys of the first object of a JSON array, reading no more than needed."""
    decoder = json.JSONDecoder()
    buffer = opening[opening.index("[") + 1 :]
    for _ in range(64):
        try:
            element, _end = decoder.raw_decode(buffer.lstrip())
        except RecursionError:
            return ()
        except ValueError:
            more = text.read(1 << 20)
            if not more:
                return ()
            buffer += more
            continue
        return tuple(element) if isinstance(element, dict) else ()
    return ()


def csv_records(
    path: Path, required: tuple[str, ...], chunk_rows: int
) -> Iterator[tuple[tuple[str, ...], Records]]:
    """Yield (column names, rows as lists of cells), `chunk_rows` rows at a time.

    Raises
    ------
    TraceError
        If a required column is missing, two have the same name, or a row has another number of
        cells than the header.
    """
    csv.field_size_limit(MAX_CELL_CHARS)
    with open_text(path) as text:
        reader = csv.reader(text)
        where = [0]
        with readable(path, where):
            header = next((row for row in reader if row), None)
            if header is None:
                raise TraceError(f"{path}: the file is empty")
            names = tuple(name.strip() for name in header)
            _check_columns(path, reader.line_num, names, required)
            for place, name in enumerate(names):
                if name and name in names[:place]:
                    raise TraceError(f"{path}:{reader.line_num}: two columns are called {name!r}")
            chunk = Records(path)
            for row in reader:
                where[0] = reader.line_num
                if not row:
                    continue
                if len(row) != len(names):
                    guess = "is the line truncated" if len(row) < len(names) else "a comma too many"
                    raise TraceError(
                        f"{path}:{reader.line_num}: {len(row)} cells where the header has "
                        f"{len(names)} ({guess}?)"
                    )
                chunk.lines.append(reader.line_num)
                chunk.values.append(row)
                if len(chunk.lines) == chunk_rows:
                    yield names, chunk
                    chunk = Records(path)
            if chunk.lines:
                yield names, chunk


def jsonl_records(path: Path, required: tuple[str, ...], chunk_rows: int) -> Iterator[Records]:
    """Yield the objects of a JSON Lines file, `chunk_rows` at a time.

    Raises
    ------
    TraceError
        If a line is no JSON object or lacks a required key.
    """
    with open_text(path) as text:
        where = [0]
        with readable(path, where):
            chunk = Records(path)
            for number, line in enumerate(text, start=1):
                where[0] = number
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except JSON_ERRORS as error:
                    raise TraceError(
                        f"{path}:{number}: no complete JSON object ({error})"
                    ) from None
                if not isinstance(record, dict):
                    raise TraceError(f"{path}:{number}: expected a JSON object")
                for key in required:
                    if key not in record:
                        _check_columns(path, number, tuple(record), required)
                chunk.lines.append(number)
                chunk.values.append(record)
                if len(chunk.lines) == chunk_rows:
                    yield chunk
                    chunk = Records(path)
            if chunk.lines:
                yield chunk


def _check_columns(
    path: Path, line: int, names: tuple[str, ...], required: tuple[str, ...]
) -> None:
    """Raise for the first missing name, with what looks most like it."""
    for name in required:
        if name not in names:
            near = look_alike(name, [one for one in names if one not in required])
            hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
            raise TraceError(f"{path}:{line}: no column {name!r}; {hint}")


_PACKED = {
    ending: f"unpack it first (or use gzip): {how}"
    for ending, how in {
        ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".zst": "unzstd", ".lz4": "unlz4",
    }.items()
}  # fmt: skip
"""What to do about files that no reader unpacks, by how their names end."""


class readable:  # noqa: N801 - reads as a verb in `with readable(path, where):`
    """Turn what a broken file raises into a `TraceError` that names the last good line."""

    def __init__(self, path: Path, where: list[int]) -> None:
        self.path = path
        self.where = where

    def __enter__(self) -> None:
        """Start to watch."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Translate a decoding, gzip or CSV error."""
        after = f"{self.path}: after line {self.where[0]}" if self.where[0] else f"{self.path}"
        if isinstance(error, UnicodeDecodeError):
            packed = f"; {_PACKED[ending]}" if (ending := self.path.suffix) in _PACKED else ""
            raise TraceError(f"{after}: not UTF-8 text ({error.reason}){packed}") from None
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error):
            raise TraceError(f"{after}: the gzip file is damaged or cut short ({error})") from None
        if isinstance(error, csv.Error):
            raise TraceError(f"{after}: not readable as CSV ({error})") from None
