"""Text Generation Inference 3: prompts join decodes, the last one cut to a prefill budget."""

from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.policies.tgi import fit_declared
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView


@register("tgi3")
class TextGenerationInference3(Policy):
    """Compute prompts beside the decodes, within a budget of tokens that cuts the last of them.

    Optimises time to first token without pausing running answers; version 3 of Text Generation
    Inference does so for every model whose prompts it can cut (all with flash attention), and
    ignores ``waiting_served_ratio`` and ``max_waiting_tokens`` for them; for others it is `tgi`.
    Needs the `max_tokens` each request declares: it is reserved at admission, so nobody is ever
    evicted, and generous declarations keep the batch small. First come, first served, so nobody
    starves.

    A step has all decodes, the next chunk of the prompts under way, and new prompts with what is
    left of `max_batch_prefill_tokens`, a multiple of the block size. The queue is looked at in
    every step but the one after a step that let somebody join others, because the router orders a
    prefill and a decode in turn. It has no limit of its own on the batch; ``engine.max_num_seqs``
    is one. The default of `max_batch_prefill_tokens` is what TGI takes where it cannot tell how
    many tokens the device needs to be busy.

    Skip-ahead is honest: what is reserved, the seats and the tokens that decodes leave of the
    budget do not change while requests decode, and a step after which the queue is looked at again
    promises nothing.

    Parameters
    ----------
    max_batch_prefill_tokens : int
        Most tokens of a step, decodes included. A prompt under way gets one at least.
    max_batch_total_tokens : int, optional
        Tokens that all running requests may hold at their declared ends; the whole KV cache if
        not given.
    """

    source = "Hugging Face text-generation-inference 3, backends/v3, support_chunking"

    def __init__(
        self, max_batch_prefill_tokens: int = 4096, max_batch_total_tokens: int | None = None
    ) -> None:
        total_tokens = 1 if max_batch_total_tokens is None else max_batch_total_tokens
        if min(max_batch_prefill_tokens, total_tokens) < 1:
            raise ValueError(
                "max_batch_prefill_tokens and max_batch_total_tokens must be at least 1"
            )
        self.max_batch_prefill_tokens = max_batch_prefill_tokens
        self.max_batch_total_tokens = max_batch_total_tokens
        self._owes_decode = False

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Note whether somebody joined others: the step after that looks at no queue."""
        joined = any(state not in plan.admitted for state, _ in plan.chunks)
        self._owes_decode = bool(plan.admitted) and (plan.decodes != () or joined)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan decodes, prompts under way, and new prompts if it is their turn."""
        budget = builder.tokens_left
        while not builder.grant_decodes():
            builder.preempt(next(builder.running()))
        left = self.max_batch_prefill_tokens - (len(view.running) - 1)
        for state in view.prefilling:
            if state not in builder.preempted:
                left -= builder.grant(state, max(left, 1))
        owes_decode = self._owes_decode and bool(view.running)  # all who joined may have ended
        if not (owes_decode or builder.preempted):
            self._admit(
                self.max_batch_prefill_tokens - (budget - builder.tokens_left), view, builder
            )
        owed = owes_decode and len(view.waiting)
        return builder.build(max_steps=1 if owed or builder.preempted else FOREVER)

    def _admit(self, left: int, view: EngineView, builder: PlanBuilder) -> None:
        block_size = view.config.block_size
        left = -(-left // block_size) * block_size
        for state in fit_declared(view, builder, self.max_batch_total_tokens):
            granted = builder.grant(state, left) if left > 0 else 0
            if not granted:
                return
            left -= granted
