"""Prefills before decodes, each in steps of their own."""

import math

from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView


@register("prefill_first")
class PrefillFirst(Policy):
    """Compute waiting prompts as soon as they fit, and decode only when none does.

    Optimises time to first token: vLLM V0's default. Needs to know nothing. Every prefill step
    stalls all running decodes, so gaps between tokens grow with the prompt and the load. Nobody
    starves in the queue; running requests can be stalled for long while prompts keep coming.

    While swapped requests wait (``engine.preemption_mode: swap``), they come back before any
    prompt is computed, but never in a step that preempted.

    Use it with ``engine.watermark: 0.01``, V0's reserve against instant preemption. Differs from
    V0 in two things. A prompt longer than the token budget is computed in several prefill-only
    steps, where V0 would drop it. And V0 asks for a free block for each decode whether it opens one
    or not (block_manager_v1.py, `can_append_slots`), so that it evicts when the last block is taken
    though nobody needs another; here a decode needs what it opens. On the claim of Llumnix at 1.2
    requests a second V0 evicts 3 to 4 % more, and P99 over P50 of the time per token is 4.19 for
    3.60.

    Skip-ahead is honest: a decode-only step means that no prompt fits, or that the delay is not
    over, and the plan says when it is; with no event seats stay the same and free blocks only
    fall. A step that preempted promises nothing.

    Parameters
    ----------
    delay_factor : float
        While others run, the oldest waiting request has to wait this many times the duration of
        the last prefill step before prompts are computed, so that more of them gather.
    """

    can_pipeline = True
    source = "vLLM V0, vllm/core/scheduler.py, _schedule_default()"

    def __init__(self, delay_factor: float = 0.0) -> None:
        if not 0.0 <= delay_factor < math.inf:
            raise ValueError(f"delay_factor must be finite and >= 0, got {delay_factor}")
        self.delay_factor = delay_factor
        self._last_prefill_ns = 0

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Remember how long the last prefill step took."""
        if plan.chunks:
            self._last_prefill_ns = now_ns - plan.start_ns

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan a prefill-only step if any prompt can be computed, else decode."""
        prefill_at_ns = self._prefill_at_ns(view)
        if not view.has_swapped:
            for state in view.prefilling:
                builder.grant(state)
            waiting = view.waiting if prefill_at_ns <= view.now_ns else ()
            for state in builder.undeferred(waiting):
                if state.num_uncomputed_tokens > builder.tokens_left and builder.has_chunks:
                    break
                if not builder.grant(state):
                    break
            if builder.has_chunks:
                return builder.build()
        while not builder.grant_running():
            builder.preempt(next(builder.running()))
        if builder.preempted:
            return builder.build()
        if view.has_swapped:
            for state in view.waiting:
                if state.swapped and not builder.grant(state):
                    break
        until_ns = prefill_at_ns if prefill_at_ns > view.now_ns else FOREVER
        return builder.build(max_steps=FOREVER, until_ns=until_ns)

    def _prefill_at_ns(self, view: EngineView) -> int:
        if not (self.delay_factor and view.running and len(view.waiting)):
            return view.now_ns
        delay_ns = round(self.delay_factor * self._last_prefill_ns)
        return view.waiting.head.request.arrival_ns + delay_ns + 1
