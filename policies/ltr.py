"""Learning to rank: preemptive scheduling by a predicted order of output lengths."""

from heapq import heappop, heappush

from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("ltr")
class LearningToRank(Ranked):
    """Serve requests in the predicted order of their output lengths, preemptively.

    Optimises mean latency, above all of bursts. Needs a rank of the output length, fixed at
    arrival (a score is enough; smaller = shorter). Without the starvation rule long requests
    starve; with it, whoever has not run for `starvation_threshold` iterations goes before all
    others until it has run for `quantum`. When queueing lasts longer than the threshold, everyone
    is promoted in turn, and the rule becomes a round-robin that preempts every few iterations and
    loses much of its throughput to it: watch `num_preemptions`.

    A score says nothing of what remains, so a mispredicted request keeps its good rank. vllm-ltr
    always swaps: set ``engine.preemption_mode: swap`` to follow it, recomputation is charged
    otherwise. Its proactive swap-in is covered by admission in the order of rank; its order stops
    at the first request that does not fit, where here running requests behind a waiting one that
    does not fit still run, and it asks for a free block for each decode as vLLM V0 does, see
    `prefill_first`. Idle iterations count from the end of the one in which a request came.

    A decision is O(n log n) in the running batch; a step that promotes merges the promoted into the
    queue anew, which is linear, but a merge of two sorted runs. Skip-ahead is honest because scores
    never change, and the plan names the iteration at which the next request may be promoted or has
    used up its quantum.

    Parameters
    ----------
    starvation_threshold : int or None
        Idle iterations after which a request is promoted; None switches the rule off.
    quantum : int
        Iterations that a promoted request may run. Those that compute its prompt do not count, or
        recomputation could use up every quantum and nobody would ever end.
    """

    source = "Fu et al., NeurIPS 2024 (arXiv:2408.15792), vllm-ltr, _get_opt_ordered_requests()"
    needs_prediction = True
    starves = True
    lazy_ranks = True
    asks_who_ran = False

    def __init__(self, starvation_threshold: int | None = 200, quantum: int = 10) -> None:
        if starvation_threshold is not None and starvation_threshold < 1:
            raise ValueError(f"starvation_threshold must be >= 1, got {starvation_threshold}")
        if quantum < 1:
            raise ValueError(f"quantum must be at least 1, got {quantum}")
        self.starvation_threshold = starvation_threshold
        self.quantum = quantum
        self._iteration = 0
        self._new: dict[int, RequestState] = {}
        self._states: dict[int, RequestState] = {}
        self._last_ran: dict[RequestState, int] = {}
        self._gone: list[RequestState] = []
        self._quantum_left: dict[int, int] = {}
        # When to look at a request again; whether it ran meanwhile is found out then.
        self._due: list[tuple[int, int]] = []

    def key(self, state: RequestState, now_ns: int) -> tuple[bool, float]:
        """Order promoted requests first, then by score."""
        return state.id not in self._quantum_left, predicted_tokens(state)

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return the steps to the next promotion or end of a quantum."""
        if self._new:  # who came while nothing ran, and is loaded first
            return 1, FOREVER
        steps = [self._due[0][0] - self._iteration] if self._due else []
        return min(*steps, *self._quantum_left.values(), FOREVER, FOREVER), FOREVER

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to know who ran."""
        self._view = view

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Remember to count its idle iterations."""
        if self.starvation_threshold is not None:
            self._new[state.id] = state

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Count iterations; promote who was idle too long, demote whose quantum is used up."""
        if self.starvation_threshold is None:
            return
        self._iteration += num_steps
        for request_id, state in self._new.items():
            self._states[request_id] = state
            self._last_ran[state] = self._iteration
            heappush(self._due, (self._iteration + self.starvation_threshold, request_id))
        self._new.clear()
        prompts = [state for state, _ in plan.chunks]
        # Where the plan lists nobody, all who run took part.
        took_part = self._view.running if plan.decodes is None else (*plan.decodes, *prompts)
        self._last_ran.update(dict.fromkeys(took_part, self._iteration))
        for state in self._gone:  # of whom the plan still tells
            self._last_ran.pop(state, None)
        self._gone.clear()
        if self._quantum_left:
            for state in took_part:
                if state.id in self._quantum_left and state not in prompts:
                    self._quantum_left[state.id] -= num_steps
                    if self._quantum_left[state.id] <= 0:
                        del self._quantum_left[state.id]
        self.rekeyed = self._promote_idle(self.starvation_threshold)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        if self.starvation_threshold is not None:
            self._gone.append(state)
        self._new.pop(state.id, None)
        self._states.pop(state.id, None)
        self._last_ran.pop(state, None)
        self._quantum_left.pop(state.id, None)

    def _promote_idle(self, threshold: int) -> list[RequestState]:
        promoted = []
        while self._due and self._due[0][0] <= self._iteration:
            _, request_id = heappop(self._due)
            state = self._states.get(request_id)
            if state is None:
                continue
            last_ran = self._last_ran[state]
            if self._iteration - last_ran >= threshold:
                self._quantum_left[request_id] = self.quantum
                self._last_ran[state] = last_ran = self._iteration
                promoted.append(state)
            heappush(self._due, (last_ran + threshold, request_id))
        return promoted
