"""Text Generation Inference: prefills interrupt decoding when enough requests wait."""

import math
from collections.abc import Iterator

from schedlab.policies.future_memory import declared_blocks
from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("tgi")
class TextGenerationInference(Policy):
    """Pause decoding for a prefill batch once enough requests wait, or have waited long enough.

    Version 2, and version 3 for models whose prompts it cannot cut; for the others version 3 is
    `tgi3`. Optimises the balance of first tokens against stalls of running answers. Needs the
    `max_tokens` each request declares: it is reserved at admission, so nobody is ever evicted,
    and generous declarations keep the batch small. First come, first served, so nobody starves.

    While n requests run, a prefill batch must have at least ``floor(n * waiting_served_ratio)``
    members, unless `max_waiting_tokens` decode steps have passed since the last one. A prefill
    is a step of its own (several, if the engine's token budget is smaller than what is chosen for
    it), and if it paused decodes one decode step follows before the queue is looked at again.

    Where TGI rejects a prompt above `max_batch_prefill_tokens`, it waits here until nobody runs
    and is computed alone.

    Skip-ahead is honest: what is reserved does not change while requests decode, and the step in
    which a batch may be smaller is counted down in the promise.

    Parameters
    ----------
    waiting_served_ratio : float
        Least size of a prefill batch, as a share of the running requests.
    max_batch_prefill_tokens : int
        Most prompt tokens in a prefill batch.
    max_waiting_tokens : int
        Decode steps after which a prefill batch may be of any size.
    max_batch_total_tokens : int, optional
        Tokens that all running requests may hold at their declared ends; the whole KV cache if
        not given.
    """

    source = "Hugging Face text-generation-inference 2, router, batching_task and queue.next_batch"

    def __init__(
        self,
        waiting_served_ratio: float = 0.3,
        max_batch_prefill_tokens: int = 4096,
        max_waiting_tokens: int = 20,
        max_batch_total_tokens: int | None = None,
    ) -> None:
        if not 0.0 <= waiting_served_ratio < math.inf:
            raise ValueError(f"waiting_served_ratio must be >= 0, got {waiting_served_ratio}")
        total_tokens = 1 if max_batch_total_tokens is None else max_batch_total_tokens
        if min(max_batch_prefill_tokens, max_waiting_tokens, total_tokens) < 1:
            raise ValueError("max_batch_prefill_tokens, max_waiting_tokens and "
                             "max_batch_total_tokens must be at least 1")  # fmt: skip
        self.waiting_served_ratio = waiting_served_ratio
        self.max_batch_prefill_tokens = max_batch_prefill_tokens
        self.max_waiting_tokens = max_waiting_tokens
        self.max_batch_total_tokens = max_batch_total_tokens
        self._waiting_tokens = 1
        self._owes_decode = False
        # Of the prefill batch under way: whom the last plan had for it, and of whom some of it is
        # computed; nobody once all of it is.
        self._chosen: tuple[RequestState, ...] = ()
        self._members: set[RequestState] = set()

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to tell a first prefill from one that interrupted decodes."""
        self._view = view

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Count decode steps since the last prefill; keep whom it has not come to yet."""
        if not plan.chunks:
            self._waiting_tokens += num_steps
            self._owes_decode = False
            self._chosen, self._members = (), set()
            return
        view, members = self._view, self._members
        members.update([state for state, _ in plan.chunks])
        self._waiting_tokens = 1
        self._owes_decode = any(state not in members for state in view.running)
        self._chosen = tuple(filter(view.waits, self._chosen))
        if not (self._chosen or view.prefilling):
            self._members = set()

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan a prefill batch if one is due, else decode."""
        batch = tuple(view.prefilling)
        if self._members:
            batch += tuple(filter(view.waits, self._chosen))
        batch = batch or self._next_batch(view, builder)
        if any([builder.grant(state) for state in batch]):
            self._chosen = batch
            return builder.build()
        while not builder.grant_running():
            builder.preempt(next(builder.running()))
        if builder.preempted:
            return builder.build()
        countdown = self.max_waiting_tokens - self._waiting_tokens
        if not len(view.waiting) or (countdown <= 0 and not self._owes_decode):
            return builder.build(max_steps=FOREVER)
        return builder.build(max_steps=1 if self._owes_decode else countdown)

    def _next_batch(self, view: EngineView, builder: PlanBuilder) -> tuple[RequestState, ...]:
        running = view.running
        if not len(view.waiting) or (running and self._owes_decode):
            return ()
        prompt_tokens = self.max_batch_prefill_tokens
        batch: list[RequestState] = []
        for state in fit_declared(view, builder, self.max_batch_total_tokens):
            prompt_tokens -= state.num_uncomputed_tokens
            full = prompt_tokens < 0 or len(batch) == builder.seats_left
            if full and (running or batch):
                break
            batch.append(state)
        waited = self._waiting_tokens >= self.max_waiting_tokens
        least = 0 if waited else math.floor(len(running) * self.waiting_served_ratio)
        return tuple(batch) if len(batch) >= least else ()


def fit_declared(
    view: EngineView, builder: PlanBuilder, most_tokens: int | None
) -> Iterator[RequestState]:
    """Yield who waits, in order of arrival, while all fit memory at their declared ends.

    The first is yielded whatever it declares where nobody holds memory.

    Parameters
    ----------
    view, builder : EngineView, PlanBuilder
        Who holds memory and who waits, and the ledger.
    most_tokens : int, optional
        Tokens that all together may hold, if less than the whole KV cache.
    """
    blocks = view.num_blocks
    if most_tokens is not None:
        blocks = min(blocks, most_tokens // view.config.block_size)
    residents = view.residents
    blocks -= sum(declared_blocks(state, view, has_last=False) for state in residents)
    alone = not residents
    for state in builder.undeferred(view.waiting):
        blocks -= declared_blocks(state, view, has_last=False)
        if blocks < 0 and not alone:
            return
        alone = False
        yield state
