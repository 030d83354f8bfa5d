"""A workload replayed inside vLLM's engine loop, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request as VllmRequest

from schedlab.gpu_backend.vllm.clock import MeasuredStepClock, Planned, StepClock
from schedlab.gpu_backend.vllm.engine import Core
from schedlab.gpu_backend.vllm.prompts import prompt_ids
from schedlab.gpu_backend.vllm.recording import Batch, VllmLog
from schedlab.gpu_backend.vllm.scheduler import PolicyScheduler
from schedlab.sim.core.engine import MOST_WAITS
from schedlab.sim.core.lifecycle import too_long
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.arrivals import Source
from schedlab.sim.errors import SchedlabError, Stalled
from schedlab.sim.request import Arrival, Request, RequestState, Status


class ReplayScheduler(PolicyScheduler):
    """The scheduler of a replay: on the clock of the run, and it writes every step down.

    Parameters
    ----------
    clock : StepClock
        Times steps.
    estimate_step_ns : callable
        Answers policies that ask what a step would take.
    """

    has_cost_model = True

    def __init__(
        self,
        clock: StepClock,
        estimate_step_ns: Callable[[BatchShape, int], int],
        **options: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        self.clock = clock
        self.at_ns = 0
        self.num_plans = 0
        self.num_estimates = 0
        self.log: VllmLog
        self.on_gone: Callable[[RequestState, int], None] | None = None
        self.waits_until_ns = -1
        """Until when the last plan waits; -1 if it did something."""
        self._estimate = estimate_step_ns
        self._coming: dict[str, Request] = {}
        self._output_tokens: dict[int, int] = {}
        self._under_way: list[tuple[Batch | None, Planned]] = []
        self._batch: Batch | None = None
        self._num_preempted = self._recomputed_tokens = 0
        super().__init__(**options)
        self.log = VllmLog(self.engine_config.block_size)

    # -- what a server would ask the world -----------------------------------------------------

    def now_ns(self) -> int:
        """Return the time of the run."""
        return self.at_ns

    def seen(self, request: Any) -> Request:  # noqa: ANN401 - vLLM's
        """Return the workload's own request."""
        return self._coming.pop(request.request_id)

    def _estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        self.num_estimates += 1
        return self._estimate(shape, num_steps)

    # -- in and out ----------------------------------------------------------------------------

    def send(self, arrival: Arrival, request: VllmRequest, at_ns: int) -> None:
        """Take a request in."""
        self.at_ns = at_ns
        vllm_id = request.request_id
        self._coming[vllm_id] = arrival.request
        self._output_tokens[arrival.request.id] = arrival.output_tokens
        self.add_request(request)
        if vllm_id in self.requests:  # else it was turned away
            self.log.sent(self.plan_requests.state_of(vllm_id), arrival.output_tokens)

    def _reject(self, request: Any, reason: str) -> None:  # noqa: ANN401 - vLLM's
        state = self.plan_requests.state_of(request.request_id)
        super()._reject(request, reason)
        self.turn_away(state, self._output_tokens[state.id], reason)

    def turn_away(self, state: RequestState, output_tokens: int, reason: str) -> None:
        """Record a request that gets no answer."""
        self.log.turned_away(state, output_tokens, reason)
        if self.on_gone is not None:
            self.on_gone(state, self.clock.now_ns)

    # -- steps ---------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan a step, and note what it is and when it was planned."""
        begun_ns = self.clock.read_ns()
        self.at_ns = self.clock.planning_ns()
        self._batch = None
        output = super().schedule(throttle_prefills)
        batch = self._batch
        shape = BatchShape(0, 0, 0) if batch is None else batch.shape
        self._under_way.append((batch, self.clock.planned(begun_ns, shape)))
        return output

    def _make_plan(self) -> BatchPlan:
        self.num_plans += 1
        plan = super()._make_plan()
        for state in plan.preempted:
            if state.status is not Status.FINISHED:
                self._num_preempted += 1
                self._recomputed_tokens += state._computed
                self.log.evicted(state.id, self.at_ns)
        does = plan.preempted or plan.rejected or plan.admitted or plan.chunks or plan.decoding()
        self.waits_until_ns = -1 if does else plan.until_ns
        return plan

    def _output(
        self, new: list[Any], resumed: list[Any], running: list[Any], tokens: dict[str, int]
    ) -> SchedulerOutput:
        if tokens:
            self._batch = self._note()
        return super()._output(new, resumed, running, tokens)

    def _note(self) -> Batch:
        """Write down the step that was planned, before vLLM counts its tokens as computed."""
        plan, requests = self._last_plan, self.plan_requests
        assert plan is not None
        for state in plan.admitted:
            if state.num_preemptions:
                self.log.resumed(state.id, self.at_ns, state.num_uncomputed_tokens)
        decoding = plan.decoding()
        computed = {s.id: s._computed for s in decoding} | {
            s.id: s._computed for s, _ in plan.chunks
        }
        contexts = [s._computed for s in decoding]
        tokens = plan.num_scheduled_tokens()
        size = self.engine_config.block_size
        held = (*requests.running.values(), *requests.leaving)
        unused = sum(-(s._computed + tokens.get(s.id, 0)) % size for s in held)
        blocks = self.engine_config.num_blocks - requests.kv.free_blocks
        batch = Batch(
            tokens=tokens,
            computed=computed,
            decodes=frozenset(s.id for s in decoding),
            preempted=tuple(s.id for s in plan.preempted),
            shape=BatchShape(
                num_decodes=len(decoding),
                decode_context_sum_tokens=sum(contexts),
                decode_context_max_tokens=max(contexts, default=0),
                decode_context_min_tokens=min(contexts, default=0),
                chunks=tuple((n, s._computed) for s, n in plan.chunks),
                rows_sampled=len(decoding)
                + sum(s.num_uncomputed_tokens == n for s, n in plan.chunks),
                num_running=len(requests.running),
                num_waiting=len(requests.waiting),
            ),
            kv_blocks=blocks,
            kv_tokens=blocks * size - unused,
            num_preempted=self._num_preempted,
            recomputed_tokens=self._recomputed_tokens,
        )
        self._num_preempted = self._recomputed_tokens = 0
        return batch

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: Any,  # noqa: ANN401 - vLLM's
    ) -> dict[int, EngineCoreOutputs]:
        """Account for a step, and note who got a token and who is answered."""
        ready_ns = self.clock.read_ns()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        batch, planned = self._under_way.pop(0)
        if batch is None:
            return outputs
        times = self.clock.ended(planned, ready_ns)
        told = [one for some in outputs.values() for one in some.outputs]
        answers = [(int(one.request_id), one) for one in told if one.new_token_ids]
        self.log.step(batch, times, [request_id for request_id, _ in answers])
        for request_id, one in answers:
            if one.finish_reason is not None:
                self.log.finished(request_id, times.end_ns)
                if self.on_gone is not None:
                    self.on_gone(self.plan_requests.state_of(one.request_id), times.end_ns)
        return outputs


class Replay:
    """One run of a workload.

    Parameters
    ----------
    core : Core
        The engine.
    policy : dict
        Name and knobs.
    clock : StepClock
        Times steps.
    estimate_step_ns : callable
        Answers policies that ask what a step would take.
    temperature : float
        Of sampling; 0 is greedy.
    progress : callable, optional
        Told how many requests are answered or rejected, after each step.
    warm_up : iterable of Arrival
        Answered before the clock starts, by `fcfs` and a scheduler of its own; see
        `schedlab.gpu_backend.vllm.opening.first_requests`.

    Attributes
    ----------
    scheduler : ReplayScheduler
        What vLLM's loop asks.
    first_s : float
        What the steps of those first requests took.
    """

    def __init__(
        self,
        core: Core,
        policy: dict[str, object],
        clock: StepClock,
        estimate_step_ns: Callable[[BatchShape, int], int],
        temperature: float = 0.0,
        progress: Callable[[int], None] | None = None,
        warm_up: Iterable[Arrival] = (),
    ) -> None:
        self._core = core
        self._first = list(warm_up)
        self.first_s = 0.0
        self._clock = clock
        self._temperature = temperature
        self._progress = progress
        self._made: dict[int, VllmRequest | str] = {}
        self.scheduler: ReplayScheduler = core.new_scheduler(
            ReplayScheduler, policy, clock, estimate_step_ns
        )

    def run(self, arrivals: Iterable[Arrival], max_concurrency: int | None) -> VllmLog:
        """Send the requests at their times, and step until all are answered.

        They are made before the clock starts: in a server that is the work of another process.

        Raises
        ------
        Stalled
            If the policy waits and nothing can ever happen.
        PolicyError
            If the policy raises, or asks for the impossible.
        SchedlabError
            If the engine fails.
        """
        engine, scheduler, clock = self._core.engine, self.scheduler, self._clock
        coming = list(arrivals)
        self._made = {one.request.id: self._make(one) for one in coming}
        if self._first:
            self._warm_up()
        source = Source(coming, self._submit, max_concurrency)
        if max_concurrency is not None:
            scheduler.on_gone = source.request_is_gone
        clock.start()
        waits = 0
        while True:
            source.send_until(clock.now_ns)
            if not (scheduler.has_requests() or engine.batch_queue):
                if source.next_ns == FOREVER:
                    break
                clock.idle_until(source.next_ns)
                continue
            scheduler.waits_until_ns = -1
            try:
                _, executed = engine.step_fn()
                engine.post_step(executed)
            except (SchedlabError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise SchedlabError(f"vLLM failed: {type(error).__name__}: {error}") from error
            if self._progress is not None:
                self._progress(scheduler.log.num_gone)
            waits = 0 if executed or engine.batch_queue else waits + 1
            until_ns = min(scheduler.waits_until_ns, source.next_ns)
            if waits and scheduler.waits_until_ns >= 0 and scheduler.has_unfinished_requests():
                if until_ns >= FOREVER or waits > MOST_WAITS:
                    raise Stalled(
                        f"stalled at t = {clock.now_ns / 1e9:.6f} s: the policy waits and nothing "
                        "is left to happen"
                    )
                clock.idle_until(until_ns)
        scheduler.log.close()
        return scheduler.log

    def _warm_up(self) -> None:
        """Answer the first requests, on the run's own stopwatch, and give the loop back."""
        clock = MeasuredStepClock(stopwatch=self._clock.read_ns)
        log = Replay(self._core, {"name": "fcfs"}, clock, _unasked).run(self._first, None)
        self.first_s = sum(log.seconds().values())
        self._core.engine.scheduler = self.scheduler

    def _make(self, arrival: Arrival) -> VllmRequest | str:
        """Return vLLM's request, or why there can be none."""
        request, output_tokens = arrival.request, arrival.output_tokens
        limit = self.scheduler.engine_config.max_model_len
        reason = too_long(request, output_tokens, limit)
        if reason is not None:
            return reason
        params = SamplingParams(
            max_tokens=min(output_tokens, request.max_tokens),
            ignore_eos=True,
            temperature=self._temperature,
            seed=request.id if self._temperature else None,
            detokenize=False,
        )
        engine, setup = self._core.engine, self._core.setup
        return VllmRequest(
            str(request.id),
            prompt_ids(request, self._core.vocab_size, setup.seed, setup.config.block_size),
            params,
            None,
            priority=request.priority,
            block_hasher=engine.request_block_hasher,
        )

    def _submit(self, arrival: Arrival, at_ns: int) -> None:
        made = self._made.pop(arrival.request.id)
        if isinstance(made, str):
            state = RequestState(arrival.request)
            state.queued_ns = at_ns
            self.scheduler.turn_away(state, arrival.output_tokens, made)
            return
        made.arrival_time = at_ns / 1e9
        between = self._core.setup.config.arrivals_between_steps
        self.scheduler.send(arrival, made, self._clock.now_ns if between else at_ns)


def _unasked(_: BatchShape, num_steps: int) -> int:
    raise SchedlabError("fcfs asks for no estimates")
