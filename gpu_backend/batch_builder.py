"""From plans to batches: gives rows their blocks, and lays batches out, ahead of time if it can."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from schedlab.gpu_backend.block_pool import BlockPool
from schedlab.gpu_backend.runner import ModelRunner
from schedlab.gpu_backend.sequences import Int64, Sequences
from schedlab.gpu_backend.step_batch import StepBatch, launch_order
from schedlab.sim.core.executor import Work
from schedlab.sim.errors import SchedlabError
from schedlab.sim.request import RequestState
from schedlab.sim.rng import stream

_INDEX_BITS = 31


class Rows(NamedTuple):
    """A batch that is ready to run, and whom its sampled tokens belong to."""

    batch: StepBatch
    states: list[RequestState]
    """Requests that get a token, in the batch's order; with drafts, each verifies several."""
    seats: Int64
    """Their seats, one for each token."""
    indices: Int64
    """Where in their sequences the token goes."""
    picks: Int64
    """Which of the sampled tokens are theirs; the others are held requests'."""
    decode_only: bool
    """Whether the batch is decodes of `states` and nothing else."""
    was_ahead: bool
    """Whether it was laid out before it was planned."""


class BatchBuilder:
    """Lays batches out in host memory, in two buffers: one runs while the next is prepared.

    Parameters
    ----------
    runner : ModelRunner
        Whose buffers to fill.
    pool : BlockPool
        Physical blocks.
    sequences : Sequences
        Token ids.
    seed : int
        Of sampling.
    """

    def __init__(
        self, runner: ModelRunner, pool: BlockPool, sequences: Sequences, seed: int
    ) -> None:
        self._pool = pool
        self._sequences = sequences
        self._key = int(stream(seed, "sampling").integers(1 << 62))
        self._batches = [runner.new_batch(), runner.new_batch()]
        self._ahead: Rows | None = None

    def build(self, work: Work, held: Collection[RequestState]) -> Rows:
        """Return the batch of a plan.

        Parameters
        ----------
        work : Work
            The plan; its requests' blocks are taken from the pool here.
        held : collection of RequestState
            Finished requests that keep their seat; their rows are computed along if the plan
            says so.
        """
        plan, shape = work.plan, work.shape
        ahead, self._ahead = self._ahead, None
        decodes = list(work.decodes.members.values()) if shape.num_decodes else []
        if not (plan.chunks or shape.padding_tokens or shape.draft_tokens):
            if ahead is not None and ahead.states == decodes:
                self._complete(ahead)
                rows = ahead
            else:
                rows = self._decodes(decodes)
            context_sum = int(rows.indices.sum()) - len(decodes)
            assert context_sum == shape.decode_context_sum_tokens, "a context is out of step"
            return rows
        return self._mixed(work, decodes, list(held) if plan.pad_finished and decodes else [])

    def prepare_next(self, rows: Rows) -> None:
        """Lay out the batch that follows a decode batch under way if nothing happens.

        Only its tokens, and blocks that its requests have yet to open, are left for `build`.
        """
        going_on = self._sequences.last_index[rows.seats] != rows.indices
        states = [rows.states[i] for i in np.flatnonzero(going_on).tolist()]
        if states:
            seats, contexts = rows.seats[going_on], rows.indices[going_on]
            self._ahead = self._lay_out_decodes(states, seats, contexts)._replace(was_ahead=True)

    def drop(self, state: RequestState) -> None:
        """Forget what was prepared if it is about a request that lost its blocks."""
        if self._ahead is not None and state in self._ahead.states:
            self._ahead = None

    def _complete(self, rows: Rows) -> None:
        """Fill in what was unknown when the decode batch was laid out."""
        batch, pool = rows.batch, self._pool
        contexts = rows.indices - 1
        n = len(contexts)
        for i in np.flatnonzero(contexts % pool.block_size == 0).tolist():
            context = int(contexts[i])
            seat = pool.grow(rows.states[i].id, context + 1)
            block = int(pool.tables[seat, context // pool.block_size])
            batch.block_tables[i, context // pool.block_size] = block
            batch.slots[i] = block * pool.block_size
        batch.tokens[:n] = self._sequences.tokens[rows.seats, contexts]

    def _decodes(self, states: list[RequestState]) -> Rows:
        contexts = [state.num_computed_tokens for state in states]
        seats = [
            self._pool.grow(state.id, context + 1)
            for state, context in zip(states, contexts, strict=True)
        ]
        return self._lay_out_decodes(states, np.array(seats), np.array(contexts))

    def _lay_out_decodes(self, states: list[RequestState], seats: Int64, contexts: Int64) -> Rows:
        batch = self._next_batch()
        batch.fill(
            self._sequences.tokens, self._pool.tables, self._pool.block_size, seats, contexts
        )
        everyone = np.arange(len(states))
        batch.sample(everyone, self._keys(seats, contexts + 1))
        return Rows(batch, states, seats, contexts + 1, everyone, True, False)

    def _mixed(self, work: Work, decodes: list[RequestState], held: list[RequestState]) -> Rows:
        """Lay out decodes, held rows and chunks in the order that suits the kernel, then padding.

        Samples are asked for, and `Rows` lists them, in the order: decodes, held rows, chunks.
        """
        pool, plan = self._pool, work.plan
        seats: list[int] = []
        contexts: list[int] = []
        num_new: list[int] = []
        for state in decodes:
            contexts.append(state.num_computed_tokens)
            num_new.append(state.decode_tokens)
            seats.append(pool.grow(state.id, contexts[-1] + num_new[-1]))
        for state in held:
            contexts.append(state.num_computed_tokens - 1)
            num_new.append(1)
            seats.append(pool.seat(state.id))
        num_singles = len(seats)
        num_sampled = num_new.copy()
        states = decodes.copy()
        for state, n in plan.chunks:
            contexts.append(state.num_computed_tokens)
            seats.append(self._seat(state, contexts[-1] + n))
            num_new.append(n)
            num_sampled.append(int(state.num_uncomputed_tokens == n))
            if num_sampled[-1]:
                states.append(state)
        batch = self._next_batch()
        if len(seats) > batch.layout.max_num_seqs:
            raise SchedlabError(
                f"a step of {len(seats)} rows, {len(held)} of them of finished requests, and the "
                f"device has room for {batch.layout.max_num_seqs}; raise engine.max_num_seqs"
            )
        all_seats, before, new = np.array(seats), np.array(contexts), np.array(num_new)
        order = launch_order(before, new)
        batch.fill(
            self._sequences.tokens, pool.tables, pool.block_size, all_seats[order], before[order],
            new[order] if plan.chunks or work.shape.draft_tokens else None, plan.padding_tokens,
        )  # fmt: skip
        last_token = np.empty_like(new)
        last_token[order] = np.cumsum(new[order]) - 1
        batch.slots[last_token[len(decodes) : num_singles]] = -1  # held rows only read
        # Of each sequence the last tokens: one, or a decode's with those drafted.
        sampled = np.repeat(np.arange(len(new)), num_sampled)
        before_last = np.cumsum(num_sampled)[sampled] - 1 - np.arange(len(sampled))
        indices = (before + new)[sampled] - before_last
        batch.sample(last_token[sampled] - before_last, self._keys(all_seats[sampled], indices))
        picks = np.flatnonzero((sampled < len(decodes)) | (sampled >= num_singles))
        return Rows(
            batch, states, all_seats[sampled][picks], indices[picks], picks,
            decode_only=False, was_ahead=False,
        )  # fmt: skip

    def _seat(self, state: RequestState, num_tokens: int) -> int:
        is_new = not self._pool.holds(state.id)
        seat = self._pool.grow(state.id, num_tokens)
        if is_new:
            self._sequences.sit(state.request, seat)
        return seat

    def _keys(self, seats: Int64, indices: Int64) -> Int64:
        """Name the randomness of a request's token by the two alone, not by batch or time."""
        return ((self._sequences.ids[seats] << _INDEX_BITS) | indices) ^ self._key

    def _next_batch(self) -> StepBatch:
        self._batches.reverse()
        return self._batches[0]
