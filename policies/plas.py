"""Autellix: least attained service of the program first, in multi-level queues."""

import math

from schedlab.policies.attained_service import Call, Queues, charge_gone, past_of
from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("plas")
class ProgramLevelAttainedService(Ranked):
    """Serve the sessions first that have had the least service so far, without a prediction.

    Optimises the completion time of sessions: short ones are not held up by the later turns of long
    ones. Needs to know which session a request belongs to; a request without one is a session of
    its own. A request enters the queue of the service that its session had from answered requests
    (queue k holds service below ``first_quantum_s * 2**k``, the last one all that is more), at its
    back and with its whole quantum: the service that the queue spans. When that is used up it goes
    to the back of the next queue, again with a whole quantum, whatever a last step took too long.
    Those who do at one step keep their order. Long sessions starve but for the paper's rule: who
    has waited `starvation` times its service, its session's included, goes to the back of the
    first queue and stays for a quantum; its own waiting and service count anew, its session's stay.

    Service is the time of the steps that a request takes part in: who has a seat and is left out
    waits. What an engine did for a request before it died is not counted. The paper states neither
    quanta nor the ratio. Three more things are ours. What a request had before it was promoted its
    session keeps, as the paper's sum of all runtimes says; its Algorithm 1 to the letter forgets
    it. Who starves in the first queue already is left there, with its quantum and what it has
    waited; there it goes to the back of that queue. And what a session brings is that of when the
    request came, though others of it may be answered meanwhile; there it is that of now. It is
    looked for who starves when a request comes and at the end of steps.

    The authors swap who is preempted: ``engine.preemption_mode: swap``. With ``recompute``, and a
    `starvation` and quanta that bring requests to the first queue sooner than what they lost is
    computed again, they evict each other for ever; such a run ends as stalled. In a cluster all
    engines know the sessions of all, as their global process table does.

    A decision is O(n log n) in the running batch; the queue is put in order again only when
    somebody who starved is promoted. Skip-ahead is honest because places change only when a quantum
    is used up or somebody has waited too long, at times that the plan names where it leaves
    somebody out. While everybody is served, places decide nothing: then a plan lasts beyond the
    ends of quanta, and who used one up drops afterwards, at the end of the step in which it did.

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
        self._queues = Queues(round(first_quantum_s * 1e9), num_queues, starvation)
        self._calls = self._queues.calls
        self._gone: dict[RequestState, Call] = {}  # whose last step is not charged yet

    def sum_ns(self, call: Call) -> int:
        """Return the service of a session with what it does not keep yet of one of its requests."""
        return call.past.service_ns + call.service_ns - call.kept_ns

    def key(self, state: RequestState, now_ns: int) -> tuple[int, int, bool, int]:
        """Order by queue, and in it by when a request came to it."""
        return self._calls[state].place

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to charge all who run."""
        self._view = view

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Join the queue of what its session has had, or the first one if that starves."""
        self._queues.join(state, past_of(state), now_ns)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Charge who took part; let drop who used up a quantum, and promote who starves."""
        view, queues = self._view, self._queues
        durations_ns = view.durations_ns if num_steps > 1 else (now_ns - plan.start_ns,)
        queues.charge(plan, view.running, durations_ns, now_ns)
        if self._gone:
            charge_gone(plan, now_ns, self._gone)
            for call in self._gone.values():
                self._keep(call)
            self._gone.clear()
        if self.starvation is not None:
            self.rekeyed = queues.promote_starving(now_ns) if queues.look_ns <= now_ns else ()

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Let its session keep what the request has had; its last step is charged after this."""
        call = self._gone[state] = self._queues.leave(state)
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

    def settle(self) -> None:
        """Charge who took part in steps while everybody was served."""
        self._queues.settle()

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return when the first quantum is used up, or the first request may have starved."""
        return FOREVER, self._queues.until_ns(view.running, view.now_ns)

    def promise(self, view: EngineView, hooks_matter: bool = True) -> tuple[int, int]:
        """Promise one step where somebody began to starve while there was none."""
        if self._queues.look_ns <= view.now_ns:
            return 1, FOREVER
        return super().promise(view, hooks_matter)
