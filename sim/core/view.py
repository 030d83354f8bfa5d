"""What a policy may look at."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.population import Population
from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import WAITS, RequestState

if TYPE_CHECKING:
    from schedlab.sim.core.engine import Engine


class EngineView:
    """A read-only window on the engine.

    Attributes
    ----------
    config : EngineConfig
        The limits.
    waiting : WaitingQueue
        Requests without a seat, in the order of the policy's key (arrival by default).
    looked_at_cache : bool
        Whether `cached_tokens` was asked since the engine last set it to False.
    prices_never_fall : bool
        Whether longer chunks, more decodes or longer contexts never take less by estimate.
    """

    __slots__ = (
        "_engine", "_requests", "config", "looked_at_cache", "prices_never_fall", "waiting",
    )  # fmt: skip

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: Population = engine.requests
        self.config: EngineConfig = engine.config
        self.waiting: WaitingQueue = engine.requests.waiting
        self.looked_at_cache = False
        self.prices_never_fall = engine.executor.prices_never_fall

    @property
    def now_ns(self) -> int:
        """Time at which the step to plan would start."""
        return self._engine.now_ns

    @property
    def durations_ns(self) -> list[int]:
        """How long each of the steps took that `Policy.on_tokens` is told of."""
        return self._engine.durations_ns

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, those not yet taken into the queue included."""
        return self._requests.num_waiting

    @property
    def running(self) -> Collection[RequestState]:
        """Unfinished requests with a seat, in the order of their admission."""
        return self._requests.running.values()

    @property
    def seated(self) -> Collection[RequestState]:
        """Requests that hold a seat, in the order of their admission.

        Beside the running ones those that have finished while this step is planned ahead
        (async scheduling), and those in the pipeline: they hold seat and memory, and may be
        preempted.
        """
        return self._requests.seated()

    @property
    def residents(self) -> Collection[RequestState]:
        """Unfinished requests that hold memory here, whatever they wait for, `running` first.

        Beside these, those in the pipeline, and all that load from a lower tier, or are loaded,
        with a seat or without. Who reckons with memory to come counts them. Not those whose KV is
        on its way from another engine: the policy is told of them when it has come.
        """
        requests = self._requests
        running = requests.running.values()
        if not (requests.in_pipeline.size or requests.loading or requests.holding):
            return running
        away = (*requests.loading.values(), *requests.holding.values())
        return (*running, *requests.in_pipeline, *away)

    @property
    def prefilling(self) -> Collection[RequestState]:
        """Running requests whose prompt (or recomputed sequence) is not computed yet."""
        return self._requests.prefilling.values()

    @property
    def decoding(self) -> list[RequestState]:
        """Running requests past their prefill, in the order of their admission."""
        running, prompts = self._requests.running, self._requests.prefilling
        if not prompts:
            return list(running.values())
        states = list(running.values())
        first = len(states) - len(prompts)
        if all([state.id in prompts for state in states[first:]]):  # most were admitted last
            return states[:first]
        return [state for state in states if state.id not in prompts]

    def output_tokens(self, states: Collection[RequestState]) -> list[int]:
        """Return `RequestState.num_output_tokens` of each of many, at a fraction of the cost."""
        if self.config.num_speculative_tokens or self._requests.in_pipeline.size:
            return [state.num_output_tokens for state in states]
        batch = self._requests.decodes
        steps = batch.steps
        return [s._generated + (steps if s._batch is batch else 0) for s in states]

    def computed_tokens(self, states: Collection[RequestState]) -> list[int]:
        """Return `RequestState.num_computed_tokens` of each of many, at a fraction of the cost."""
        if self.config.num_speculative_tokens or self._requests.in_pipeline.size:
            return [state.num_computed_tokens for state in states]
        batch = self._requests.decodes
        steps = batch.steps
        return [s._computed + (steps if s._batch is batch else 0) for s in states]

    @property
    def is_in_step(self) -> bool:
        """Whether each step gives those who decode in it one token, known when it ends.

        Then a policy that is told of all steps can tell everyone's progress by itself: not with
        drafts, several batches in flight or steps planned ahead, nor where memory comes back from
        lower tiers or another engine counts (vLLM).
        """
        config = self.config
        return type(self._requests.decodes) is DecodeBatch and not (
            config.async_scheduling or config.kv_tiers or config.pipeline_parallel_size > 1
        )

    @property
    def held(self) -> Collection[RequestState]:
        """Finished requests that keep their seat until their sealed batch ends."""
        return self._requests.held.values()

    @property
    def kept(self) -> Collection[RequestState]:
        """Answered requests whose memory is kept for their sessions, the longest kept first.

        A plan may preempt them: then it is free, and its contents are found as long as they last.
        """
        return self._requests.kept.values()

    @property
    def loading(self) -> Collection[RequestState]:
        """Requests with a seat whose KV is on its way from a lower tier; they run when it is there.

        In the order in which they were admitted.
        """
        return self._requests.loading.values()

    @property
    def loaded(self) -> list[RequestState]:
        """Requests without a seat whose KV has come from a lower tier, the first loaded first.

        They hold memory, wait in no queue, and run when they are granted tokens.
        """
        requests = self._requests
        if not requests.come:
            return []
        return [state for i, state in requests.holding.items() if i in requests.come]

    def waits(self, state: RequestState) -> bool:
        """Whether a request that the policy knows of is in the queue, at O(1).

        Who is loaded without a seat, or on his way so, is not: his turn has come already.
        """
        return state.status is WAITS and state.id not in self._requests.holding

    @property
    def in_pipeline(self) -> Collection[RequestState]:
        """Requests with a seat whose batch is in the pipeline; none of `running`.

        They can be granted no tokens before it is back, or planned on ahead. A plan may preempt
        them: then their memory is lost, and the token that comes out of that batch is not.
        """
        return self._requests.in_pipeline

    @property
    def num_decodes(self) -> int:
        """Running requests past their prefill."""
        return self._requests.decodes.size + len(self._requests.paused)

    @property
    def paused(self) -> Collection[RequestState]:
        """Running requests past their prefill that the last plan of the batch left out."""
        return self._requests.paused.values()

    @property
    def num_paused(self) -> int:
        """How many these are."""
        return len(self._requests.paused)

    def decode_contexts(self) -> tuple[int, int, int]:
        """Return the sum, the largest and the smallest of the cached tokens of all decodes.

        There must be one. Costs O(1) while nobody is paused.
        """
        requests = self._requests
        batch = requests.decodes
        if not requests.paused:
            return batch.context_sum_tokens, batch.context_max_tokens, batch.context_min_tokens
        paused = self.computed_tokens(requests.paused.values())
        least = min(paused)
        if batch.size:
            least = min(least, batch.context_min_tokens)
        total = batch.context_sum_tokens + sum(paused)
        return total, max(batch.context_max_tokens, max(paused)), least

    @property
    def has_swapped(self) -> bool:
        """Whether a waiting request has its KV in host memory."""
        return self._requests.free_swap_blocks < self.config.swap_space_blocks

    @property
    def free_blocks(self) -> int:
        """KV blocks that nobody holds."""
        return self._requests.kv.free_blocks

    @property
    def num_blocks(self) -> int:
        """KV blocks in all."""
        return self.config.num_blocks

    @property
    def free_tokens(self) -> int:
        """Tokens that the free KV blocks hold."""
        return self.free_blocks * self.config.block_size

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all KV blocks hold."""
        return self.config.num_blocks * self.config.block_size

    def cached_tokens(self, state: RequestState) -> int:
        """Count the tokens of a waiting request that the prefix cache holds now.

        A policy that asks is asked again whenever a cached block is lost.
        """
        self.looked_at_cache = True
        return 0 if state.swapped else self._requests.kv.lookup(state).tokens

    def estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Estimate how long a step of this shape would take, from the calibrated cost model.

        Both backends answer from the same model, so that a policy which asks decides alike.

        Parameters
        ----------
        shape : BatchShape
            The step.
        num_steps : int
            How many steps of its decodes, each with a token more in every context, of which the
            longest is told; more than one only without chunks.
        """
        if self.config.num_speculative_tokens:
            shape = self._with_drafts(shape)
        return self._engine.executor.estimate_step_ns(shape, num_steps)

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Return what `estimate_step_ns` says of a step with one more prefill, by its new tokens.

        Parameters
        ----------
        shape : BatchShape
            The step without it.
        context_tokens : int
            Its tokens in the cache.
        """
        if self.config.num_speculative_tokens:
            shape = self._with_drafts(shape)
        return self._engine.executor.chunk_pricer(shape, context_tokens)

    def _with_drafts(self, shape: BatchShape) -> BatchShape:
        """Let as many tokens be drafted for each decode as for those that run now."""
        decodes = self._requests.decodes
        each = float(self.config.num_speculative_tokens)
        if decodes.size:
            each = decodes.drafts_next_step() / decodes.size
        return replace(shape, draft_tokens=round(shape.num_decodes * each))
