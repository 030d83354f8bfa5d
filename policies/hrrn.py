"""Highest response ratio next."""

import math
from collections.abc import Iterator

import numpy as np

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

_SLOTS = 64


@register("hrrn")
class HighestResponseRatioNext(ContinuousBatching):
    """Admit the request with the largest ratio of (wait + service) to service.

    Optimises mean latency like shortest-job-first, but a request gains on shorter ones while it
    waits and passes all that come much later than itself. Needs a prediction of the output
    length. As an order, (wait + service) / service is the same as wait / service, so the time a
    predicted token takes cancels out. While the server keeps up nobody starves; in an overload
    that never ends, waits of short requests grow as well, and one that is r times longer starves
    if the load is above 1 / (1 - 1/r).

    A decision is linear in the queue, and vectorised: ratios drift at different rates, so all are
    computed again. Skip-ahead is honest because a step in which someone could be admitted
    promises nothing.
    """

    source = "Brinch Hansen 1971; used over batches by Magnus (arXiv:2406.04785)"
    needs_prediction = True
    starves = True

    def __init__(self) -> None:
        # Requests in flight by slot; a free slot holds None and a ratio of -inf.
        self._states: list[RequestState | None] = [None] * _SLOTS
        self._arrivals_ns = np.full(_SLOTS, math.inf)
        self._service = np.ones(_SLOTS)
        self._free = list(range(_SLOTS))
        self._slots: dict[RequestState, int] = {}

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Take a slot."""
        service = max(predicted_tokens(state), 1.0)
        if not self._free:
            size = len(self._states)
            self._free = list(range(size, 2 * size))
            self._states += [None] * size
            self._arrivals_ns = np.append(self._arrivals_ns, np.full(size, math.inf))
            self._service = np.append(self._service, np.ones(size))
        slot = self._slots[state] = self._free.pop()
        self._states[slot] = state
        self._arrivals_ns[slot] = state.request.arrival_ns
        self._service[slot] = service

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Free the slot."""
        slot = self._slots.pop(state)
        self._states[slot] = None
        self._arrivals_ns[slot] = math.inf
        self._free.append(slot)

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise nothing where someone could be admitted: ratios drift."""
        return 1, FOREVER

    def order(self, view: EngineView) -> Iterator[RequestState]:
        """Yield by descending response ratio; equal ones by arrival."""
        ratios = (view.now_ns - self._arrivals_ns) / self._service
        ratios[[self._slots[state] for state in view.residents]] = -math.inf
        while (best := ratios.max()) > -math.inf:
            equal = []
            for i in np.flatnonzero(ratios == best).tolist():
                candidate = self._states[i]
                assert candidate is not None
                equal.append((candidate.request.arrival_ns, candidate.id, i))
            slot = min(equal)[-1]
            state = self._states[slot]
            assert state is not None
            ratios[slot] = -math.inf
            yield state
