"""What every trace reader must keep, checked on a sample of its format."""

from __future__ import annotations

import dataclasses
import gzip
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from schedlab.sim.errors import TraceError
from schedlab.testing.check import FAULTS, LawBroken
from schedlab.testing.laws import require
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import peek
from schedlab.traces.trace import Trace

ReaderLaw = Callable[[Reader, Path, Path], None]


def check_reader(reader: Reader, sample: Path, *, only: str | Iterable[str] | None = None) -> None:
    """Check that a reader keeps every law of `READER_LAWS`.

    Parameters
    ----------
    reader : Reader
        What a module of readers calls ``READER``.
    sample : Path
        A small file of its format, plain text, with at least three rows.
    only : str or iterable of str, optional
        Names of the laws to check; all by default.

    Raises
    ------
    LawBroken
        With the law, and what happened.
    """
    chosen = list(READER_LAWS) if only is None else [only] if isinstance(only, str) else only
    for name in chosen:
        law = READER_LAWS[name]
        meaning = (law.__doc__ or "").partition("\n")[0].rstrip(".")
        with tempfile.TemporaryDirectory() as folder:
            try:
                law(reader, Path(sample), Path(folder))
            except FAULTS as error:
                text = str(error)
                reason = text if isinstance(error, AssertionError) else repr(error)
                raise LawBroken(f"reader {reader.name!r}", name, meaning, reason, None) from error


def knows_its_format(reader: Reader, sample: Path, folder: Path) -> None:
    """Recognise the sample, and no file of another kind."""
    require(reader.sniff(peek(sample)), f"{sample.name} is not recognised")
    for name, text in (
        ("other.csv", "surname,town\nAda,London\n"),
        ("other.jsonl", '{"surname": "Ada"}\n'),
        ("other.json", json.dumps([{"surname": "Ada"}])),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        require(not reader.sniff(peek(folder / name)), f"{text!r} is taken for its own")


def gives_valid_requests(reader: Reader, sample: Path, folder: Path) -> None:
    """Give requests in order of arrival with lengths of at least one, and a report that adds up."""
    trace = _read(reader, sample)
    require(len(trace) > 0, "no request")
    require((trace.prompt_tokens >= 1).all(), "a prompt of no token")
    require((trace.output_tokens >= 1).all(), "an answer of no token")
    if trace.arrival_ns is not None:
        require((np.diff(trace.arrival_ns) >= 0).all(), "arrivals go back in time")
        require(trace.arrival_ns[0] >= 0, "the first request comes before time 0")
    report = trace.report
    kept = report.rows_read - sum(report.rows_dropped.values())
    require(kept == len(trace), f"the report says {kept} requests are left, there are {len(trace)}")
    require(report.format == reader.name, f"the report says format {report.format!r}")


def reads_in_chunks_what_it_reads_whole(reader: Reader, sample: Path, folder: Path) -> None:
    """Give the same requests whatever the size of chunks, plain or gzip."""
    whole = _read(reader, sample)
    packed = folder / f"{sample.name}.gz"
    packed.write_bytes(gzip.compress(sample.read_bytes()))
    for path, rows in ((sample, 1), (sample, 2), (packed, 65536)):
        _require_same(whole, _read(reader, path, rows), f"{path.name} in chunks of {rows}")


def leaves_the_file_alone(reader: Reader, sample: Path, folder: Path) -> None:
    """Read twice alike, and write nothing."""
    before = sample.read_bytes()
    _require_same(_read(reader, sample), _read(reader, sample), "a second reading")
    require(sample.read_bytes() == before, "reading changes the file")


def names_file_and_row_of_a_mistake(reader: Reader, sample: Path, folder: Path) -> None:
    """Refuse a file that is cut off or damaged with a TraceError that names it."""
    text = sample.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    damaged = {"empty": "", "garbled": "".join([*lines[:-1], "\x00?\n"])}
    if len(lines) > 2:
        damaged["letters for numbers"] = "".join(
            [*lines[:-1], "".join("x" if c.isdigit() else c for c in lines[-1])]
        )
    for what, content in damaged.items():
        path = folder / f"damaged{sample.suffix}"
        path.write_text(content, encoding="utf-8")
        try:
            _read(reader, path)
        except TraceError as error:
            require(
                path.name in str(error), f"the error of a file with {what} names no file: {error}"
            )
        except FAULTS as error:
            raise AssertionError(
                f"a file with {what} ends in {error!r}, not a TraceError"
            ) from error
        else:
            raise AssertionError(f"a file with {what} is read without an error")


READER_LAWS: dict[str, ReaderLaw] = {
    law.__name__: law
    for law in (
        knows_its_format, gives_valid_requests, reads_in_chunks_what_it_reads_whole,
        leaves_the_file_alone, names_file_and_row_of_a_mistake,
    )
}  # fmt: skip
"""The laws of readers by name, in the order in which they are checked."""


def _read(reader: Reader, path: Path, chunk_rows: int = 65536) -> Trace:
    options = ReadOptions(chunk_rows, "estimate", 1, False)
    return Trace.concat(list(reader.chunks(path, options)))


def _require_same(one: Trace, other: Trace, how: str) -> None:
    for field in dataclasses.fields(Trace):
        here, there = getattr(one, field.name), getattr(other, field.name)
        if isinstance(here, np.ndarray) or isinstance(there, np.ndarray):
            same = (
                here is not None
                and there is not None
                and len(here) == len(there)
                and all(a == b or (a != a and b != b) for a, b in zip(here, there, strict=True))
            )
            require(same, f"{how} gives another {field.name}")
        elif here is not None and field.name in ("prefix", "turns"):
            same = there is not None and here.rows() == there.rows()
            require(same, f"{how} gives another {field.name}")
