"""FairBatching: a time budget for each step, which prompts share with decodes by slack."""

import math

from schedlab.policies.deadlines import due_ns
from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.policies.slack_loop import Deadlines, plan_by_slack
from schedlab.sim.core.plan import BatchPlan
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
    could still be in time, so nobody starves. Memory is taken from the latest arrival, or where
    prompts under way block each other from the last that is due. The budget of prompts that each
    engine reports to a router (PAB) is not modelled.

    The paper's text was not at hand: the rules are those of two independent accounts of it, which
    agree. The first of a step is taken whatever its time, an addition.

    A decision is O(1) in the running batch where all of it and all prompts end long before the
    first token is due. Where one is late it looks at those who become urgent or cease to be, while
    all have one target between tokens and those who are urgent fit: an order of dates is kept from
    plan to plan. Else it is linear, O(n log n) where not all of it fits the time. It asks for
    O(log n) step times. Skip-ahead is honest because a step in which a prompt is there
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
        self._tbt_ns = round(tbt_s * 1e3 * 1e6)
        self._own_tbt_ms: dict[int, float] = {}
        self._offsets_ns: list[int] = []
        self._deadlines = Deadlines()

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note its targets."""
        ttft_ms, tbt_ms, offsets_ns = self.ttft_s * 1e3, self.tbt_s * 1e3, self._offsets_ns
        slo = state.request.slo
        if slo is not None:
            offsets_ns = []
            ttft_ms = ttft_ms if slo.ttft_ms is None else slo.ttft_ms
            if slo.tpot_ms is not None:
                self._own_tbt_ms[state.id] = tbt_ms = slo.tpot_ms
        target = state.request.arrival_ns, offsets_ns, ttft_ms, tbt_ms
        self._deadlines.add(state, target)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._own_tbt_ms.pop(state.id, None)
        self._deadlines.forget(state)

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by when the next token is due."""
        return due_ns(state, self._deadlines.targets)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan urgent decodes, prompts, other decodes, as many as end within the time."""
        tbt_ns = self._tbt_ns
        if self._own_tbt_ms:
            self._deadlines.together = []  # not all move on by the same time
            own, tbt_ms = self._own_tbt_ms, self.tbt_s * 1e3
            tbt_ms = min((own.get(s.id, tbt_ms) for s in view.decoding), default=tbt_ms)
            tbt_ns = round(tbt_ms * 1e6)
        return plan_by_slack(view, builder, self._deadlines, tbt_ns)
