"""The tables of a run in Parquet files: written whole, read when asked."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np

from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import replacing
from schedlab.sim.record.columns import Columns, Ints, Pairs
from schedlab.sim.record.steps import Steps
from schedlab.sim.record.token_times import STINT_COLUMNS, TokenTimes

_ROWS_PER_BATCH = 1_000_000


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
    gaps, times = log.token_gaps(), log.token_counts()
    steps = log.steps()
    tables: dict[str, Iterable[Columns]] = {
        "requests": [requests],
        "steps": steps.batches(_ROWS_PER_BATCH) if isinstance(steps, Steps) else [steps],
        "preemptions": [log.preemptions()],
        "gaps": [{"gap_ns": gaps[0], "count": gaps[1]}],
        "tokens": [{"time_ns": times[0], "count": times[1]}],
        "stints": [dict(zip(STINT_COLUMNS, log.token_times_of_all().stints.T, strict=True))],
    }
    for name, batches in tables.items():
        write_table(folder / f"{name}.parquet", batches)


def write_table(path: Path, batches: Iterable[Columns]) -> None:
    """Write the pieces of a table; only one of them is in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as temporary, ExitStack() as closing:
        writer = None
        for columns in batches:
            table = pa.table({name: np.ascontiguousarray(data) for name, data in columns.items()})
            if writer is None:
                schema = table.schema
                writer = closing.enter_context(
                    pq.ParquetWriter(temporary, schema, compression="zstd")
                )
            writer.write_table(table, row_group_size=_ROWS_PER_BATCH)


def read_table(path: Path) -> Columns:
    """Read a table that `write_table` wrote.

    Raises
    ------
    SchedlabError
        If the file is missing or is none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise SchedlabError(f"{path}: cannot read table: {error}") from error
    return {name: table[name].to_numpy() for name in table.column_names}
