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

_ROWS_PER_BATCH = 1_000_000


class RunLog(Protocol):
    """What a result needs of a log; `sim.record.log.RunLog` is the one the engine writes."""

    def steps(self) -> Columns:
        """Return one row a step; columns as in `schedlab.sim.record.steps.Steps`."""

    def preemptions(self) -> Columns:
        """Return one row a preemption: id, evicted_ns, resumed_ns."""

    def token_gaps(self) -> Pairs:
        """Return all gaps between tokens of one request as (gap in ns, how many)."""

    def token_counts(self) -> Pairs:
        """Return (time in ns, tokens that came out then)."""

    def token_times(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns."""


class SavedLog:
    """A log on disk; a table is read when it is asked for.

    Parameters
    ----------
    folder : Path
        Where `save_tables` wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> Columns:
        """Return one row a step."""
        return read_table(self._folder / "steps.parquet")

    def preemptions(self) -> Columns:
        """Return one row a preemption."""
        return read_table(self._folder / "preemptions.parquet")

    def token_gaps(self) -> Pairs:
        """Return all gaps between tokens of one request as (gap in ns, how many)."""
        return self._pairs("gaps.parquet", "gap_ns")

    def token_counts(self) -> Pairs:
        """Return (time in ns, tokens that came out then)."""
        return self._pairs("tokens.parquet", "time_ns")

    def token_times(self, request_id: int) -> Ints:
        """Raise SchedlabError: the token times of single requests are not saved."""
        raise SchedlabError(
            f"{self._folder}: token times of single requests (here {request_id}) are not saved; "
            "run the experiment again to get them"
        )

    def _pairs(self, name: str, key: str) -> Pairs:
        columns = read_table(self._folder / name)
        return columns[key].astype(np.int64), columns["count"].astype(np.int64)


def save_tables(folder: Path, requests: Columns, log: RunLog) -> None:
    """Write requests, steps, preemptions, gaps and tokens, each file whole or not at all."""
    gaps, times = log.token_gaps(), log.token_counts()
    steps = log.steps()
    tables: dict[str, Iterable[Columns]] = {
        "requests": [requests],
        "steps": steps.batches(_ROWS_PER_BATCH) if isinstance(steps, Steps) else [steps],
        "preemptions": [log.preemptions()],
        "gaps": [{"gap_ns": gaps[0], "count": gaps[1]}],
        "tokens": [{"time_ns": times[0], "count": times[1]}],
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
