"""The real GPU behind the engine: carries plans out and samples tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from schedlab.gpu_backend.batch_builder import BatchBuilder, Rows
from schedlab.gpu_backend.block_pool import BlockPool
from schedlab.gpu_backend.clock import Clock
from schedlab.gpu_backend.kv_memory import KVMemory
from schedlab.gpu_backend.named_tokens import NamedTokens
from schedlab.gpu_backend.runner import ModelRunner
from schedlab.gpu_backend.sequences import Int64, PromptIds, Sequences, random_prompts
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor, Steps, Work
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.request import DONE, Request, RequestState
from schedlab.sim.speculation.recording import Drafts

EstimateStepNs = Callable[[BatchShape, int], int]
"""Answers policies that ask what a step would take."""


class StepTime(NamedTuple):
    """One executed step: what it was, and where its time went."""

    shape: BatchShape
    duration_ns: int
    """By the run's clock, scheduling overhead included."""
    overhead_ns: int
    """Scheduling overhead in it."""
    prepare_ns: int
    """Host: laying out the batch before its launch."""
    device_ns: int
    """From the copy of the batch to the device to the sampled tokens."""
    was_prepared: bool
    """Whether the batch was laid out while the step before it ran."""


class TorchExecutor(Executor):
    """Runs plans on a real model.

    All that a plan computes goes through the model as one mixed batch, one step at a time. The
    tokens are the model's own, but a request ends at the length its trace says (EOS is ignored),
    so both backends run the same work. A preempted request computes prompt and generated tokens
    again, or has its KV copied to the host and back, and goes on where it was.

    Parameters
    ----------
    runner : ModelRunner
        Model and KV cache on a device.
    config : EngineConfig
        The engine's limits.
    clock : Clock
        Says how long a step took.
    estimate_step_ns : callable, optional
        Answers policies that ask what a step would take, e.g.
        ``Pricing(cost_model).estimate_ns``: both backends must answer alike.
    prompt_ids : callable, optional
        Token ids of a request's prompt; random ones by default.
    seed : int
        Of random prompts and of sampling.
    shuffle_blocks : bool
        Hand KV blocks out in random order.
    prepare_ahead : bool, optional
        Lay out the next decode batch while the device works; by default on a GPU only, since on
        a CPU nothing runs meanwhile.

    Attributes
    ----------
    pool : BlockPool
        Physical blocks.
    steps : list of StepTime
        Every step so far.
    num_estimates : int
        How often a policy has asked what a step would take.
    drafts : dict of int to list of (int, int)
        By request, tokens drafted and accepted; empty, since it does not speculate.

    Notes
    -----
    Tokens computed for nobody cost their linear layers and no attention. The rows of held
    requests (static batching) decode over their cache, write nothing and are thrown away.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Clock,
        *,
        estimate_step_ns: EstimateStepNs | None = None,
        prompt_ids: PromptIds | None = None,
        seed: int = 0,
        shuffle_blocks: bool = False,
        prepare_ahead: bool | None = None,
    ) -> None:
        self.runner = runner
        self.clock = clock
        vocabulary = runner.decoder.config.shape.vocab_size
        if prompt_ids is None and config.enable_prefix_caching:
            prompt_ids = NamedTokens(seed, vocabulary, config.block_size)
        self.sequences = Sequences(
            config.most_resident,
            config.max_model_len,
            prompt_ids or random_prompts(seed, vocabulary),
        )
        shuffle_seed = seed if shuffle_blocks else None
        self.kv_bytes: KVMemory | None = None
        if config.enable_prefix_caching or config.kv_tiers:
            contents = prompt_ids if isinstance(prompt_ids, NamedTokens) else None
            self.kv_bytes = KVMemory(runner, config, clock, self.sequences, contents, shuffle_seed)
            self.pool = self.kv_bytes.pool
        else:
            self.pool = BlockPool(
                config.num_blocks,
                config.block_size,
                config.most_resident,
                config.max_model_len,
                shuffle_seed,
            )
        self.steps: list[StepTime] = []
        self.num_estimates = 0
        self.drafts: dict[int, Drafts] = {}
        self._estimate_step_ns = estimate_step_ns
        self._has_tiers = bool(config.kv_tiers)
        self._block_size = config.block_size
        self._held: dict[int, RequestState] = {}
        self._prepares_ahead = runner.is_cuda if prepare_ahead is None else prepare_ahead
        self._builder = BatchBuilder(runner, self.pool, self.sequences, seed)

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request, output_tokens: int) -> None:
        """Learn of a request and its true output length."""
        self.sequences.add(request, output_tokens)

    def joined(self, states: Collection[RequestState], decodes: DecodeBatch) -> None:
        """Do nothing: the batch is read when it is executed."""

    def look_ahead(self, state: RequestState) -> None:
        """Refuse: drafts are known when they are verified."""
        raise NotImplementedError("this executor does not speculate")

    def cut(self, num_steps: int) -> None:
        """Do nothing: steps are run one by one."""

    def released(self, state: RequestState) -> None:
        """Free a request's blocks and seat; its tokens stay known."""
        self._builder.drop(state)
        self._held.pop(state.id, None)
        if self.pool.holds(state.id):
            self.sequences.leave(state.request, self.pool.seat(state.id), state.num_tokens)
        self.pool.release(state.id, state.num_computed_tokens)

    def swapped_out(self, state: RequestState) -> None:
        """Note that a request's KV is to be copied to the host, before `released` comes."""
        if not self._has_tiers:
            # Not the slots of rejected drafts behind its context, which are not counted either.
            count = -(-state.num_computed_tokens // self._block_size)
            self.runner.swap.swap_out(state.id, self.pool.blocks(state.id)[:count])

    def swapped_in(self, state: RequestState) -> None:
        """Seat a request again and note that its KV is to be copied back."""
        if self.kv_bytes is not None:
            self.kv_bytes.loaded(state)
        seat = self.pool.grow(state.id, state.num_computed_tokens)
        self.sequences.sit(state.request, seat)
        self.runner.swap.swap_in(state.id, self.pool.blocks(state.id))

    def remove(self, state: RequestState) -> None:
        """Forget a request that finished or was rejected, but for the tokens it generated.

        If its memory is kept for its session, that takes no seat.
        """
        if state.status is DONE and self.pool.holds(state.id):
            assert self.kv_bytes is not None
            self.sequences.leave(state.request, self.pool.seat(state.id), state.num_tokens)
            self.kv_bytes.keep(state)
        self.sequences.forget(state.request)
        self.runner.swap.forget(state.id)
        if self.kv_bytes is not None:
            self.kv_bytes.forget(state.id)

    def output_tokens(self, request: Request) -> int:
        """Return a request's true output length."""
        return self.sequences.output_tokens(request)

    def generated(self, request_id: int) -> Int64:
        """Return the tokens of a request that has finished (or was preempted), int64."""
        return self.sequences.generated(request_id)

    def wait_for_copies(self) -> None:
        """Wait for what is still copied when the work is done, so that it disturbs nobody else.

        Raises
        ------
        SchedlabError
            If a copy has failed.
        """
        if self.kv_bytes is not None:
            self.kv_bytes.wait_for_copies()

    def check(self, engine: Engine) -> None:
        """Prove that blocks on device and host are those the engine counts, between two steps.

        Raises
        ------
        AssertionError
            If a count is off; names it.
        """
        if self.kv_bytes is not None:
            self.kv_bytes.check(engine)
        else:
            self.pool.check(engine)
        if not self._has_tiers:
            self.runner.swap.check(engine)

    def estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Answer from the cost model that the simulator would ask.

        Raises
        ------
        SpecError
            If the executor was given none.
        """
        if self._estimate_step_ns is None:
            raise SpecError(
                "this policy plans by estimated step times: give the real backend a cost model "
                "(cost_model: a profile of this device and model)"
            )
        self.num_estimates += 1
        return self._estimate_step_ns(shape, num_steps)

    # -- steps ---------------------------------------------------------------------------------

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        """Run one step; see `schedlab.sim.core.executor.Executor.execute`."""
        self.clock.step_begins(work.now_ns)
        begun_ns = time.perf_counter_ns()
        memory = self.kv_bytes
        if memory is not None:
            memory.lay_out(work.plan)
        rows = self._builder.build(work, self._held.values())
        prepare_ns = time.perf_counter_ns() - begun_ns
        if memory is not None:
            memory.before_step(rows.batch.slots[: rows.batch.num_tokens])
        self.runner.launch(rows.batch)
        if memory is not None:
            memory.launched()
        if self._prepares_ahead and rows.decode_only:
            self._builder.prepare_next(rows)
        tokens = self.runner.wait()
        finished = self._keep(work, rows, tokens)
        if work.plan.finished != "leave":
            self._held.update((state.id, state) for state in finished)
        duration_ns, overhead_ns = self._step_ends(work)
        device_ns, was_ahead = self.runner.device_ns, rows.was_ahead
        self.steps.append(
            StepTime(work.shape, duration_ns, overhead_ns, prepare_ns, device_ns, was_ahead)
        )
        return Steps([duration_ns], overhead_ns, finished)

    def _step_ends(self, work: Work) -> tuple[int, int]:
        """Return how long the step took, and how much of it is scheduling overhead."""
        return self.clock.step_ends(work.shape)

    def _keep(self, work: Work, rows: Rows, tokens: Int64) -> list[RequestState]:
        """Write down the tokens that came out; return whose was the last."""
        self.sequences.tokens[rows.seats, rows.indices] = tokens[rows.picks]
        last = np.flatnonzero(self.sequences.last_index[rows.seats] == rows.indices)
        return [rows.states[i] for i in last.tolist()]
