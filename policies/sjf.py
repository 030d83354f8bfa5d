"""Shortest job first, by predicted output length."""

from collections.abc import Sequence

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.sim.request import RequestState


def predicted_tokens(state: RequestState) -> float:
    """Return what the predictor said of a request's output.

    Raises
    ------
    ValueError
        If no predictor was asked.
    """
    predicted = state.request.predicted_tokens
    if predicted is None:
        raise ValueError(
            f"request {state.id} carries no prediction; the policy needs a predictor, for example "
            "policy.predictor: oracle"
        )
    return predicted


@register("sjf")
class ShortestJobFirst(ContinuousBatching):
    """Admit the request with the shortest predicted output first.

    Optimises mean latency. Needs a prediction of the output (a length, a bucket or a rank); what
    it gains depends on how well the prediction orders requests. Running requests are not
    preempted for shorter ones, so in an iteration-level engine it orders admission only and
    gains nothing while there is no queue. Long requests starve under sustained load. Memory is
    taken from the longest prediction. Skip-ahead is honest because predictions never change.
    """

    source = "SSJF, Qiu et al. 2024 (arXiv:2404.08509), in an iteration-level engine"
    needs_prediction = True
    starves = True

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order by predicted output length."""
        return predicted_tokens(state)

    def victim(self, running: Sequence[RequestState], now_ns: int) -> RequestState:
        """Take from the longest prediction."""
        return max(running, key=lambda s: (self.key(s, now_ns), s.request.arrival_ns, s.id))
