"""Autellix: least attained service along the critical path of the program first."""

from schedlab.policies.attained_service import Call
from schedlab.policies.plas import ProgramLevelAttainedService
from schedlab.policies.registry import register


@register("atlas")
class AdaptiveThreadLevelAttainedService(ProgramLevelAttainedService):
    """Serve the sessions first whose longest chain of answered requests has had the least service.

    As `plas`, for sessions whose requests run side by side: what counts is not the sum of their
    services but the longest chain of them, each sent when the one before it was answered, as far as
    it is known. Requests that were sent together so have one priority, and a session that fans out
    is not put behind one that works as long one call at a time. Optimises the completion time of
    sessions. Needs to know which session a request belongs to. Long sessions starve but for the
    rule of `plas`.

    Skip-ahead is honest as that of `plas` is.

    Parameters
    ----------
    first_quantum_s, num_queues, starvation
        As those of `plas`.
    """

    source = "Autellix, Luo et al. 2025 (arXiv:2502.13965), section 4.2: ATLAS"

    def sum_ns(self, call: Call) -> int:
        """Return the longest chain of services in a session, with that which a request ends."""
        return max(call.past.service_ns, call.service_ns)
