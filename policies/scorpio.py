"""SCORPIO: guards for both latency targets, and credits that let lenient requests skip steps."""

import math
from collections.abc import Iterable

from schedlab.policies.policy import Policy
from schedlab.policies.preemption import grant_or_preempt
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState, Slo, Status

_NO_TARGETS = Slo()
_ROUNDING = 1e-9


@register("scorpio")
class Scorpio(Policy):
    """Admit only what can meet its targets, and decode each request no faster than it must.

    Optimises goodput: requests that meet both targets. Needs a target for the first token and one
    between tokens (``slo``; defaults below) and the calibrated step-time estimate; a prediction
    of the output length, if there is one, sharpens the estimate. Rejects, so nobody starves: a
    request either meets a place before its deadline or is given up. At low load it is slightly
    worse than first come, first served, since guards err on the safe side.

    *First token.* Waiting requests go by deadline; one is rejected when the prefill work ahead of
    it and its own would take until after its deadline. *Between tokens.* A request's pace is
    ``tightest target / its own target``; the paces of all who run add up to a virtual batch size.
    The next one is admitted if a step of that many rows, at their mean length, takes no longer
    than the tightest target (always if nobody runs). *Credits.* Each step earns a decode its pace,
    and costs one credit when it runs: at twice the tightest target it runs in every other step.

    The queue behind the first request that has to wait is not looked at. Where memory runs out the
    latest arrival is preempted (the paper does not say). Its predictor is a model with 100 bins:
    use ``{name: bucketed, ...}`` or a trained one.

    A decision is O(n) in the running batch. Skip-ahead is honest: only a step in which everyone
    runs at pace 1 and nobody could be admitted promises anything, and then credits stay at zero.

    Parameters
    ----------
    ttft_s, tbt_s : float
        Targets of requests that state none.
    """

    source = "SCORPIO, arXiv:2505.23022; MisterBrookT/Scorpio"

    def __init__(self, ttft_s: float = 2.0, tbt_s: float = 0.05) -> None:
        if not (0.0 < ttft_s < math.inf and 0.0 < tbt_s < math.inf):
            raise ValueError(f"ttft_s and tbt_s must be finite and > 0, got {ttft_s}, {tbt_s}")
        self.ttft_s = ttft_s
        self.tbt_s = tbt_s
        self._credits: dict[RequestState, float] = {}
        # Of those who decode, when the last step ended; plans must not see it change within one.
        self._tightest_s = math.inf

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by the deadline of the first token."""
        target_ms = (state.request.slo or _NO_TARGETS).ttft_ms
        target_s = self.ttft_s if target_ms is None else target_ms / 1e3
        return state.request.arrival_ns + round(target_s * 1e9)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Book the credits of the step, and see who decodes from now on."""
        ran = set(plan.decoding())
        for state, credit in self._credits.items():
            self._credits[state] = credit + num_steps * (self._pace(state) - (state in ran))
        for state in plan.preempted:
            self._credits.pop(state, None)
        for state in (*plan.decoding(), *(state for state, _ in plan.chunks)):
            if state.is_decoding and state.status is Status.RUNNING:
                self._credits.setdefault(state, 0.0)
        self._tightest_s = min(map(self._target_s, self._credits), default=math.inf)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._credits.pop(state, None)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan decodes with a credit, prompts under way, then new ones within the guards."""
        decodes = [s for s in view.running if s.is_decoding]
        victims = sorted(view.running, key=lambda s: (s.request.arrival_ns, s.id))
        paused = False
        for state in decodes:
            if state in builder.preempted:
                continue
            if self._credits.get(state, 0.0) + self._pace(state) < 1.0 - _ROUNDING:
                paused = True
            else:
                grant_or_preempt(builder, state, victims)
        prefilling = [s for s in view.prefilling if s not in builder.preempted]
        for state in prefilling:
            builder.grant(state)
        if not builder.preempted:
            self._admit(view, builder)
        if prefilling and len(prefilling) == len(view.running) and not builder.has_chunks:
            # Prompts under way block each other for memory.
            builder.preempt(max(prefilling, key=lambda s: (s.request.arrival_ns, s.id)))
        at_rest = not (paused or prefilling or len(view.waiting) or builder.preempted)
        same_pace = all(self._pace(s) == 1.0 for s in decodes)
        return builder.build(max_steps=FOREVER if at_rest and same_pace else 1)

    def _admit(self, view: EngineView, builder: PlanBuilder) -> None:
        members = list(view.running)
        due_ns = view.now_ns + sum(self._prefill_ns(view, s) for s in view.prefilling)
        for state in view.waiting:
            if builder.seats_left < 1 or builder.tokens_left < 1:
                return
            done_ns = due_ns + self._prefill_ns(view, state)
            if done_ns > self.key(state, view.now_ns) and not state.num_output_tokens:
                builder.reject(state, "its first token cannot meet its target")
                continue
            if members and self._step_s(view, [*members, state]) > self._tightest(
                [*members, state]
            ):
                return
            if not builder.grant(state):
                return
            members.append(state)
            due_ns = done_ns

    def _step_s(self, view: EngineView, members: list[RequestState]) -> float:
        """Estimate a step of the virtual batch."""
        tightest_s = self._tightest(members)
        rows = math.ceil(sum(tightest_s / self._target_s(s) for s in members) - _ROUNDING)
        lengths = [_expected_tokens(s) for s in members]
        mean = sum(lengths) / len(lengths)
        shape = BatchShape(rows, round(rows * mean), round(max(lengths)), rows_sampled=rows)
        return view.estimate_step_ns(shape) / 1e9

    def _prefill_ns(self, view: EngineView, state: RequestState) -> int:
        chunk = ((state.num_uncomputed_tokens, state.num_computed_tokens),)
        return view.estimate_step_ns(BatchShape(0, 0, 0, chunk, rows_sampled=1))

    def _tightest(self, members: Iterable[RequestState]) -> float:
        return min(map(self._target_s, members))

    def _target_s(self, state: RequestState) -> float:
        target_ms = (state.request.slo or _NO_TARGETS).tpot_ms
        return self.tbt_s if target_ms is None else target_ms / 1e3

    def _pace(self, state: RequestState) -> float:
        return min(1.0, self._tightest_s / self._target_s(state))


def _expected_tokens(state: RequestState) -> float:
    """Return the mean length of a request over the rest of its life."""
    generated, predicted = state.num_output_tokens, state.request.predicted_tokens or 0.0
    return state.request.prompt_tokens + max(generated, (generated + predicted) / 2)
