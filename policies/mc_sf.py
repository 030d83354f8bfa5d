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
    prediction is preempted; the paper's theory has no under-prediction, its benchmarks clear the
    whole batch or a part drawn by chance. The unused end of a request's last block counts as used,
    and who outlives its prediction has a token to come, where the paper would count it no more.

    The paper computes a prompt in one round, whatever its length. Here prompts share a budget: who
    is behind others takes more steps, its answer ends so much later, and the peak is looked for
    then. The steps are told from the decodes there are now, and without
    `long_prefill_token_threshold`.

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
        capacity = view.capacity_tokens * (1.0 - self.margin)
        peak = FuturePeak()
        residents = view.residents
        num_decodes = sum([state.num_uncomputed_tokens == 1 for state in residents])
        ahead = 0
        for state in residents:
            if state.num_uncomputed_tokens == 1:
                peak.add(*self._future(state, 0, view))
            else:
                ahead += state.num_uncomputed_tokens
                peak.add(*self._future(state, self._late_steps(ahead, num_decodes, view), view))
        alone = not residents
        for state in builder.undeferred(view.waiting):
            ahead += state.num_uncomputed_tokens
            future = self._future(state, self._late_steps(ahead, num_decodes, view), view)
            if not alone and not peak.stays_within(*future, capacity):
                return
            alone = False
            peak.add(*future)
            yield state

    def _late_steps(self, prompt_tokens: int, num_decodes: int, view: EngineView) -> int:
        """Return in how many steps more than one so many tokens of prompts are computed."""
        per_step = max(view.config.max_num_batched_tokens - num_decodes, 1)
        return max(-(-prompt_tokens // per_step) - 1, 0)

    def _future(self, state: RequestState, late_steps: int, view: EngineView) -> tuple[int, float]:
        """Return what a request holds now and its steps to come, of a line to its last token.

        While its prompt is computed it holds no more than the line says.
        """
        remaining = max(predicted_tokens(state) - state.num_output_tokens, 1.0)
        return state.num_tokens + view.config.block_size - 1 - late_steps, remaining + late_steps
