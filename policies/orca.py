"""Orca: iteration-level scheduling of whole prompts."""

from collections.abc import Iterator

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("orca")
class Orca(ContinuousBatching):
    """Let requests join and leave at every iteration; a prompt is computed whole, among decodes.

    Optimises throughput against request-level batching. Needs to know the longest answer a
    request may have, `max_tokens`, because its memory is reserved at admission: use it with
    ``engine.kv_allocator: contiguous_declared`` (or ``contiguous_max``, ``contiguous_pow2``,
    ``contiguous_exact``, the baselines of the PagedAttention paper), where nobody is ever
    preempted. A request that declares nothing may fill the model. Strictly first come,
    first served, so nobody starves; but every whole prompt stalls the decodes it joins, and
    reservations keep the batch small.

    Orca has no token budget: set ``engine.max_num_batched_tokens`` above the longest prompt. A
    prompt that does not fit beside the decodes waits for them, one beyond the budget takes
    several steps. Selective batching is a matter of the cost model, which prices linear layers
    by all tokens and attention by request. Its pipeline of workers is
    ``engine.pipeline_parallel_size``; ``max_num_seqs`` is then the paper's largest batch, and
    ``max_num_resident`` its slots, of all batches together.

    Skip-ahead is honest for the reason given in `ContinuousBatching`: the room in the budget is
    the same in every decode-only step.
    """

    source = "Orca, Yu et al., OSDI 2022, algorithm 1"

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise all: the room in the budget is the same in every decode-only step."""
        return FOREVER, FOREVER

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Yield in order of arrival while the whole prompt fits the step."""
        for state in builder.undeferred(view.waiting):
            whole = min(state.num_uncomputed_tokens, view.config.max_num_batched_tokens)
            if whole > builder.tokens_left:
                return
            yield state
