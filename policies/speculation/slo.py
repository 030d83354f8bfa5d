"""More tokens for those whose target asks for it."""

from collections.abc import Sequence

from schedlab.policies.speculation.draft_length import (
    DraftLength,
    acceptance_rate,
    expected_tokens,
    require_rate,
)
from schedlab.policies.speculation.registry import register
from schedlab.sim.core.draft_length import Decoding
from schedlab.sim.request import RequestState


@register("slo")
class SloDrafts(DraftLength):
    """Draft for each request what its target of time per output token asks for.

    First each gets, the most urgent first, as few drafts as bring it back to its target in the
    step to come, but no more than somewhat over its even share; then what is left of a budget goes
    to whoever profits most from one more. The more decode, the shorter are the longest drafts.
    AdaServe builds trees of drafts and knows how likely each token is; here a draft is a sequence,
    and all tokens are as likely to be accepted as those so far.

    Parameters
    ----------
    budget_tokens : int
        Tokens to verify in a step, one of each request among them. AdaServe takes what the GPU
        computes in the time that reading the weights takes.
    prior_rate, prior_tokens : float
        As of ``goodput``.
    target_share : float
        Most drafts that a request gets for its target, as a multiple of an even share of the
        budget, rounded down: the paper's ``n_max``, for which it gives no value. 1.2 is that of the
        authors' code.
    min_depth : int
        Drafts that a request may get however many decode, if the budget has them: ``D_min``. The
        authors' experiments set 3 (Qwen 2.5 32B, at most 5) or 4 (Llama 3.1 70B, at most 8).
    depth_offset : int
        Requests added to those that decode where the longest draft is told from their number:
        ``c_1``, which the paper leaves to a search. 0 is ours. Below 0 drafts are longer.

    Notes
    -----
    With a budget of B tokens and n requests, none drafts more than ``d = clip(D_max, D_min,
    floor(B / (n + c_1)) - 1)`` tokens (equation 8), where ``D_max`` is ``num_speculative_tokens``.
    Paper and code differ: the code (flexflow/flexflow-serve, branch specscheduler,
    ``request_manager.cc``) serves targets in the other order, whoever needs fewest tokens first,
    and drafts up to ``min(ceil(B / n), D_max)``. Here order and depth are the paper's;
    ``target_share`` counts drafts, as the code does, without the token that is computed anyway.
    Both choose in every step, and not only when others decode.
    """

    source = "AdaServe, Li et al., arXiv 2501.12162, sections 4.2, 4.3 and 5.2"
    needs_targets = ("tpot_ms",)

    def __init__(
        self,
        budget_tokens: int = 256,
        prior_rate: float = 0.7,
        prior_tokens: float = 20.0,
        target_share: float = 1.2,
        min_depth: int = 3,
        depth_offset: int = 0,
    ) -> None:
        require_rate("prior_rate", prior_rate)
        if budget_tokens < 1:
            raise ValueError(f"budget_tokens must be at least 1, got {budget_tokens}")
        if prior_tokens <= 0:
            raise ValueError(f"prior_tokens must be above 0, got {prior_tokens}")
        if target_share < 0:
            raise ValueError(f"target_share must not be negative, got {target_share}")
        if min_depth < 0:
            raise ValueError(f"min_depth must not be negative, got {min_depth}")
        self.budget_tokens = budget_tokens
        self.prior_rate = prior_rate
        self.prior_tokens = prior_tokens
        self.target_share = target_share
        self.min_depth = min_depth
        self.depth_offset = depth_offset

    def choose(self, decoding: Decoding) -> Sequence[int]:
        """Meet targets first, then spend what is left of the budget."""
        rate = acceptance_rate(decoding, self.prior_rate, self.prior_tokens)
        count, budget = len(decoding.requests), self.budget_tokens
        depth = self._depth(count, decoding.most)
        yields = [expected_tokens(rate, k) for k in range(depth + 1)]
        left = max(budget - count, 0)
        step_ms = decoding.step_ns(min(depth, left // count)) / 1e6
        wanted = [_tokens_due(s, decoding.now_ns, step_ms) for s in decoding.requests]
        most = int(min(depth, budget * self.target_share / count))
        drafts = [0] * count
        for i in sorted(range(count), key=lambda i: -wanted[i]):
            enough = next((k for k in range(most) if yields[k] >= wanted[i]), most)
            drafts[i] = min(enough, left)
            left -= drafts[i]
        # One more token profits most where fewest are drafted: rates are alike.
        for level in range(depth):
            for i in range(count):
                if left and drafts[i] == level:
                    drafts[i] += 1
                    left -= 1
        return drafts

    def _depth(self, count: int, most: int) -> int:
        """Return how many drafts one of so many requests may get: equation 8."""
        divisor = count + self.depth_offset
        if divisor <= 0:
            return most
        return min(max(self.budget_tokens // divisor - 1, self.min_depth), most)


def _tokens_due(state: RequestState, now_ns: int, step_ms: float) -> float:
    """Return how many tokens a request needs in a step to meet its target when that ends."""
    slo = state.request.slo
    if slo is None or slo.tpot_ms is None or state.first_token_ns < 0:
        return 1.0
    decoding_ms = (now_ns - state.first_token_ns) / 1e6 + step_ms
    return decoding_ms / slo.tpot_ms - (state.num_output_tokens - 1)
