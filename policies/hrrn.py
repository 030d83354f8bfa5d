"""Highest response ratio next."""

from policies.continuous_batching import ContinuousBatching
from policies.registry import register
from policies.sjf import predicted_tokens
from sim.request import RequestState


@register("hrrn")
class HighestResponseRatioNext(ContinuousBatching):
    """Admit the request with the largest ratio of (wait + service) to service.

    Optimises mean latency like shortest-job-first, but a request gains on shorter ones while it
    waits and passes all that come much later than itself. Needs a prediction of the output
    length. As an order, (wait + service) / service is the same as wait / service, so the time a
    predicted token takes cancels out. While the server keeps up nobody starves; in an overload
    that never ends, waits of short requests grow as well, and one that is r times longer starves
    if the load is above 1 / (1 - 1/r).

    A decision is linear in the queue: ratios drift at different rates, so the queue is sorted
    again at every decision. Skip-ahead is honest because a step in which someone could be
    admitted promises nothing.
    """

    source = "Brinch Hansen 1971; used over batches by Magnus (arXiv:2406.04785)"
    needs_prediction = True
    starves = True
    static_keys = False

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order by descending response ratio."""
        wait_ns = now_ns - state.request.arrival_ns
        return -wait_ns / max(predicted_tokens(state), 1.0)
