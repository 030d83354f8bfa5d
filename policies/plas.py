"""Autellix: least attained service of the program first, in multi-level queues."""

import math

from schedlab.policies.attained_service import Call, charge, charge_gone, least_left_ns, past_of
from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RUNS, RequestState


@register("plas")
class ProgramLevelAttainedService(Ranked):
    """Serve the sessions first that have had the least service so far, without a prediction.

    Optimises the completion time of sessions: short ones are not held up by the later turns of long
    ones. Needs to know which session a request belongs to; a request without one is a session of
    its own. A request enters the queue of the service that its session had from answered requests
    (queue k holds service below ``first_quantum_s * 2**k``, the last one all that is more), and
    drops to the next one when its own service takes it there; within a queue, first come, first
    served. Long sessions starve but for the paper's rule: who has waited more than `starvation`
    times its service, its session's included, goes to the first queue.

    Service is the time of the steps that a request takes part in: who has a seat and is left out
    waits. What an engine did for a request before it died is not counted. The quanta are ours, the
    paper states none. The authors swap who is preempted: ``engine.preemption_mode: swap``. With
    ``recompute``, and a `starvation` that brings requests to the first queue sooner than what they
    lost is computed again, they evict each other for ever; such a run ends as stalled. Where queues
    are so long that most starve by it, with either, they evict each other by turns and little is
    left of the gain. In a cluster all engines know the sessions of all, as their global process
    table does.

    A decision is O(n log n) in the running batch and sorts the queue. Skip-ahead is honest because
    places change only when a quantum is used up or somebody has waited too long, at times that the
    plan names where it leaves somebody out; while everybody is served, places decide nothing, and
    what a queue depends on, the service so far, is the same added up at once.

    Parameters
    ----------
    first_quantum_s : float
        Service that the first queue holds.
    num_queues : int
        How many there are.
    starvation : float or None
        Waiting time over service at which a request goes to the first queue; None = never.
    """

    source = "Autellix, Luo et al. 2025 (arXiv:2502.13965), section 4.2: PLAS, anti-starvation"
    starves = True
    lazy_ranks = True
    asks_who_ran = False

    def __init__(
        self,
        first_quantum_s: float = 0.5,
        num_queues: int = 8,
        starvation: float | None = None,
    ) -> None:
        if not 0.0 < first_quantum_s < math.inf:
            raise ValueError(f"first_quantum_s must be finite and > 0, got {first_quantum_s}")
        if num_queues < 1:
            raise ValueError(f"num_queues must be at least 1, got {num_queues}")
        if starvation is not None and not 0.0 < starvation < math.inf:
            raise ValueError(f"starvation must be finite and > 0, got {starvation}")
        self.first_quantum_s = first_quantum_s
        self.num_queues = num_queues
        self.starvation = starvation
        # Who waits gets no service: only that it has waited too long moves it.
        self.static_keys = starvation is None
        self._first_ns = round(first_quantum_s * 1e9)
        self._calls: dict[RequestState, Call] = {}
        self._gone: dict[RequestState, Call] = {}  # whose last step is not charged yet

    def sum_ns(self, call: Call) -> int:
        """Return the service of a session with what it does not keep yet of one of its requests."""
        return call.past.service_ns + call.service_ns - call.kept_ns

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by queue."""
        call = self._calls[state]
        if self.starvation is not None and self._starves_since_ns(call) <= now_ns:
            return 0
        return call.queue

    def _starves_since_ns(self, call: Call) -> int:
        """Return from when on a request has waited too long, if it gets no more service."""
        service_ns = call.service_ns
        if self.starvation is None or not service_ns:
            return FOREVER
        # It has waited since it came, but for the time that it was served.
        most_ns = math.ceil(self.starvation * service_ns)
        return call.came_ns + service_ns - call.base_ns + most_ns - call.waited_ns

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to charge all who run."""
        self._view = view

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note what its session has had."""
        past, last = past_of(state), self.num_queues - 1
        self._calls[state] = Call(past, now_ns, self._first_ns, last)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Charge who took part."""
        used_ns = now_ns - plan.start_ns
        charge(plan, self._view.running, used_ns, self._calls)
        if self._gone:
            charge_gone(plan, used_ns, self._gone)
            for call in self._gone.values():
                self._keep(call)
            self._gone.clear()

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Let its session keep what the request has had; its last step is charged after this."""
        call = self._gone[state] = self._calls.pop(state)
        call.gone_ns = now_ns
        call.past.waited_ns += now_ns - call.came_ns
        self._keep(call)

    def _keep(self, call: Call) -> None:
        past, service_ns = call.past, call.service_ns
        past.service_ns = self.sum_ns(call)
        past.waited_ns -= service_ns - call.kept_ns
        call.kept_ns = service_ns

    def on_reject(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._calls.pop(state, None)

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return when the first quantum is used up, or the first request has waited too long."""
        now_ns = view.now_ns
        until_ns = min(now_ns + least_left_ns(view.running, self._calls), FOREVER)
        if self.starvation is not None:
            for state in (*view.waiting, *view.running):
                at_ns = self._starves_since_ns(self._calls[state])
                if at_ns <= now_ns and state.status is RUNS:
                    # Service takes it back out of the first queue.
                    at_ns = now_ns + max(int((now_ns - at_ns) / self.starvation), 1)
                if at_ns > now_ns:
                    until_ns = min(until_ns, at_ns)
        return FOREVER, until_ns
