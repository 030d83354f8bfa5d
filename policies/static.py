"""Static batching: sealed batches, run to the end of their longest request."""

from collections.abc import Collection, Iterable

from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("static")
class Static(Policy):
    """Form a batch from the head of the queue when the GPU is idle; nobody joins or leaves.

    Optimises nothing; the serving of FasterTransformer-style engines, and the baseline that
    continuous batching is measured against. Needs to know nothing. A batch lasts as long as its
    longest answer, finished requests keep seat and memory until then, and everyone else waits.
    First come, first served, so nobody starves.

    The prompts of a batch are computed before its first decode. Where they exceed
    `max_num_batched_tokens` (which engines of that time did not have), they take several steps.
    Under memory pressure the latest admission is preempted, and computed again in the next batch.
    Who comes from another engine with its KV joins the batch that runs, for it has a seat already.

    Skip-ahead is honest: between events the members of a sealed batch do not change.

    Parameters
    ----------
    max_batch_size : int, optional
        Most requests in a batch; `max_num_seqs` if not given.
    pad_prompts : bool
        Compute every prompt at the length of the batch's longest.
    pad_decodes : bool
        Compute the rows of finished requests until the batch ends.
    return_early : bool
        Answer a request when it finishes, not when the batch does. Its slot stays empty.
    """

    source = "FasterTransformer's batching as described in Orca (OSDI'22), section 2"
    sets_memory_aside = True

    def __init__(
        self,
        max_batch_size: int | None = None,
        pad_prompts: bool = True,
        pad_decodes: bool = True,
        return_early: bool = False,
    ) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self.max_batch_size = max_batch_size
        self.pad_prompts = pad_prompts
        self.pad_decodes = pad_decodes
        self.return_early = return_early

    def dispatch_at_ns(self, view: EngineView) -> int:
        """Return when the waiting requests may form a batch, if nothing else happens."""
        return view.now_ns

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Go on with the batch; form the next one when the GPU is idle."""
        if not view.running:
            dispatch_at_ns = self.dispatch_at_ns(view) if view.waiting else FOREVER
            if dispatch_at_ns > view.now_ns:
                return builder.build(until_ns=dispatch_at_ns)
            batch = self._form(view, builder)
            self._prefill(batch, 0, builder)
        elif view.prefilling:
            self._go_on_with_prompts(view, builder)
        else:
            while not builder.grant_running():
                builder.preempt(next(builder.running()), "recompute")
        return builder.build(
            max_steps=1 if builder.preempted else FOREVER,
            finished="hold" if self.return_early else "hold_answer",
            pad_finished=self.pad_decodes,
        )

    def _form(self, view: EngineView, builder: PlanBuilder) -> list[RequestState]:
        return self._admit(view.waiting, builder)

    def _admit(self, states: Iterable[RequestState], builder: PlanBuilder) -> list[RequestState]:
        batch: list[RequestState] = []
        for state in states:
            if len(batch) == self.max_batch_size or not builder.admit(state):
                break
            batch.append(state)
        return batch

    def _go_on_with_prompts(self, view: EngineView, builder: PlanBuilder) -> None:
        # A prompt under way is as long as what is computed of it, at least.
        done = view.decode_contexts()[1] if view.num_decodes else 0
        for state in view.held:
            done = max(done, state.num_computed_tokens)
        prompts = list(view.prefilling)
        self._prefill(prompts, done, builder)
        # Requests that other engines began may have come with KV where a prompt was to go on.
        while prompts and not builder.has_chunks:
            last = next(builder.running())
            done = max(done, last.num_computed_tokens)
            builder.preempt(last, "recompute")
            prompts = [state for state in prompts if state is not last]
            self._prefill(prompts, done, builder)

    def _prefill(
        self, prompts: Collection[RequestState], longest_done: int, builder: PlanBuilder
    ) -> None:
        longest, lengths = 0, [state.num_tokens for state in prompts]
        if self.pad_prompts:
            longest = max([longest_done, *lengths])
        for state, length in zip(prompts, lengths, strict=True):
            # Padding goes with the tokens it accompanies, so that it uses up the budget as well.
            # The first token of a step may exceed it, or a very short prompt would never start.
            padded = max(length, longest)
            n = builder.tokens_left * length // padded
            granted = builder.grant(state, max(n, 1)) if n or not builder.has_chunks else 0
            if not granted:
                break
            extra = padded - length
            if extra:
                done = state.num_computed_tokens
                builder.pad(extra * (done + granted) // length - extra * done // length)
