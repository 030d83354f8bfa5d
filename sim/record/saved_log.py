"""The tables of a run in Parquet files: written whole, read when asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SchedlabError, nearest
from schedlab.sim.files import open_regular, replacing
from schedlab.sim.record.columns import Columns, Ints, Pairs
from schedlab.sim.record.log import RunLog as EmptyLog
from schedlab.sim.record.steps import Steps
from schedlab.sim.record.token_times import STINT_COLUMNS, TokenTimes

_ROWS_PER_BATCH = 1_000_000
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
}  # fmt: skip
"""What no table can be read without; what others of its columns hold is checked, too."""


class RunLog(Protocol):
    """What a result needs of a log; `sim.record.log.RunLog` is the one the engine writes."""

    def steps(self) -> Columns:
        """Return one row a step; columns as in `schedlab.sim.record.steps.Steps`."""

    def preemptions(self) -> Columns:
        """Return one row a preemption: id, evicted_ns, resumed_ns (-1 = never)."""

    def token_gaps(self, ids: Ints | None = None) -> Pairs:
        """Return all gaps between tokens of one request as (gap in ns, how many)."""

    def token_counts(self, ids: Ints | None = None) -> Pairs:
        """Return (time in ns, tokens that came out then)."""

    def token_times(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns."""

    def token_times_of_all(self) -> TokenTimes:
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
        self._token_times: TokenTimes | None = None

    def steps(self) -> Columns:
        """Return one row a step."""
        return read_table(self._folder / "steps.parquet")

    def preemptions(self) -> Columns:
        """Return one row a preemption."""
        return read_table(self._folder / "preemptions.parquet")

    def token_gaps(self, ids: Ints | None = None) -> Pairs:
        """Return all gaps between tokens of one request as (gap in ns, how many)."""
        if ids is None:
            return self._pairs("gaps.parquet", "gap_ns")
        return self.token_times_of_all().gaps(ids)

    def token_counts(self, ids: Ints | None = None) -> Pairs:
        """Return (time in ns, tokens that came out then)."""
        if ids is None:
            return self._pairs("tokens.parquet", "time_ns")
        return self.token_times_of_all().counts(ids)

    def token_times(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns."""
        return self.token_times_of_all().of(request_id)

    def token_times_of_all(self) -> TokenTimes:
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
            columns = read_table(path)
            stints = np.column_stack([columns[name] for name in STINT_COLUMNS]).astype(np.int64)
            self._token_times = TokenTimes.of_steps(stints, self.steps())
        return self._token_times

    def _pairs(self, name: str, key: str) -> Pairs:
        columns = read_table(self._folder / name)
        return columns[key].astype(np.int64), columns["count"].astype(np.int64)


def save_tables(folder: Path, requests: Columns, log: RunLog) -> None:
    """Write the tables of a run, each file whole or not at all."""
    for name, columns in _tables(requests, log):
        if isinstance(columns, Steps):
            write_table(folder / f"{name}.parquet", columns.batches(_ROWS_PER_BATCH))
        else:
            write_table(folder / f"{name}.parquet", [columns])


def _tables(requests: Columns, log: RunLog) -> Iterator[tuple[str, Columns]]:
    gaps, times = log.token_gaps(), log.token_counts()
    yield "requests", requests
    yield "steps", log.steps()
    yield "preemptions", log.preemptions()
    yield "gaps", {"gap_ns": gaps[0], "count": gaps[1]}
    yield "tokens", {"time_ns": times[0], "count": times[1]}
    yield "stints", dict(zip(STINT_COLUMNS, log.token_times_of_all().stints.T, strict=True))


def write_table(path: Path, batches: Iterable[Columns]) -> None:
    """Write the pieces of a table; only one of them is in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as temporary, ExitStack() as closing:
        writer = None
        for columns in batches:
            table = pa.table({name: _arrow(data) for name, data in columns.items()})
            if writer is None:
                schema = table.schema
                writer = closing.enter_context(
                    pq.ParquetWriter(temporary, schema, compression="zstd")
                )
            writer.write_table(table, row_group_size=_ROWS_PER_BATCH)


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
            table = pq.read_table(file)
    except (OSError, MemoryError, pa.ArrowException) as error:
        raise SchedlabError(f"{path}: cannot read table: {error!s:.200}") from None
    columns = {name: table[name].to_numpy() for name in table.column_names}
    for name in _NEEDED.get(path.stem, ()):
        if name not in columns:
            raise SchedlabError(f"{path}: no column {name!r}; {nearest(name, columns)}")
    for name, dtype in _columns_of(path.stem).items():
        if name not in columns:
            continue
        kinds = "iufb" if dtype.kind == "f" else "iub"
        if columns[name].dtype.kind not in kinds:
            wanted = "numbers" if dtype.kind == "f" else "whole numbers in every row"
            raise SchedlabError(f"{path}: column {name!r} must hold {wanted}")
    return columns


@cache
def _columns_of(table: str) -> dict[str, np.dtype[np.generic]]:
    """Return the columns that a table of a run has, as an empty log gives them."""
    log = EmptyLog(block_size=1, grows=True)
    tables: dict[str, Columns] = dict(_tables(log.requests(), log))
    return {name: column.dtype for name, column in tables.get(table, {}).items()}
