"""Prefills before decodes, each in steps of their own."""

from policies.policy import Policy
from policies.registry import register
from sim.plan import FOREVER, BatchPlan
from sim.plan_builder import PlanBuilder
from sim.view import EngineView


@register("prefill_first")
class PrefillFirst(Policy):
    """Compute waiting prompts as soon as they fit, and decode only when none does.

    Optimises time to first token: vLLM V0's default. Needs to know nothing. Every prefill step
    stalls all running decodes, so gaps between tokens grow with the prompt and the load. Nobody
    starves in the queue; running requests can be stalled for long while prompts keep coming.

    While swapped requests wait (``engine.preemption_mode: swap``), they come back before any
    prompt is computed, but never in a step that preempted.

    Use it with ``engine.watermark: 0.01``, V0's reserve against instant preemption. Differs from
    V0 in one thing: a prompt longer than the token budget is computed in several prefill-only
    steps, where V0 would drop it.

    Skip-ahead is honest: a decode-only step means that no prompt fits, and with no event seats
    stay the same and free blocks only fall. A step that preempted promises nothing.
    """

    source = "vLLM V0, vllm/core/scheduler.py, _schedule_default()"

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan a prefill-only step if any prompt can be computed, else decode."""
        if not view.has_swapped:
            for state in view.prefilling:
                builder.grant(state)
            for state in view.waiting:
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
        return builder.build(max_steps=FOREVER)
