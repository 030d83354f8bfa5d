"""TRAIL: shortest predicted remaining time, by predictions that are refined while decoding."""

from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RUNS, RequestState


@register("trail")
class Trail(Ranked):
    """Serve the requests with the fewest predicted tokens left; preempt only those who just began.

    Optimises mean latency where preemption costs memory or recomputation. Needs a prediction of
    the output in tokens, and does best with one that is refined while the answer is generated
    (``predictor: refined``); with ``oracle`` it is the paper's Trail+. Between refinements the
    prediction counts down by one a token. A running request gives way to a shorter one only in its
    first `preemptible_share` times its first prediction tokens; from then on it goes before all who
    may still be preempted. Long requests starve under sustained load, and an answer that outlives
    its prediction ranks as if about to end until it is refined.

    Who is preempted loses its seat and memory, as in the authors' SGLang, whose radix tree takes
    the memory so that it goes on from its prefix (``engine.enable_prefix_caching``). The paper's
    vLLM, by notes on it, keeps memory until it is short: with ``engine.max_num_resident`` above
    ``max_num_seqs`` who is preempted pauses like that. A request evicted for want of blocks when
    it could not be preempted any more waits by what it has left (the authors' SGLang puts it last).
    Predictions cost the engine no time: the paper's classifier is a small one.

    A decision is O(n log n) in the running batch. Skip-ahead is honest because what is left only
    falls for those who decode, until the next refinement, which the plan names; see `Ranked`.

    Parameters
    ----------
    preemptible_share : float
        The paper's C: 0 preempts nobody for rank, 1 until the first prediction is used up.
    """

    source = (
        "TRAIL, Shahout et al., ICLR 2025 (arXiv:2410.01035): SPRPT with limited preemption; "
        "harvard-cns/TRAIL-llm-scheduling, sglang.patch"
    )
    needs_prediction = True
    starves = True
    pauses = False
    lazy_ranks = True

    def __init__(self, preemptible_share: float = 0.8) -> None:
        if not preemptible_share >= 0.0:
            raise ValueError(f"preemptible_share must be >= 0, got {preemptible_share}")
        self.preemptible_share = preemptible_share

    def key(self, state: RequestState, now_ns: int) -> tuple[bool, float]:
        """Order those who may not be preempted first, then by predicted tokens left."""
        first, refinement = predicted_tokens(state), state.request.refinement
        refined = None if refinement is None else refinement.total_tokens(state)
        done = state.num_output_tokens
        left = max((first if refined is None else refined) - done, 0.0)
        may_stay = state.status is RUNS and done >= self.preemptible_share * first
        return not may_stay, left

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return the steps until a prediction is refined."""
        refined = ((s.request.refinement, s) for s in view.running)
        left = (each.tokens_until_next(s) for each, s in refined if each is not None)
        return min(left, default=FOREVER), FOREVER
