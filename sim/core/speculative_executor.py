"""A simulated GPU that verifies drafts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.executor import Executor, SimExecutor
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.track import Outcome, SpeculatingState, look_ahead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.request import Request, RequestState


class Acceptance(Protocol):
    """What becomes of drafts, request by request, whatever the schedule."""

    def outcome(self, request: Request, output_tokens: int) -> Outcome:
        """Return what becomes of the drafts of a request with an answer of so many tokens."""


class Drafter(Protocol):
    """What making drafts takes.

    Attributes
    ----------
    reads_contexts : bool
        Whether it depends on contexts, and so on who has how many tokens; else on rows alone.
    """

    reads_contexts: bool

    def step_ns(
        self, verified: BatchShape, drafts: int, rows: list[int], met_tokens: Sequence[int] = ()
    ) -> int:
        """Return what a step spends on drafts.

        Parameters
        ----------
        verified : BatchShape
            The step, as it is priced (`BatchShape.verification`).
        drafts : int
            Drafted tokens that it verifies.
        rows : list of int
            Requests for which a 1st, 2nd, .. token is drafted.
        met_tokens : sequence of int
            New tokens in each pass of all engines that share its experts, if any do.
        """

    def pass_tokens(self, verified: BatchShape, rows: list[int]) -> list[int]:
        """Return the new tokens of each pass through the model that drafts; none without one."""

    def uneven_ns(self, steps: UnevenSteps, drafts: int, rows: list[list[int]]) -> list[int]:
        """Return what each of some steps spends on drafts; `drafts` of them all, `rows` of each."""


class SpeculativeExecutor(SimExecutor):
    """A GPU whose decode steps verify drafts, and make those of the next step.

    Parameters
    ----------
    pricing : Pricing
        What the steps of the model take.
    config : EngineConfig
        The limits of the engine.
    acceptance : Acceptance
        What becomes of drafts.
    drafter : Drafter
        What they take.

    Notes
    -----
    The time of a step is that of its verification (`BatchShape.verification`), and that of drafting
    as many tokens as it verifies. Steps are priced one by one: contexts grow unevenly.
    """

    def __init__(
        self, pricing: Pricing, config: EngineConfig, acceptance: Acceptance, drafter: Drafter
    ) -> None:
        super().__init__(pricing)
        self.writes_late = False  # drafts are priced with them
        self.prices_never_fall = False
        self._config = config
        self._acceptance = acceptance
        self._drafter = drafter
        self._drafting_ns = drafter.step_ns
        self._drafts_read_contexts = drafter.reads_contexts
        self._outcomes: dict[int, Outcome] = {}
        # The first of the steps priced last, and all of them if there are several.
        self._first = BatchShape(0, 0, 0)
        self._drafts = 0
        self._decodes: SpeculativeBatch | None = None
        self._priced: UnevenSteps | None = None

    def add(self, request: Request, output_tokens: int) -> None:
        """Learn of a request and its true output length."""
        super().add(request, output_tokens)
        length = min(output_tokens, request.max_tokens)
        self._outcomes[request.id] = self._acceptance.outcome(request, length)

    def remove(self, state: RequestState) -> None:
        """Forget a request that finished or was rejected."""
        super().remove(state)
        if state.id in self._outcomes:
            del self._outcomes[state.id]

    def look_ahead(self, state: RequestState) -> None:
        """Set the track of a request that is in no batch."""
        assert isinstance(state, SpeculatingState)
        outcome, length = (
            self._outcomes[state.id],
            state.num_output_tokens + self._tokens_left(state),
        )
        state.track = look_ahead(self._config, state, outcome, length)

    def joined(self, states: Collection[RequestState], decodes: DecodeBatch) -> None:
        """Schedule the ends of requests on the clock of the decode batch, by their tracks."""
        for state in states:
            assert isinstance(state, SpeculatingState)
            track = state.track
            assert track is not None
            self._end_at(state, decodes.steps + len(track.bursts) - track.first)

    def _durations_ns(self, shape: BatchShape, decodes: DecodeBatch, num_steps: int) -> list[int]:
        assert isinstance(decodes, SpeculativeBatch)
        drafts, pricing = shape.draft_tokens, self.pricing
        self._first = first = shape.verification()
        self._drafts, self._decodes = drafts, decodes
        if num_steps == 1:
            self._priced = None
            return [pricing.step_ns(first, 1)[0] + self._drafting_ns(first, drafts, self._rows())]
        self._priced = steps = decodes.uneven(first, num_steps)
        verifying_ns = pricing.uneven_ns(steps)
        if self._drafts_read_contexts or not decodes.drafts_alike():
            drafting_ns = self._drafter.uneven_ns(steps, drafts, decodes.drafting_rows(num_steps))
            return [verifying_ns[i] + drafting_ns[i] for i in range(num_steps)]
        each_ns = self._drafting_ns(first, drafts, decodes.rows_next_step)
        return [step_ns + each_ns for step_ns in verifying_ns]

    def _count_outside(self, shape: BatchShape, num_steps: int) -> None:
        for one in self._priced_steps()[:num_steps]:
            self.pricing.carried_out(one)

    def cut(self, num_steps: int) -> None:
        """Count the steps behind the first `num_steps` as not executed."""
        if self.pricing.can_be_outside:
            for one in self._priced_steps()[num_steps : self._last_num_steps]:
                self.pricing.take_back(one)
        self._num_steps -= self._last_num_steps - num_steps
        self._last_num_steps = num_steps

    def _priced_steps(self) -> list[BatchShape]:
        return [self._first] if self._priced is None else self._priced.shapes()

    def pass_tokens(self, more_tokens: int = 0) -> list[int]:
        """Return the new tokens of each pass: the model's, then those of its drafter."""
        first = self._padded(more_tokens)
        return [first.num_new_tokens, *self._drafter.pass_tokens(first, self._rows())]

    def idle_tokens(self) -> int:
        """Count the tokens of a batch for nobody: a request with all its drafts."""
        return 1 + self._config.num_speculative_tokens

    def idle_pass_tokens(self, num_tokens: int) -> list[int]:
        """Return the new tokens of each pass of a batch for nobody, its drafter's among them."""
        batch = BatchShape(1, 0, 0, padding_tokens=num_tokens - 1)
        rows = [1] * self._config.num_speculative_tokens
        return [num_tokens, *self._drafter.pass_tokens(batch, rows)]

    def _padded(self, more_tokens: int) -> BatchShape:
        """Return the first of the steps priced last, with more tokens for nobody."""
        first = self._first
        if not more_tokens:
            return first
        return replace(first, padding_tokens=first.padding_tokens + more_tokens)

    def _rows(self) -> list[int]:
        """Return for how many requests a 1st, 2nd, .. token is drafted in the step priced last."""
        decodes = self._decodes
        return [] if decodes is None or not self._first.num_decodes else decodes.rows_next_step

    def longer_among_ns(self, met_tokens: Sequence[int], more_tokens: int = 0) -> int:
        """Return how much longer the step executed last takes where experts are shared."""
        first, drafts, rows = self._first, self._drafts, self._rows()
        step_ns, drafter = self.pricing.step_ns, self._drafter
        padded = self._padded(more_tokens)
        among = replace(padded, gathered_tokens=met_tokens[0])
        self.pricing.meet(first, among)
        longer_ns = step_ns(among, 1)[0] - step_ns(first, 1)[0]
        longer_ns += drafter.step_ns(padded, drafts, rows, met_tokens[1:])
        return longer_ns - drafter.step_ns(first, drafts, rows)

    def estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Price a step, or the longest of so many like it; its decodes share its drafts evenly."""
        return estimate_with_drafts(self.pricing.estimate_ns, self._drafter, shape, num_steps)

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Return what `estimate_step_ns` says of a step with one more prefill, by its tokens."""
        return Executor.chunk_pricer(self, shape, context_tokens)


def estimate_with_drafts(
    estimate_ns: Callable[[BatchShape, int], int],
    drafter: Drafter | None,
    shape: BatchShape,
    num_steps: int,
) -> int:
    """Price a step, or the longest of so many like it, for policies; both backends ask it.

    Parameters
    ----------
    estimate_ns : callable
        Prices steps of the model.
    drafter : Drafter or None
        What drafting takes; None where that is nothing.
    shape : BatchShape
        The step; its decodes share its drafts evenly.
    num_steps : int
        How many.
    """
    verified = shape.verification()
    verifying_ns = estimate_ns(verified, num_steps)
    if drafter is None:
        return verifying_ns
    each = -(-shape.draft_tokens // shape.num_decodes) if shape.num_decodes else 0
    rows = [shape.num_decodes] * each
    return verifying_ns + drafter.step_ns(verified, shape.draft_tokens, rows)
