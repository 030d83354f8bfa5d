"""The one scheduling loop, for both backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import stalled
from schedlab.sim.core.draft_length import Drafting, DraftLength
from schedlab.sim.core.executor import Executor, Work, total
from schedlab.sim.core.lifecycle import Lifecycle
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.plan_fault import plan_fault
from schedlab.sim.core.promise import PromiseCheck
from schedlab.sim.core.reception import seat_arrived
from schedlab.sim.core.scheduling import SchedulingPolicy
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.step import Segment, batch_shape, segment_row
from schedlab.sim.core.view import EngineView
from schedlab.sim.errors import InfeasiblePlan, PolicyError, SchedlabError
from schedlab.sim.request import Arrival, RequestState

MOST_WAITS = 100_000
"""Plans in a row that only wait, of a policy that has stalled."""


class Engine:
    """Plan a step, carry it out, account for it; again.

    The engine owns the arithmetic (blocks, seats, budget), the clock and the log; the policy owns
    the decisions, the executor durations and true lengths. It is plain Python: `begin` plans and
    starts a segment of one or more steps, `commit` accounts for it once its time has passed, and
    whoever drives it (a fleet, a test, a real backend) moves the clock.

    Parameters
    ----------
    config : EngineConfig
        The limits.
    policy : SchedulingPolicy
        The decisions.
    executor : Executor
        The GPU, simulated or real.
    draft_length : DraftLength, optional
        How many tokens to draft, where `config.num_speculative_tokens` is not 0; always so many if
        not given.
    observer : callable, optional
        Called with the engine after every committed segment (tests, progress).

    Attributes
    ----------
    requests : Lifecycle
        Everyone who was submitted, by state, and what they hold.
    now_ns : int
        The clock.
    wait_until_ns : int
        If `begin` returned nothing: until when the policy waits at the latest.
    durations_ns : list of int
        How long each step of the segment took that was committed last, if the policy is told of it.
    num_plans : int
        Calls of `policy.plan` so far.
    cache_is_watched : bool
        Set by who drives the engine: whether somebody looks at its prefix cache between plans, so
        that no block may be lost in the middle of a segment.
    """

    has_pipeline: ClassVar[bool] = False

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy,
        executor: Executor,
        observer: Callable[[Engine], None] | None = None,
        draft_length: DraftLength | None = None,
    ) -> None:
        self.config = config = config.for_policy(policy.pauses, policy.seats_loaded)
        if config.pipeline_parallel_size > 1 and not self.has_pipeline:
            raise ValueError("pipeline_parallel_size > 1 takes a PipelinedEngine")
        self.policy = policy
        self._by_arrival = policy.by_arrival
        self._on_tokens = policy.on_tokens
        self.executor = executor
        self.observer = observer
        self.now_ns = 0
        self.wait_until_ns = FOREVER
        self.durations_ns: list[int] = []
        self.num_plans = 0
        self.cache_is_watched = False
        self.requests = Lifecycle(config, policy, executor)
        self.kv = self.requests.kv
        self.log = self.requests.log
        self.view = EngineView(self)
        self.builder = PlanBuilder(self.requests)
        self._drafting: Drafting | None = None
        if draft_length is not None and config.num_speculative_tokens:
            estimate_ns = executor.estimate_step_ns
            self._drafting = Drafting(self.requests, draft_length, estimate_ns)
        self._promise = PromiseCheck(self) if config.check_horizon else None
        self._segment: Segment | None = None
        self._ready_ns = -1  # `Work.ready_ns`
        self._preemptions_without_token = 0
        self._waits = 0, 0
        if policy.on_start is not None:
            policy.on_start(self.view)

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        """Take a request in, or reject it with a reason if it can never run."""
        self.requests.submit(arrival, now_ns)

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
        requests = self.requests
        is_plain = requests.is_plain
        if not is_plain and requests.intake.requests:
            requests.take_in(now_ns)
        if self._drafting is not None:  # nobody has drafted yet for who is seated now
            self._drafting.choose(now_ns)
        if not is_plain:
            self._settle(now_ns)
        # Whoever was evicted when nobody could run is charged to the next step, and to no other.
        has_changed = requests.step_preempted > 0
        if self._drafting is not None and self._drafting.is_due:
            has_changed = True
        # As many plans as there are requests in flight, each of which may be turned away, and two.
        gone = requests.num_finished + requests.num_rejected + requests.num_handed_over
        for _ in range(requests.num_arrived - gone + 2):
            if not is_plain and requests.untold:  # no step was planned with them
                requests.tell_overrun(now_ns)
            plan = self.make_plan() if self._promise is None else self._promise.make_plan()
            changes = False
            if plan.admitted or plan.preempted or plan.rejected:
                changes = has_changed = True
                requests.apply(plan, self.builder.cached_tokens, now_ns)
                if plan.preempted:
                    self._count_preemptions(len(plan.preempted))
            # A plan with changes is not made twice, nor is one that does not know all yet; and
            # clients who were answered or rejected just now may send before a second step.
            has_left = is_held_back = False
            if not is_plain:
                has_left = bool(requests.leaving or requests.overrun)
                is_held_back = bool(requests.intake.requests)
            repeats = not (has_changed or has_left or is_held_back)
            if has_left:
                requests.let_go(plan, now_ns)
            num_decodes = requests.choose_decodes(plan)
            if requests.needs_less:
                requests.needs_less = repeats = False
                requests.num_events += 1
            if num_decodes or plan.chunks or requests.step_overrun:
                self._segment = self._start(plan, num_decodes, horizon_ns, repeats)
                return self._segment
            if is_held_back:
                requests.take_in(now_ns, wait=False)
            elif not (changes or has_left):
                self._wait(plan)
                return None
            elif requests.tiers is not None and requests.tiers.ready_ns > now_ns:
                self.wait_until_ns = requests.tiers.ready_ns
                return None
            elif not self._plans_again():
                return None
        raise stalled(self, "the policy preempts or rejects but never schedules a token")

    def _plans_again(self) -> bool:
        """Whether a plan that only takes seats away is followed by another at once."""
        return True

    def _settle(self, now_ns: int) -> None:
        """Let those go, come or run whose time has come."""
        requests = self.requests
        if requests.tiers is not None:
            requests.settle(now_ns)
        if requests.arrived:
            seat_arrived(requests)
        if requests.kept:
            requests.expire(now_ns)
        if (requests.leaving or requests.overrun) and requests.intake.is_idle(now_ns):
            requests.let_go(None, now_ns)

    @property
    def chooses_drafts_next(self) -> bool:
        """Whether drafts are chosen anew after this step, for who came from elsewhere."""
        return self._drafting is not None and self._drafting.is_due

    def make_plan(self) -> BatchPlan:
        """Ask the policy for the plan of the step that would start now, and check its form."""
        policy, builder, waiting = self.policy, self.builder, self.requests.waiting
        if not self._by_arrival:  # whose keys never change
            if not policy.static_keys:
                waiting.sort(self.now_ns)
            elif policy.rekeyed:
                waiting.rekey(policy.rekeyed, self.now_ns)
        builder.reset(self.now_ns)
        requests = self.requests
        self.view.looked_at_cache = self.cache_is_watched or (
            requests.tiers is not None and requests.tiers.minds_losses(requests.num_waiting)
        )
        self._evictions_seen = self.kv.num_evictions
        self.num_plans += 1
        try:
            # What a policy returns may be anything; the compiled core must not check it here.
            decide: Callable[[EngineView, PlanBuilder], object] = policy.plan
            made = decide(self.view, builder)
        except InfeasiblePlan as error:
            self.kv.rollback()
            raise InfeasiblePlan(self._told(error)) from error
        except SchedlabError as error:
            self.kv.rollback()
            raise type(error)(self.blame(str(error))) from error
        except Exception as error:
            self.kv.rollback()
            raise PolicyError(self._told(error)) from error
        plan = builder.plan
        if plan is None or made is not plan:
            self.kv.rollback()
            got = "another plan" if made else type(made).__name__
            what = "plan() must return what builder.build() gave it last, and ask for nothing after"
            raise InfeasiblePlan(self.blame(f"{what}; got {got}"))
        if builder.set_aside_blocks:
            builder.settle()
        return plan

    def _told(self, error: Exception) -> str:
        return self.blame(plan_fault(error, self.policy, self._ask_again))

    def _ask_again(self) -> object:
        """Ask for the plan that ended in an error once more, to learn how it comes to that."""
        self.builder.reset(self.now_ns)
        try:
            decide: Callable[[EngineView, PlanBuilder], object] = self.policy.plan
            return decide(self.view, self.builder)
        finally:
            self.kv.rollback()

    def blame(self, what: str) -> str:
        """Name the policy and the time in the message of an error."""
        return f"policy {type(self.policy).__name__} at t = {self.now_ns / 1e9:.6f} s: {what}"

    def _count_preemptions(self, count: int) -> None:
        requests = self.requests
        if requests.handed_over or requests.fetching:
            return  # when their KV has come memory is free, or they decode, whatever is done here
        self._preemptions_without_token += count
        if self._preemptions_without_token > 100 + 10 * requests.num_in_flight:
            raise stalled(
                self, f"{self._preemptions_without_token} preemptions in a row without a token"
            )

    def _wait(self, plan: BatchPlan) -> None:
        if self.requests.tiers is not None:
            self.requests.tiers.close_finished()
        if self.requests.num_in_flight:
            if plan.until_ns <= self.now_ns:
                what = f"waits until {plan.until_ns} ns, which is not after now"
                raise InfeasiblePlan(self.blame(what))
            at = self.log.num_steps
            self._waits = at, self._waits[1] + 1 if self._waits[0] == at else 1
            if self._waits[1] > MOST_WAITS:
                name = type(self.policy).__name__
                raise stalled(self, f"policy {name} has waited {MOST_WAITS:,} times in a row")
            self.wait_until_ns = min(plan.until_ns, self.requests.next_event_ns)
            if self.requests.tiers is not None:
                self.wait_until_ns = min(self.wait_until_ns, self.requests.tiers.wait_for_copy())
        elif self.requests.tiers is not None and self.requests.tiers.is_seen:
            self.wait_until_ns = self.requests.next_event_ns

    # -- executing -----------------------------------------------------------------------------

    def _start(self, plan: BatchPlan, num_decodes: int, horizon_ns: int, repeats: bool) -> Segment:
        requests, kv, now_ns = self.requests, self.kv, self.now_ns
        batch = requests.decodes
        first_step_blocks = batch.blocks_next_step() if num_decodes and kv.grows else 0
        wait_ns = 0
        if requests.tiers is not None:
            requests.copy_lost()
            wait_ns = requests.tiers.wait_ns(kv.free_blocks)
        max_steps = 1
        if (
            repeats
            and not plan.chunks
            and wait_ns == 0
            and self.config.fast_forward
            and self._promise is None
            and not (
                requests.tiers is not None
                and requests.tiers.changes_by_itself(requests.num_waiting)
            )
        ):
            max_steps = self._steps_in_memory(plan.max_steps, first_step_blocks)
            horizon_ns = min(horizon_ns, plan.until_ns)
            if not requests.is_plain and (requests.kept or requests.tiers is not None):
                horizon_ns = min(horizon_ns, requests.next_seen_ns)
        shape = batch_shape(requests, plan, num_decodes)
        work = Work(now_ns, plan, shape, batch, self._ready_ns)
        steps = self.executor.execute(work, max_steps, horizon_ns)
        if wait_ns:
            steps.durations_ns = [steps.durations_ns[0] + wait_ns]
        elif requests.tiers is not None:
            requests.tiers.note_wait()
        row = segment_row(requests, shape, steps, now_ns, first_step_blocks)
        segment = Segment(plan, now_ns, steps, shape, row, first_step_blocks)
        if segment.end_ns >= FOREVER:
            raise SchedlabError(
                f"simulated time passes 2^62 ns (146 years): step {self.log.num_steps} takes "
                f"{max(steps.durations_ns) / 1e9:.3g} s; look at the cost model and at "
                "engine.scheduling_overhead"
            )
        return segment

    def _steps_in_memory(self, max_steps: int, first_step_blocks: int) -> int:
        """Bound a promise by the memory that decodes take, and by what the policy saw of it."""
        kv = self.kv
        if max_steps == 1 or not kv.grows:
            return max_steps
        free_blocks = kv.free_blocks
        tiers = self.requests.tiers
        if tiers is not None:
            free_blocks -= tiers.num_busy
        if self.view.looked_at_cache:
            if kv.num_evictions != self._evictions_seen:
                return 1
            free_blocks = min(free_blocks, kv.blocks_before_eviction())
        return self.requests.decodes.steps_within(free_blocks + first_step_blocks, max_steps)

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
        if segment.cut(now_ns):
            self.executor.cut(segment.num_steps)
        return segment.end_ns

    def die(self, now_ns: int) -> list[RequestState]:
        """Stop for good: the step under way never ends, and all memory is lost.

        Steps that ended by `now_ns` count.

        Returns
        -------
        list of RequestState
            Who was neither answered nor rejected, nor is on its way from or to another engine, in
            order of arrival.
        """
        segment = self._segment
        if segment is not None:
            if segment.break_off(now_ns):
                self.executor.cut(segment.num_steps)
            if segment.num_steps:
                self.commit()
            self._segment = None
        self.now_ns = now_ns
        return self.requests.abandon(now_ns)

    def commit(self) -> None:
        """Account for the segment under way; the clock moves to its end."""
        segment = self._segment
        assert segment is not None
        self._segment = None
        requests, plan, steps = self.requests, segment.plan, segment.steps
        num_steps = segment.row.num_steps
        end_ns = self.now_ns = segment.end_ns
        if requests.tiers is not None:
            if requests.tiers.next_done_ns < end_ns:
                self._settle_unseen(segment)
            requests.tiers.now_ns = end_ns
        num_decodes = segment.shape.num_decodes
        requests.step_decoded = num_decodes > 0
        if not requests.is_plain:
            requests.intake.step_done(end_ns - steps.durations_ns[-1], end_ns)
        if self.config.num_speculative_tokens:
            self._log_verifications(num_steps, num_decodes)
        new_blocks = self._advance_decodes(segment, num_decodes)
        if steps.times is not None and self._on_tokens is None:
            steps.times.write(num_steps, self.log.durations)
            self.log.add_written(segment.row, new_blocks)
        else:
            durations_ns = steps._durations_ns if steps.times is None else steps.durations_ns
            self.durations_ns = durations_ns
            self.log.add_segment(segment.row, durations_ns, new_blocks)
        finished = steps.finished
        if plan.chunks:
            self._advance_prefills(plan.chunks, finished, end_ns)
        if requests.tiers is not None and requests.tiers.follows_connector:
            requests.store_step(plan.chunks)
        if finished:
            self._finish(finished, plan, end_ns)
        if not requests.is_plain and requests.untold:
            requests.tell_overrun(end_ns)
        if self._on_tokens is not None:
            self._on_tokens(plan, num_steps, end_ns)
        if self.observer is not None:
            self.observer(self)

    def _finish(self, finished: list[RequestState], plan: BatchPlan, end_ns: int) -> None:
        """Let requests finish whose last token came out."""
        self.requests.finish(finished, plan.finished, end_ns)

    def _advance_prefills(
        self,
        chunks: tuple[tuple[RequestState, int], ...],
        finished: list[RequestState],
        end_ns: int,
    ) -> None:
        """Account for the prompt tokens that were computed."""
        requests = self.requests
        for state, n in chunks:
            if requests.advance_prefill(state, n, end_ns, state in finished):
                self._preemptions_without_token = 0

    def _settle_unseen(self, segment: Segment) -> None:
        """Let copies end that nobody looked for, each before the step that began next.

        What is stored at the end of the last step finds the tiers as that step did.
        """
        requests, step_ns = self.requests, segment.start_ns
        tiers = requests.tiers
        assert tiers is not None
        for duration_ns in segment.steps.durations_ns[:-1]:
            step_ns += duration_ns
            if tiers.next_done_ns <= step_ns:
                requests.settle(step_ns)

    def _log_verifications(self, num_steps: int, num_decodes: int) -> None:
        """Write down what is drafted and accepted in the steps under way."""
        if not num_decodes:
            self.log.add_no_verifications(num_steps)
            return
        batch = self.requests.decodes
        assert isinstance(batch, SpeculativeBatch)
        batch.write_verifications(num_steps, self.log.verifications)

    def _advance_decodes(self, segment: Segment, num_decodes: int) -> list[int]:
        """Let every member of the decode batch step; return the blocks opened in each step."""
        num_steps = segment.row.num_steps
        if not num_decodes:
            return [0] * num_steps
        requests, kv = self.requests, self.kv
        batch = requests.decodes
        if num_steps == 1:
            new_blocks = [segment.first_step_blocks]
        else:
            new_blocks = batch.blocks_per_step(num_steps) if kv.grows else [0] * num_steps
            kv.free_blocks -= total(new_blocks) - segment.first_step_blocks
        requests.resident_tokens += batch.advance(num_steps)
        self._preemptions_without_token = 0
        return new_blocks
