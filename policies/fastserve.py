"""FastServe: skip-join multi-level feedback queues."""

import math

from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState, Status


class _Place:
    """Where a request stands: its level, its position there, and what it has had."""

    __slots__ = (
        "last_ran_ns", "level", "output_tokens", "owes_token", "position", "quantum_ns", "used_ns",
    )  # fmt: skip

    def __init__(self, level: int, quantum_ns: int, position: int, arrival_ns: int) -> None:
        self.level = level
        self.quantum_ns = quantum_ns
        self.position = position
        self.used_ns = 0
        self.last_ran_ns = arrival_ns
        self.output_tokens = 0
        self.owes_token = False


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
    `starvation_s` come to the front of the first level.

    FastServe swaps, and does so ahead of need: set ``engine.preemption_mode: swap`` to follow it;
    swapping here happens when it is needed. Preemption is by rank, see `Ranked`; the paper's
    order of swapping by estimated next start is not modelled.

    A decision is O(n log n) in the running batch; the queue is sorted again only when the
    starvation rule promotes. Skip-ahead is honest because places change only when a quantum is
    used up, at a time the plan names, or when the starvation rule looks.

    Parameters
    ----------
    first_quantum_s : float
        Quantum of the first level; each further level's is twice the one before.
    starvation_s : float
        Time without running after which a request is promoted.
    starvation_period : int
        Iterations between two looks for such requests.
    """

    source = "FastServe, Wu et al. (arXiv:2305.05920), LLMServe/FastServe scheduler.py"
    starves = True

    def __init__(
        self,
        first_quantum_s: float = 0.010,
        starvation_s: float = 3.0,
        starvation_period: int = 1000,
    ) -> None:
        if not 0.0 < first_quantum_s < math.inf:
            raise ValueError(f"first_quantum_s must be finite and > 0, got {first_quantum_s}")
        if not starvation_s >= 0.0:
            raise ValueError(f"starvation_s must be >= 0, got {starvation_s}")
        if starvation_period < 1:
            raise ValueError(f"starvation_period must be at least 1, got {starvation_period}")
        self.first_quantum_s = first_quantum_s
        self.starvation_s = starvation_s
        self.starvation_period = starvation_period
        self._first_quantum_ns = round(first_quantum_s * 1e9)
        self._places: dict[int, _Place] = {}
        self._iteration = 0
        self._back = 0
        self._front = 0

    def key(self, state: RequestState, now_ns: int) -> tuple[bool, int, int]:
        """Order prompts under way first, then by level and position in it."""
        place = self._places[state.id]
        under_way = state.status is Status.RUNNING and place.owes_token
        return not under_way, place.level, place.position

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to estimate prefill times."""
        self._view = view

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Join the first level whose quantum holds the prefill, at its back."""
        prompt = ((state.request.prompt_tokens, 0),)
        prefill_ns = self._view.estimate_step_ns(BatchShape(0, 0, 0, prompt, rows_sampled=1))
        level = 0
        while self._first_quantum_ns << level < prefill_ns:
            level += 1
        self._back += 1
        self._places[state.id] = _Place(
            level, self._first_quantum_ns << level, self._back, state.request.arrival_ns
        )

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Charge who ran; demote who used up a quantum; now and then look for the starving."""
        self.static_keys = True
        used_ns, places = now_ns - plan.start_ns, self._places
        used_up = []
        for state in plan.decoding():
            place = places.get(state.id)
            if place is None:
                continue
            place.last_ran_ns = now_ns
            place.used_ns += used_ns
            place.output_tokens += num_steps
            if place.used_ns >= place.quantum_ns:
                used_up.append(((not place.owes_token, place.level, place.position), place))
            place.owes_token = False
        prompts = []
        for state, _ in plan.chunks:
            place = places.get(state.id)
            if place is None:
                continue
            place.last_ran_ns = now_ns
            place.used_ns += used_ns
            place.owes_token = state.num_output_tokens == place.output_tokens
            place.output_tokens = state.num_output_tokens
            if not place.owes_token and place.used_ns >= place.quantum_ns:
                prompts.append(place)
        # By rank, as they are in a plan that had to rank them.
        for place in reversed([*(place for _, place in sorted(used_up)), *prompts]):
            self._move_to_front(place, place.level + 1)
        before, self._iteration = self._iteration, self._iteration + num_steps
        if self._iteration // self.starvation_period > before // self.starvation_period:
            self._promote_starving(now_ns)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        del self._places[state.id]

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return the steps to the next look, and when the first quantum may be used up."""
        least_ns = FOREVER
        for state in view.running:
            place = self._places[state.id]
            if place.owes_token:
                return 1, FOREVER
            left_ns = place.quantum_ns - place.used_ns
            if left_ns < least_ns:
                least_ns = left_ns
        steps = self.starvation_period - self._iteration % self.starvation_period
        return steps, (view.now_ns + max(least_ns, 1) if view.running else FOREVER)

    def _move_to_front(self, place: _Place, level: int) -> None:
        self._front -= 1
        place.level, place.position, place.used_ns = level, self._front, 0
        place.quantum_ns = self._first_quantum_ns << level

    def _promote_starving(self, now_ns: int) -> None:
        limit_ns = now_ns - self.starvation_s * 1e9
        starving = [p for p in self._places.values() if p.last_ran_ns <= limit_ns]
        for place in reversed(starving):
            self._move_to_front(place, 0)
        self.static_keys = not starving
