"""FairBatching: a time budget for each step, which prompts share with decodes by slack."""

import math
from collections.abc import Collection, Sequence
from heapq import merge

from schedlab.policies.deadlines import Target, next_due_ns
from schedlab.policies.policy import Policy
from schedlab.policies.preemption import grant_all_decodes, grant_or_preempt
from schedlab.policies.registry import register
from schedlab.policies.sarathi import latest_arrival
from schedlab.policies.step_load import StepLoad
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("fair_batching")
class FairBatching(Policy):
    """Give prompts the time that decodes are ahead of their deadlines.

    Optimises the time to first token while answers keep their pace on average. Needs the targets
    (``slo`` to the first token and between tokens; defaults below) and the calibrated step-time
    estimate. Token j of an answer is due at arrival + `ttft_s` + j `tbt_s`; slack is the time until
    a request's next token is due. A step may take as long as the least slack of all decodes, but at
    least the least time between tokens of any (so that it never shrinks to nothing). Within that
    time it takes, each by slack: decodes that are due before the step after it could end (slack
    below that time plus the least time between tokens), prompts, all other decodes. Where nobody
    decodes, the engine's token budget is the limit.

    It fails where the estimate does: steps that take longer break every promise. In overload all
    decodes are urgent, and prompts get what these leave. Prompts late by much go before those that
    could still be in time, so nobody starves. Memory is taken from the latest arrival. The budget
    of prompts that each engine reports to a router (PAB) is not modelled.

    The paper's text was not at hand: the rules are those of two independent accounts of it, which
    agree. The first of a step is taken whatever its time, an addition.

    A decision is linear in the running batch, O(n log n) where not all of it fits the time, and
    asks for O(log n) step times. Skip-ahead is honest because a step in which a prompt is there
    that could be computed promises nothing, and one of decodes alone holds while each such step
    ends within the least time between tokens, whatever the slack; each of these is priced.

    Parameters
    ----------
    ttft_s, tbt_s : float
        Targets of requests that state none.
    """

    source = "FairBatching, Lyu, Liu, Wu, Chen, arXiv:2510.14392, as described by others"

    def __init__(self, ttft_s: float = 1.0, tbt_s: float = 0.05) -> None:
        if not (0.0 < ttft_s < math.inf and 0.0 < tbt_s < math.inf):
            raise ValueError(f"ttft_s and tbt_s must be finite and > 0, got {ttft_s}, {tbt_s}")
        self.ttft_s = ttft_s
        self.tbt_s = tbt_s
        self._own_tbt_ms: dict[int, float] = {}
        self._targets: dict[RequestState, Target] = {}

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note its targets."""
        ttft_ms, tbt_ms = self.ttft_s * 1e3, self.tbt_s * 1e3
        slo = state.request.slo
        if slo is not None:
            ttft_ms = ttft_ms if slo.ttft_ms is None else slo.ttft_ms
            if slo.tpot_ms is not None:
                self._own_tbt_ms[state.id] = tbt_ms = slo.tpot_ms
        self._targets[state] = state.request.arrival_ns, ttft_ms, tbt_ms

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._own_tbt_ms.pop(state.id, None)
        self._targets.pop(state, None)

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by when the next token is due."""
        arrival_ns, ttft_ms, tbt_ms = self._targets[state]
        return arrival_ns + round((ttft_ms + state.num_output_tokens * tbt_ms) * 1e6)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan urgent decodes, prompts, other decodes, as many as end within the time."""
        now_ns, decodes = view.now_ns, view.decoding
        tbt_ms = self.tbt_s * 1e3
        if self._own_tbt_ms:
            own = self._own_tbt_ms
            tbt_ms = min((own.get(state.id, tbt_ms) for state in decodes), default=tbt_ms)
        tbt_ns = round(tbt_ms * 1e6) if decodes else 0
        load = StepLoad(view)
        could_prefill = view.prefilling or (len(view.waiting) and builder.seats_left)
        if not could_prefill:
            # The budget is the least time between tokens at least, whatever the slack.
            both = load.with_decodes(decodes)
            steps = both.steps_within(tbt_ns)
            if steps and grant_all_decodes(decodes, builder, view):
                return builder.build(max_steps=steps)
        due_ns = next_due_ns(decodes, self._targets)
        budget_ns = max(min(due_ns) - now_ns, tbt_ns) if decodes else FOREVER
        urgent, others = decodes, []
        if could_prefill and decodes:
            urgent_ns = now_ns + budget_ns + tbt_ns
            if max(due_ns) >= urgent_ns:
                dated = [*zip(decodes, due_ns, strict=True)]
                urgent = [state for state, at_ns in dated if at_ns < urgent_ns]
                others = [state for state, at_ns in dated if at_ns >= urgent_ns]

        def place(state: RequestState) -> tuple[int, int, int]:
            return self.key(state, now_ns), state.request.arrival_ns, state.id

        served, load = self._decode(urgent, load, budget_ns, builder, view)
        under_way = sorted((s for s in view.prefilling if s not in builder.preempted), key=place)
        waiting = view.waiting if not builder.preempted else ()
        for state in merge(under_way, waiting, key=place):
            if not (builder.tokens_left and builder.rows_left):
                break
            most = min(state.num_uncomputed_tokens, builder.tokens_left)
            chunk = load.chunk_within(state, most, budget_ns) or int(load.is_empty)
            granted = builder.grant(state, chunk) if chunk else 0
            if not granted:
                break
            load.add(state, granted)
            served.add(state)
        more, load = self._decode(others, load, budget_ns, builder, view, served)
        served |= more
        if load.is_empty and view.running and not builder.preempted:
            # Prompts under way block each other for memory.
            builder.preempt(latest_arrival(builder))
        if could_prefill or len(served) < len(decodes):
            return builder.build()
        return builder.build(max_steps=max(load.steps_within(tbt_ns), 1))

    def _decode(
        self,
        states: Sequence[RequestState],
        load: StepLoad,
        budget_ns: int,
        builder: PlanBuilder,
        view: EngineView,
        served: Collection[RequestState] = (),
    ) -> tuple[set[RequestState], StepLoad]:
        """Grant the first due that fit the time, taking memory from who is not served."""
        if builder.preempted:
            states = [state for state in states if state not in builder.preempted]
        if not states:
            return set(), load
        both = load.with_decodes(states)
        if both.is_within(budget_ns) and grant_all_decodes(states, builder, view):
            return set(states), both
        states = sorted(states, key=lambda s: (self.key(s, 0), s.request.arrival_ns, s.id))
        within = load.decodes_within(states, budget_ns) or int(load.is_empty)
        granted: set[RequestState] = set()
        for state in states[:within]:
            if not (builder.tokens_left and builder.rows_left):
                break
            if state in builder.preempted:
                continue
            if not builder.grant(state):
                rest = {*builder.running()} - granted - {*served}
                by_arrival = sorted(rest, key=lambda s: (s.request.arrival_ns, s.id))
                if not grant_or_preempt(builder, state, by_arrival):
                    continue
            load.add(state, 1)
            granted.add(state)
        return granted, load
