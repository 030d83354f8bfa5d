"""Shortest remaining time first, preemptive, by predicted output length."""

from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("srtf")
class ShortestRemainingTimeFirst(Ranked):
    """Serve the requests with the fewest predicted tokens left, taking memory from the others.

    Optimises mean latency, given exact lengths and free preemption. Needs a prediction of the
    output in tokens (a mere rank will not do). Long requests starve under sustained load. An
    answer that outlives its prediction ranks ever better, as if about to end, and preemption is
    paid for in recomputation or swapping, which can cost more than it gains.

    A decision is O(n log n) in the running batch. Skip-ahead is honest because remaining time
    falls for those who decode and stays for all others; see `Ranked`.
    """

    source = "Schrage 1968; the mode `srtf` of vllm-ltr (Fu et al. 2024)"
    needs_prediction = True
    starves = True

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order by predicted tokens not generated yet."""
        return predicted_tokens(state) - state.num_output_tokens

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise all: no key gets worse by itself."""
        return FOREVER, FOREVER
