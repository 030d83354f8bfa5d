"""The steps of a run, one row each, written out from segments a column at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from schedlab.sim.record.columns import BATCH_ROWS, Columns, LazyTable, whole_numbers
from schedlab.sim.record.segment_row import SEGMENT_COLUMNS
from schedlab.sim.record.spool import Spool
from schedlab.sim.record.token_times import MICRO_BATCH

Int64 = npt.NDArray[np.int64]


VERIFICATION_COLUMNS = ("draft_tokens", "accepted_tokens", "num_drafts")
"""Of a step that verifies drafts: tokens drafted, those of them that came out, and requests that
had any."""

_STAGE = "stage_{}_ns"


def stage_columns(num_stages: int) -> tuple[str, ...]:
    """Return the columns of a run with a pipeline that say what each stage spent on a step."""
    return tuple(_STAGE.format(place) for place in range(num_stages))


def _of_pipeline(num_columns: int) -> tuple[str, ...]:
    """Return all columns that only a run with a pipeline has."""
    return (*stage_columns(num_columns - 1), MICRO_BATCH)


_COLUMN = {name: i for i, name in enumerate(SEGMENT_COLUMNS)}
_FIRST_STEP_ONLY = ("num_preempted", "recomputed_tokens", "swapped_bytes")


def stages_of(steps: Columns) -> tuple[str, ...]:
    """Return the columns of stages that a table of steps has; none where nobody has a pipeline."""
    return stage_columns(sum(name.startswith("stage_") for name in steps))


def by_engine(steps: Columns) -> Iterator[tuple[int, Int64]]:
    """Yield each engine that took some of these steps, and which; one engine alone is 0."""
    num_rows = len(whole_numbers(steps, "start_ns"))
    engines = np.zeros(num_rows, dtype=np.int64)
    if "engine" in steps:
        engines = whole_numbers(steps, "engine")
    for engine in np.unique(engines).tolist():
        yield engine, np.flatnonzero(engines == engine)


def num_stages_by_engine(steps: Columns) -> dict[int, int]:
    """Return the number of stages of each engine that took some of these steps and has any."""
    names = stages_of(steps)
    if not names:
        return {}
    # What an engine has not takes no time.
    used = np.count_nonzero([whole_numbers(steps, name) for name in names], axis=0)
    found = {engine: int(used[here].max()) for engine, here in by_engine(steps)}
    return {engine: count for engine, count in found.items() if count}


class StepTable(Mapping[str, Int64]):
    """A table of steps; a column is computed when it is asked for, and not kept.

    Columns: start_ns, end_ns, num_decodes, decode_context_sum_tokens, num_prefills,
    prefill_tokens, padding_tokens, num_running, num_waiting, kv_tokens (resident when the step
    ends), kv_allocated_tokens (held by requests), kv_reserved_unused_tokens (held, and used by
    its owner later), kv_fragmentation_tokens (held for nothing), num_preempted,
    recomputed_tokens (thrown away by preemptions at the step's start), overhead_ns,
    swapped_bytes.

    Parameters
    ----------
    segments : ndarray of int64, shape (num_segments, len(SEGMENT_COLUMNS))
        Runs of steps with the same batch.
    durations_ns, new_blocks : ndarray of int64, shape (num_steps,)
        Per step: how long it took, and how many KV blocks its decodes opened.
    block_size : int
        Tokens in a KV block.
    grows : bool
        Whether decodes open blocks as they go, or use what was reserved at admission.
    wanted : slice
        Which of these steps the table has.
    verifications : ndarray of int64, shape (num_steps, len(VERIFICATION_COLUMNS)), optional
        Columns that only a run with drafts has: more of the table.
    stages : ndarray of int64, shape (num_steps, num_stages + 1), optional
        Columns that only a run with a pipeline has: `stage_columns`, and `MICRO_BATCH` (-1 where
        nobody decodes). There a step goes from its plan to when its batch is back, and steps
        overlap; memory is what was held as it was planned, and what it computes itself.
    """

    _NAMES: tuple[str, ...] = (
        "start_ns", "end_ns", "num_decodes", "decode_context_sum_tokens", "num_prefills",
        "prefill_tokens", "padding_tokens", "num_running", "num_waiting", "kv_tokens",
        "kv_allocated_tokens", "kv_reserved_unused_tokens", "kv_fragmentation_tokens",
        "num_preempted", "recomputed_tokens", "overhead_ns", "swapped_bytes",
    )  # fmt: skip

    def __init__(
        self,
        segments: Int64,
        durations_ns: Int64,
        new_blocks: Int64,
        block_size: int,
        grows: bool,
        wanted: slice = slice(None),
        verifications: Int64 | None = None,
        stages: Int64 | None = None,
    ) -> None:
        self._segments = segments
        self._durations_ns = durations_ns
        self._new_blocks = new_blocks
        self._block_size = block_size
        self._grows = grows
        self._wanted = wanted
        self._verifications = verifications
        self._stages = stages
        self._columns = np.ascontiguousarray(segments.T)  # each is read several times
        self._counts = self._segment("num_steps")
        self._first = np.cumsum(self._counts) - self._counts
        self._of_step: Int64 | None = None
        self._decoded: Int64 | None = None

    @property
    def _names(self) -> tuple[str, ...]:
        names = self._NAMES if self._verifications is None else self._NAMES + VERIFICATION_COLUMNS
        return names if self._stages is None else names + _of_pipeline(self._stages.shape[1])

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def num_rows(self) -> int:
        """Steps in the table."""
        return len(self._durations_ns[self._wanted])

    def rows(self, start: int, stop: int) -> StepTable:
        """Return some of the steps; only their segments are looked at."""
        start, stop, _ = slice(start, stop).indices(self.num_rows)
        shift = self._wanted.start or 0
        start, stop = start + shift, stop + shift
        if start < stop:
            low = int(np.searchsorted(self._first, start, side="right")) - 1
            high = int(np.searchsorted(self._first, stop))
            first = int(self._first[low])
            last = int(self._first[high]) if high < len(self._first) else len(self._durations_ns)
        else:  # of no segment
            stop = first = last = start
            low = high = 0
        return StepTable(
            self._segments[low:high],
            self._durations_ns[first:last],
            self._new_blocks[first:last],
            self._block_size,
            self._grows,
            slice(start - first, stop - first),
            None if self._verifications is None else self._verifications[first:last],
            None if self._stages is None else self._stages[first:last],
        )

    def __getitem__(self, name: str) -> Int64:
        """Return one column, shape (num_rows,).

        Raises
        ------
        KeyError
            If there is no such column.
        """
        if name not in self._names:
            raise KeyError(name)
        return self._column(name)[self._wanted]

    def _column(self, name: str) -> Int64:
        """Return a column of all steps of the segments."""
        if name == "start_ns":
            return self._column("end_ns") - self._durations_ns
        if name == "end_ns":
            elapsed = np.cumsum(self._durations_ns)
            before = (elapsed - self._durations_ns)[self._first]
            return elapsed + self._spread(self._segment("start_ns") - before)
        if name == "decode_context_sum_tokens":
            return self._spread(self._segment(name)) + self._decoded_before()
        if name == "kv_tokens":
            start = self._segment("kv_tokens") + self._segment("prefill_tokens")
            column = self._spread(start + self._segment("num_decodes")) + self._decoded_before()
            return column if self._verifications is None else column + self._accepted()
        if name == "kv_allocated_tokens":
            grown = np.cumsum(self._new_blocks)
            before = (grown - self._new_blocks)[self._first]
            held = grown + self._spread(self._segment("kv_allocated_blocks") - before)
            return held * self._block_size
        if name == "kv_reserved_unused_tokens":
            reserved = self._segment(name)
            if self._grows:
                return self._spread(reserved)
            reserved = reserved - self._segment("prefill_tokens") - self._segment("num_decodes")
            return self._spread(reserved) - self._decoded_before()
        if name == "kv_fragmentation_tokens":
            used = self._column("kv_tokens") + self._column("kv_reserved_unused_tokens")
            return self._column("kv_allocated_tokens") - used
        if name in VERIFICATION_COLUMNS and self._verifications is not None:
            return self._verifications[:, VERIFICATION_COLUMNS.index(name)]
        if self._stages is not None and (name == MICRO_BATCH or name.startswith("stage_")):
            return self._stages[:, _of_pipeline(self._stages.shape[1]).index(name)]
        if name in _FIRST_STEP_ONLY:
            column = np.zeros(len(self._durations_ns), dtype=np.int64)
            column[self._first] = self._segment(name)
            return column
        return self._spread(self._segment(name))

    def tokens_out(self) -> Int64:
        """Return how many tokens came out at the end of each step."""
        out = self._spread(self._segment("num_decodes") + self._segment("prefills_done"))
        if self._verifications is not None:
            out = out + self._accepted()
        return out[self._wanted]

    def _segment(self, name: str) -> Int64:
        column: Int64 = self._columns[_COLUMN[name]]
        return column

    def _spread(self, values: Int64) -> Int64:
        """Return for each step the value of its segment."""
        if self._of_step is None:
            self._of_step = np.repeat(np.arange(len(self._counts)), self._counts)
        return values.take(self._of_step)

    def _decoded_before(self) -> Int64:
        """Return the tokens that each step's segment decoded before it."""
        if self._decoded is not None:
            return self._decoded
        index = np.arange(len(self._durations_ns)) - self._spread(self._first)
        decoded = self._spread(self._segment("num_decodes")) * index
        if self._verifications is not None:
            before = np.cumsum(self._accepted()) - self._accepted()
            decoded = decoded + before - self._spread(before[self._first])
        self._decoded = decoded
        return decoded

    def _accepted(self) -> Int64:
        return self._column("accepted_tokens")


_MARKED = 65_536
"""Segments of which it is known at which step they begin."""


class StoredSteps(Mapping[str, Int64]):
    """The steps of a long run, whose segments are on disk; a table as `StepTable` is.

    Parameters
    ----------
    segments, durations_ns, new_blocks : Spool
        As the arrays of `StepTable`.
    block_size, grows, verifications, stages
        As there.
    """

    def __init__(
        self,
        segments: Spool,
        durations_ns: Spool,
        new_blocks: Spool,
        block_size: int,
        grows: bool,
        verifications: Spool | None = None,
        stages: Spool | None = None,
    ) -> None:
        self._segments = segments
        self._durations_ns = durations_ns
        self._new_blocks = new_blocks
        self._block_size = block_size
        self._grows = grows
        self._verifications = verifications
        self._stages = stages
        self._all: StepTable | None = None
        self._tokens_out: LazyTable | None = None
        counts = segments.column(_COLUMN["num_steps"])
        before = np.add.reduceat(counts, np.arange(0, len(counts), _MARKED))
        self._marks = np.concatenate([[0], np.cumsum(before)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[str]:
        yield from StepTable._NAMES
        if self._verifications is not None:
            yield from VERIFICATION_COLUMNS
        if self._stages is not None:
            yield from _of_pipeline(self._stages.num_columns)

    @property
    def num_rows(self) -> int:
        """Steps in the table."""
        return self._durations_ns.num_rows

    def rows(self, start: int, stop: int) -> StepTable:
        """Return some of the steps; of a table of one batch all are read once, and kept."""
        if self.num_rows > BATCH_ROWS:
            return self._read(start, stop)
        if self._all is None:
            self._all = self._read(0, self.num_rows)
        return self._all if stop - start == self.num_rows else self._all.rows(start, stop)

    def _read(self, start: int, stop: int) -> StepTable:
        low = int(np.searchsorted(self._marks, start, side="right")) - 1
        high = int(np.searchsorted(self._marks, stop))
        first, last = int(self._marks[low]), int(self._marks[high])
        steps = StepTable(
            self._segments.rows(low * _MARKED, min(high * _MARKED, self._segments.num_rows)),
            self._durations_ns.column(0, first, last),
            self._new_blocks.column(0, first, last),
            self._block_size,
            self._grows,
            verifications=None
            if self._verifications is None
            else self._verifications.rows(first, last),
            stages=None if self._stages is None else self._stages.rows(first, last),
        )
        return steps.rows(start - first, stop - first)

    def __getitem__(self, name: str) -> Int64:
        """Return one column, shape (num_rows,).

        Raises
        ------
        KeyError
            If there is no such column.
        """
        starts = range(0, self.num_rows, BATCH_ROWS)
        pieces = [self.rows(low, min(low + BATCH_ROWS, self.num_rows))[name] for low in starts]
        column: Int64 = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return column

    def tokens_out(self) -> LazyTable:
        """Return time_ns and count: how many tokens came out at the end of each step with any."""
        if self._tokens_out is not None:
            return self._tokens_out
        found = Spool(2)
        for start in range(0, self.num_rows, BATCH_ROWS):
            steps = self.rows(start, min(start + BATCH_ROWS, self.num_rows))
            out = steps.tokens_out()
            found.append(np.column_stack([steps["end_ns"][out > 0], out[out > 0]]))
        self._tokens_out = found.table(("time_ns", "count"))
        return self._tokens_out
