"""Static priorities."""

from collections.abc import Sequence

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.sim.request import RequestState


@register("priority")
class Priority(ContinuousBatching):
    """Serve the most urgent class first: lower number, sooner, as in vLLM.

    Optimises the latency of urgent classes. Needs the priority each request declares. Less
    urgent requests starve while urgent ones keep coming, and a waiting urgent request never
    evicts a running one: memory is only taken when running requests run out of it, and then
    from the least urgent, latest arrival. Skip-ahead is honest because priorities never change.

    Where vLLM preempts the very request it was scheduling, it leaves out all behind it for that
    step; here they are scheduled if they fit, unless ``engine.preempt_in_order`` is set.
    """

    source = "vLLM V1, policy=priority"
    starves = True

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by priority, then arrival."""
        return state.request.priority

    def victim(self, running: Sequence[RequestState], now_ns: int) -> RequestState:
        """Take from the least urgent; among equals, from the latest arrival."""
        return max(running, key=lambda s: (s.request.priority, s.request.arrival_ns, s.id))
