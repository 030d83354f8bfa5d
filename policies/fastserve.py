"""FastServe: skip-join multi-level feedback queues."""

import math
from collections import Counter
from collections.abc import Iterator
from heapq import merge
from itertools import islice

from schedlab.policies.feedback import Standing, charge, least_left_ns, put_off, settle
from schedlab.policies.preemption import Place
from schedlab.policies.rank_loop import grant_by_rank
from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.policies.shared_steps import SharedSteps
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import PolicyError
from schedlab.sim.request import RUNS, RequestState


@register("fastserve")
class FastServe(Ranked):
    """Serve short answers first without a prediction: who has run for long drops to lower levels.

    Optimises mean latency where lengths vary. Needs the time a prompt takes, from the calibrated
    cost model, to let a new request skip the levels whose quantum its prefill would exceed; it
    needs to know nothing of the output. A request that used up its level's quantum
    (``first_quantum_s * 2**level``) goes to the front of the next level. A prompt is one
    iteration in FastServe; where it takes several here, it neither drops nor gives way before its
    token is out, or preemptions could undo each other for ever. Low levels starve, but
    for the rule that every `starvation_period` iterations those who have not run for
    `starvation_s` come to the front of the first level. What they used of their quantum counts
    there: who used more than the first quantum stays for one iteration.

    FastServe swaps: set ``engine.preemption_mode: swap`` to follow it. Preemption is by rank, see
    `Ranked`. It swaps ahead of need, too, with `reserve_blocks` and memory below the GPU's
    (``engine.kv_offload``):

    - Where fewer blocks than the reserve are free, requests that this step leaves out are swapped
      out, the one with the latest estimated next start first, as far as host memory has room:
      new prompts find memory without waiting for a copy.
    - Otherwise, of the next `max_num_seqs` behind the step those that were swapped out are loaded,
      the earliest estimated start first, as long as the reserve stays free: their KV is there
      when they run. At a step that takes memory from anybody nothing is loaded like that.
    - While less than `host_reserve` of the host memory has room, new prompts are not admitted:
      those who are swapped out need that memory, and the prompts would be next.

    A request starts again when it is promoted, or when those in higher levels have used up their
    quanta down to its own, `max_num_seqs` at a time, whichever is sooner (the paper's ENST). All
    of that overlaps with computing; it helps where the link is idle. It fails where memory is so
    short that whoever is loaded is swapped out before it ran, where the reserve is memory that
    more requests could run in, and where the link is the bottleneck, which copies ahead of need
    then crowd.

    Where the authors' code differs: it puts the batch back after each iteration one by one, each in
    front of those before, so that the order within a level turns round every time, as does that of
    those who are promoted; here they keep their order, which is that of arrival for those who are
    promoted. There, who never ran counts as waiting since long ago; here since it came. And there
    even those are swapped out for the reserve that it would compute in this step; here they stay.

    A decision is O(n log n) in the running batch; the queue is sorted again only when the
    starvation rule promotes. Skip-ahead is honest because places change only when a quantum is
    used up, at a time the plan names, or when the starvation rule looks. While everybody is served
    places decide nothing: then a plan lasts beyond the ends of quanta, and who used one up drops
    afterwards, from the end of the step in which he did. Estimated starts move
    with the clock, but decide only in which order requests move at a step where some do; whether
    any does depends on free memory, which falls by a block a request in `block_size` steps at
    most, and so stays above the reserve for the steps that are promised.

    Parameters
    ----------
    first_quantum_s : float
        Quantum of the first level; each further level's is twice the one before.
    starvation_s : float
        Time without running after which a request is promoted.
    starvation_period : int
        Iterations between two looks for such requests.
    reserve_blocks : int
        KV blocks of the GPU to keep free by swapping ahead of need; 0 is swapping at need. The
        authors' code keeps `max_num_seqs`.
    host_reserve : float
        Share of host memory below which no new prompt is admitted, if `reserve_blocks` is not 0;
        0.1 in the authors' code.
    """

    can_pipeline = False
    lazy_ranks = True
    asks_who_ran = False
    source = "FastServe, Wu et al. (arXiv:2305.05920), LLMServe/FastServe scheduler.py"
    starves = True

    def __init__(
        self,
        first_quantum_s: float = 0.010,
        starvation_s: float = 3.0,
        starvation_period: int = 1000,
        reserve_blocks: int = 0,
        host_reserve: float = 0.1,
    ) -> None:
        if not 0.0 < first_quantum_s < math.inf:
            raise ValueError(f"first_quantum_s must be finite and > 0, got {first_quantum_s}")
        if not starvation_s >= 0.0:
            raise ValueError(f"starvation_s must be >= 0, got {starvation_s}")
        if starvation_period < 1:
            raise ValueError(f"starvation_period must be at least 1, got {starvation_period}")
        if reserve_blocks < 0:
            raise ValueError(f"reserve_blocks must be >= 0, got {reserve_blocks}")
        if not 0.0 <= host_reserve <= 1.0:
            raise ValueError(f"host_reserve must be from 0 to 1, got {host_reserve}")
        self.first_quantum_s = first_quantum_s
        self.starvation_s = starvation_s
        self.starvation_period = starvation_period
        self.reserve_blocks = reserve_blocks
        self.host_reserve = host_reserve
        self._first_quantum_ns = round(first_quantum_s * 1e9)
        self._places: dict[RequestState, Standing] = {}
        self._shared = SharedSteps()  # that decodes are not charged for yet
        self._prefills_ns: dict[int, int] = {}  # by tokens of the prompt: many are as long
        self._iteration = 0
        self._drafts = False
        self._back = 0
        self._front = 0

    def key(self, state: RequestState, now_ns: int) -> tuple[bool, int, int]:
        """Order prompts under way first, then by level and position in it."""
        place = self._places[state]
        under_way = state.status is RUNS and place.owes_token
        return not under_way, place.level, place.position

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to estimate prefill times."""
        if self.reserve_blocks and not view.config.kv_tiers:
            raise PolicyError(
                f"fastserve: reserve_blocks: {self.reserve_blocks} needs memory to swap to beside "
                "the steps; set engine.kv_offload, or reserve_blocks: 0"
            )
        self._view = view
        self._drafts = view.config.num_speculative_tokens > 0

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Join the first level whose quantum holds the prefill, at its back."""
        prompt_tokens = state.request.prompt_tokens
        prefill_ns = self._prefills_ns.get(prompt_tokens)
        if prefill_ns is None:
            shape = BatchShape(0, 0, 0, ((prompt_tokens, 0),), rows_sampled=1)
            self._prefills_ns[prompt_tokens] = prefill_ns = self._view.estimate_step_ns(shape)
        level = 0
        while self._first_quantum_ns << level < prefill_ns:
            level += 1
        self._back += 1
        place = self._places[state] = Standing(
            level, self._first_quantum_ns << level, self._back, state.request.arrival_ns
        )
        place.output_tokens = state.num_output_tokens  # some, if it lost its engine or moves

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Charge who ran; demote who used up a quantum; now and then look for the starving."""
        self.static_keys = True
        view = self._view
        durations_ns = view.durations_ns if num_steps > 1 else (now_ns - plan.start_ns,)
        running, places = view.running, self._places
        if self._drafts or not put_off(plan, running, durations_ns, now_ns, places, self._shared):
            self.settle()
            charge(plan, running, durations_ns, now_ns, places, self._drop, self._drafts)
        before, self._iteration = self._iteration, self._iteration + num_steps
        if self._iteration // self.starvation_period > before // self.starvation_period:
            self.settle()
            self._promote_starving(now_ns)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        del self._places[state]
        self._shared.leave(state)

    def settle(self) -> None:
        """Charge who decoded while everybody was served, and let drop who used up quanta."""
        settle(self._places, self._shared, self._drop)

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return when the first quantum may be used up."""
        least_ns = least_left_ns(view.running, self._places)
        if least_ns is None:
            return 1, FOREVER
        return FOREVER, (view.now_ns + max(least_ns, 1) if view.running else FOREVER)

    def promise(self, view: EngineView, hooks_matter: bool = True) -> tuple[int, int]:
        """Promise no more steps than there are to the next look for the starving."""
        max_steps, until_ns = super().promise(view, hooks_matter)
        to_look = self.starvation_period - self._iteration % self.starvation_period
        return min(max_steps, to_look), until_ns

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Grant tokens by rank; then swap ahead of need, if there is a reserve to keep."""
        if not self.reserve_blocks:
            return super().plan(view, builder)
        self.settle()
        place = self._order(view.now_ns)
        candidates = self._candidates(view, builder)
        grant_by_rank(view.running, candidates, builder, self.key, view.now_ns)
        idle = [
            s
            for s in view.running
            if not (s in builder.preempted or builder.serves(s) or self._places[s].owes_token)
        ]
        # Beside a step that computes: who lacks blocks that are being loaded into must stay, or
        # two that do not fit together would make room for each other for ever.
        computes = builder.rows_left < view.config.max_num_seqs
        if view.free_blocks < self.reserve_blocks:
            if computes:
                self._swap_out(idle, view, builder)
        elif view.has_swapped and not builder.preempted:
            self._swap_in(idle, place, view, builder)
        steps, until_ns = self.promise(view)
        return builder.build(min(steps, self._steps_above_reserve(idle, view, builder)), until_ns)

    def _candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Iterate over who may leave the queue for this step, in its order."""
        config = view.config
        host_is_short = builder.swap_blocks_left < self.host_reserve * config.kv_tiers[0].num_blocks
        # Loads take no rows of the step that asks for them: without a limit they would take all
        # memory at once.
        loads_left = config.max_num_seqs - len(view.loading)
        for state in view.waiting:
            if state.swapped:
                if loads_left < 1:
                    continue
                loads_left -= 1
            elif host_is_short and not state.num_output_tokens:
                continue
            yield state

    def _swap_out(self, idle: list[RequestState], view: EngineView, builder: PlanBuilder) -> None:
        for _, state in sorted(self._next_starts(idle, view), reverse=True):
            if view.free_blocks >= self.reserve_blocks:
                break
            builder.offload(state)

    def _swap_in(
        self, idle: list[RequestState], place: Place, view: EngineView, builder: PlanBuilder
    ) -> None:
        size = view.config.block_size
        queue = (state for state in view.waiting if not builder.serves(state))
        behind = merge(sorted(idle, key=place), queue, key=place)
        ahead = [s for s in islice(behind, view.config.max_num_seqs) if s.swapped]
        for _, state in sorted(self._next_starts(ahead, view)):
            num_blocks = -(-state.num_computed_tokens // size)
            if view.free_blocks - num_blocks >= self.reserve_blocks:
                builder.prefetch(state)

    def _next_starts(
        self, states: list[RequestState], view: EngineView
    ) -> list[tuple[tuple[float, int, int], RequestState]]:
        """Estimate in how many nanoseconds requests run again; with their places, as ties."""
        quantum_ns, now_ns = self._first_quantum_ns, view.now_ns
        num_in_level = Counter(place.level for place in self._places.values())
        starts = []
        for state in states:
            place = self._places[state]
            ahead_ns = sum(
                num * ((quantum_ns << place.level) - (quantum_ns << level))
                for level, num in num_in_level.items()
                if level < place.level
            )  # a request at level l uses up quanta l, l + 1, ... until it is at this one
            promoted_ns = self.starvation_s * 1e9 - (now_ns - place.last_ran_ns)
            start_ns = min(max(promoted_ns, 0.0), ahead_ns / view.config.max_num_seqs)
            starts.append(((start_ns, place.level, place.position), state))
        return starts

    def _steps_above_reserve(
        self, idle: list[RequestState], view: EngineView, builder: PlanBuilder
    ) -> int:
        """Return for how many steps nobody is swapped out, if nothing happens."""
        num_rows = view.config.max_num_seqs - builder.rows_left
        spare_blocks = view.free_blocks - self.reserve_blocks
        if not idle or not num_rows or spare_blocks < 0:  # who could not go now, cannot go later
            return FOREVER
        return 1 + view.config.block_size * (spare_blocks // num_rows)

    def _drop(self, place: Standing) -> None:
        self._move_to_front(place, place.level + 1)

    def _move_to_front(self, place: Standing, level: int) -> None:
        self._front -= 1
        place.level, place.position = level, self._front
        place.left_ns = self._first_quantum_ns << level

    def _promote_starving(self, now_ns: int) -> None:
        limit_ns = now_ns - self.starvation_s * 1e9
        starving = [p for p in self._places.values() if p.last_ran_ns <= limit_ns]
        for place in reversed(starving):
            used_ns = (self._first_quantum_ns << place.level) - place.left_ns
            self._move_to_front(place, 0)
            place.left_ns -= used_ns
        self.static_keys = not starving
