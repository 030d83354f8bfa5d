"""InferCept: keep the memory of an intercepted request while that wastes less than recomputing."""

from schedlab.policies.registry import register
from schedlab.policies.retaining import Retaining
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.request import RequestState


@register("infercept")
class InferCept(Retaining):
    """Serve sessions first come, first served; keep memory as long as that wastes the least.

    Optimises throughput where answers call tools that are soon done. While a tool works, keeping
    the memory of a context of C tokens wastes C tokens' memory for as long. Throwing it away wastes
    that of all others who run for the time of computing C again, chunk by chunk, and that of C for
    half of this time, since it comes back bit by bit. How long the tool works is not known: as the
    paper estimates it, as long again as it has until now. So memory is kept until both wastes are
    equal, ``recomputing * (1 / 2 + others / C)``, and then given up. When that time has come it is
    reckoned anew, with the others of then. What is given up may still be found in the prefix cache.
    Needs prefix caching (without it, or with async scheduling, nothing is kept), and the step time
    of prompts.

    The paper's third choice, to swap, is there where lower tiers are (``engine.kv_offload``): what
    is given up is found in them. Loading it back wastes its own memory for as long and nobody
    else's, since copies run beside the steps, so it is kept no longer than that takes.

    Other than in the paper, nothing is decided anew in every step but when its time has come, so
    that fewer others shorten no time; a prompt is chunked by the budget of a step, not by what is
    left of it up to a point of saturation, and copies queue on their link without a budget of their
    own; memory of answers for a user is given up at once, since nobody knows whether he asks again
    (there a request says so). The authors' code is told how long each tool will work, charges the
    others only what a chunk adds to a step, gives what is to be computed again up only when memory
    is needed if that would waste the most, and lets who comes back to kept memory run before the
    preempted.

    Needs to know which session a request belongs to. Nobody starves, but a long session holds up
    all that began behind it. See `Retaining` for the order and for what gives way. Skip-ahead is
    honest because the engine ends a segment where memory stops being kept, and free blocks only
    fall until then.
    """

    source = "InferCept, Abhyankar et al., ICML 2024 (arXiv:2402.01869), section 4.3: waste"

    def keeps_until(self, state: RequestState, now_ns: int) -> int:
        """Return when keeping will have wasted as much as recomputing or loading would."""
        if state.tool is None:
            return now_ns
        assert self._view is not None
        own = state.num_tokens
        others = sum([other.num_computed_tokens for other in self._view.running])
        recomputing_ns = int(self.recompute_ns(state) * (own / 2 + others) / own)
        return state.last_token_ns + min(recomputing_ns, self.reload_ns(state))

    def keeps_longer(self, state: RequestState, now_ns: int, is_awaited: bool) -> int:
        """Decide anew, by who runs now."""
        return FOREVER if is_awaited else self.keeps_until(state, now_ns)
