"""The tables of a run in Parquet files: written whole, read when asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SchedlabError, nearest
from schedlab.sim.files import open_regular, replacing
from schedlab.sim.record.columns import (
    BATCH_ROWS,
    Column,
    Columns,
    Ints,
    LazyTable,
    Read,
    batches,
    whole_numbers,
)
from schedlab.sim.record.log import RunLog
from schedlab.sim.record.sessions import has_sessions, session_columns
from schedlab.sim.record.spool import Spool
from schedlab.sim.record.stored_token_times import StoredTokenTimes
from schedlab.sim.record.token_times import STINT_COLUMNS, TokenTimes

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

_NEEDED = {
    "requests": (
        "id", "arrival_ns", "prompt_tokens", "generated_tokens", "first_token_ns",
        "last_token_ns", "finish_ns", "status",
    ),
    "steps": ("start_ns", "end_ns"),
    "preemptions": ("id", "evicted_ns", "resumed_ns"),
    "gaps": ("gap_ns", "count"),
    "tokens": ("time_ns", "count"),
    "stints": STINT_COLUMNS,
    "bursts": ("tokens",),
    "copies": (
        "id", "tier", "is_load", "is_swap", "num_blocks", "issued_ns", "done_ns", "used_blocks",
    ),
    "copy_waits": ("start_ns", "wait_ns"),
}  # fmt: skip
"""What no table can be read without; what others of its columns hold is checked, too."""


class ResultLog(Protocol):
    """What a result needs of a log; `sim.record.log.RunLog` is the one the engine writes."""

    def steps(self) -> Columns:
        """Return one row a step; columns as in `schedlab.sim.record.steps.StepTable`."""

    def preemptions(self) -> Columns:
        """Return one row a preemption: id, evicted_ns, resumed_ns (-1 = never)."""

    def token_gaps(self, ids: Ints | None = None) -> Columns:
        """Return all gaps between tokens of one request: gap_ns, and count, how many."""

    def token_counts(self, ids: Ints | None = None) -> Columns:
        """Return time_ns and count: the tokens that came out then."""

    def token_times(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns."""

    def token_times_of_all(self) -> TokenTimes | StoredTokenTimes:
        """Return when all tokens came out."""


class SavedLog:
    """A log on disk; a table is read when it is asked for.

    Parameters
    ----------
    folder : Path
        Where `save_tables` wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token_times: TokenTimes | StoredTokenTimes | None = None

    def steps(self) -> Columns:
        """Return one row a step."""
        return read_table(self._folder / "steps.parquet")

    def preemptions(self) -> Columns:
        """Return one row a preemption."""
        return read_table(self._folder / "preemptions.parquet")

    def token_gaps(self, ids: Ints | None = None) -> Columns:
        """Return all gaps between tokens of one request: gap_ns, and count, how many."""
        if ids is None:
            return read_table(self._folder / "gaps.parquet")
        return self.token_times_of_all().gaps(ids)

    def token_counts(self, ids: Ints | None = None) -> Columns:
        """Return time_ns and count: the tokens that came out then."""
        if ids is None:
            return read_table(self._folder / "tokens.parquet")
        return self.token_times_of_all().counts(ids)

    def token_times(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns."""
        return self.token_times_of_all().of(request_id)

    def token_times_of_all(self) -> TokenTimes | StoredTokenTimes:
        """Return when all tokens came out.

        Raises
        ------
        SchedlabError
            If an early version wrote the run, which did not keep them.
        """
        if self._token_times is None:
            path = self._folder / "stints.parquet"
            if not path.is_file():
                raise SchedlabError(
                    f"{self._folder}: the token times of single requests were not saved by the "
                    "version that made this run; run the experiment again to get them"
                )
            stints, steps = read_table(path), self.steps()
            bursts = self._bursts()
            if isinstance(stints, LazyTable) and "engine" not in steps:
                spool = Spool(len(STINT_COLUMNS))
                for some in batches(stints):
                    spool.append(_stint_rows(some))
                self._token_times = StoredTokenTimes(spool, steps, _one_column(bursts))
            else:
                tokens = None if bursts is None else whole_numbers(bursts, "tokens")
                self._token_times = TokenTimes.of_steps(_stint_rows(stints), steps, tokens)
        return self._token_times

    def _bursts(self) -> Columns | None:
        """Return how many tokens decode steps of stints yielded, of a run with drafts."""
        path = self._folder / "bursts.parquet"
        return read_table(path) if path.is_file() else None


def _stint_rows(columns: Columns) -> Ints:
    return np.column_stack([whole_numbers(columns, name) for name in STINT_COLUMNS])


def _one_column(bursts: Columns | None) -> Spool | None:
    if bursts is None:
        return None
    spool = Spool(1)
    for some in batches(bursts):
        spool.append(whole_numbers(some, "tokens")[:, np.newaxis])
    return spool


def save_tables(folder: Path, requests: Columns, log: ResultLog) -> None:
    """Write the tables of a run, each file whole or not at all."""
    for name, columns in _tables(requests, log):
        write_table(folder / f"{name}.parquet", batches(columns))


def _tables(requests: Columns, log: ResultLog) -> Iterator[tuple[str, Columns]]:
    yield "requests", requests
    yield "steps", log.steps()
    yield "preemptions", log.preemptions()
    yield "gaps", log.token_gaps()
    yield "tokens", log.token_counts()
    token_times = log.token_times_of_all()
    yield "stints", token_times.stints()
    if (bursts := token_times.bursts) is not None:
        yield "bursts", {"tokens": bursts}
    if has_sessions(requests):
        yield "sessions", session_columns(requests)


def write_table(path: Path, pieces: Iterable[Columns]) -> None:
    """Write the pieces of a table; only one of them is in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as temporary, ExitStack() as closing:
        writer = None
        for columns in pieces:
            table = pa.table({name: _arrow(data) for name, data in columns.items()})
            if writer is None:
                # Hardly a number comes twice, or many follow each other: differences take half the
                # time and half the space of a dictionary of them.
                kinds = {field.name: field.type for field in table.schema}
                whole = [name for name, kind in kinds.items() if pa.types.is_integer(kind)]
                writer = closing.enter_context(
                    pq.ParquetWriter(
                        temporary,
                        table.schema,
                        compression="zstd",
                        use_dictionary=[n for n, k in kinds.items() if pa.types.is_string(k)],
                        column_encoding=dict.fromkeys(whole, "DELTA_BINARY_PACKED"),
                    )
                )
            writer.write_table(table, row_group_size=BATCH_ROWS)


def _arrow(data: npt.NDArray[np.generic]) -> object:
    """Return a column as Arrow has it, numbers without copying them.

    Given an array of NumPy, Arrow would import pandas, if it is installed, to ask whether it is a
    series: a third of a second, a quarter of a short run.
    """
    import pyarrow as pa

    data = np.ascontiguousarray(data)
    if data.dtype.kind not in "iuf":
        return data
    buffers = [None, pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.from_numpy_dtype(data.dtype), len(data), buffers)


def read_table(path: Path) -> Columns:
    """Read a table that `save_tables` wrote.

    Parameters
    ----------
    path : Path
        Its file; the name says which columns it must have.

    Raises
    ------
    SchedlabError
        If the file is missing or is none, or lacks a column, or has text or empty cells where
        numbers belong.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(path) as file:
            found = pq.ParquetFile(file)
            if found.metadata.num_rows > BATCH_ROWS:
                columns: Columns = _stored_table(path, found.metadata)
            else:
                table = found.read()
                columns = {name: table[name].to_numpy() for name in table.column_names}
    except (OSError, MemoryError, pa.ArrowException) as error:
        raise SchedlabError(f"{path}: cannot read table: {error!s:.200}") from None
    for name in _NEEDED.get(path.stem, ()):
        if name not in columns:
            raise SchedlabError(f"{path}: no column {name!r}; {nearest(name, columns)}")
    if isinstance(columns, dict):
        for name, column in columns.items():
            _check(path, name, column)
    return columns


def _stored_table(path: Path, metadata: FileMetaData) -> LazyTable:
    """Return a table that stays in its file; the row groups that are asked for are read."""
    import pyarrow.parquet as pq

    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    firsts = np.concatenate([[0], np.cumsum(sizes)])

    def reader(name: str) -> Read:
        def read(start: int, stop: int) -> Column:
            low = int(np.searchsorted(firsts, start, side="right")) - 1
            high = int(np.searchsorted(firsts, stop))
            with open_regular(path) as file:
                table = pq.ParquetFile(file).read_row_groups(range(low, high), columns=[name])
            column: Column = table[name].to_numpy()[start - firsts[low] : stop - firsts[low]]
            _check(path, name, column)
            return column

        return read

    return LazyTable(metadata.num_rows, {name: reader(name) for name in metadata.schema.names})


def _check(path: Path, name: str, column: Column) -> None:
    """Raise if a column of a run's table does not hold the kind of numbers that it must."""
    dtype = _columns_of(path.stem).get(name)
    if dtype is None:
        return
    if column.dtype.kind not in ("iufb" if dtype.kind == "f" else "iub"):
        wanted = "numbers" if dtype.kind == "f" else "whole numbers in every row"
        raise SchedlabError(f"{path}: column {name!r} must hold {wanted}")


@cache
def _columns_of(table: str) -> dict[str, np.dtype[np.generic]]:
    """Return the columns that a table of a run has, as an empty log gives them."""
    log = RunLog(block_size=1, grows=True)
    tables: dict[str, Columns] = dict(_tables(log.requests(), log))
    return {name: column.dtype for name, column in tables.get(table, {}).items()}
