"""What happened in a run, in compact columns: one row a request, one row a segment of steps."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any, Final, SupportsIndex

import numpy as np
import numpy.typing as npt
from librt.strings import BytesWriter, write_f64_le, write_i32_le, write_i64_le

from schedlab.sim.record.columns import BATCH_ROWS, REJECTED, Columns, LazyTable
from schedlab.sim.record.copies import Copies
from schedlab.sim.record.rows import CommonRows, Rows
from schedlab.sim.record.segment_row import SEGMENT_COLUMNS, SegmentRow
from schedlab.sim.record.spool import Spool, SpoolFile
from schedlab.sim.record.steps import VERIFICATION_COLUMNS, Int64, StepTable, StoredSteps
from schedlab.sim.record.stored_token_times import StoredTokenTimes
from schedlab.sim.record.token_times import (
    STINT_COLUMNS,
    TokenTimes,
    decodes_before,
    in_order_of_steps,
)
from schedlab.sim.request import RequestState, Slo

_REQUEST_NUMBERS = (
    "id", "arrival_ns", "prompt_tokens", "output_tokens", "generated_tokens", "first_scheduled_ns",
    "first_token_ns", "last_token_ns", "finish_ns", "num_preemptions", "recomputed_tokens",
    "priority", "status", "queued_ns", "cached_tokens", "prefix_hit_tokens",
)  # fmt: skip
"""What is logged of a request when it leaves the engine; times are -1 if never."""

_TARGETS = ("predicted_tokens", "slo_ttft_ms", "slo_tpot_ms", "slo_e2el_ms")
"""What a request asked for and what was predicted of it; NaN if nothing."""

REQUEST_COLUMNS = (*_REQUEST_NUMBERS, *_TARGETS)
"""What every table of requests has."""

MOST_NUMBERS_IN_MEMORY = 2_000_000
"""Of requests, segments or steps, 8 bytes each; what is more is moved to temporary files."""

_NAN: Final = float("nan")
_NUMBER_BYTES: Final = 8
_VERIFICATION_BYTES: Final = len(VERIFICATION_COLUMNS) * _NUMBER_BYTES
_NO_TARGETS: Final = np.full(len(_TARGETS), _NAN).tobytes()


class RunLog:
    """Grows while the engine runs; read it through columns.

    Steps are kept by segment (a run of steps with the same batch), and token times as stints
    (`token_times.STINT_COLUMNS`). Everything per step and per token is derived on demand. The
    tables of a long run are moved to temporary files as they grow, and are then read from there a
    column or a batch of rows at a time; what they hold is the same.

    Parameters
    ----------
    block_size : int
        Tokens in a KV block.
    grows : bool
        Whether decoding requests take blocks as they go.
    speculates : bool
        Whether decode steps verify drafts, so that each may yield several tokens of a request.
    num_stages : int
        Stages of the pipeline that steps pass; 1 = there is none.

    Attributes
    ----------
    num_steps : int
        Steps run.
    own_rows : Rows
        What is in memory of this log alone: while it writes to common rows what it was dealt, not
        what is there.
    verifications : BytesWriter
        `VERIFICATION_COLUMNS` of steps, 8 bytes each: who verifies drafts writes them there.
    tells_by_step : bool
        Whether the tokens of answers are those that come out of its steps. Of an engine that hands
        prompts over, or is handed them, they need not be: some come with KV, some are for nobody.
    """

    def __init__(
        self, block_size: int, grows: bool, speculates: bool = False, num_stages: int = 1
    ) -> None:
        self.own_rows = Rows()
        self._rows = self.own_rows
        self._common: CommonRows | None = None
        self._place = 0
        self.num_steps = 0
        self.tells_by_step = True
        self._most_bytes = MOST_NUMBERS_IN_MEMORY * _NUMBER_BYTES
        self.block_size = block_size
        self.grows = grows
        self.speculates = speculates
        self.num_stages = num_stages
        self.reject_reasons: dict[int, str] = {}
        self.copies = Copies()
        self.verifications = BytesWriter()
        self._bursts = BytesWriter()
        self._stages = array("q")
        self._evictions = array("q")
        self._resumptions = array("q")
        self._spools: dict[str, Spool] = {}
        self._spool_file = SpoolFile()
        self._steps: StoredSteps | None = None
        self._token_times: tuple[tuple[int, int], TokenTimes | StoredTokenTimes] | None = None

    def write_to(self, common: CommonRows) -> None:
        """Write to rows of several logs, all of which may lie in memory as one may."""
        self._rows = self._common = common
        self._place = len(common.logs)
        common.logs.append(self)
        self._spool_file = common.file

    # -- writing (the engine) ------------------------------------------------------------------

    def add_request(
        self, state: RequestState, output_tokens: int, finish_ns: int, status: int
    ) -> None:
        """Record a request that left the engine."""
        # As bytes right away, a number after the other in the order of its columns.
        rows = self._rows
        r, row = state.request, rows.requests
        generated = state._generated if state._batch is None else state.num_output_tokens
        write_i64_le(row, r.id)
        write_i64_le(row, r.arrival_ns)
        write_i64_le(row, r.prompt_tokens)
        write_i64_le(row, output_tokens)
        write_i64_le(row, generated)
        write_i64_le(row, state.first_scheduled_ns)
        write_i64_le(row, state.first_token_ns)
        write_i64_le(row, state.last_token_ns)
        write_i64_le(row, finish_ns)
        write_i64_le(row, state.num_preemptions)
        write_i64_le(row, state.recomputed_tokens)
        write_i64_le(row, r.priority)
        write_i64_le(row, status)
        write_i64_le(row, state.queued_ns)
        write_i64_le(row, state.cached_tokens)
        write_i64_le(row, state.prefix_hit_tokens)
        targets, slo, predicted = rows.targets, r.slo, r.predicted_tokens
        if slo is None and predicted is None:
            targets.write(_NO_TARGETS)
        else:
            for target in (predicted, *(slo or Slo())):
                write_f64_le(targets, _NAN if target is None else target)
        common = self._common
        if common is not None:
            write_i32_le(common.requests_of, self._place)
        if len(row) >= self._most_bytes:
            self._spill()

    def reject(self, state: RequestState, output_tokens: int, reason: str) -> None:
        """Record a request that was turned away, with what it had got until then."""
        self.add_request(state, output_tokens, -1, REJECTED)
        self.reject_reasons[state.id] = reason

    def add_segment(self, row: SegmentRow, durations_ns: list[int], new_blocks: list[int]) -> None:
        """Record steps of one batch, with a number of each for every step."""
        durations = self._rows.durations_ns
        for duration_ns in durations_ns:
            write_i64_le(durations, duration_ns)
        self.add_written(row, new_blocks)

    @property
    def durations(self) -> BytesWriter:
        """Where the durations of steps are written that `add_written` is told of next."""
        return self._rows.durations_ns

    def add_written(self, row: SegmentRow, new_blocks: list[int]) -> None:
        """As `add_segment`, of steps whose durations were written just now."""
        rows, common = self._rows, self._common
        segments, durations, blocks = rows.segments, rows.durations_ns, rows.new_blocks
        row.write(segments)
        for num_blocks in new_blocks:
            write_i64_le(blocks, num_blocks)
        self.num_steps += len(new_blocks)
        if common is not None:
            write_i32_le(common.segments_of, self._place)
        most_bytes = self._most_bytes
        if len(segments) >= most_bytes or len(durations) >= most_bytes:
            self._spill()

    def add_stint(self, request_id: int, entry_ns: int, first: int, last: int) -> None:
        """Record the tokens that a request got since it entered the decode batch.

        Of a pipeline `first` and `last` are counted by micro-batch, and carry its number above
        `MICRO_BATCH_BITS`.
        """
        if last > first or entry_ns >= 0:
            row, common = self._rows.stints, self._common
            write_i64_le(row, request_id)
            write_i64_le(row, entry_ns)
            write_i64_le(row, first)
            write_i64_le(row, last)
            if common is not None:
                write_i32_le(common.stints_of, self._place)

    def add_stints(self, states: Collection[RequestState], start: int, steps: int) -> None:
        """Record the tokens that members of a decode batch got.

        Parameters
        ----------
        states : collection of RequestState
            Who.
        start, steps : int
            What its first step is called, and how many it took.
        """
        row, common = self._rows.stints, self._common
        for state in states:  # as `add_stint`, written out: many come and go
            entry_ns, first = state._entry_ns, state._stint_start
            if steps > first or entry_ns >= 0:
                write_i64_le(row, state.id)
                write_i64_le(row, entry_ns)
                write_i64_le(row, start + first)
                write_i64_le(row, start + steps)
                if common is not None:
                    write_i32_le(common.stints_of, self._place)

    def add_bursts(self, tokens: bytes) -> None:
        """Record how many tokens each decode step of the stint added last yielded."""
        self._bursts.write(tokens)

    def add_no_verifications(self, num_steps: int) -> None:
        """Record that nobody decoded in steps of an engine with drafts."""
        self.verifications.write(bytes(num_steps * _VERIFICATION_BYTES))

    def add_stages(self, stages_ns: list[int], micro_batch: int) -> None:
        """Record what each stage of a pipeline spent on the step added next, and who decodes."""
        self._stages.extend(stages_ns)
        self._stages.append(micro_batch)

    def add_eviction(self, request_id: int, now_ns: int) -> None:
        """Record that a running request lost its memory."""
        self._evictions.extend((request_id, now_ns))

    def add_resumption(self, request_id: int, now_ns: int, tokens_to_compute: int) -> None:
        """Record that an evicted request runs again, and how much of it must be computed."""
        self._resumptions.extend((request_id, now_ns, tokens_to_compute))

    def _spill(self) -> None:
        """Move what has grown to temporary files, of all who write to the same rows."""
        common = self._common
        if common is None:
            self._spill_own()
            return
        common.deal()
        for log in common.logs:
            if len(log.own_rows.durations_ns) or log._spools:  # without steps it is not much
                log._spill_own()

    def _spill_own(self) -> None:
        own = self.own_rows
        self._spill_table("requests", own.requests, len(_REQUEST_NUMBERS))
        self._spill_table("targets", own.targets, len(_TARGETS), np.float64)
        self._spill_table("segments", own.segments, len(SEGMENT_COLUMNS))
        self._spill_table("durations_ns", own.durations_ns, 1)
        self._spill_table("new_blocks", own.new_blocks, 1)
        self._spill_table("stints", own.stints, len(STINT_COLUMNS))
        if self.speculates:
            self._spill_table("verifications", self.verifications, len(VERIFICATION_COLUMNS))
            self._spill_table("bursts", self._wide_bursts(), 1)
            self.verifications, self._bursts = BytesWriter(), BytesWriter()
        if self.num_stages > 1:
            self._spill_table("stages", self._stages, self.num_stages + 1)
            self._stages = array("q")
        own.clear()

    def _wide_bursts(self) -> bytes:
        """Return the bursts in memory, a byte each there, as wide as other numbers."""
        return np.frombuffer(self._bursts.getvalue(), dtype=np.uint8).astype(np.int64).tobytes()

    def _spill_table(
        self,
        name: str,
        values: bytes | BytesWriter | array[int],
        width: int,
        dtype: npt.DTypeLike = np.int64,
    ) -> None:
        rows = _matrix(values, width, dtype)
        if name not in self._spools:
            self._spools[name] = Spool(width, rows.dtype, self._spool_file)
        self._spools[name].append(rows)

    def _spool(self, name: str, values: bytes | BytesWriter | array[int]) -> Spool:
        """Return a table of which something was spilled, with what is in memory of it."""
        spool = self._spools[name]
        return spool.followed_by(_matrix(values, spool.num_columns, spool.dtype))

    # -- reading -------------------------------------------------------------------------------

    def _gather(self) -> Rows:
        """Return what is in memory of this log."""
        if self._common is not None:
            self._common.deal()
        return self.own_rows

    def requests(self) -> Columns:
        """Return one row a request, by id; times in ns (-1 = never), targets in ms (NaN = none)."""
        own = self._gather()
        if self._spools:
            return self._spilled_requests(own)
        rows = _matrix(own.requests, len(_REQUEST_NUMBERS))
        order = np.argsort(rows[:, 0], kind="stable")
        columns: dict[str, npt.NDArray[np.generic]] = {
            name: np.ascontiguousarray(rows[order, i]) for i, name in enumerate(_REQUEST_NUMBERS)
        }
        columns["status"] = columns["status"].astype(np.int8)
        targets = _matrix(own.targets, len(_TARGETS), np.float64)
        for i, name in enumerate(_TARGETS):
            columns[name] = np.ascontiguousarray(targets[order, i])
        return columns

    def _spilled_requests(self, own: Rows) -> LazyTable:
        rows = self._spool("requests", own.requests)
        order = np.argsort(rows.column(0), kind="stable")
        by_id = rows.in_order(order)
        targets = self._spool("targets", own.targets).in_order(order)
        readers = by_id.readers(_REQUEST_NUMBERS) | targets.readers(_TARGETS)
        status = readers["status"]
        readers["status"] = lambda start, stop: status(start, stop).astype(np.int8)
        return LazyTable(by_id.num_rows, readers)

    def steps(self) -> StepTable | StoredSteps:
        """Return one row a step."""
        own = self._gather()
        if self._spools:
            if self._steps is not None and self._steps.num_rows == self.num_steps:
                return self._steps
            self._steps = StoredSteps(
                self._spool("segments", own.segments),
                self._spool("durations_ns", own.durations_ns),
                self._spool("new_blocks", own.new_blocks),
                self.block_size,
                self.grows,
                self._spool("verifications", self.verifications) if self.speculates else None,
                self._spool("stages", self._stages) if self.num_stages > 1 else None,
            )
            return self._steps
        return StepTable(
            _matrix(own.segments, len(SEGMENT_COLUMNS)),
            _matrix(own.durations_ns, 1)[:, 0],
            _matrix(own.new_blocks, 1)[:, 0],
            self.block_size,
            self.grows,
            verifications=_matrix(self.verifications, len(VERIFICATION_COLUMNS))
            if self.speculates
            else None,
            stages=_matrix(self._stages, self.num_stages + 1) if self.num_stages > 1 else None,
        )

    def token_gaps(self, ids: Int64 | None = None) -> Columns:
        """Return all gaps between tokens of the same request; see `TokenTimes.gaps`."""
        return self.token_times_of_all().gaps(ids)

    def token_counts(self, ids: Int64 | None = None) -> Columns:
        """Return time_ns and count, the tokens that came out then: a row a step with any.

        With `ids` only of those requests.
        """
        if ids is not None or not self.tells_by_step:
            return self.token_times_of_all().counts(ids)
        steps = self.steps()
        if isinstance(steps, StoredSteps):
            return steps.tokens_out()
        out = steps.tokens_out()
        return {"time_ns": steps["end_ns"][out > 0], "count": out[out > 0]}

    def token_times(self, request_id: SupportsIndex) -> Int64:
        """Return when each token of a request came out, in ns."""
        return self.token_times_of_all().of(int(request_id))

    def token_times_of_all(self) -> TokenTimes | StoredTokenTimes:
        """Return when all tokens came out, as far as the run has come."""
        own = self._gather()
        so_far = self.num_steps, len(own.stints)
        if self._token_times is None or self._token_times[0] != so_far:
            steps = self.steps()
            before = decodes_before(steps) if self.num_stages > 1 else None
            if self._spools:
                stints = self._spool("stints", own.stints)
                if before is not None:
                    by_batch, stints = stints, Spool(len(STINT_COLUMNS))
                    for some in by_batch.batches(BATCH_ROWS):
                        stints.append(in_order_of_steps(some, before))
                spilled = self._spool("bursts", self._wide_bursts()) if self.speculates else None
                self._token_times = so_far, StoredTokenTimes(stints, steps, spilled)
            else:
                rows = _matrix(own.stints, len(STINT_COLUMNS)).copy()
                if before is not None:
                    rows = in_order_of_steps(rows, before)
                bursts = _matrix(self._wide_bursts(), 1)[:, 0] if self.speculates else None
                self._token_times = so_far, TokenTimes.of_steps(rows, steps, bursts)
        return self._token_times[1]

    def preemptions(self) -> dict[str, Int64]:
        """Return one row a preemption, by request id and time.

        Columns: id, evicted_ns, resumed_ns (-1 = never: rejected while it waited, or the run is
        not over), resumed_tokens (those it had to compute before its next token when it ran again:
        its whole sequence, less what was swapped or still cached; 0 = never).
        """
        evicted, resumed = _matrix(self._evictions, 2), _matrix(self._resumptions, 3)
        evicted = evicted[np.argsort(evicted[:, 0], kind="stable")]
        resumed = resumed[np.argsort(resumed[:, 0], kind="stable")]
        # A request resumes between two evictions: its k-th eviction meets its k-th resumption.
        ids = evicted[:, 0]
        nth = np.arange(len(ids)) - np.searchsorted(ids, ids)
        row = np.searchsorted(resumed[:, 0], ids) + nth
        came_back = row < np.searchsorted(resumed[:, 0], ids, side="right")
        resumed_ns, resumed_tokens = np.full(len(ids), -1), np.zeros(len(ids), dtype=np.int64)
        resumed_ns[came_back] = resumed[row[came_back], 1]
        resumed_tokens[came_back] = resumed[row[came_back], 2]
        return {
            "id": ids,
            "evicted_ns": evicted[:, 1],
            "resumed_ns": resumed_ns,
            "resumed_tokens": resumed_tokens,
        }


def _matrix(
    values: bytes | BytesWriter | array[int], width: int, dtype: npt.DTypeLike = np.int64
) -> npt.NDArray[Any]:
    if isinstance(values, BytesWriter):
        values = values.getvalue()
    # A view: while it lives, what it shows cannot grow.
    rows = np.frombuffer(values, dtype=dtype) if values else np.zeros(0, dtype=dtype)
    return rows.reshape(-1, width)
