"""The real GPU where steps verify drafts that a look-up made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedlab.gpu_backend.batch_builder import Rows
from schedlab.gpu_backend.clock import Clock
from schedlab.gpu_backend.executor import EstimateStepNs, TorchExecutor
from schedlab.gpu_backend.prompt_lookup import look_up
from schedlab.gpu_backend.runner import ModelRunner
from schedlab.gpu_backend.sequences import Int64
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.executor import Work
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.speculative_executor import Drafter, estimate_with_drafts
from schedlab.sim.core.track import SpeculatingState, most_drafts, one_ahead
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import Request, RequestState


class PromptLookup(NamedTuple):
    """How many last tokens a draft continues."""

    shortest: int = 2
    longest: int = 4


class SpeculatingExecutor(TorchExecutor):
    """Runs plans on a real model, drafts by prompt look-up, and verifies the drafts.

    A decode computes its last token and those drafted, and samples at each: drafts are right as far
    as they are what is sampled, and the sample behind them is one more token. Each place of an
    answer has randomness of its own, so what comes out is what would have come without drafts, at
    any temperature, as far as the kernels give a token the same logits in a batch of another form.

    Parameters
    ----------
    runner, config, clock, estimate_step_ns, seed
        See `TorchExecutor`.
    lookup : PromptLookup
        How drafts are looked up.
    modelled_drafter : Drafter, optional
        What a look-up takes by the modelled clock, and as policies are told; nothing by default.

    Attributes
    ----------
    drafts : dict of int to list of (int, int)
        By request: tokens drafted and accepted, one verification after the other; what
        `schedlab.sim.speculation.recording.write_drafts` writes for the simulation to replay. A
        draft that was lost by a preemption, after which the next token comes without it, counts as
        rejected.

    Notes
    -----
    Unlike in simulation, what becomes of a draft is known when it was verified: tracks are one
    verification long, and the batch is told before it moves on. Batches are never prepared ahead.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Clock,
        *,
        estimate_step_ns: EstimateStepNs | None = None,
        seed: int = 0,
        lookup: PromptLookup | None = None,
        modelled_drafter: Drafter | None = None,
    ) -> None:
        super().__init__(
            runner, config, clock, estimate_step_ns=estimate_step_ns, seed=seed, prepare_ahead=False
        )
        self._config = config
        self._lookup = lookup or PromptLookup()
        self._modelled_drafter = modelled_drafter
        self._drafted: dict[int, int] = {}  # most tokens for the next place of a request

    def add(self, request: Request, output_tokens: int) -> None:
        """Learn of a request and its true output length."""
        super().add(request, output_tokens)
        self.drafts[request.id] = []

    def remove(self, state: RequestState) -> None:
        """Forget a request that finished or was rejected; see `TorchExecutor.remove`."""
        super().remove(state)
        self._drafted.pop(state.id, None)

    def look_ahead(self, state: RequestState) -> None:
        """Draft for the next verification of a request that is in no batch."""
        assert isinstance(state, SpeculatingState)
        context = state.num_computed_tokens
        most = most_drafts(self._config, state, context)
        state.draft_once = -1
        drafted = self._draft(self.pool.seat(state.id), context + 1, most)
        self._drafted[state.id] = max(drafted, self._drafted.get(state.id, 0))
        state.track = one_ahead(self._config, state, drafted)

    def estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Answer with verification and drafting, as the simulation does."""
        estimate_ns = super().estimate_step_ns
        return estimate_with_drafts(estimate_ns, self._modelled_drafter, shape, num_steps)

    def _draft(self, seat: int, num_tokens: int, most: int) -> int:
        """Write a draft behind the first `num_tokens` of a sequence; return its length."""
        if most < 1:
            return 0
        tokens = self.sequences.tokens[seat]
        found = look_up(tokens[:num_tokens], most, *self._lookup)
        tokens[num_tokens : num_tokens + len(found)] = found
        return len(found)

    def _step_ends(self, work: Work) -> tuple[int, int]:
        """Return how long the step took, and how much of it is scheduling overhead."""
        shape, verified = work.shape, work.shape.verification()
        duration_ns, overhead_ns = self.clock.step_ends(verified)
        if self._modelled_drafter is not None and self.clock.mode == "modelled":
            batch = work.decodes
            assert isinstance(batch, SpeculativeBatch)
            rows = batch.drafting_rows(1)[0] if shape.num_decodes else []
            duration_ns += self._modelled_drafter.step_ns(verified, shape.draft_tokens, rows)
        return duration_ns, overhead_ns

    def _keep(self, work: Work, rows: Rows, tokens: Int64) -> list[RequestState]:
        """Take the tokens up to the first that was drafted wrong, and draft anew behind them."""
        sequences, batch = self.sequences, work.decodes
        assert isinstance(batch, SpeculativeBatch)
        finished: list[RequestState] = []
        at = 0
        for state in rows.states:
            assert isinstance(state, SpeculatingState)
            decodes = state in batch
            count = state.decode_tokens if decodes else 1
            seat, index = int(rows.seats[at]), int(rows.indices[at])
            sampled = tokens[rows.picks[at : at + count]]
            at += count
            sequence = sequences.tokens[seat]
            wrong = np.flatnonzero(sampled[:-1] != sequence[index : index + count - 1])
            accepted = int(wrong[0]) if len(wrong) else count - 1
            left = int(sequences.last_index[seat]) - index + 1
            came = min(accepted + 1, left)
            sequence[index : index + came] = sampled[:came]
            ends = came == left
            if ends:
                finished.append(state)
            if not decodes:
                if index > state.request.prompt_tokens:  # computed again: its draft was lost
                    self.drafts[state.id].append((self._drafted.pop(state.id, 0), 0))
                continue
            self.drafts[state.id].append((self._drafted[state.id], accepted))
            following = None
            if not ends:
                most = most_drafts(self._config, state, index + came - 1)
                following = self._drafted[state.id] = self._draft(seat, index + came, most)
            batch.settle(state, came, accepted, following)
        return finished
