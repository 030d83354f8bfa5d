"""How much KV memory requests will need before they end."""

from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


def declared_blocks(state: RequestState, view: EngineView, has_last: bool = True) -> int:
    """Return the KV blocks for all the tokens that a request declares.

    Its last token is never computed, so it needs none for that: `has_last` counts it all the same.
    """
    request, config = state.request, view.config
    tokens = request.prompt_tokens + request.max_tokens - (not has_last)
    return -(-min(tokens, config.max_model_len) // config.block_size)


class FuturePeak:
    """The largest KV memory that a set of requests will ever hold at one time.

    Each request holds `used` tokens now, gains one a step, and gives all back after `remaining`
    steps. The sum can only peak just before an end: sorted by descending `remaining`, the i-th
    end finds the first i requests resident, so the peak is
    ``max_i(remaining_i * i + used_1 + ... + used_i)`` (i = 1, 2, ...).

    Source: Past-Future scheduler (arXiv:2507.10150), eq. of the future required memory; the same
    set of instants is checked by MC-SF (arXiv:2502.07115).
    """

    def __init__(self) -> None:
        self._requests: list[tuple[float, int, int]] = []
        self._most_tokens = 0.0

    def add(self, used_tokens: int, remaining_tokens: float) -> None:
        """Take a request into the set."""
        # The index breaks ties, so that equal requests keep the order they came in.
        self._requests.append((-remaining_tokens, len(self._requests), used_tokens))
        self._most_tokens += used_tokens + remaining_tokens

    def tokens(self) -> float:
        """Return the peak in tokens, 0 for an empty set."""
        peak, used_sum = 0.0, 0
        for i, (negative_remaining, _, used) in enumerate(sorted(self._requests), start=1):
            used_sum += used
            peak = max(peak, used_sum - negative_remaining * i)
        return peak

    def tokens_with(self, used_tokens: int, remaining_tokens: float) -> float:
        """Return the peak if one more request joined; the set stays as it is."""
        joined = FuturePeak()
        joined._requests = list(self._requests)
        joined.add(used_tokens, remaining_tokens)
        return joined.tokens()

    def stays_within(
        self, used_tokens: int, remaining_tokens: float, capacity_tokens: float
    ) -> bool:
        """Say whether the peak stays within a capacity if one more request joined."""
        # No peak is above all that all of them will ever hold; a token is more than rounding.
        most_tokens = self._most_tokens + used_tokens + remaining_tokens + 1.0
        if most_tokens <= capacity_tokens:
            return True
        return self.tokens_with(used_tokens, remaining_tokens) <= capacity_tokens
