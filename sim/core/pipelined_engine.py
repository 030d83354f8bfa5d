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
from schedlab.sim.core.pipeline import BatchInFlight, LateRequest
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
    (`EngineCore.step_with_batch_queue`). Nor prompts, as in Sarathi-Serve; with
    `chunked_pipeline_parallelism` a prompt runs on until its last chunk is under way, as in vLLM:
    nothing that its next chunk needs comes out of the last stage, and no batch overtakes another,
    so what a stage needs of earlier ones is in its cache. Such a chunk counts as computed
    from when it begins.

    Who is preempted while a batch computes him loses his memory, not the token that comes out; he
    waits until it has, as in vLLM (`num_stale_output_tokens` in 0.32; not yet in 0.24). Where
    prompts are handed over nothing comes out, as nobody could go on without that memory.

    With `arrivals_between_steps` who comes while batches are in flight is seen when the oldest is
    back, as vLLM's engine core waits for that. Before it does, it fills its queue with batches of
    nobody, which take no time and leave with the one before them, but a place until then.

    Every step is planned: nothing is skipped. Decodes that go from batch to batch together are
    kept as they are (`MicroBatch`), so that a step costs no more the more they are.

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
        self._ended: dict[int, int] = {}  # the chunks that end in it, but for those followed
        self._late: dict[int, LateRequest] = {}  # who was preempted since that one began
        self._awake_ns = -1  # when it last had nothing to wait for
        self._empty: deque[int] = deque()  # batches of nobody behind each of those in flight
        self._num_empty = 0
        self._spares: list[DecodeBatch] = []

    def can_begin(self, now_ns: int) -> bool:
        """Whether another batch may start now, and there is somebody to plan for."""
        requests, num_batches = self.requests, len(self._in_flight)
        if num_batches + self._num_empty >= self.config.pipeline_parallel_size:
            return False
        if num_batches and self.config.arrivals_between_steps and now_ns != self._awake_ns:
            return False
        known = len(requests.running) + len(requests.waiting) + len(requests.arrived)
        return known + len(requests.intake.requests) > 0

    @property
    def next_end_ns(self) -> int:
        """When the oldest batch is back; FOREVER if none is in flight."""
        return self._in_flight[0].end_ns if self._in_flight else FOREVER

    def _plans_again(self) -> bool:
        """Whether there is a place for another batch, once this one of nobody has taken its own."""
        if not (self._in_flight and self.config.arrivals_between_steps):
            return True
        self._empty[-1] += 1
        self._num_empty += 1
        num_batches = len(self._in_flight) + self._num_empty
        return num_batches < self.config.pipeline_parallel_size

    def _start(self, plan: BatchPlan, num_decodes: int, horizon_ns: int, repeats: bool) -> Segment:
        if plan.finished != "leave":
            what = "holds finished requests, which is not simulated with several batches in flight"
            raise InfeasiblePlan(self.blame(what))
        segment = super()._start(plan, num_decodes, horizon_ns, False)
        requests = self.requests
        running = requests.running
        chunks: dict[int, int] = {}
        followed: dict[int, tuple[RequestState, int]] = {}
        follows = self.config.chunked_pipeline_parallelism
        for state, n in plan.chunks:
            if follows and n < state.num_uncomputed_tokens:
                followed[state.id] = (state, n)
            else:
                chunks[state.id] = n
                del requests.prefilling[state.id]
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
        for state, n in followed.values():
            requests.advance_prefill(state, n, segment.end_ns, False)
        batch = BatchInFlight(running, chunks, decodes, followed, segment.steps.finished)
        requests.in_pipeline.enter(batch)
        if not self._in_flight:
            self._awake_ns = self.now_ns
        self._in_flight.append(segment)
        self._empty.append(0)
        return segment

    def commit(self) -> None:
        """Account for the oldest batch in flight, whose requests run again from its end on."""
        if self.config.arrivals_between_steps:
            room = self.config.pipeline_parallel_size - len(self._in_flight) - self._num_empty
            self._empty[-1] += room
            self._num_empty += room
        self._num_empty -= self._empty.popleft()
        segment = self._segment = self._in_flight.popleft()
        self._awake_ns = segment.end_ns
        requests, plan = self.requests, segment.plan
        batch = requests.in_pipeline.leave()
        self._back = decodes = batch.decodes
        self._ended = batch.chunks
        self._late = batch.late
        if batch.late:
            steps = segment.steps
            steps.finished = [state for state in steps.finished if state.id in batch.running]
            self._ended = {i: n for i, n in batch.chunks.items() if i in batch.running}
        if self._on_tokens is not None:  # who asks the plan who decoded
            late = [late.state for late in batch.late.values() if late.decodes and late.gets_token]
            decoded = decodes.members.values() if decodes is not None else ()
            plan.decodes = (*decoded, *late)
        if requests.running:
            requests.running = _by_seat(requests.running | batch.running)
        else:
            requests.running = batch.running
        if plan.chunks:
            for state, _ in plan.chunks:
                if state.id in self._ended:
                    requests.prefilling[state.id] = state
            if len(requests.prefilling) > 1:
                requests.prefilling = _by_seat(requests.prefilling)
        stages_ns = segment.steps.stages_ns
        assert stages_ns is not None
        self.log.add_stages(stages_ns, decodes.number if decodes is not None else -1)
        super().commit()

    def die(self, now_ns: int) -> list[RequestState]:
        """Stop for good: batches in flight never come back; see `Engine.die`."""
        pipeline = self.requests.in_pipeline
        for batch in pipeline.batches:
            for state, n in batch.followed.values():
                if state.id not in pipeline.draining:
                    state._computed -= n
        self._in_flight.clear()
        self._segment = None
        return super().die(now_ns)

    def _advance_prefills(
        self,
        chunks: tuple[tuple[RequestState, int], ...],
        finished: list[RequestState],
        end_ns: int,
    ) -> None:
        """Account for the chunks that nobody followed: the others are accounted for."""
        if len(self._ended) < len(chunks):
            chunks = tuple([(state, n) for state, n in chunks if state.id in self._ended])
        super()._advance_prefills(chunks, finished, end_ns)

    def _advance_decodes(self, segment: Segment, num_decodes: int) -> list[int]:
        """Let those decode who were in the batch; return the blocks opened."""
        requests, back = self.requests, self._back
        if back is not None:
            requests.resident_tokens += back.advance(1)
        if self._late:
            self._deliver_late()
        if back is None:
            return [segment.first_step_blocks]
        self._back = None
        if not back.size:
            self._spares.append(back)
            return [segment.first_step_blocks]
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

    def _deliver_late(self) -> None:
        """Give those a token who were preempted since their batch began."""
        back, requests = self._back, self.requests
        for i, late in self._late.items():
            if not late.gets_token:
                continue
            if late.decodes:
                assert back is not None
                step = back.numbered_from + back.steps
                self.log.add_stint(i, -1, step - 1, step)
            else:
                self.log.add_stint(i, self.now_ns, 0, 0)
            requests.deliver_late(late, self.now_ns)
            self._preemptions_without_token = 0
        self._late = {}


def _by_seat(states: dict[int, RequestState]) -> dict[int, RequestState]:
    """Return requests in the order of their admission."""
    return {state.id: state for state in sorted(states.values(), key=seat_number)}
