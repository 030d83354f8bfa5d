"""What is written down of a run inside vLLM: the same tables as of a run of ours."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedlab.gpu_backend.vllm.clock import StepTimes
from schedlab.sim.core.plan_log import RecordedStep
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.record.columns import FINISHED, TRUNCATED, Column, Columns, Ints
from schedlab.sim.record.log import RunLog
from schedlab.sim.record.segment_row import SegmentRow
from schedlab.sim.record.stored_token_times import StoredTokenTimes
from schedlab.sim.record.token_times import TokenTimes
from schedlab.sim.request import RequestState


class Batch(NamedTuple):
    """A step as it was scheduled."""

    tokens: dict[int, int]
    """Request id to tokens computed."""
    computed: dict[int, int]
    """Request id to tokens in the cache before it, those found there among them."""
    decodes: frozenset[int]
    preempted: tuple[int, ...]
    shape: BatchShape
    kv_blocks: int
    """Held when it begins."""
    kv_tokens: int
    """In them when it ends, shared ones once."""
    num_preempted: int
    """Since the step in front of it began."""
    recomputed_tokens: int

    def told(self) -> str:
        """Write the batch down: ``id:tokens@computed`` of each request."""
        return " ".join(f"{i}:{n}@{self.computed[i]}" for i, n in self.tokens.items())


class _Answer:
    """What is known of a request that was sent."""

    def __init__(self, state: RequestState, output_tokens: int) -> None:
        self.state = state
        self.output_tokens = output_tokens
        self.num_tokens = 0
        self.first_ns = self.last_ns = self.entry_ns = -1
        self.stint: list[int] | None = None


class VllmLog:
    """A log that is filled from outside, step by step, and read as one of ours.

    Its table of steps has further columns: schedule_ns, model_ns, update_ns, between_ns (the rest
    of the overhead), and as text batch (``id:tokens@computed`` of each request) and preempted
    (ids).

    Parameters
    ----------
    block_size : int
        Tokens in a KV block.

    Attributes
    ----------
    num_gone : int
        Requests answered or rejected so far.
    """

    def __init__(self, block_size: int) -> None:
        self._log = RunLog(block_size, grows=True)
        self._answers: dict[int, _Answer] = {}
        self._rows: list[tuple[StepTimes, Batch]] = []
        self._num_decode_steps = 0
        self._done: list[tuple[_Answer, int]] = []
        self.num_gone = 0

    # -- writing (the scheduler) ---------------------------------------------------------------

    def sent(self, state: RequestState, output_tokens: int) -> None:
        """Learn of a request that vLLM got."""
        self._answers[state.id] = _Answer(state, output_tokens)

    def turned_away(self, state: RequestState, output_tokens: int, reason: str) -> None:
        """Record a request that was rejected."""
        answer = self._answers.pop(state.id, None)
        if answer is not None:
            self._set(answer)
            self._end_stint(answer)
        self._log.reject(state, output_tokens, reason)
        self.num_gone += 1

    def step(self, batch: Batch, times: StepTimes, answered: list[int]) -> None:
        """Record a step, and who got a token at its end."""
        self._rows.append((times, batch))
        shape = batch.shape
        decode_step = self._num_decode_steps
        self._num_decode_steps += shape.num_decodes > 0
        for request_id in answered:
            answer = self._answers[request_id]
            answer.num_tokens += 1
            answer.last_ns = times.end_ns
            if answer.first_ns < 0:
                answer.first_ns = times.end_ns
            if request_id not in batch.decodes:
                self._end_stint(answer)
                answer.entry_ns = times.end_ns
                answer.stint = [self._num_decode_steps] * 2
            elif answer.stint is not None and answer.stint[1] == decode_step:
                answer.stint[1] += 1
            else:
                self._end_stint(answer)
                answer.stint = [decode_step, decode_step + 1]
        self._log.add_segment(_segment(batch, times), [times.end_ns - times.start_ns], [0])

    def finished(self, request_id: int, end_ns: int) -> None:
        """Record that a request has its answer."""
        answer = self._answers.pop(request_id)
        self._end_stint(answer)
        # Its state is the scheduler's until the policy has heard of it.
        self._done.append((answer, end_ns))
        self.num_gone += 1

    def close(self) -> None:
        """Write down the requests, when the scheduler has done with them."""
        for answer, end_ns in self._done:
            self._set(answer)
            is_cut = answer.output_tokens > answer.state.request.max_tokens
            status = TRUNCATED if is_cut else FINISHED
            self._log.add_request(answer.state, answer.output_tokens, end_ns, status)
        self._done.clear()

    def evicted(self, request_id: int, now_ns: int) -> None:
        """Record that a running request lost its memory."""
        self._log.add_eviction(request_id, now_ns)

    def resumed(self, request_id: int, now_ns: int, tokens_to_compute: int) -> None:
        """Record that an evicted request runs again."""
        self._log.add_resumption(request_id, now_ns, tokens_to_compute)

    def _set(self, answer: _Answer) -> None:
        state = answer.state
        state._generated = answer.num_tokens
        state.first_token_ns, state.last_token_ns = answer.first_ns, answer.last_ns

    def _end_stint(self, answer: _Answer) -> None:
        if answer.stint is not None:
            self._log.add_stint(answer.state.id, answer.entry_ns, *answer.stint)
        answer.stint, answer.entry_ns = None, -1

    # -- reading -------------------------------------------------------------------------------

    def recorded(self) -> list[RecordedStep]:
        """Return every step: the decision, what it costs by, and what it took."""
        return [
            RecordedStep(
                times.start_ns, batch.tokens, batch.preempted, batch.shape,
                times.end_ns - times.start_ns, times.overhead_ns,
            )
            for times, batch in self._rows
        ]  # fmt: skip

    def seconds(self) -> dict[str, float]:
        """Return where the time of all steps went."""
        columns = self._more()
        names = ("schedule_ns", "model_ns", "update_ns", "between_ns")
        return {f"{name[:-3]}_s": float(columns[name].sum()) / 1e9 for name in names}

    @property
    def num_steps(self) -> int:
        """Steps run."""
        return self._log.num_steps

    @property
    def reject_reasons(self) -> dict[int, str]:
        """Why requests were turned away, by id."""
        return self._log.reject_reasons

    def requests(self) -> Columns:
        """Return one row a request; see `RunLog.requests`."""
        return self._log.requests()

    def steps(self) -> Columns:
        """Return one row a step."""
        return {**self._log.steps(), **self._more()}

    def preemptions(self) -> Columns:
        """Return one row a preemption; see `RunLog.preemptions`."""
        return self._log.preemptions()

    def token_gaps(self, ids: Ints | None = None) -> Columns:
        """Return all gaps between tokens of one request; see `RunLog.token_gaps`."""
        return self._log.token_gaps(ids)

    def token_counts(self, ids: Ints | None = None) -> Columns:
        """Return how many tokens came out when; see `RunLog.token_counts`."""
        return self._log.token_counts(ids)

    def token_times(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns."""
        return self._log.token_times(request_id)

    def token_times_of_all(self) -> TokenTimes | StoredTokenTimes:
        """Return when all tokens came out."""
        return self._log.token_times_of_all()

    def _more(self) -> dict[str, Column]:
        rows = self._rows
        split = np.array(
            [
                (t.schedule_ns, t.model_ns, t.update_ns, t.end_ns - t.start_ns - t.model_ns)
                for t, _ in rows
            ],
            dtype=np.int64,
        ).reshape(-1, 4)
        schedule_ns, model_ns, update_ns, rest_ns = split.T
        return {
            "schedule_ns": schedule_ns,
            "model_ns": model_ns,
            "update_ns": update_ns,
            "between_ns": np.maximum(rest_ns - schedule_ns - update_ns, 0),
            "batch": np.array([b.told() for _, b in rows], dtype=object),
            "preempted": np.array([" ".join(map(str, b.preempted)) for _, b in rows], dtype=object),
        }


def _segment(batch: Batch, times: StepTimes) -> SegmentRow:
    shape = batch.shape
    prefill_tokens = sum(n for n, _ in shape.chunks)
    return SegmentRow(
        start_ns=times.start_ns,
        num_steps=1,
        num_decodes=shape.num_decodes,
        decode_context_sum_tokens=shape.decode_context_sum_tokens,
        num_prefills=len(shape.chunks),
        prefill_tokens=prefill_tokens,
        prefills_done=shape.rows_sampled - shape.num_decodes,
        padding_tokens=shape.padding_tokens,
        num_running=shape.num_running,
        num_waiting=shape.num_waiting,
        kv_tokens=batch.kv_tokens - prefill_tokens - shape.num_decodes,
        kv_allocated_blocks=batch.kv_blocks,
        kv_reserved_unused_tokens=0,
        num_preempted=batch.num_preempted,
        recomputed_tokens=batch.recomputed_tokens,
        overhead_ns=times.overhead_ns,
        swapped_bytes=0,
    )
