"""InferCept: keep the memory of an intercepted request while that wastes less than recomputing."""

from schedlab.policies.registry import register
from schedlab.policies.retaining import Retaining
from schedlab.sim.request import RequestState


@register("infercept")
class InferCept(Retaining):
    """Serve sessions first come, first served; keep memory as long as that wastes the least.

    Optimises throughput where answers call tools that are soon done. While a tool works, keeping
    the memory of a context of C tokens wastes C tokens' memory for as long; throwing it away wastes
    that of C, and of all others who run, for the time of computing C again. How long the tool works
    is not known: as the paper's dynamic estimate has it, as long again as it has until now. So
    memory is kept until both wastes are equal, ``recomputing * (1 + others / C)``, and then given
    up. Answers for a user are given up at once. What is given up may still be found in the prefix
    cache. Needs prefix caching (without it, or with async scheduling, nothing is kept), and the
    step time of prompts.

    The paper's third choice, to swap, is there where lower tiers are (``engine.kv_offload``): what
    is given up is found in them. Loading it back wastes its own memory for as long and nobody
    else's, since copies run beside the steps, so it is kept no longer than that takes. The paper
    spreads recomputation over steps by a budget of its own, and swapping by one of the link; here a
    prompt is chunked by the budget of a step alone, and copies queue on their link.

    Needs to know which session a request belongs to. Nobody starves, but a long session holds up
    all that began behind it. See
    `Retaining` for what gives way. Skip-ahead is honest because the engine ends a segment where
    memory stops being kept, and free blocks only fall until then.
    """

    source = "InferCept, Abhyankar et al., ICML 2024 (arXiv:2402.01869), section 4: waste"

    def keeps_until(self, state: RequestState, now_ns: int) -> int:
        """Return when keeping has wasted as much as recomputing or loading would."""
        if state.tool is None:
            return now_ns
        assert self._view is not None
        own = state.num_tokens
        others = sum([other.num_computed_tokens for other in self._view.running])
        recomputing_ns = int(self.recompute_ns(state) * (own + others) / own)
        return now_ns + min(recomputing_ns, self.reload_ns(state))
