"""SCORPIO: guards for both latency targets, and credits that let lenient requests skip steps."""

import math
from collections.abc import Collection

from schedlab.policies.credits import Credits
from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.policies.virtual_batch import VirtualBatch
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RUNS, RequestState, Slo

_NO_TARGETS = Slo()


@register("scorpio")
class Scorpio(Policy):
    """Admit only what can meet its targets, and decode each request no faster than it must.

    Optimises goodput: requests that meet both targets. Needs a target for the first token and one
    between tokens (``slo``; defaults below) and the calibrated step-time estimate; a prediction
    of the output length, if there is one, sharpens the estimate. Rejects, so nobody starves: a
    request either meets a place before its deadline or is given up. At low load it is slightly
    worse than first come, first served, since guards err on the safe side.

    *First token.* Waiting requests go by deadline; one is rejected, wherever it stands in the
    queue, when the prefill work ahead of it and its own would take until `ttft_margin_s` before its
    deadline. As in the authors' code that time follows from the number of tokens alone, those of
    all prompts together: full steps and one of the rest, each priced as one prompt. Decodes in
    these steps and what prompts have in the cache are left out: with prompts of 500 tokens in
    overload goodput is up to a quarter less than if each prompt were charged a step of its own. But
    of a burst of short prompts that would reject most, who could be in time.

    *Between tokens.* A request's pace is ``tightest target / its own target``; the paces of all who
    run add up to a virtual batch size. The next one is admitted if a step of that many rows takes,
    `safety` times over, less than 0.99 of the tightest target (always if nobody runs). The rows
    have the mean length that all have now, and half the answer predicted of the next one, as in
    the authors' code (MisterBrookT/Scorpio, scheduler.py, `_tpot_admission_control` and
    `_pred_tpot`): how much longer the others will get is left out. *Credits.* Each step earns a
    decode its pace, and costs one credit when it runs: at twice the tightest target it runs in
    every other step.

    The authors' loop is vLLM V0's, where prompts are steps of their own: `prefill_first`. By
    default prompts and decodes share steps as in V1; the guard prices decodes alone, so it is
    `safety` that leaves room for the prompts. Nobody is admitted past the first request that has to
    wait. Where memory runs out the latest arrival is preempted (the paper does not say). Its
    predictor is a model with 100 bins: use ``{name: bucketed, ...}`` or a trained one.

    A decision is O(n) in the running batch and the queue. Skip-ahead is honest: only a step in
    which everyone runs at pace 1 and nobody could be admitted promises anything, and then credits
    stay at zero.

    Parameters
    ----------
    ttft_s, tbt_s : float
        Targets of requests that state none.
    ttft_margin_s : float
        How long before its deadline a first token must be out by the estimate.
    safety : float
        Factor on the estimated step: the authors' inefficiency factor, which they tune.
    prefill_first : bool
        Whether prompts are computed in steps of their own, before all decodes.
    """

    source = "SCORPIO, arXiv:2505.23022; MisterBrookT/Scorpio"

    def __init__(
        self,
        ttft_s: float = 2.0,
        tbt_s: float = 0.05,
        ttft_margin_s: float = 0.05,
        safety: float = 1.2,
        prefill_first: bool = False,
    ) -> None:
        if not (0.0 < ttft_s < math.inf and 0.0 < tbt_s < math.inf):
            raise ValueError(f"ttft_s and tbt_s must be finite and > 0, got {ttft_s}, {tbt_s}")
        if not 0.0 < safety < math.inf:
            raise ValueError(f"safety must be finite and > 0, got {safety}")
        if not 0.0 <= ttft_margin_s < math.inf:
            raise ValueError(f"ttft_margin_s must be finite and >= 0, got {ttft_margin_s}")
        self.ttft_margin_s = ttft_margin_s
        self.safety = safety
        self.prefill_first = prefill_first
        self.ttft_s = ttft_s
        self.tbt_s = tbt_s
        self._credits = Credits(tbt_s)
        self._prefill_times_ns = {0: 0}  # of steps, by their tokens

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by the deadline of the first token."""
        target_ms = (state.request.slo or _NO_TARGETS).ttft_ms
        target_s = self.ttft_s if target_ms is None else target_ms / 1e3
        return state.request.arrival_ns + round(target_s * 1e9)

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note its own target between tokens; it may decode already, on another engine before."""
        slo = state.request.slo
        if slo is not None and slo.tpot_ms is not None:
            self._credits.own_targets_s[state] = slo.tpot_ms / 1e3
        if state.status is RUNS:
            self._credits.expect()

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Book the credits of the step, and see who decodes from now on."""
        took_decodes = not (self.prefill_first and plan.chunks)
        self._credits.note_step(plan, num_steps, took_decodes)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._credits.forget(state)
        self._credits.own_targets_s.pop(state, None)

    def on_reject(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._credits.own_targets_s.pop(state, None)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Give up who is late; plan decodes with a credit, and prompts within the guards."""
        self._credits.forget_evicted()
        in_time = self._reject_late(view, builder)
        if self.prefill_first:
            self._prefill(view, builder, in_time)
            if builder.has_chunks:
                return builder.build()
        one_rests, run_always = self._credits.grant(view, builder, not self.prefill_first)
        if not self.prefill_first:
            self._prefill(view, builder, in_time)
        if builder.preempted and not builder.has_chunks:
            decodes = [s for s in view.decoding if s not in builder.preempted]
            if not any(builder.serves(s) for s in decodes):
                # Whoever had a credit lost its memory. A step without anybody earns no credits, so
                # that it would come back and lose it again, for ever.
                for state in decodes:
                    builder.grant(state)
        prefilling = [s for s in view.prefilling if s not in builder.preempted]
        if prefilling and len(prefilling) == len(view.running) and not builder.has_chunks:
            # Prompts under way block each other for memory.
            builder.preempt(max(prefilling, key=lambda s: (s.request.arrival_ns, s.id)))
        at_rest = not (one_rests or prefilling or len(view.waiting) or builder.preempted)
        return builder.build(max_steps=FOREVER if at_rest and run_always else 1)

    def _reject_late(self, view: EngineView, builder: PlanBuilder) -> list[RequestState]:
        """Give up who cannot have a first token in time, and return the others who wait."""
        in_time: list[RequestState] = []
        if not len(view.waiting):
            return in_time
        budget = view.config.max_num_batched_tokens
        full_ns = self._prefill_ns(view, budget)
        margin_ns = self.ttft_margin_s * 1e9
        ahead_tokens = sum(s.num_uncomputed_tokens for s in view.prefilling)
        for state in view.waiting:
            tokens = ahead_tokens + state.num_uncomputed_tokens
            num_full, rest = divmod(tokens, budget)
            due_ns = view.now_ns + num_full * full_ns + self._prefill_ns(view, rest)
            late = due_ns + margin_ns > self.key(state, view.now_ns)
            if late and not state.num_output_tokens:
                builder.reject(state, "its first token cannot meet its target")
            else:
                in_time.append(state)
                ahead_tokens = tokens
        return in_time

    def _prefill(
        self, view: EngineView, builder: PlanBuilder, waiting: Collection[RequestState]
    ) -> None:
        """Grant prompts under way, then admit as many as the targets between tokens allow."""
        for state in view.prefilling:
            if state not in builder.preempted:
                builder.grant(state)
        if builder.preempted or not waiting:
            return
        batch = VirtualBatch(view, self._credits)
        for state in builder.undeferred(waiting):
            if builder.seats_left < 1 or builder.tokens_left < 1:
                return
            batch.add(state)
            if not batch.is_in_time(self.safety) or not builder.grant(state):
                return

    def _prefill_ns(self, view: EngineView, num_tokens: int) -> int:
        step_ns = self._prefill_times_ns.get(num_tokens)
        if step_ns is None:
            shape = BatchShape(0, 0, 0, ((num_tokens, 0),), rows_sampled=1)
            step_ns = self._prefill_times_ns[num_tokens] = view.estimate_step_ns(shape)
        return step_ns
