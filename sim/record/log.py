"""What happened in a run, in compact columns: one row a request, one row a segment of steps."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Any, Final, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from schedlab.sim.record.columns import REJECTED, Columns, LazyTable
from schedlab.sim.record.copies import Copies
from schedlab.sim.record.spool import Spool, SpoolFile
from schedlab.sim.record.steps import (
    VERIFICATION_COLUMNS,
    Int64,
    SegmentRow,
    StepTable,
    StoredSteps,
)
from schedlab.sim.record.stored_token_times import StoredTokenTimes
from schedlab.sim.record.token_times import STINT_COLUMNS, TokenTimes
from schedlab.sim.request import RequestState


class _RequestRow(NamedTuple):
    """What is logged of a request when it leaves the engine; times are -1 if never."""

    id: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    generated_tokens: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    finish_ns: int
    num_preemptions: int
    recomputed_tokens: int
    priority: int
    status: int
    queued_ns: int
    cached_tokens: int
    prefix_hit_tokens: int


class _TargetRow(NamedTuple):
    """What a request asked for and what was predicted of it; NaN if nothing."""

    predicted_tokens: float | None
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    slo_e2el_ms: float | None


REQUEST_COLUMNS = (*_RequestRow._fields, *_TargetRow._fields)
"""What every table of requests has."""

MOST_NUMBERS_IN_MEMORY = 2_000_000
"""Of requests, segments or steps, 8 bytes each; what is more is moved to temporary files."""

_NAN = float("nan")
_NUMBER_BYTES: Final = 8
# Rows are packed: to append their bytes costs a third of what their numbers do one by one.
_PACKS: Final = [Struct(f"{n}q").pack for n in range(257)]
_pack_number: Final = _PACKS[1]
_pack_stint: Final = Struct(f"{len(STINT_COLUMNS)}q").pack
_pack_request: Final = Struct(f"{len(_RequestRow._fields)}q").pack
_pack_targets: Final = Struct(f"{len(_TargetRow._fields)}d").pack
_NO_TARGETS: Final = _pack_targets(*(_NAN for _ in _TargetRow._fields))


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
    """

    def __init__(
        self, block_size: int, grows: bool, speculates: bool = False, num_stages: int = 1
    ) -> None:
        self.block_size = block_size
        self.grows = grows
        self.speculates = speculates
        self.num_stages = num_stages
        self.reject_reasons: dict[int, str] = {}
        self.copies = Copies()
        self._requests = bytearray()
        self._targets = bytearray()
        self._segments = bytearray()
        self._durations_ns = bytearray()
        self._new_blocks = bytearray()
        self._stints = bytearray()
        self._verifications = array("q")
        self._bursts = array("q")
        self._stages = array("q")
        self._evictions = array("q")
        self._resumptions = array("q")
        self._spools: dict[str, Spool] = {}
        self._spool_file = SpoolFile()
        self._num_sharing = 1
        self._num_spilled_steps = 0
        self._steps: StoredSteps | None = None
        self._token_times: tuple[tuple[int, int], TokenTimes | StoredTokenTimes] | None = None

    def share_memory(self, num_logs: int, file: SpoolFile) -> None:
        """Hold only a part of what may lie in memory, and move the rest to a common file.

        Parameters
        ----------
        num_logs : int
            Logs that grow at the same time.
        file : SpoolFile
            Theirs: a thousand engines have no thousand files open.
        """
        self._num_sharing = num_logs
        self._spool_file = file

    # -- writing (the engine) ------------------------------------------------------------------

    def add_request(
        self, state: RequestState, output_tokens: int, finish_ns: int, status: int
    ) -> None:
        """Record a request that left the engine."""
        r, generated_tokens = state.request, state.num_output_tokens
        # A `_RequestRow`, without the detour of making one; a test compares names with fields.
        row = _pack_request(
            r.id,
            r.arrival_ns,
            r.prompt_tokens,
            output_tokens,
            generated_tokens,
            state.first_scheduled_ns,
            state.first_token_ns,
            state.last_token_ns,
            finish_ns,
            state.num_preemptions,
            state.recomputed_tokens,
            r.priority,
            status,
            state.queued_ns,
            state.cached_tokens,
            state.prefix_hit_tokens,
        )
        self._requests += row
        slo = r.slo
        if slo is None and r.predicted_tokens is None:
            self._targets += _NO_TARGETS
        else:
            ttft, tpot, e2el = slo or (None, None, None)
            targets = _TargetRow(
                r.predicted_tokens, slo_ttft_ms=ttft, slo_tpot_ms=tpot, slo_e2el_ms=e2el
            )
            self._targets += _pack_targets(*[_NAN if x is None else x for x in targets])
        if self._is_much(self._requests):
            self._spill()

    def reject(self, state: RequestState, output_tokens: int, reason: str) -> None:
        """Record a request that was turned away, with what it had got until then."""
        self.add_request(state, output_tokens, -1, REJECTED)
        self.reject_reasons[state.id] = reason

    def add_segment(self, row: bytes, durations_ns: list[int], new_blocks: list[int]) -> None:
        """Record steps of one batch: a packed `SegmentRow`, and a number of each for every step."""
        self._segments += row
        num_steps = len(durations_ns)
        if num_steps == 1:
            self._durations_ns += _pack_number(durations_ns[0])
            self._new_blocks += _pack_number(new_blocks[0])
        else:
            pack = _PACKS[num_steps] if num_steps < len(_PACKS) else Struct(f"{num_steps}q").pack
            self._durations_ns += pack(*durations_ns)
            self._new_blocks += pack(*new_blocks)
        if self._is_much(self._segments) or self._is_much(self._durations_ns):
            self._spill()

    def add_stint(self, request_id: int, entry_ns: int, first: int, last: int) -> None:
        """Record the tokens that a request got since it entered the decode batch."""
        if last > first or entry_ns >= 0:
            self._stints += _pack_stint(request_id, entry_ns, first, last)

    def add_bursts(self, tokens: list[int]) -> None:
        """Record how many tokens each decode step of the stint added last yielded."""
        self._bursts.extend(tokens)

    def add_verifications(
        self, drafted: list[int], accepted: list[int], num_drafts: list[int]
    ) -> None:
        """Record of steps how many tokens they verified, how many came out, of how many drafts."""
        for row in zip(drafted, accepted, num_drafts, strict=True):
            self._verifications.extend(row)

    def add_stages(self, stages_ns: list[int]) -> None:
        """Record what each stage of the pipeline spent on the step that is added next."""
        self._stages.extend(stages_ns)

    def add_eviction(self, request_id: int, now_ns: int) -> None:
        """Record that a running request lost its memory."""
        self._evictions.extend((request_id, now_ns))

    def add_resumption(self, request_id: int, now_ns: int, tokens_to_compute: int) -> None:
        """Record that an evicted request runs again, and how much of it must be computed."""
        self._resumptions.extend((request_id, now_ns, tokens_to_compute))

    def _is_much(self, rows: bytearray) -> bool:
        return len(rows) * self._num_sharing >= MOST_NUMBERS_IN_MEMORY * _NUMBER_BYTES

    def _spill(self) -> None:
        """Move what has grown to temporary files."""
        self._num_spilled_steps = self.num_steps
        self._spill_table("requests", self._requests, len(_RequestRow._fields))
        self._spill_table("targets", self._targets, len(_TargetRow._fields), np.float64)
        self._spill_table("segments", self._segments, len(SegmentRow._fields))
        self._spill_table("durations_ns", self._durations_ns, 1)
        self._spill_table("new_blocks", self._new_blocks, 1)
        self._spill_table("stints", self._stints, len(STINT_COLUMNS))
        if self.speculates:
            self._spill_table("verifications", self._verifications, len(VERIFICATION_COLUMNS))
            self._spill_table("bursts", self._bursts, 1)
            self._verifications, self._bursts = array("q"), array("q")
        if self.num_stages > 1:
            self._spill_table("stages", self._stages, self.num_stages)
            self._stages = array("q")
        self._requests, self._targets = bytearray(), bytearray()
        self._segments, self._stints = bytearray(), bytearray()
        self._durations_ns, self._new_blocks = bytearray(), bytearray()

    def _spill_table(
        self, name: str, values: bytearray | array[int], width: int, dtype: npt.DTypeLike = np.int64
    ) -> None:
        rows = _matrix(values, width, dtype)
        if name not in self._spools:
            self._spools[name] = Spool(width, rows.dtype, self._spool_file)
        self._spools[name].append(rows)

    def _spool(self, name: str, values: bytearray | array[int]) -> Spool:
        """Return a table of which something was spilled, with what is in memory of it."""
        spool = self._spools[name]
        return spool.followed_by(_matrix(values, spool.num_columns, spool.dtype))

    # -- reading -------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps run."""
        return self._num_spilled_steps + len(self._durations_ns) // _NUMBER_BYTES

    def requests(self) -> Columns:
        """Return one row a request, by id; times in ns (-1 = never), targets in ms (NaN = none)."""
        if self._spools:
            return self._spilled_requests()
        rows = _matrix(self._requests, len(_RequestRow._fields))
        order = np.argsort(rows[:, 0], kind="stable")
        columns: dict[str, npt.NDArray[np.generic]] = {
            name: np.ascontiguousarray(rows[order, i]) for i, name in enumerate(_RequestRow._fields)
        }
        columns["status"] = columns["status"].astype(np.int8)
        targets = _matrix(self._targets, len(_TargetRow._fields), np.float64)
        for i, name in enumerate(_TargetRow._fields):
            columns[name] = np.ascontiguousarray(targets[order, i])
        return columns

    def _spilled_requests(self) -> LazyTable:
        rows = self._spool("requests", self._requests)
        order = np.argsort(rows.column(0), kind="stable")
        by_id = rows.in_order(order)
        targets = self._spool("targets", self._targets).in_order(order)
        readers = by_id.readers(_RequestRow._fields) | targets.readers(_TargetRow._fields)
        status = readers["status"]
        readers["status"] = lambda start, stop: status(start, stop).astype(np.int8)
        return LazyTable(by_id.num_rows, readers)

    def steps(self) -> StepTable | StoredSteps:
        """Return one row a step."""
        if self._spools:
            if self._steps is not None and self._steps.num_rows == self.num_steps:
                return self._steps
            self._steps = StoredSteps(
                self._spool("segments", self._segments),
                self._spool("durations_ns", self._durations_ns),
                self._spool("new_blocks", self._new_blocks),
                self.block_size,
                self.grows,
                self._spool("verifications", self._verifications) if self.speculates else None,
                self._spool("stages", self._stages) if self.num_stages > 1 else None,
            )
            return self._steps
        return StepTable(
            _matrix(self._segments, len(SegmentRow._fields)),
            _matrix(self._durations_ns, 1)[:, 0],
            _matrix(self._new_blocks, 1)[:, 0],
            self.block_size,
            self.grows,
            verifications=_matrix(self._verifications, len(VERIFICATION_COLUMNS))
            if self.speculates
            else None,
            stages=_matrix(self._stages, self.num_stages) if self.num_stages > 1 else None,
        )

    def token_gaps(self, ids: Int64 | None = None) -> Columns:
        """Return all gaps between tokens of the same request; see `TokenTimes.gaps`."""
        return self.token_times_of_all().gaps(ids)

    def token_counts(self, ids: Int64 | None = None) -> Columns:
        """Return time_ns and count, the tokens that came out then: a row a step with any.

        With `ids` only of those requests.
        """
        if ids is not None:
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
        so_far = self.num_steps, len(self._stints)
        if self._token_times is None or self._token_times[0] != so_far:
            if self._spools:
                stints = self._spool("stints", self._stints)
                spilled = self._spool("bursts", self._bursts) if self.speculates else None
                self._token_times = so_far, StoredTokenTimes(stints, self.steps(), spilled)
            else:
                rows = _matrix(self._stints, len(STINT_COLUMNS)).copy()
                bursts = _matrix(self._bursts, 1)[:, 0].copy() if self.speculates else None
                self._token_times = so_far, TokenTimes.of_steps(rows, self.steps(), bursts)
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
    values: bytearray | array[int], width: int, dtype: npt.DTypeLike = np.int64
) -> npt.NDArray[Any]:
    # A view: while it lives, what it shows cannot grow.
    rows = np.frombuffer(values, dtype=dtype) if values else np.zeros(0, dtype=dtype)
    return rows.reshape(-1, width)
