"""The batch of a step while it is formed, as its time depends on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState

_STEPS_AHEAD = 32
_STRIDES = 4


class StepLoad:
    """Adds up what a step computes, and asks how much more of it ends within a time.

    Times are those of `EngineView.estimate_step_ns`, without the scheduling overhead of a queue. A
    larger batch is taken to need no less time; a calibrated curve that falls somewhere may stop a
    search early.

    Parameters
    ----------
    view : EngineView
        Who is asked.
    """

    def __init__(self, view: EngineView) -> None:
        self._view = view
        self._num_decodes = 0
        self._sum_tokens = 0
        self._longest_tokens = 0
        self._shortest_tokens = FOREVER
        self._chunks: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed yet."""
        return not (self._num_decodes or self._chunks)

    def add(self, state: RequestState, tokens: int) -> None:
        """Count the tokens that a request was granted: a chunk, or one if it decodes."""
        context = state.num_computed_tokens
        if not state.is_decoding:
            self._chunks = (*self._chunks, (tokens, context))
            return
        self._num_decodes += 1
        self._sum_tokens += context
        self._longest_tokens = max(self._longest_tokens, context)
        self._shortest_tokens = min(self._shortest_tokens, context)

    def with_decodes(self, states: Collection[RequestState]) -> StepLoad:
        """Return this load and a token of each of some decodes."""
        num_decodes = self._num_decodes + len(states)
        if states and num_decodes == self._view.num_decodes:
            return self.with_all_decodes()
        load = StepLoad(self._view)
        load._chunks = self._chunks
        load._num_decodes = num_decodes
        contexts = [state.num_computed_tokens for state in states]
        load._sum_tokens = self._sum_tokens + sum(contexts)
        load._longest_tokens = max(self._longest_tokens, max(contexts, default=0))
        load._shortest_tokens = min(self._shortest_tokens, min(contexts, default=FOREVER))
        return load

    def with_all_decodes(self) -> StepLoad:
        """Return this load and a token of each decode that is not in it; there must be one."""
        load, view = StepLoad(self._view), self._view
        load._chunks = self._chunks
        load._num_decodes = view.num_decodes
        contexts = view.decode_contexts()
        load._sum_tokens, load._longest_tokens, load._shortest_tokens = contexts
        return load

    def is_within(self, budget_ns: float) -> bool:
        """Whether the step ends within the time."""
        return self.is_empty or self._ns() <= budget_ns

    def decodes_within(self, states: Sequence[RequestState], budget_ns: float) -> int:
        """Return how many of the first `states` may decode as well."""
        contexts = [state.num_computed_tokens for state in states]
        return _most(len(contexts), lambda n: self._ns(contexts[:n]), budget_ns)

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return self._num_decodes + sum([tokens for tokens, _ in self._chunks])

    def is_full(self, budget_ns: float, decodes: bool = True, prompts: bool = True) -> bool:
        """Whether surely no decode may be computed as well, nor a prompt, were it one token.

        Of what is said not to be left nothing is asked.
        """
        view = self._view
        if self.is_empty or not view.prices_never_fall:
            return False
        if decodes and self._ns((0,)) <= budget_ns:
            return False
        return not prompts or view.estimate_step_ns(self._shape().with_chunk(1, 0)) > budget_ns

    def chunk_within(self, state: RequestState, most: int, budget_ns: float, guess: int = 0) -> int:
        """Return how many tokens of a prompt, up to `most`, may be computed as well.

        Where so many as are guessed, and no more, they are found soonest.
        """
        if budget_ns >= FOREVER or most < 1:
            return max(most, 0)
        view = self._view
        price_ns = view.chunk_pricer(self._shape(), state.num_computed_tokens)
        return _most(most, price_ns, budget_ns, view.prices_never_fall, guess)

    def steps_within(self, budget_ns: float) -> int:
        """Return for how many steps of these decodes alone each ends within the time.

        Every one of them is priced, up to a few dozen; none of a step with chunks.
        """
        if self._chunks or not self._num_decodes:
            return 0
        return _most(_STEPS_AHEAD, lambda n: self._ns(num_steps=n), budget_ns)

    def _ns(self, contexts: Sequence[int] = (), num_steps: int = 1) -> int:
        return self._view.estimate_step_ns(self._shape(contexts), num_steps)

    def _shape(self, contexts: Sequence[int] = ()) -> BatchShape:
        """Return the shape of the step, with decodes of these contexts as well."""
        num_decodes = self._num_decodes + len(contexts)
        longest, shortest = self._longest_tokens, self._shortest_tokens
        if contexts:
            longest, shortest = max(longest, *contexts), min(shortest, *contexts)
        return BatchShape(
            num_decodes,
            self._sum_tokens + sum(contexts),
            longest,
            self._chunks,
            rows_sampled=num_decodes + len(self._chunks),
            decode_context_min_tokens=shortest if num_decodes else 0,
        )


def _most(
    limit: int,
    price_ns: Callable[[int], int],
    budget_ns: float,
    never_falls: bool = False,
    guess: int = 0,
) -> int:
    """Return the largest number up to `limit` that ends in time, as all below it are taken to."""
    if limit < 1 or price_ns(limit) <= budget_ns:
        return max(limit, 0)
    least, too_many = 0, limit
    if never_falls and 0 < guess < limit:
        least, too_many = _about(guess, limit, price_ns, budget_ns)
    if never_falls and not least and too_many > 1 and price_ns(1) > budget_ns:
        return 0
    while too_many - least > 1:
        middle = (least + too_many) // 2
        if price_ns(middle) <= budget_ns:
            least = middle
        else:
            too_many = middle
    return least


def _about(
    guess: int, limit: int, price_ns: Callable[[int], int], budget_ns: float
) -> tuple[int, int]:
    """Return a number that ends in time, or 0, and one that does not, close to a guess if it is."""
    if price_ns(guess) <= budget_ns:
        least, stride = guess, 1
        while least + stride < limit:
            if price_ns(least + stride) > budget_ns:
                return least, least + stride
            least += stride
            stride *= _STRIDES
        return least, limit
    too_many, stride = guess, 1
    while too_many - stride > 0:
        if price_ns(too_many - stride) <= budget_ns:
            return too_many - stride, too_many
        too_many -= stride
        stride *= _STRIDES
    return 0, too_many
