"""The same number of tokens whatever happens."""

from collections.abc import Sequence

from schedlab.policies.speculation.draft_length import DraftLength
from schedlab.policies.speculation.registry import register
from schedlab.sim.core.draft_length import Decoding


@register("fixed")
class Fixed(DraftLength):
    """Draft `num_speculative_tokens` for everybody, as vLLM does by default.

    Pays while the GPU waits for memory and not for arithmetic; under load the tokens that are
    rejected take the time of others.
    """

    source = "Leviathan et al., ICML 2023; vLLM, speculative_config.num_speculative_tokens"

    def choose(self, decoding: Decoding) -> Sequence[int]:
        """Return the most for each."""
        return [decoding.most] * len(decoding.requests)
