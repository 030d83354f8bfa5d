"""Prompts that are computed where they are answered, though others have engines of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlab.sim.drive.engine_state import note_sent
from schedlab.sim.drive.router import Router, chosen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schedlab.sim.drive.disaggregation import Disaggregation
    from schedlab.sim.drive.fleet import Fleet
    from schedlab.sim.drive.members import Member
    from schedlab.sim.request import Request


class LocalPrefill:
    """Who of those that come is served whole by an engine of role ``decode``.

    A request is if its prompt is short, if it would wait for long wherever prompts are computed, or
    if nobody is up there. Where it depends on what an engine has cached that engine is chosen when
    the request comes; who is not served whole goes on there when its prompt is computed, and counts
    as one of its requests until then.

    Parameters
    ----------
    fleet : Fleet
        All engines; it asks from now on.
    plan : Disaggregation
        Who is served whole.

    Notes
    -----
    NVIDIA Dynamo 0.2 computes a prompt apart if more than ``max_local_prefill_length`` tokens of it
    are not in the cache of the worker that decodes, and less than ``max_prefill_queue_size``
    requests are in the one queue of prompts (examples/llm/components/disagg_router.py). llm-d does
    if its ``nonCachedTokens`` or more are not in the cache of the pod that its profile for decodes
    chose (llm-d-inference-scheduler, 520af47, prefix_based_pd_decider.go).
    """

    def __init__(self, fleet: Fleet, plan: Disaggregation) -> None:
        self._fleet = fleet
        self._plan = plan
        self._promised: dict[int, Member] = {}
        if plan.serves_some_whole:
            fleet.stays_local = self.choose
        if plan.local_uncached_tokens is not None:
            fleet.on_request_gone = self.withdraw

    def choose(self, request: Request) -> Member | None:
        """Choose the engine that serves a request whole; None if its prompt is computed apart."""
        plan = self._plan
        self.withdraw(request.id)  # it lost the engine of its prompt
        receivers = self._fleet.serving("decode")
        if not receivers:
            return None
        if request.prompt_tokens <= plan.local_prompt_tokens or self._would_wait():
            return self._among(receivers, plan.router, request)
        if plan.local_uncached_tokens is None:
            return None
        receiver = self._among(receivers, plan.router, request)
        uncached_tokens = request.prompt_tokens - receiver.live.cached_tokens(request)
        if uncached_tokens <= plan.local_uncached_tokens:
            return receiver
        self._promised[request.id] = receiver
        note_sent(request, receiver.live, receiver.known)
        return None

    def _would_wait(self) -> bool:
        """Whether a prompt would wait for long wherever prompts are computed."""
        plan = self._plan
        known = [member.known for member in self._fleet.serving("prefill", "mixed")]
        if not known:
            return True
        most_tokens, most_requests = plan.local_queue_tokens, plan.local_queue_requests
        if most_tokens is not None and min(one.backlog_tokens for one in known) > most_tokens:
            return True
        return most_requests is not None and sum(one.num_waiting for one in known) > most_requests

    def _among(self, receivers: Sequence[Member], router: Router, request: Request) -> Member:
        return self._fleet.members[chosen(router, request, [m.known for m in receivers])]

    def has_promised(self, request_id: int) -> bool:
        """Whether an engine was chosen to go on with a request when it came."""
        return request_id in self._promised

    def take(self, request_id: int) -> Member | None:
        """Return the engine, if any, that was chosen to go on with a request, and counts it."""
        return self._promised.pop(request_id, None)

    def withdraw(self, request_id: int) -> None:
        """Forget which engine was to go on with a request."""
        receiver = self._promised.pop(request_id, None)
        if receiver is not None:
            self.uncount(request_id, receiver)

    def uncount(self, request_id: int, receiver: Member) -> None:
        """Count a request no more where it was to go on, though it is there still."""
        receiver.live.count(self._fleet.arrivals[request_id].request, -1)
        self._fleet.settle_soon(receiver)  # which may only have waited for it

    def died(self, member: Member) -> None:
        """Forget who was to go on with an engine that died."""
        for request_id in [i for i, receiver in self._promised.items() if receiver is member]:
            del self._promised[request_id]
