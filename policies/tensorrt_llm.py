"""TensorRT-LLM: admission by one of its capacity policies."""

from collections.abc import Iterator

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.future_memory import declared_blocks
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

CAPACITY_POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")


@register("tensorrt_llm")
class TensorRTLLM(ContinuousBatching):
    """Admit a request only if it can never be evicted, as soon as its prompt fits, or in batches.

    Optimises predictability (``guaranteed_no_evict``, the default: a request under way is never
    paused; ``static_batch``: and nobody joins until all have ended) or the use of memory
    (``max_utilization``: as many requests a step as fit, the latest admission is paused when memory
    runs out). Needs the `max_tokens` each request declares:
    generous declarations keep memory reserved for answers that never come, and the batch small.
    First come, first served, so nobody starves.

    A paused request is recomputed, unless ``engine.preemption_mode`` swaps. Context chunking is
    ``engine.enable_chunked_prefill``, on by default in TensorRT-LLM's executor and off in its
    Python interface. There a request's first chunk needs, and takes, the blocks of its whole
    prompt: with chunks use ``max_utilization`` with ``engine.scheduler_reserve_full_isl: true``,
    or prompts are begun that do not fit, and are paused again and again where memory is scarce.
    Not modelled are its fourth policy, which computes prompts first, that it keeps back a prompt
    which could soon reuse the blocks of one under way, and that chunks which do not end a prompt
    are whole multiples of a unit.

    Skip-ahead is honest: what running requests have declared does not change while they decode,
    and otherwise as in `ContinuousBatching`.

    Parameters
    ----------
    capacity_policy : {"guaranteed_no_evict", "max_utilization", "static_batch"}
        TensorRT-LLM's `capacity_scheduler_policy`.
    """

    can_pipeline = False
    source = "NVIDIA TensorRT-LLM, capacityScheduler.cpp, CapacitySchedulerPolicy"

    def __init__(self, capacity_policy: str = "guaranteed_no_evict") -> None:
        if capacity_policy not in CAPACITY_POLICIES:
            raise ValueError(
                f"capacity_policy must be one of {', '.join(CAPACITY_POLICIES)}; "
                f"got {capacity_policy!r}"
            )
        self.capacity_policy = capacity_policy

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise all: what is declared does not change while requests decode."""
        return FOREVER, FOREVER

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Yield in order of arrival while all can be carried to their declared ends."""
        if self.capacity_policy == "max_utilization":
            yield from view.waiting
            return
        if self.capacity_policy == "static_batch" and view.residents:
            return
        free = view.num_blocks - sum(declared_blocks(s, view) for s in view.residents)
        for state in builder.undeferred(view.waiting):
            free -= declared_blocks(state, view)
            if free < 0:
                return
            yield state
