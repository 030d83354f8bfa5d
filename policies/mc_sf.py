"""MC-SF: memory-constrained shortest first."""

from collections.abc import Iterator, Sequence

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.future_memory import FuturePeak
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("mc_sf")
class MemoryConstrainedShortestFirst(ContinuousBatching):
    """Admit in ascending predicted length, as long as memory suffices at every predicted end.

    Optimises total latency under a memory limit without preemption; close to the hindsight
    optimum when predictions are exact. Needs a prediction of the output in tokens. Long requests
    starve under sustained load, and with mixed prompt lengths shortest-output-first can be far
    from optimal; without `shortest_first`, which is the paper's MC-Benchmark, nobody starves.
    Under-prediction runs out of memory: over-estimate, or keep a `margin`. Then the longest
    prediction is preempted, where the paper clears the whole batch. The unused end of a request's
    last block counts as used.

    While someone waits who could have a seat, a decision costs O(n log n) in the running batch.
    Skip-ahead is honest because such a step promises nothing: predicted peaks pass with time.

    Parameters
    ----------
    margin : float
        Share of the memory that admission keeps free, in [0, 1).
    shortest_first : bool
        Whether to admit in ascending predicted length, or in order of arrival.
    """

    can_pipeline = False
    source = "Jaillet et al. 2025 (arXiv:2502.07115), algorithm MC-SF"
    needs_prediction = True
    starves = True

    def __init__(self, margin: float = 0.1, shortest_first: bool = True) -> None:
        if not 0.0 <= margin < 1.0:
            raise ValueError(f"margin must be in [0, 1), got {margin}")
        self.margin = margin
        self.shortest_first = shortest_first

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order by predicted output length, or by arrival alone."""
        return predicted_tokens(state) if self.shortest_first else 0.0

    def victim(self, running: Sequence[RequestState], now_ns: int) -> RequestState:
        """Take from the longest prediction."""
        return max(running, key=lambda s: (predicted_tokens(s), s.request.arrival_ns, s.id))

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise nothing where someone could be admitted: predicted peaks pass."""
        return 1, FOREVER

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Yield the shortest first while the predicted peak stays within memory."""
        slack = view.config.block_size - 1
        capacity = view.capacity_tokens * (1.0 - self.margin)
        peak = FuturePeak()
        residents = view.residents
        for state in residents:
            peak.add(state.num_tokens + slack, self._remaining(state))
        alone = not residents
        for state in builder.undeferred(view.waiting):
            need = state.num_tokens + slack, self._remaining(state)
            if not alone and not peak.stays_within(*need, capacity):
                return
            alone = False
            peak.add(*need)
            yield state

    def _remaining(self, state: RequestState) -> float:
        return max(predicted_tokens(state) - state.num_output_tokens, 1.0)
