"""The number of tokens with the most accepted ones a second."""

from collections.abc import Sequence

from schedlab.policies.speculation.draft_length import (
    DraftLength,
    acceptance_rate,
    expected_tokens,
    require_rate,
)
from schedlab.policies.speculation.registry import register
from schedlab.sim.core.draft_length import Decoding


@register("goodput")
class Goodput(DraftLength):
    """Draft what yields most tokens a second, by the cost model and the acceptance so far.

    At low load that is many tokens, under load few or none. Needs an estimate of the step time. The
    number is the same for all requests, as in SmartSpec; the acceptance rate is that of all drafts
    so far, where SmartSpec averages recent ones. The authors' code (LiuXiaoxuanPKU/vllm, branch
    dsd, ``spec_decode/dsd.py``) counts the goodput of no drafts 1.1 times, averages acceptance as
    0.85 of the old and 0.15 of the new, and chooses every 20 steps, not when others decode.

    Parameters
    ----------
    prior_rate : float
        Acceptance rate that is believed before any draft was verified.
    prior_tokens : float
        For how many verified tokens that belief counts.
    """

    source = "SmartSpec, Liu et al., arXiv 2406.14066, section 4 (TurboSpec); equation of goodput"

    def __init__(self, prior_rate: float = 0.7, prior_tokens: float = 20.0) -> None:
        require_rate("prior_rate", prior_rate)
        if prior_tokens <= 0:
            raise ValueError(f"prior_tokens must be above 0, got {prior_tokens}")
        self.prior_rate = prior_rate
        self.prior_tokens = prior_tokens

    def choose(self, decoding: Decoding) -> Sequence[int]:
        """Try every number of tokens; among equals the smaller."""
        rate = acceptance_rate(decoding, self.prior_rate, self.prior_tokens)
        lengths = range(decoding.most + 1)
        best = max(lengths, key=lambda k: expected_tokens(rate, k) / decoding.step_ns(k))
        return [best] * len(decoding.requests)
