"""The batch of a step while it is formed, as its time depends on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState

Chunks = tuple[tuple[int, int], ...]
"""New and cached tokens of each."""

STEPS_AHEAD = 32
"""For how many steps `StepLoad.steps_within` looks ahead."""
_STRIDES = 4
_HEADROOM = 4
_PROMPT_STRIDE = 256
_CONTEXT_STRIDE = 1024


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
        self._chunks: Chunks = ()
        self._chunk_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed yet."""
        return not (self._num_decodes or self._chunks)

    def add(self, state: RequestState, tokens: int) -> None:
        """Count the tokens that a request was granted: a chunk, or one if it decodes."""
        context = state.num_computed_tokens
        if not state.is_decoding:
            self._chunks = (*self._chunks, (tokens, context))
            self._chunk_tokens += tokens
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
        load._chunks, load._chunk_tokens = self._chunks, self._chunk_tokens
        load._num_decodes = num_decodes
        contexts = self._view.computed_tokens(states)
        load._sum_tokens = self._sum_tokens + sum(contexts)
        load._longest_tokens = max(self._longest_tokens, max(contexts, default=0))
        load._shortest_tokens = min(self._shortest_tokens, min(contexts, default=FOREVER))
        return load

    def with_all_decodes(self, but: Collection[RequestState] = ()) -> StepLoad:
        """Return this load and a token of each decode that is not in it, but of some.

        There must be another, and none of these be in it.
        """
        load, view = StepLoad(self._view), self._view
        load._chunks, load._chunk_tokens = self._chunks, self._chunk_tokens
        load._num_decodes = view.num_decodes - len(but)
        sum_tokens, longest_tokens, shortest_tokens = view.decode_contexts()
        if but:
            contexts = view.computed_tokens(but)
            sum_tokens -= sum(contexts)
            if max(contexts) == longest_tokens or min(contexts) == shortest_tokens:
                left_out = set(but)
                rest = view.computed_tokens([s for s in view.decoding if s not in left_out])
                longest_tokens, shortest_tokens = max(rest), min(rest)
        load._sum_tokens = sum_tokens
        load._longest_tokens, load._shortest_tokens = longest_tokens, shortest_tokens
        return load

    def is_within(self, budget_ns: float) -> bool:
        """Whether the step ends within the time."""
        return self.is_empty or self._ns() <= budget_ns

    def decodes_within(self, states: Sequence[RequestState], budget_ns: float) -> int:
        """Return how many of the first `states` may decode as well."""
        contexts = self._view.computed_tokens(states)
        return _most(len(contexts), lambda n: self._ns(contexts[:n]), budget_ns)

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return self._num_decodes + self._chunk_tokens

    def is_full(self, budget_ns: float, decodes: bool = True, prompts: bool = True) -> bool:
        """Whether surely no decode may be computed as well, nor a prompt, were it one token.

        Of what is said not to be left nothing is asked.
        """
        view = self._view
        if self.is_empty or not view.prices_never_fall:
            return False
        if decodes and self._ns((0,)) <= budget_ns:
            return False
        return not prompts or self._ns(chunks=(*self._chunks, (1, 0))) > budget_ns

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
        return _most(STEPS_AHEAD, lambda n: self._ns(num_steps=n), budget_ns)

    def _ns(
        self, contexts: Sequence[int] = (), num_steps: int = 1, chunks: Chunks | None = None
    ) -> int:
        return self._view.estimate_step_ns(self._shape(contexts, chunks), num_steps)

    def _shape(self, contexts: Sequence[int] = (), chunks: Chunks | None = None) -> BatchShape:
        """Return the shape of the step, with decodes of these contexts as well."""
        if chunks is None:
            chunks = self._chunks
        num_decodes = self._num_decodes + len(contexts)
        longest, shortest = self._longest_tokens, self._shortest_tokens
        if contexts:
            longest, shortest = max(longest, *contexts), min(shortest, *contexts)
        return BatchShape(
            num_decodes,
            self._sum_tokens + sum(contexts),
            longest,
            chunks,
            rows_sampled=num_decodes + len(chunks),
            decode_context_min_tokens=shortest if num_decodes else 0,
        )


class Ceiling:
    """The largest step of decodes that was found to end within some time.

    Where prices never fall none with fewer decodes and tokens takes longer, so that most steps need
    not be priced.
    """

    __slots__ = ("_longest_tokens", "_ns", "_num_decodes", "_sum_tokens")

    def __init__(self) -> None:
        self._num_decodes = self._sum_tokens = self._longest_tokens = 0
        self._ns = FOREVER

    def is_above(self, load: StepLoad, budget_ns: float, num_steps: int = 1) -> bool:
        """Whether surely each of the next steps of a load of decodes alone ends within the time.

        If not, they may all the same.
        """
        view = load._view
        if not view.prices_never_fall:
            return False
        num_decodes, ahead = load._num_decodes, num_steps - 1
        sum_tokens = load._sum_tokens + num_decodes * ahead
        longest_tokens = load._longest_tokens + ahead
        if (
            num_decodes <= self._num_decodes
            and sum_tokens <= self._sum_tokens
            and longest_tokens <= self._longest_tokens
            and self._ns <= budget_ns
        ):
            return True
        num_decodes += num_decodes // _HEADROOM + 1
        sum_tokens += sum_tokens // _HEADROOM
        longest_tokens += longest_tokens // _HEADROOM
        shape = BatchShape(
            num_decodes,
            sum_tokens,
            longest_tokens,
            rows_sampled=num_decodes,
            decode_context_min_tokens=load._shortest_tokens + ahead,
        )
        ns = view.estimate_step_ns(shape)
        if ns > budget_ns:
            return False
        self._num_decodes, self._sum_tokens = num_decodes, sum_tokens
        self._longest_tokens, self._ns = longest_tokens, ns
        return True


class PromptCeilings:
    """Steps with one prompt that were found to end within some time, one for each length of it.

    Where prices never fall none with a shorter prompt, or fewer decodes and tokens, takes longer,
    so that most steps need not be priced.
    """

    __slots__ = ("_of_lengths",)

    def __init__(self) -> None:
        # By length in strides: decodes, sum of their contexts, longest of these, context of the
        # prompt, and the time.
        self._of_lengths: dict[int, tuple[int, int, int, int, int]] = {}

    def is_above(self, load: StepLoad, state: RequestState, tokens: int, budget_ns: float) -> bool:
        """Whether surely a step of decodes and so many tokens of a prompt ends within the time.

        If not, it may all the same.
        """
        view = load._view
        if load._chunks or budget_ns >= FOREVER or not view.prices_never_fall:
            return False
        context_tokens = state.num_computed_tokens
        length = -(-tokens // _PROMPT_STRIDE)
        num_decodes, sum_tokens = load._num_decodes, load._sum_tokens
        longest_tokens = load._longest_tokens
        found = self._of_lengths.get(length)
        if (
            found is None
            or num_decodes > found[0]
            or sum_tokens > found[1]
            or longest_tokens > found[2]
            or context_tokens > found[3]
        ):
            num_decodes += num_decodes // _HEADROOM + 1
            sum_tokens += sum_tokens // _HEADROOM
            longest_tokens += longest_tokens // _HEADROOM
            context_tokens = -(-context_tokens // _CONTEXT_STRIDE) * _CONTEXT_STRIDE
            shape = BatchShape(
                num_decodes,
                sum_tokens,
                longest_tokens,
                ((length * _PROMPT_STRIDE, context_tokens),),
                rows_sampled=num_decodes + 1,
                decode_context_min_tokens=load._shortest_tokens if load._num_decodes else 0,
            )
            ns = view.estimate_step_ns(shape)
            found = num_decodes, sum_tokens, longest_tokens, context_tokens, ns
            self._of_lengths[length] = found
        return found[4] <= budget_ns


def _most(
    limit: int,
    price_ns: Callable[[int], int],
    budget_ns: float,
    never_falls: bool = False,
    guess: int = 0,
) -> int:
    """Return the largest number up to `limit` that ends in time, as all below it are taken to."""
    if limit < 1:
        return 0
    least, too_many = 0, limit
    if never_falls and 0 < guess < limit:
        if price_ns(guess) > budget_ns:
            least, too_many = _below(guess, price_ns, budget_ns)
        elif price_ns(guess + 1) > budget_ns:
            return guess
        elif price_ns(limit) <= budget_ns:
            return limit
        else:
            least, too_many = _above(guess + 1, limit, price_ns, budget_ns)
    elif price_ns(limit) <= budget_ns:
        return limit
    if never_falls and not least and too_many > 1 and price_ns(1) > budget_ns:
        return 0
    while too_many - least > 1:
        middle = (least + too_many) // 2
        if price_ns(middle) <= budget_ns:
            least = middle
        else:
            too_many = middle
    return least


def _above(
    least: int, limit: int, price_ns: Callable[[int], int], budget_ns: float
) -> tuple[int, int]:
    """Return a number that ends in time and one that does not, the next ones above if they are."""
    stride = 1
    while least + stride < limit:
        if price_ns(least + stride) > budget_ns:
            return least, least + stride
        least += stride
        stride *= _STRIDES
    return least, limit


def _below(too_many: int, price_ns: Callable[[int], int], budget_ns: float) -> tuple[int, int]:
    """Return a number that ends in time, or 0, and one that does not, the next ones below."""
    stride = 1
    while too_many - stride > 0:
        if price_ns(too_many - stride) <= budget_ns:
            return too_many - stride, too_many
        too_many -= stride
        stride *= _STRIDES
    return 0, too_many
