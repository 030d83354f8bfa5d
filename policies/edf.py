"""Earliest deadline first."""

import math

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.sim.request import RequestState


@register("edf")
class EarliestDeadlineFirst(ContinuousBatching):
    """Admit the request whose deadline comes first.

    Optimises the number of deadlines met while all can be met; in overload it serves requests
    that are already late and makes the others late too. Needs a latency target for each request:
    the time to first token of its ``slo``, else its time to the end, else `default_ttft_s`.
    Nobody starves, because every deadline passes and then comes before all later ones. A deadline
    is for admission only: running requests are not preempted for urgent ones.

    Skip-ahead is honest because deadlines never change.

    Parameters
    ----------
    default_ttft_s : float
        Target of requests that state none.
    """

    source = "Liu & Layland 1973; the baseline of SLO-aware schedulers (arXiv:2503.22562)"

    def __init__(self, default_ttft_s: float = 1.0) -> None:
        if not 0.0 < default_ttft_s < math.inf:
            raise ValueError(f"default_ttft_s must be finite and > 0, got {default_ttft_s}")
        self.default_ttft_s = default_ttft_s

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by deadline."""
        slo = state.request.slo
        target_ms = None if slo is None else slo.ttft_ms if slo.ttft_ms is not None else slo.e2el_ms
        if target_ms is None:
            target_ms = self.default_ttft_s * 1e3
        return state.request.arrival_ns + round(target_ms * 1e6)
