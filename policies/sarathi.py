"""Sarathi-Serve: chunked prefills that never stall a decode."""

from schedlab.policies.policy import Policy
from schedlab.policies.preemption import latest_arrival
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView


@register("sarathi")
class Sarathi(Policy):
    """Fill each step up to a chunk: all decodes, then prefills under way, then new requests.

    Optimises the time between tokens: a decode is in every step, and a step is never longer than
    the chunk makes it. Needs to know nothing, but the chunk must be tuned to the target: the
    paper takes 512 tokens for a strict one and 2048 for a relaxed one. Small chunks compute
    prompts less efficiently and delay first tokens. First come, first served, so nobody starves.
    Under memory pressure the latest arrival is preempted and recomputed.

    Use it with ``engine.scheduler_reserve_full_isl: true`` and ``engine.watermark: 0.01``, which
    is how the original admits: only if the whole prompt fits. It takes all of that memory at once;
    here it is looked for, and taken as it is needed. The original asks for a free block for each
    decode whether it opens one or not (`can_append_slot`), and so evicts a little sooner, as
    `prefill_first` tells of vLLM V0. The chunk that follows the position in the prompt (dynamic
    chunking) is not modelled.

    Skip-ahead is honest: a decode-only step means that no prompt has room; with no event the
    chunk's room and the seats stay the same, and free blocks only fall.

    Parameters
    ----------
    chunk_size : int
        Tokens of a step, decodes included. Decodes are never left out for it.
    """

    can_pipeline = True
    source = "Sarathi-Serve, Agrawal et al., OSDI 2024, sarathi_scheduler.py"

    def __init__(self, chunk_size: int = 512) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self.chunk_size = chunk_size

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan decodes first; prompts share what they leave of the chunk."""
        budget = builder.tokens_left
        while not builder.grant_decodes():
            builder.preempt(latest_arrival(builder))
        left = self.chunk_size - (budget - builder.tokens_left)
        for state in view.prefilling:
            if left > 0 and state not in builder.preempted:
                left -= builder.grant(state, left)
        if view.prefilling and builder.tokens_left == budget:
            # Prompts under way block each other for memory; the original reserves them whole.
            builder.preempt(latest_arrival(builder))
        if builder.preempted:
            return builder.build()
        for state in builder.undeferred(view.waiting):
            granted = builder.grant(state, left) if left > 0 else 0
            if not granted:
                break
            left -= granted
        return builder.build(max_steps=FOREVER)
