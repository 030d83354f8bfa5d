"""The one scheduling loop, for both backends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import difference, stalled
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.executor import Executor, Steps, Work
from schedlab.sim.core.intake import Intake
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.scheduling import SchedulingPolicy
from schedlab.sim.core.view import EngineView
from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import InfeasiblePlan, PolicyError, PolicyLied, SchedlabError
from schedlab.sim.kv.kv_cache import make_kv_cache
from schedlab.sim.record.columns import FINISHED, TRUNCATED
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival, Request, RequestState, Status


class Segment:
    """A run of steps of one batch: planned and under way, not yet committed."""

    __slots__ = ("first_step_blocks", "log_columns", "num_decodes", "plan", "start_ns", "steps")

    def __init__(
        self,
        plan: BatchPlan,
        start_ns: int,
        steps: Steps,
        num_decodes: int,
        first_step_blocks: int,
        log_columns: tuple[int, ...],
    ) -> None:
        self.plan = plan
        self.start_ns = start_ns
        self.steps = steps
        self.num_decodes = num_decodes
        self.first_step_blocks = first_step_blocks
        self.log_columns = log_columns

    @property
    def end_ns(self) -> int:
        """When its last step ends."""
        return self.start_ns + sum(self.steps.durations_ns)


class Engine:
    """Plan a step, carry it out, account for it; again.

    The engine owns the arithmetic (blocks, seats, budget), the clock, true lengths (through its
    executor) and the log; the policy owns the decisions. It is plain Python: `begin` plans and
    starts a segment of one or more steps, `commit` accounts for it once its time has passed, and
    whoever drives it (SimPy, a test, a real backend) moves the clock.

    Parameters
    ----------
    config : EngineConfig
        The limits.
    policy : SchedulingPolicy
        The decisions.
    executor : Executor
        The GPU, simulated or real.
    observer : callable, optional
        Called with the engine after every committed segment (tests, progress).

    Attributes
    ----------
    now_ns : int
        The clock.
    waiting, running, prefilling, paused, held
        Requests by state: in the queue; with a seat; of these, in prefill; of these, decoding
        but left out of the last plan that picked; finished but keeping their seat.
    unanswered : list of RequestState
        Held requests whose answer waits for the end of their batch.
    leaving : list of RequestState
        Finished requests whose seat and memory the next plan still counts (async scheduling).
    resident_tokens : int
        Tokens of all requests in the KV cache; those that share a block count each.
    free_swap_blocks : int
        Host memory for swapped requests that is free, in KV blocks.
    num_plans : int
        Calls of `policy.plan` so far.
    on_gone : callable, optional
        Set by who drives the engine: called when a request is answered or rejected. It must not
        call the engine back, which is in the middle of something.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy,
        executor: Executor,
        observer: Callable[[Engine], None] | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.executor = executor
        self.observer = observer
        self.now_ns = 0
        self.num_plans = 0
        self.num_arrived = 0
        self.num_finished = 0
        self.num_rejected = 0
        self._output_tokens: dict[int, int] = {}
        self.kv = make_kv_cache(config, self._output_length)
        self.waiting = WaitingQueue(policy.key)
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
        self.paused: dict[int, RequestState] = {}
        self.held: dict[int, RequestState] = {}
        self.decode_batch = DecodeBatch(config.block_size)
        self.log = RunLog(config.block_size, self.kv.grows)
        self.wait_until_ns = FOREVER
        self._segment: Segment | None = None
        self.resident_tokens = 0
        self.free_swap_blocks = config.swap_space_blocks
        self._held_tokens = 0
        self.unanswered: list[RequestState] = []
        self.leaving: list[RequestState] = []
        self._intake = Intake(config)
        self.policy_looked_at_cache = False
        self._evictions_seen = 0
        self._preemptions_without_token = 0
        self._step_preempted = 0
        self._step_recomputed_tokens = 0
        self._step_swapped_bytes = 0
        self._promise: tuple[tuple[object, ...], int, int] | None = None
        self.on_gone: Callable[[], None] | None = None
        self.view = EngineView(self)
        self.builder = PlanBuilder(self)
        if policy.on_start is not None:
            policy.on_start(self.view)

    def _output_length(self, request: Request) -> int:
        return min(self._output_tokens[request.id], request.max_tokens)

    # -- requests in and out -------------------------------------------------------------------

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        """Take a request in, or reject it with a reason if it can never run."""
        request, output_tokens, _ = arrival
        self._promise = None
        total = request.prompt_tokens + min(output_tokens, request.max_tokens)
        if total > self.config.max_model_len:
            self.num_arrived += 1
            self._reject(
                request,
                output_tokens,
                f"prompt and output take {total} tokens, max_model_len is "
                f"{self.config.max_model_len}",
            )
            return
        self._output_tokens[request.id] = output_tokens
        self.executor.add(request, output_tokens)
        state = RequestState(request)
        state.queued_ns = now_ns
        if self._intake.holds_back:
            self._intake.add(state)
        else:
            self._enqueue(state, now_ns)
        self.num_arrived += 1

    def _enqueue(self, state: RequestState, now_ns: int) -> None:
        if self.policy.on_arrival is not None:
            self.policy.on_arrival(state, now_ns)
        self.waiting.add(state, now_ns)

    def _take_in(self, now_ns: int, wait: bool = True) -> None:
        for state in self._intake.take(now_ns, wait):
            self._promise = None
            self._enqueue(state, now_ns)

    def _reject(self, request: Request, output_tokens: int, reason: str) -> None:
        self.num_rejected += 1
        self.log.reject(request, output_tokens, reason)
        if self.on_gone is not None:
            self.on_gone()

    @property
    def num_in_flight(self) -> int:
        """Requests taken in and neither answered nor rejected."""
        return self.num_arrived - self.num_finished - self.num_rejected

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, those that the scheduler does not know of yet among them."""
        return len(self.waiting) + len(self._intake)

    # -- planning ------------------------------------------------------------------------------

    def begin(self, now_ns: int, horizon_ns: int = FOREVER) -> Segment | None:
        """Plan, and start a segment.

        Parameters
        ----------
        now_ns : int
            The time; not before the end of the last segment.
        horizon_ns : int
            The next event known from outside (an arrival): no step but the first starts at or
            after it.

        Returns
        -------
        Segment or None
            `None` if the policy waits; then `wait_until_ns` says until when at the latest.

        Raises
        ------
        PolicyError
            If the policy raises, returns no plan of its builder, asks for the impossible or (in
            debug mode) breaks its promise.
        Stalled
            If work is preempted over and over and no token comes out.
        """
        self.now_ns = now_ns
        self.wait_until_ns = FOREVER
        if self._intake:
            self._take_in(now_ns)
        if self.leaving and self._intake.is_idle(now_ns):
            self._let_go()
        in_flight = self.num_in_flight
        anybody_gone = False
        for _ in range(in_flight + 2):
            plan = self._make_checked_plan() if self.config.check_horizon else self._make_plan()
            changed = bool(plan.preempted or plan.rejected or plan.admitted)
            if changed:
                self._apply(plan)
                # A client who was answered or rejected just now may send at this very instant.
                anybody_gone = self.num_in_flight < in_flight
            repeats = not (changed or anybody_gone or self.leaving or self._intake)
            gone = bool(self.leaving)
            if gone:
                self._let_go()
            num_decodes = self._choose_decodes(plan)
            if num_decodes or plan.chunks:
                self._segment = self._start(plan, num_decodes, horizon_ns, repeats)
                return self._segment
            if self._intake:
                self._take_in(now_ns, wait=False)
                continue
            if not (changed or gone):
                if not self.num_in_flight:
                    return None
                if plan.until_ns <= now_ns:
                    raise self._blame(
                        InfeasiblePlan(f"waits until {plan.until_ns} ns, which is not after now")
                    )
                self.wait_until_ns = plan.until_ns
                return None
        raise stalled(self, "the policy preempts or rejects but never schedules a token")

    def _make_plan(self) -> BatchPlan:
        policy, builder = self.policy, self.builder
        if not policy.static_keys:
            self.waiting.sort(self.now_ns)
        elif policy.rekeyed:
            self.waiting.rekey(policy.rekeyed, self.now_ns)
        builder.reset()
        self.policy_looked_at_cache = False
        self._evictions_seen = self.kv.num_evictions
        self.num_plans += 1
        try:
            plan = policy.plan(self.view, builder)
        except SchedlabError as error:
            self.kv.rollback()
            raise self._blame(error) from error
        except Exception as error:
            self.kv.rollback()
            raise self._blame(
                PolicyError(f"plan() raised {type(error).__name__}: {error}")
            ) from error
        if plan is None or plan is not builder.plan:
            self.kv.rollback()
            raise self._blame(
                InfeasiblePlan(
                    "plan() must return what builder.build() gave it last, and ask for nothing "
                    f"after it; got {'another plan' if plan else type(plan).__name__}"
                )
            )
        builder.settle()
        return plan

    def _blame(self, error: SchedlabError) -> SchedlabError:
        where = f"policy {type(self.policy).__name__} at t = {self.now_ns / 1e9:.6f} s: "
        return error if str(error).startswith("policy ") else type(error)(where + str(error))

    def _apply(self, plan: BatchPlan) -> None:
        now_ns = self.now_ns
        for state in plan.preempted:
            self._evict(state, swap=state in plan.swapped)
        cached_tokens = self.builder.cached_tokens
        for state in plan.admitted:
            self.waiting.remove(state, now_ns)
            state.status = Status.RUNNING
            self.running[state.id] = state
            if state.swapped:
                self._swap_in(state)
            phase = self.paused if state.is_decoding else self.prefilling
            phase[state.id] = state
            if cached_tokens and (cached := cached_tokens.get(state.id)):
                self._reuse(state, cached)
            if state.first_scheduled_ns < 0:
                state.first_scheduled_ns = now_ns
            else:
                self.log.add_resumption(state.id, now_ns, state.num_uncomputed_tokens)
        for state, reason in plan.rejected:
            self.waiting.remove(state, now_ns)
            if state.swapped:
                self.free_swap_blocks += self._swap_blocks(state)
            state.status = Status.REJECTED
            self._reject(state.request, self._output_tokens.pop(state.id), reason)
            self.executor.remove(state)
        if self.held and not self.running:
            self._end_sealed_batch(now_ns)
        if plan.preempted:
            self._step_preempted += len(plan.preempted)
            self._preemptions_without_token += len(plan.preempted)
            if self._preemptions_without_token > 100 + 10 * self.num_in_flight:
                raise stalled(
                    self, f"{self._preemptions_without_token} preemptions in a row without a token"
                )

    def _evict(self, state: RequestState, swap: bool) -> None:
        self._leave_decodes(state)
        self.prefilling.pop(state.id, None)
        del self.running[state.id]
        state.num_preemptions += 1
        self.log.add_eviction(state.id, self.now_ns)
        self.resident_tokens -= state._computed
        if swap:
            self.executor.swapped_out(state)
            self.free_swap_blocks -= self._swap_blocks(state)
            self._step_swapped_bytes += self._swap_blocks(state) * self.config.kv_block_bytes
            state.swapped = True
        else:
            state.recomputed_tokens += state._computed
            self._step_recomputed_tokens += state._computed
            state._computed = 0
        state.status = Status.WAITING
        self.executor.released(state)
        self.waiting.add(state, self.now_ns)

    def _reuse(self, state: RequestState, num_tokens: int) -> None:
        """Count tokens that the prefix cache holds as computed."""
        state._computed = num_tokens
        state.cached_tokens += num_tokens
        if state.first_scheduled_ns < 0:
            state.prefix_hit_tokens = num_tokens
        self.resident_tokens += num_tokens

    def _swap_in(self, state: RequestState) -> None:
        state.swapped = False
        self.resident_tokens += state._computed
        self.free_swap_blocks += self._swap_blocks(state)
        self._step_swapped_bytes += self._swap_blocks(state) * self.config.kv_block_bytes
        self.executor.swapped_in(state)

    def _swap_blocks(self, state: RequestState) -> int:
        return -(-state._computed // self.config.block_size)

    def _leave_decodes(self, state: RequestState) -> None:
        batch = self.decode_batch
        if state._batch is batch:
            batch.leave(state)
            self.log.add_stint(state.id, state._entry_ns, state._stint_start, batch.steps)
            state._entry_ns = -1
        else:
            self.paused.pop(state.id, None)

    def _join_decodes(self, state: RequestState) -> None:
        self.executor.joined(state, self.decode_batch)
        self.decode_batch.join(state)

    def _choose_decodes(self, plan: BatchPlan) -> int:
        """Make the decode batch exactly the requests that decode, if any do."""
        chosen = plan.decodes
        if chosen is None:
            for state in list(self.paused.values()):
                del self.paused[state.id]
                self._join_decodes(state)
            return self.decode_batch.size
        if chosen:
            ids = {state.id for state in chosen}
            for state in [s for s in self.decode_batch.members.values() if s.id not in ids]:
                self._leave_decodes(state)
                self.paused[state.id] = state
            for state in chosen:
                if self.paused.pop(state.id, None) is not None:
                    self._join_decodes(state)
        return len(chosen)

    # -- executing -----------------------------------------------------------------------------

    def _start(self, plan: BatchPlan, num_decodes: int, horizon_ns: int, repeats: bool) -> Segment:
        batch, kv = self.decode_batch, self.kv
        first_step_blocks = batch.blocks_next_step() if num_decodes and kv.grows else 0
        num_waiting, num_running = len(self.waiting), len(self.running)
        max_steps = 1
        chunks: tuple[tuple[int, int], ...] = ()
        prefill_tokens = prefills_done = 0
        if plan.chunks:
            chunks = tuple([(n, state._computed) for state, n in plan.chunks])
            for state, n in plan.chunks:
                prefill_tokens += n
                prefills_done += state.num_uncomputed_tokens == n
        elif repeats and self.config.fast_forward and not self.config.check_horizon:
            max_steps = plan.max_steps
            if max_steps > 1 and kv.grows:
                free_blocks = kv.free_blocks
                if self.policy_looked_at_cache:
                    free_blocks = kv.blocks_before_eviction()
                    if kv.num_evictions != self._evictions_seen:
                        max_steps = 1
                max_steps = batch.steps_within(free_blocks + first_step_blocks, max_steps)
            horizon_ns = min(horizon_ns, plan.until_ns)
        pad_rows = len(self.held) if plan.pad_finished and num_decodes else 0
        padding_tokens = plan.padding_tokens + pad_rows
        if self.config.cudagraph_capture_sizes:
            padding_tokens += self._graph_padding(num_decodes + prefill_tokens + padding_tokens)
        context_sum = batch.context_sum_tokens if num_decodes else 0
        shape = BatchShape(
            num_decodes=num_decodes,
            decode_context_sum_tokens=context_sum,
            decode_context_max_tokens=batch.context_max_tokens if num_decodes else 0,
            decode_context_min_tokens=batch.context_min_tokens if num_decodes else 0,
            chunks=chunks,
            padding_tokens=padding_tokens,
            padding_rows=pad_rows,
            padding_context_tokens=self._held_tokens if pad_rows else 0,
            rows_sampled=num_decodes + prefills_done + pad_rows,
            swapped_bytes=self._step_swapped_bytes,
            num_running=num_running,
            num_waiting=num_waiting,
        )
        reserved_unused = 0 if kv.grows else kv.fragmentation(self.resident_tokens)[0]
        steps = self.executor.execute(Work(self.now_ns, plan, shape, batch), max_steps, horizon_ns)
        log_columns = (
            self.now_ns, len(steps.durations_ns), num_decodes, context_sum, len(chunks),
            prefill_tokens, prefills_done, shape.padding_tokens, num_running, num_waiting,
            self.resident_tokens - kv.shared_tokens,
            kv.num_blocks - kv.free_blocks - first_step_blocks,
            reserved_unused, self._step_preempted, self._step_recomputed_tokens,
            steps.overhead_ns, self._step_swapped_bytes,
        )  # fmt: skip
        self._step_preempted = self._step_recomputed_tokens = self._step_swapped_bytes = 0
        return Segment(plan, self.now_ns, steps, num_decodes, first_step_blocks, log_columns)

    def cut(self, now_ns: int) -> int:
        """Shorten the segment under way to the steps that started before `now_ns`.

        For drivers that learn of an event only when it happens: the step in flight is finished,
        the ones behind it are not begun.

        Returns
        -------
        int
            When the shortened segment ends.
        """
        segment = self._segment
        assert segment is not None
        durations = segment.steps.durations_ns
        start_ns = segment.start_ns
        for i, duration in enumerate(durations):
            if i and start_ns >= now_ns:
                self.executor.cut(i)
                segment.steps = Steps(durations[:i], segment.steps.overhead_ns, [])
                columns = segment.log_columns
                segment.log_columns = (columns[0], i, *columns[2:])
                break
            start_ns += duration
        return segment.end_ns

    def commit(self) -> None:
        """Account for the segment under way; the clock moves to its end."""
        segment = self._segment
        assert segment is not None
        self._segment = None
        plan, steps = segment.plan, segment.steps
        batch, kv = self.decode_batch, self.kv
        num_steps = len(steps.durations_ns)
        end_ns = self.now_ns = segment.end_ns
        self._intake.step_done(end_ns - steps.durations_ns[-1], end_ns)
        if segment.num_decodes:
            new_blocks = batch.blocks_per_step(num_steps) if kv.grows else [0] * num_steps
            if num_steps > 1:
                kv.free_blocks -= sum(new_blocks) - segment.first_step_blocks
            batch.steps += num_steps
            self.resident_tokens += segment.num_decodes * num_steps
            self._preemptions_without_token = 0
        else:
            new_blocks = [0] * num_steps
        self.log.add_segment(segment.log_columns, steps.durations_ns, new_blocks)
        for state, n in plan.chunks:
            self._advance_prefill(state, n, end_ns, state in steps.finished)
        if steps.finished:
            self._promise = None
            for state in steps.finished:
                self._finish(state, end_ns, plan)
            if self.held and not self.running:
                self._end_sealed_batch(end_ns)
        if self.policy.on_tokens is not None:
            self.policy.on_tokens(plan, num_steps, end_ns)
        if self.observer is not None:
            self.observer(self)

    def _advance_prefill(
        self, state: RequestState, num_tokens: int, end_ns: int, is_last: bool
    ) -> None:
        state._computed += num_tokens
        self.resident_tokens += num_tokens
        left = state.request.prompt_tokens + state._generated - state._computed
        if left == 0:
            state._generated += 1
            state._entry_ns = end_ns
            if state.first_token_ns < 0:
                state.first_token_ns = end_ns
            self._preemptions_without_token = 0
        elif left > 1 or not state._generated:
            return
        # One token left after a recomputation is a decode like any other.
        del self.prefilling[state.id]
        if not is_last:
            self._join_decodes(state)

    def _finish(self, state: RequestState, end_ns: int, plan: BatchPlan) -> None:
        if state._batch is not None:
            self._leave_decodes(state)
        else:
            steps = self.decode_batch.steps
            self.log.add_stint(state.id, state._entry_ns, steps, steps)
        del self.running[state.id]
        state.last_token_ns = end_ns
        if plan.finished == "leave":
            if self.config.async_scheduling:
                self.leaving.append(state)
            else:
                self._release(state)
            self._log_finished(state, end_ns)
        else:
            state.status = Status.HELD
            self.held[state.id] = state
            self._held_tokens += state._computed
            if plan.finished == "hold":
                self._log_finished(state, end_ns)
            else:
                self.unanswered.append(state)

    def _release(self, state: RequestState) -> None:
        self.kv.release(state)
        self.executor.released(state)
        self.resident_tokens -= state._computed

    def _let_go(self) -> None:
        """Release what finished before the step that the last plan was made in."""
        for state in self.leaving:
            self._release(state)
        self.leaving.clear()
        self._promise = None

    def _graph_padding(self, num_tokens: int) -> int:
        """Count the tokens up to the next captured batch size; 0 beyond the largest."""
        sizes = self.config.cudagraph_capture_sizes
        i = bisect_left(sizes, num_tokens)
        return sizes[i] - num_tokens if i < len(sizes) else 0

    def _end_sealed_batch(self, end_ns: int) -> None:
        for state in self.held.values():
            self._release(state)
            state.status = Status.FINISHED
        self.held.clear()
        self._held_tokens = 0
        for state in self.unanswered:
            self._log_finished(state, end_ns)
        self.unanswered.clear()

    def _log_finished(self, state: RequestState, finish_ns: int) -> None:
        if state.status is Status.RUNNING:
            state.status = Status.FINISHED
        request = state.request
        truncated = self.executor.is_truncated(request)
        output_tokens = self._output_tokens.pop(request.id)
        self.log.add_request(state, output_tokens, finish_ns, TRUNCATED if truncated else FINISHED)
        self.executor.remove(state)
        self.num_finished += 1
        if self.policy.on_finish is not None:
            self.policy.on_finish(state, finish_ns)
        if self.on_gone is not None:
            self.on_gone()

    # -- checking ------------------------------------------------------------------------------

    def _make_checked_plan(self) -> BatchPlan:
        """Plan twice, and compare with the other call and with what was promised before."""
        promise, self._promise = self._promise, None
        if self.kv.grows and self.decode_batch.blocks_next_step() > self.kv.free_blocks:
            promise = None  # running out of memory ends a promise
        first = self._make_plan().decision()
        self.kv.rollback()
        plan = self._make_plan()
        decision = plan.decision()
        if decision != first:
            raise self._blame(
                PolicyLied(difference("planned twice at one instant", first, decision))
            )
        if promise is not None and promise[1] > 0 and self.now_ns < promise[2]:
            if decision != promise[0]:
                raise self._blame(
                    PolicyLied(difference("broke its skip-ahead promise", promise[0], decision))
                )
            self._promise = (decision, promise[1] - 1, promise[2])
        elif not (plan.chunks or plan.admitted or plan.preempted or plan.rejected):
            self._promise = (decision, plan.max_steps - 1, plan.until_ns)
        return plan
