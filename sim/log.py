"""What happened in a run, in compact columns: one row a request, one row a segment of steps."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from sim.request import Request, RequestState

Int64 = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[np.generic]]

FINISHED, REJECTED, UNFINISHED, TRUNCATED = range(4)
"""Codes of the `status` column."""

_REQUEST_COLUMNS = (
    "id", "arrival_ns", "prompt_tokens", "output_tokens", "generated_tokens",
    "first_scheduled_ns", "first_token_ns", "last_token_ns", "finish_ns",
    "num_preemptions", "recomputed_tokens", "priority", "status",
)  # fmt: skip
_TARGET_COLUMNS = ("predicted_tokens", "slo_ttft_ms", "slo_tpot_ms", "slo_e2el_ms")
_SEGMENT_COLUMNS = (
    "start_ns", "num_steps", "num_decodes", "decode_context_sum_tokens", "num_prefills",
    "prefill_tokens", "prefills_done", "padding_tokens", "num_running", "num_waiting",
    "kv_tokens", "kv_allocated_blocks", "kv_reserved_unused_tokens", "num_preempted",
    "recomputed_tokens", "overhead_ns", "swapped_bytes",
)  # fmt: skip
_NAN = float("nan")


class RunLog:
    """Grows while the engine runs; read it through columns.

    Steps are kept by segment (a run of steps with the same batch), and token times as stints:
    (request, entry, first, last) says that the request got a token at `entry` from its prefill
    (-1 if it did not) and then one in each of the decode steps first..last-1, counted over the
    whole run. Everything per step and per token is derived from these on demand.

    Parameters
    ----------
    block_size : int
        Tokens in a KV block.
    grows : bool
        Whether decoding requests take blocks as they go.
    """

    def __init__(self, block_size: int, grows: bool) -> None:
        self.block_size = block_size
        self.grows = grows
        self.reject_reasons: dict[int, str] = {}
        self._requests = array("q")
        self._targets = array("d")
        self._segments = array("q")
        self._durations_ns = array("q")
        self._new_blocks = array("q")
        self._stints = array("q")
        self._ends_ns: Int64 | None = None

    # -- writing (the engine) ------------------------------------------------------------------

    def add_request(
        self, state: RequestState, output_tokens: int, finish_ns: int, status: int
    ) -> None:
        """Record a request that left the engine."""
        r = state.request
        self._requests.extend((
            r.id, r.arrival_ns, r.prompt_tokens, output_tokens, state.num_output_tokens,
            state.first_scheduled_ns, state.first_token_ns, state.last_token_ns, finish_ns,
            state.num_preemptions, state.recomputed_tokens, r.priority, status,
        ))  # fmt: skip
        slo = r.slo
        if slo is None and r.predicted_tokens is None:
            self._targets.extend((_NAN, _NAN, _NAN, _NAN))
            return
        ttft, tpot, e2el = slo or (None, None, None)
        self._targets.extend(
            _NAN if x is None else x for x in (r.predicted_tokens, ttft, tpot, e2el)
        )

    def reject(self, request: Request, output_tokens: int, reason: str) -> None:
        """Record a request that was turned away."""
        self.add_request(RequestState(request), output_tokens, -1, REJECTED)
        self.reject_reasons[request.id] = reason

    def add_segment(
        self, columns: tuple[int, ...], durations_ns: list[int], new_blocks: list[int]
    ) -> None:
        """Record steps of one batch; `columns` in the order of the segment columns."""
        self._segments.extend(columns)
        self._durations_ns.extend(durations_ns)
        self._new_blocks.extend(new_blocks)
        self._ends_ns = None

    def add_stint(self, request_id: int, entry_ns: int, first: int, last: int) -> None:
        """Record the tokens that a request got since it entered the decode batch."""
        if last > first or entry_ns >= 0:
            self._stints.extend((request_id, entry_ns, first, last))

    # -- reading -------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps run."""
        return len(self._durations_ns)

    def requests(self) -> Columns:
        """Return one row a request, by id; times in ns (-1 = never), targets in ms (NaN = none)."""
        rows = _matrix(self._requests, len(_REQUEST_COLUMNS))
        order = np.argsort(rows[:, 0], kind="stable")
        columns: Columns = {
            name: np.ascontiguousarray(rows[order, i]) for i, name in enumerate(_REQUEST_COLUMNS)
        }
        columns["status"] = columns["status"].astype(np.int8)
        targets = np.frombuffer(self._targets, dtype=np.float64).reshape(-1, len(_TARGET_COLUMNS))
        for i, name in enumerate(_TARGET_COLUMNS):
            columns[name] = np.ascontiguousarray(targets[order, i])
        return columns

    def steps(self) -> Columns:
        """Return one row a step.

        Columns: start_ns, end_ns, num_decodes, decode_context_sum_tokens, num_prefills,
        prefill_tokens, padding_tokens, num_running, num_waiting, kv_tokens (resident when the
        step ends), kv_allocated_tokens, kv_reserved_unused_tokens, kv_fragmentation_tokens,
        num_preempted, recomputed_tokens (thrown away by preemptions at the step's start),
        overhead_ns, swapped_bytes.
        """
        segments = self._segment_columns()
        counts = segments["num_steps"]
        ends = self._step_ends_ns()
        durations = np.frombuffer(self._durations_ns, dtype=np.int64)
        first = np.zeros(len(ends), dtype=bool)
        first[np.cumsum(counts) - counts] = True
        index = np.arange(len(ends)) - np.repeat(np.cumsum(counts) - counts, counts)

        def spread(name: str) -> Int64:
            return np.repeat(segments[name], counts)

        def at_start(name: str) -> Int64:
            return np.where(first, spread(name), 0)

        decodes = spread("num_decodes")
        kv_tokens = spread("kv_tokens") + decodes * (index + 1)
        new_blocks = np.frombuffer(self._new_blocks, dtype=np.int64)
        grown = np.cumsum(new_blocks)
        before = np.repeat(
            (grown - new_blocks)[np.cumsum(counts) - counts] if len(ends) else grown, counts
        )
        allocated = (spread("kv_allocated_blocks") + grown - before) * self.block_size
        reserved = spread("kv_reserved_unused_tokens")
        if not self.grows:
            reserved = reserved - decodes * (index + 1) - spread("prefill_tokens")
        return {
            "start_ns": ends - durations,
            "end_ns": ends,
            "num_decodes": decodes,
            "decode_context_sum_tokens": spread("decode_context_sum_tokens") + decodes * index,
            "num_prefills": spread("num_prefills"),
            "prefill_tokens": spread("prefill_tokens"),
            "padding_tokens": spread("padding_tokens"),
            "num_running": spread("num_running"),
            "num_waiting": spread("num_waiting"),
            "kv_tokens": kv_tokens + spread("prefill_tokens"),
            "kv_allocated_tokens": allocated,
            "kv_reserved_unused_tokens": reserved,
            "kv_fragmentation_tokens": allocated - kv_tokens - spread("prefill_tokens") - reserved,
            "num_preempted": at_start("num_preempted"),
            "recomputed_tokens": at_start("recomputed_tokens"),
            "overhead_ns": spread("overhead_ns"),
            "swapped_bytes": at_start("swapped_bytes"),
        }

    def token_gaps(self) -> tuple[Int64, Int64]:
        """Return all gaps between tokens of the same request, as (gap in ns, how many).

        A decode step gives the same gap to every request that also took part in the one before,
        so the pairs are about as many as the steps.
        """
        stints = self._stint_rows()
        decode_ends = np.append(self._decode_ends_ns(), -1)  # stints may end before any decode
        ids, entry, first, last = (stints[:, i] for i in range(4))
        # Gaps inside stints: decode step s counts once for each stint with first < s < last.
        change = np.zeros(len(decode_ends) + 1, dtype=np.int64)
        inside = last - first >= 2
        np.add.at(change, first[inside] + 1, 1)
        np.add.at(change, last[inside], -1)
        counts = np.cumsum(change)[: len(decode_ends)]
        gaps = np.diff(decode_ends, prepend=0)
        # Gaps at the seams: the token before a stint's first one.
        order = np.argsort(ids, kind="stable")
        ids, entry, first, last = ids[order], entry[order], first[order], last[order]
        has_entry, has_decodes = entry >= 0, last > first
        first_decode = decode_ends[first]
        final = np.where(has_decodes, decode_ends[last - 1], entry)
        head = np.where(has_entry, entry, first_decode)
        same = np.zeros(len(ids), dtype=bool)
        same[1:] = ids[1:] == ids[:-1]
        before = np.roll(final, 1)
        seams = np.concatenate([
            (head - before)[same],
            (first_decode - entry)[has_entry & has_decodes],
        ])  # fmt: skip
        used = counts > 0
        return (
            np.concatenate([gaps[used], seams]),
            np.concatenate([counts[used], np.ones(len(seams), dtype=np.int64)]),
        )

    def token_counts(self) -> tuple[Int64, Int64]:
        """Return (time in ns, tokens that came out then), one pair a step with any."""
        segments = self._segment_columns()
        out = np.repeat(segments["num_decodes"] + segments["prefills_done"], segments["num_steps"])
        return self._step_ends_ns()[out > 0], out[out > 0]

    def token_times(self, request_id: int) -> Int64:
        """Return when each token of a request came out, in ns."""
        decode_ends = self._decode_ends_ns()
        times: list[Int64] = []
        for row in self._stint_rows():
            if row[0] == request_id:
                if row[1] >= 0:
                    times.append(row[1:2])
                times.append(decode_ends[row[2] : row[3]])
        return np.concatenate(times) if times else np.zeros(0, dtype=np.int64)

    def _segment_columns(self) -> dict[str, Int64]:
        rows = _matrix(self._segments, len(_SEGMENT_COLUMNS))
        return {name: rows[:, i] for i, name in enumerate(_SEGMENT_COLUMNS)}

    def _stint_rows(self) -> Int64:
        return _matrix(self._stints, 4)

    def _step_ends_ns(self) -> Int64:
        if self._ends_ns is None:
            segments = self._segment_columns()
            counts, starts = segments["num_steps"], segments["start_ns"]
            durations = np.frombuffer(self._durations_ns, dtype=np.int64)
            elapsed = np.cumsum(durations)
            first = np.cumsum(counts) - counts
            offset = starts - (elapsed - durations)[first] if len(durations) else starts
            self._ends_ns = elapsed + np.repeat(offset, counts)
        return self._ends_ns

    def _decode_ends_ns(self) -> Int64:
        segments = self._segment_columns()
        decoding = np.repeat(segments["num_decodes"] > 0, segments["num_steps"])
        return self._step_ends_ns()[decoding]


def _matrix(values: array[int], width: int) -> Int64:
    return np.frombuffer(values, dtype=np.int64).reshape(-1, width)
