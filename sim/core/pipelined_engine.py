"""The scheduling loop with several batches in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.draft_length import DraftLength
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor
from schedlab.sim.core.micro_batch import MicroBatch
from schedlab.sim.core.pipeline import BatchInFlight
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.scheduling import SchedulingPolicy
from schedlab.sim.core.step import Segment
from schedlab.sim.errors import InfeasiblePlan
from schedlab.sim.request import RequestState, seat_number


class PipelinedEngine(Engine):
    """An engine whose GPUs are the stages of a pipeline, with as many batches in flight.

    Whoever drives it calls `begin` as often as it `can_begin` and something starts, and `commit`
    when the oldest batch is back, at `next_end_ns`. From the one to the other the requests of a
    batch are `EngineView.in_pipeline`: they keep seat and memory, and the policy plans without
    them, as vLLM V1 does not schedule a decode again whose output is not back
    (`EngineCore.step_with_batch_queue`). Prompts neither, as in Sarathi-Serve, where vLLM has the
    next chunk follow at once. Every step is planned: nothing is skipped. Decodes that
    go from batch to batch together are kept as they are (`MicroBatch`), so that a step costs no
    more the more they are.

    Parameters
    ----------
    config, policy, executor, observer, draft_length
        As for `Engine`; the executor is a `PipelineExecutor`, or one whose batches end in the order
        in which they began.
    """

    has_pipeline: ClassVar[bool] = True

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy,
        executor: Executor,
        observer: Callable[[Engine], None] | None = None,
        draft_length: DraftLength | None = None,
    ) -> None:
        super().__init__(config, policy, executor, observer, draft_length)
        self._in_flight: deque[Segment] = deque()
        self._num_batches = 0  # beside the first
        self._back: MicroBatch | None = None  # who decoded in the batch that ends
        self._spares: list[DecodeBatch] = []

    @property
    def can_begin(self) -> bool:
        """Whether another batch may start, and there is somebody to plan for."""
        requests = self.requests
        if len(self._in_flight) >= self.config.pipeline_parallel_size:
            return False
        return len(requests.running) + len(requests.waiting) + len(requests.arrived) > 0

    @property
    def next_end_ns(self) -> int:
        """When the oldest batch is back; FOREVER if none is in flight."""
        return self._in_flight[0].end_ns if self._in_flight else FOREVER

    def _start(self, plan: BatchPlan, num_decodes: int, horizon_ns: int, repeats: bool) -> Segment:
        if plan.finished != "leave":
            what = "holds finished requests, which is not simulated with several batches in flight"
            raise InfeasiblePlan(self.blame(what))
        segment = super()._start(plan, num_decodes, horizon_ns, False)
        requests = self.requests
        running = requests.running
        chunks = {state.id: n for state, n in plan.chunks}
        for i in chunks:
            del requests.prefilling[i]
        decodes: MicroBatch | None = None
        if num_decodes:
            assert isinstance(requests.decodes, MicroBatch)
            decodes = requests.decodes
            if not self._spares:
                self._num_batches += 1
                self._spares.append(MicroBatch(self.config.block_size, self._num_batches))
            requests.decodes = self._spares.pop()
        if num_decodes + len(chunks) == len(running):  # mostly everyone
            requests.running = {}
        else:
            goes = chunks.keys() if decodes is None else chunks.keys() | decodes.members.keys()
            running = {i: state for i, state in running.items() if i in goes}
            for i in goes:
                del requests.running[i]
        requests.in_pipeline.enter(BatchInFlight(running, chunks, decodes))
        self._in_flight.append(segment)
        return segment

    def commit(self) -> None:
        """Account for the oldest batch in flight, whose requests run again from its end on."""
        segment = self._segment = self._in_flight.popleft()
        requests, plan = self.requests, segment.plan
        batch = requests.in_pipeline.leave()
        self._back = decodes = batch.decodes
        if batch.num_lost:
            _forget_preempted(segment, batch)
        if self._on_tokens is not None:  # who asks the plan who decoded
            plan.decodes = tuple(decodes.members.values()) if decodes is not None else ()
        if requests.running:
            requests.running = _by_seat(requests.running | batch.running)
        else:
            requests.running = batch.running
        if plan.chunks:
            for state, _ in plan.chunks:
                requests.prefilling[state.id] = state
            if len(requests.prefilling) > 1:
                requests.prefilling = _by_seat(requests.prefilling)
        stages_ns = segment.steps.stages_ns
        assert stages_ns is not None
        self.log.add_stages(
            stages_ns, decodes.number if decodes is not None and decodes.size else -1
        )
        super().commit()

    def die(self, now_ns: int) -> list[RequestState]:
        """Stop for good: batches in flight never come back; see `Engine.die`."""
        self._in_flight.clear()
        self._segment = None
        return super().die(now_ns)

    def _advance_decodes(self, segment: Segment, num_decodes: int) -> list[int]:
        """Let those decode who were in the batch; return the blocks opened."""
        back = self._back
        if back is None:
            return [segment.first_step_blocks]
        self._back = None
        if not back.size:
            self._spares.append(back)
            return [segment.first_step_blocks]
        requests = self.requests
        requests.resident_tokens += back.advance(1)
        self._preemptions_without_token = 0
        if requests.decodes.size:
            states = list(back.members.values())
            for state in states:
                requests.leave_batch(back, state)
            self.executor.joined(states, requests.decodes)
            requests.decodes.join_all(states)
            self._spares.append(back)
        else:
            self._spares.append(requests.decodes)
            requests.decodes = back
        return [segment.first_step_blocks]


def _forget_preempted(segment: Segment, batch: BatchInFlight) -> None:
    """Throw away what comes out for requests that were preempted meanwhile: it is padding."""
    plan, steps, running = segment.plan, segment.steps, batch.running
    chunks = tuple([(state, n) for state, n in plan.chunks if state.id in running])
    prefill_tokens = prefills_done = 0
    for (state, n), (_, context) in zip(plan.chunks, segment.shape.chunks, strict=True):
        if state.id not in running:
            prefill_tokens += n
            prefills_done += n + context == state.num_tokens
    num_decodes = 0 if batch.decodes is None else batch.decodes.size
    segment.row.computed_for_nobody(
        num_decodes=segment.shape.num_decodes - num_decodes,
        num_prefills=len(plan.chunks) - len(chunks),
        prefill_tokens=prefill_tokens,
        prefills_done=prefills_done,
    )
    plan.chunks = chunks
    steps.finished = [state for state in steps.finished if state.id in running]


def _by_seat(states: dict[int, RequestState]) -> dict[int, RequestState]:
    """Return requests in the order of their admission."""
    return {state.id: state for state in sorted(states.values(), key=seat_number)}
