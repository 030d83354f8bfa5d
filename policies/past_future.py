"""Past-Future: admission by the future peak of memory, from lengths seen in the past."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.future_memory import FuturePeak
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

_GOLDEN = 0.6180339887498949


@register("past_future")
class PastFuture(ContinuousBatching):
    """Admit the head of the queue if memory will suffice until all running requests end.

    Optimises the batch size without evictions: between the conservative reservation of declared
    ends and the aggressive admission of what fits now. Needs no prediction of a single request,
    only that lengths to come are distributed like the last `window` ones; it errs when the mix
    changes. First come, first served, so nobody starves.

    A request that has generated g tokens is assumed to end at a length drawn from the past ones
    above g, or at its declared maximum if there are none. The draw is the quantile
    ``frac(0.618... * (id + 1))``, fixed for each request and evenly spread over all, where the
    original draws anew. Should memory run out all the same, the latest admission is preempted.
    The unused end of a request's last block counts as used.

    While someone waits who could have a seat, a decision costs O(n log n) in the running batch.
    Skip-ahead is honest because such a step promises nothing: assumed lengths change as answers
    grow.

    Parameters
    ----------
    window : int
        How many finished requests make up the past.
    reserved : float
        Share of the memory that admission keeps free of the plan, in [0, 1).
    """

    source = "Past-Future scheduler, Gong et al., ASPLOS 2025 (arXiv:2507.10150), LightLLM"

    def __init__(self, window: int = 1000, reserved: float = 0.03) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if not 0.0 <= reserved < 1.0:
            raise ValueError(f"reserved must be in [0, 1), got {reserved}")
        self.window = window
        self.reserved = reserved
        self._past: deque[int] = deque()
        self._lengths: list[int] = []

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Add the length to the past."""
        self._past.append(state.num_output_tokens)
        insort(self._lengths, state.num_output_tokens)
        if len(self._past) > self.window:
            del self._lengths[bisect_left(self._lengths, self._past.popleft())]

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise nothing where someone could be admitted: assumed lengths change."""
        return 1, FOREVER

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Yield in order of arrival while the future peak stays within memory."""
        peak = FuturePeak()
        for state in view.running:
            peak.add(*self._need(state, view))
        capacity = view.num_blocks * view.config.block_size * (1.0 - self.reserved)
        alone = not view.running
        for state in view.waiting:
            need = self._need(state, view)
            if not alone and peak.tokens_with(*need) > capacity:
                return
            alone = False
            peak.add(*need)
            yield state

    def _need(self, state: RequestState, view: EngineView) -> tuple[int, float]:
        config, request, done = view.config, state.request, state.num_output_tokens
        most = min(request.max_tokens, config.max_model_len - request.prompt_tokens)
        longer = bisect_right(self._lengths, done)
        if longer < len(self._lengths):
            quantile = (request.id + 1) * _GOLDEN % 1.0
            most = min(most, self._lengths[longer + int(quantile * (len(self._lengths) - longer))])
        return state.num_tokens + config.block_size - 1, max(most - done, 1)
