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
    step to come; then what is left of a budget goes to whoever profits most from one more. AdaServe
    builds trees of drafts and knows how likely each token is; here a draft is a sequence, and all
    tokens are as likely to be accepted as those so far.

    Parameters
    ----------
    budget_tokens : int
        Tokens to verify in a step, one of each request among them. AdaServe takes what the GPU
        computes in the time that reading the weights takes.
    prior_rate, prior_tokens : float
        As of ``goodput``.
    """

    source = "AdaServe, Li et al., arXiv 2501.12162, sections 4.2 and 4.3"
    needs_targets = ("tpot_ms",)

    def __init__(
        self, budget_tokens: int = 256, prior_rate: float = 0.7, prior_tokens: float = 20.0
    ) -> None:
        require_rate("prior_rate", prior_rate)
        if budget_tokens < 1:
            raise ValueError(f"budget_tokens must be at least 1, got {budget_tokens}")
        if prior_tokens <= 0:
            raise ValueError(f"prior_tokens must be above 0, got {prior_tokens}")
        self.budget_tokens = budget_tokens
        self.prior_rate = prior_rate
        self.prior_tokens = prior_tokens

    def choose(self, decoding: Decoding) -> Sequence[int]:
        """Meet targets first, then spend what is left of the budget."""
        rate = acceptance_rate(decoding, self.prior_rate, self.prior_tokens)
        count, most = len(decoding.requests), decoding.most
        yields = [expected_tokens(rate, k) for k in range(most + 1)]
        left = max(self.budget_tokens - count, 0)
        step_ms = decoding.step_ns(min(most, left // count)) / 1e6
        wanted = [_tokens_due(s, decoding.now_ns, step_ms) for s in decoding.requests]
        drafts = [0] * count
        for i in sorted(range(count), key=lambda i: -wanted[i]):
            enough = next((k for k in range(most) if yields[k] >= wanted[i]), most)
            drafts[i] = min(enough, left)
            left -= drafts[i]
        # One more token profits most where fewest are drafted: rates are alike.
        for level in range(most):
            for i in range(count):
                if left and drafts[i] == level:
                    drafts[i] += 1
                    left -= 1
        return drafts


def _tokens_due(state: RequestState, now_ns: int, step_ms: float) -> float:
    """Return how many tokens a request needs in a step to meet its target when that ends."""
    slo = state.request.slo
    if slo is None or slo.tpot_ms is None or state.first_token_ns < 0:
        return 1.0
    decoding_ms = (now_ns - state.first_token_ns) / 1e6 + step_ms
    return decoding_ms / slo.tpot_ms - (state.num_output_tokens - 1)
