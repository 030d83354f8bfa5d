"""The scheduling loop with several batches in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.draft_length import DraftLength
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor
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
    them, as vLLM V1 does not schedule a request again whose output is not back
    (`EngineCore.step_with_batch_queue`). Every step is planned: nothing is skipped.

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
        self._num_begun = 0
        self._num_ended = 0
        self._num_decode_steps = 0

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
        batch, running, in_pipeline = requests.decodes, requests.running, requests.in_pipeline
        plan.decodes = tuple(batch.members.values()) if num_decodes else ()
        for state in plan.decodes:
            batch.leave(state)
            del running[state.id]
            in_pipeline[state] = 1, self._num_begun
        for state, n in plan.chunks:
            del running[state.id], requests.prefilling[state.id]
            in_pipeline[state] = n, self._num_begun
        self._num_begun += 1
        self._in_flight.append(segment)
        return segment

    def commit(self) -> None:
        """Account for the oldest batch in flight, whose requests run again from its end on."""
        segment = self._segment = self._in_flight.popleft()
        requests = self.requests
        self._forget_preempted(segment)
        for state, _ in segment.plan.chunks:
            del requests.in_pipeline[state]
            requests.running[state.id] = requests.prefilling[state.id] = state
        if len(requests.prefilling) > 1:
            requests.prefilling = _by_seat(requests.prefilling)
        stages_ns = segment.steps.stages_ns
        assert stages_ns is not None
        self.log.add_stages(stages_ns)
        super().commit()
        self._num_ended += 1

    def die(self, now_ns: int) -> list[RequestState]:
        """Stop for good: batches in flight never come back; see `Engine.die`."""
        self._in_flight.clear()
        self._segment = None
        return super().die(now_ns)

    def _is_back(self, state: RequestState) -> bool:
        """Whether a request of the batch that ends was not preempted in the meantime."""
        found = self.requests.in_pipeline.get(state)
        return found is not None and found[1] == self._num_ended

    def _forget_preempted(self, segment: Segment) -> None:
        """Throw away what comes out for requests that were preempted meanwhile: it is padding."""
        plan, steps = segment.plan, segment.steps
        assert plan.decodes is not None
        in_batch = [*plan.decodes, *[state for state, _ in plan.chunks]]
        if all([self._is_back(state) for state in in_batch]):
            return
        decodes = tuple([state for state in plan.decodes if self._is_back(state)])
        chunks = tuple([(state, n) for state, n in plan.chunks if self._is_back(state)])
        prefill_tokens = prefills_done = 0
        for (state, n), (_, context) in zip(plan.chunks, segment.shape.chunks, strict=True):
            if not self._is_back(state):
                prefill_tokens += n
                prefills_done += n + context == state.num_tokens
        segment.row.computed_for_nobody(
            num_decodes=len(plan.decodes) - len(decodes),
            num_prefills=len(plan.chunks) - len(chunks),
            prefill_tokens=prefill_tokens,
            prefills_done=prefills_done,
        )
        plan.decodes, plan.chunks = decodes, chunks
        steps.finished = [state for state in steps.finished if self._is_back(state)]

    def _advance_decodes(self, segment: Segment, num_decodes: int) -> list[int]:
        """Let those decode who were in the batch; return the blocks opened."""
        requests, log, plan = self.requests, self.log, segment.plan
        assert plan.decodes is not None
        if plan.decodes:
            step, finished = self._num_decode_steps, segment.steps.finished
            self._num_decode_steps += 1
            for state in plan.decodes:
                del requests.in_pipeline[state]
                requests.running[state.id] = state
                state._computed += 1
                state._generated += 1
                log.add_stint(state.id, state._entry_ns, step, step + 1)
                state._entry_ns = -1
                if state not in finished:
                    requests.decodes.join(state)
            requests.resident_tokens += len(plan.decodes)
            self._preemptions_without_token = 0
        requests.running = _by_seat(requests.running)
        return [segment.first_step_blocks]


def _by_seat(states: dict[int, RequestState]) -> dict[int, RequestState]:
    """Return requests in the order of their admission."""
    return {state.id: state for state in sorted(states.values(), key=seat_number)}
