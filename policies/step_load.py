"""The batch of a step while it is formed, as its time depends on it."""

from collections.abc import Callable, Sequence

from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState

_STEPS_AHEAD = 32


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
        self._contexts: list[int] = []
        self._chunks: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed yet."""
        return not self._contexts and not self._chunks

    def add(self, state: RequestState, tokens: int) -> None:
        """Count the tokens that a request was granted: a chunk, or one if it decodes."""
        if state.is_decoding:
            self._contexts.append(state.num_computed_tokens)
        else:
            self._chunks.append((tokens, state.num_computed_tokens))

    def decodes_within(self, states: Sequence[RequestState], budget_ns: float) -> int:
        """Return how many of the first `states` may decode as well."""
        contexts = [state.num_computed_tokens for state in states]
        return _most(len(contexts), lambda n: self._ns(contexts[:n], ()) <= budget_ns)

    def chunk_within(self, state: RequestState, most: int, budget_ns: float) -> int:
        """Return how many tokens of a prompt, up to `most`, may be computed as well."""
        context = state.num_computed_tokens
        return _most(most, lambda n: self._ns((), ((n, context),)) <= budget_ns)

    def steps_within(self, budget_ns: float) -> int:
        """Return for how many steps of these decodes alone each ends within the time, at least 1.

        Every one of them is priced, up to a few dozen.
        """
        steps = 1
        while steps < _STEPS_AHEAD and self._ns((), (), grown=steps) <= budget_ns:
            steps += 1
        return steps

    def _ns(
        self, contexts: Sequence[int], chunks: tuple[tuple[int, int], ...], grown: int = 0
    ) -> int:
        every = [*self._contexts, *contexts]
        both = (*self._chunks, *chunks)
        shape = BatchShape(
            len(every),
            sum(every) + grown * len(every),
            max(every, default=-grown) + grown,
            both,
            rows_sampled=len(every) + len(both),
            decode_context_min_tokens=min(every, default=-grown) + grown,
        )
        return self._view.estimate_step_ns(shape)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` that fits, all below it taken to fit as well."""
    if limit < 1 or fits(limit):
        return max(limit, 0)
    least, too_many = 0, limit
    while too_many - least > 1:
        middle = (least + too_many) // 2
        if fits(middle):
            least = middle
        else:
            too_many = middle
    return least
