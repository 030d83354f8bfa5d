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
from schedlab.sim.errors import InfeasiblePlan, SchedlabError
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

    With `async_scheduling` there is a place for one batch more than there are stages, as in vLLM
    0.32 with its V2 model runner (`VllmConfig.max_concurrent_batches`). Plans are counted, those of
    nobody among them, and who samples a token in one may decode again so many plans later as there
    are stages (`next_decode_eligible_step` in vllm/v1/core/sched/async_scheduler.py). By then his
    batch is the oldest in flight, `Pipeline.settling`: what it computes counts as if it were back,
    but for who ends in it. His seat and memory that plan still reckons with
    (`Population.leaving`), perhaps even with another token of his (`overrun_at_stop`), and he is
    answered when the batch is back.

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
        self._num_micro_batches = 0  # beside the first
        self._back: BatchInFlight | None = None  # the one that is accounted for
        self._late: dict[int, LateRequest] = {}  # who was preempted since the batch that ends began
        self._awake_ns = -1  # when it last had nothing to wait for
        self._empty: deque[int] = deque()  # batches of nobody behind each of those in flight
        self._num_empty = 0
        self._spares: list[DecodeBatch] = []
        self._ahead = config.pipelines_ahead
        self._most_batches = config.most_batches
        self._number = 0  # of the last plan, where they are made ahead
        self._changed = False  # whether it took seats or memory away, and scheduled nobody

    def can_begin(self, now_ns: int) -> bool:
        """Whether another batch may start now, and there is somebody to plan for."""
        num_batches = len(self._in_flight)
        if num_batches + self._num_empty >= self._most_batches:
            return False
        if num_batches and self.config.arrivals_between_steps and now_ns != self._awake_ns:
            return False
        return self._knows_anybody() or (self._ahead and self.requests.in_pipeline.size > 0)

    def _knows_anybody(self) -> bool:
        """Whether there is somebody whose batch is not in flight."""
        requests = self.requests
        known = len(requests.running) + len(requests.waiting) + len(requests.arrived)
        return known + len(requests.intake.requests) > 0

    @property
    def next_end_ns(self) -> int:
        """When the oldest batch is back; FOREVER if none is in flight."""
        return self._in_flight[0].end_ns if self._in_flight else FOREVER

    def begin(self, now_ns: int, horizon_ns: int = FOREVER) -> Segment | None:
        """Plan, and start a batch; see `Engine.begin`.

        Where batches are planned ahead, plans of nobody follow each other as long as there is a
        place for them: for each somebody else may run again.
        """
        if not self._ahead:
            return super().begin(now_ns, horizon_ns)
        wait_until_ns = FOREVER
        while True:
            self._number += 1
            self._changed = False
            if self._number == self._settles_at() or self._knows_anybody():
                segment = super().begin(now_ns, horizon_ns)
                if segment is not None:
                    return segment
                wait_until_ns = min(wait_until_ns, self.wait_until_ns)
            room = self._most_batches - len(self._in_flight) - self._num_empty
            if self._in_flight and room:
                # Nothing is different for the next plan, unless this one took something away.
                num_empty = 1 if self._changed else min(room, self._settles_at() - self._number)
                self._empty[-1] += num_empty
                self._num_empty += num_empty
                self._number += num_empty - 1
                if num_empty < room:
                    continue
            self.wait_until_ns = wait_until_ns
            return None

    def _settles_at(self) -> int:
        """Return the number of the plan for which those in the oldest batch run again."""
        batches = self.requests.in_pipeline.batches
        return batches[0].number + self.config.pipeline_parallel_size if batches else FOREVER

    def _settle(self, now_ns: int) -> None:
        """Let those go, come or run whose time has come."""
        super()._settle(now_ns)
        if self._ahead and self._number == self._settles_at():
            self._settle_batch(self._in_flight[0])

    def _plans_again(self) -> bool:
        """Whether there is a place for another batch, once this one of nobody has taken its own."""
        if not (self._in_flight and self.config.arrivals_between_steps):
            return True
        if self._ahead:
            self._changed = True
            return False
        self._empty[-1] += 1
        self._num_empty += 1
        return len(self._in_flight) + self._num_empty < self._most_batches

    def _start(self, plan: BatchPlan, num_decodes: int, horizon_ns: int, repeats: bool) -> Segment:
        if plan.finished != "leave":
            what = "holds finished requests, which is not simulated with several batches in flight"
            raise InfeasiblePlan(self.blame(what))
        requests = self.requests
        unnamed: frozenset[int] = frozenset()
        if self._ahead:
            if num_decodes:
                unnamed = requests.in_pipeline.awaited(requests.decodes.members)
            self._ready_ns = self._in_flight[0].end_ns if requests.in_pipeline.is_awaited else 0
        segment = super()._start(plan, num_decodes, horizon_ns, False)
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
                self._num_micro_batches += 1
                self._spares.append(MicroBatch(self.config.block_size, self._num_micro_batches))
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
        batch.number, batch.unnamed = self._number, unnamed
        requests.in_pipeline.enter(batch)
        if not self._in_flight:
            self._awake_ns = self.now_ns
        self._in_flight.append(segment)
        self._empty.append(0)
        return segment

    def commit(self) -> None:
        """Account for the oldest batch in flight, whose requests run again from its end on.

        If not before: where batches are planned ahead only what it computes is delivered now.
        """
        if self.config.arrivals_between_steps:
            room = self._most_batches - len(self._in_flight) - self._num_empty
            self._empty[-1] += room
            self._num_empty += room
        self._num_empty -= self._empty.popleft()
        segment, requests = self._in_flight[0], self.requests
        if self._ahead and requests.in_pipeline.settling is None:
            self._settle_batch(segment)
            if requests.leaving or requests.overrun:
                requests.let_go(None, segment.end_ns)
        self._in_flight.popleft()
        self._segment = segment
        self._awake_ns = segment.end_ns
        batch = requests.in_pipeline.leave()
        self._late = batch.late
        if not self._ahead:
            self._rejoin(segment, batch)
        if self._on_tokens is not None:  # who asks the plan who decoded
            late = [late.state for late in batch.late.values() if late.decodes and late.gets_token]
            segment.plan.decodes = (*batch.decoded, *late)
        stages_ns = segment.steps.stages_ns
        assert stages_ns is not None
        self.log.add_stages(stages_ns, batch.decodes.number if batch.decodes is not None else -1)
        self._back = batch
        super().commit()

    def _settle_batch(self, segment: Segment) -> None:
        """Let what the oldest batch in flight computes count: its end is known here."""
        requests, chunks = self.requests, segment.plan.chunks
        batch = self._back = requests.in_pipeline.settle()
        sampled = set() if batch.decodes is None else set(batch.decodes.members)
        for state, n in chunks:
            if state.id in batch.running and n == state.num_uncomputed_tokens:
                sampled.add(state.id)
        batch.sampled = sampled
        self._rejoin(segment, batch)
        batch.running = batch.running.copy()  # the other one changes
        self._advance_batch(batch)
        self._join_again(batch)
        finished = segment.steps.finished
        if chunks:
            self._advance_rest(chunks, finished, segment.end_ns)
        if finished:
            requests.finish(finished, "leave", segment.end_ns)

    def _rejoin(self, segment: Segment, batch: BatchInFlight) -> None:
        """Let the requests of a batch run again, as they were when it began."""
        requests, plan, decodes = self.requests, segment.plan, batch.decodes
        if batch.late:
            steps = segment.steps
            steps.finished = [state for state in steps.finished if state.id in batch.running]
            batch.chunks = {i: n for i, n in batch.chunks.items() if i in batch.running}
        if self._on_tokens is not None and decodes is not None:
            batch.decoded = tuple(decodes.members.values())
        if requests.running:
            requests.running = _by_seat(requests.running | batch.running)
        else:
            requests.running = batch.running
        if plan.chunks:
            for state, _ in plan.chunks:
                if state.id in batch.chunks:
                    requests.prefilling[state.id] = state
            if len(requests.prefilling) > 1:
                requests.prefilling = _by_seat(requests.prefilling)

    def die(self, now_ns: int) -> list[RequestState]:
        """Stop for good: batches in flight never come back; see `Engine.die`.

        Raises
        ------
        SchedlabError
            If batches are planned ahead: what one in flight computes counts already.
        """
        if self._ahead:
            raise SchedlabError(
                "engines that die are not simulated with async_scheduling and "
                "pipeline_parallel_size > 1; set async_scheduling: false"
            )
        pipeline = self.requests.in_pipeline
        for batch in pipeline.batches:
            for state, n in batch.followed.values():
                if state.id not in pipeline.draining:
                    state._computed -= n
        self._in_flight.clear()
        self._segment = None
        return super().die(now_ns)

    def _finish(self, finished: list[RequestState], plan: BatchPlan, end_ns: int) -> None:
        """Let requests finish whose last token came out, or answer who has finished ahead."""
        if self._ahead:
            self.requests.answer_ended(end_ns)
        else:
            super()._finish(finished, plan, end_ns)

    def _advance_prefills(
        self,
        chunks: tuple[tuple[RequestState, int], ...],
        finished: list[RequestState],
        end_ns: int,
    ) -> None:
        """Account for the chunks that nobody followed: the others are accounted for."""
        if not self._ahead:
            self._advance_rest(chunks, finished, end_ns)

    def _advance_rest(
        self,
        chunks: tuple[tuple[RequestState, int], ...],
        finished: list[RequestState],
        end_ns: int,
    ) -> None:
        assert self._back is not None
        ended = self._back.chunks
        if len(ended) < len(chunks):
            chunks = tuple([(state, n) for state, n in chunks if state.id in ended])
        super()._advance_prefills(chunks, finished, end_ns)

    def _advance_decodes(self, segment: Segment, num_decodes: int) -> list[int]:
        """Let those decode who were in the batch; return the blocks opened."""
        batch = self._back
        assert batch is not None
        if not self._ahead:
            self._advance_batch(batch)
        if self._late:
            self._deliver_late(batch)
        if not self._ahead:
            self._join_again(batch)
        return [segment.first_step_blocks]

    def _advance_batch(self, batch: BatchInFlight) -> None:
        """Let those decode who were in a batch."""
        decodes = batch.decodes
        if decodes is not None:
            self.requests.resident_tokens += decodes.advance(1)
            batch.last_decode = decodes.numbered_from + decodes.steps

    def _join_again(self, batch: BatchInFlight) -> None:
        """Let those who decoded in a batch decode on, with whoever else can."""
        requests, back = self.requests, batch.decodes
        if back is None:
            return
        if not back.size:
            self._spares.append(back)
            return
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

    def _deliver_late(self, batch: BatchInFlight) -> None:
        """Give those a token who were preempted since their batch began."""
        requests = self.requests
        for i, late in self._late.items():
            if not late.gets_token:
                continue
            if late.decodes:
                self.log.add_stint(i, -1, batch.last_decode - 1, batch.last_decode)
            else:
                self.log.add_stint(i, self.now_ns, 0, 0)
            requests.deliver_late(late, self.now_ns)
            self._preemptions_without_token = 0
        self._late = {}


def _by_seat(states: dict[int, RequestState]) -> dict[int, RequestState]:
    """Return requests in the order of their admission."""
    return {state.id: state for state in sorted(states.values(), key=seat_number)}
