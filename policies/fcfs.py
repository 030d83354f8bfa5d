"""First come, first served."""

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register


@register("fcfs")
class FirstComeFirstServed(ContinuousBatching):
    """Serve in the order of arrival, as vLLM V1 does by default.

    Optimises nothing in particular; the baseline of the field. Needs to know nothing. Nobody
    starves, but one long prompt or answer holds up everyone behind it (head-of-line blocking).
    The latest admission is preempted and comes back first. Skip-ahead is honest because arrival
    times never change.
    """

    source = "vLLM V1, policy=fcfs"
