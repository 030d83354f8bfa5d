"""SLAI: decodes run as late as their deadlines allow, so that prompts go first."""

import math

from schedlab.policies.last_moment import LastMoments, decoded_by, plan_at_last_moment
from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RUNS, RequestState

ORDERS = ("fcfs", "shortest_prompt", "paying_first")


@register("slai")
class SLAI(Policy):
    """Schedule a decode only when its next token is about to be late; fill up with prompts.

    Optimises the time to first token while each request's time between tokens holds. Needs a
    target for the time between tokens (``slo.tpot_ms`` of the request, else `tbt_s`), and no
    prediction. After each step that gave a request a token, its last schedulable time is set to
    the end of the step + target - offset x mean step time. A step takes, within `token_budget`:
    decodes whose last schedulable time has come; prompts under way; new prompts; other decodes.
    In the orders by prompt length long prompts starve under load. At overload answers end later,
    which holds memory for longer.

    A decode without a free block takes it from the latest prompt under way, else it is preempted
    itself. The original asks for that block whether the decode opens it or not, and so evicts a
    little sooner, as `prefill_first` tells of vLLM V0. Use it with
    ``engine.scheduler_reserve_full_isl: true``, which is how the original admits. RAD, the
    theoretical scheduler of the same paper, is not modelled.

    A decision is O(n log n) in the running batch. Skip-ahead is honest: while all decodes run, no
    prompt is under way and nobody could be admitted, deadlines change nothing; any other step
    promises nothing.

    Parameters
    ----------
    order : {"fcfs", "shortest_prompt", "paying_first"}
        Order of new prompts; paying users are those of lower `priority` numbers.
    token_budget : int
        Tokens of a step.
    tbt_s : float
        Target of requests that state none.
    offset : int
        Steps of safety before a deadline, if `dynamic_offset` is off.
    dynamic_offset : bool
        5 steps while less than `memory_limit` of the memory is used, else 10, so that decodes
        end sooner.
    memory_limit : float
        Share of the memory in use from which the offset is larger.
    max_decodes : int
        Most decodes in a step.
    """

    source = "SLAI, arXiv:2508.01002; agrimUT/SLAI, slai_scheduler.py"
    starves = True

    def __init__(
        self,
        order: str = "shortest_prompt",
        token_budget: int = 512,
        tbt_s: float = 0.2,
        offset: int = 10,
        dynamic_offset: bool = True,
        memory_limit: float = 0.96,
        max_decodes: int = 128,
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
        if min(token_budget, max_decodes) < 1:
            raise ValueError("token_budget and max_decodes must be at least 1")
        if not 0.0 < tbt_s < math.inf:
            raise ValueError(f"tbt_s must be finite and > 0, got {tbt_s}")
        if offset < 0 or not 0.0 <= memory_limit <= 1.0:
            raise ValueError("offset must be >= 0 and memory_limit in [0, 1]")
        self.order = order
        self.token_budget = token_budget
        self.tbt_s = tbt_s
        self.offset = offset
        self.dynamic_offset = dynamic_offset
        self.memory_limit = memory_limit
        self.max_decodes = max_decodes
        self._target_ns = round(tbt_s * 1e9)
        self._busy_ns = 0
        self._num_steps = 0
        self._moments = LastMoments()
        self._own_targets_ns: dict[RequestState, int] = {}
        self._gone: list[RequestState] = []

    def key(self, state: RequestState, now_ns: int) -> tuple[int, int]:
        """Order new prompts; who lost its memory has an answer behind its prompt, as there."""
        request = state.request
        if self.order == "fcfs":
            return 0, request.arrival_ns
        paying = request.priority if self.order == "paying_first" else 0
        return paying, state.num_tokens

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to see how full the memory is."""
        self._view = view

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note its own target, if it has one; who decodes, on another engine before, is due."""
        if state.status is RUNS:
            self._moments.is_due(state)
        slo = state.request.slo
        if slo is not None and slo.tpot_ms is not None:
            self._own_targets_ns[state] = round(slo.tpot_ms / 1e3 * 1e9)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Set the last schedulable time of everyone who got a token."""
        self._busy_ns += now_ns - plan.start_ns
        self._num_steps += num_steps
        moments = self._moments
        decoded = decoded_by(plan)
        if decoded is None or decoded:
            offset, view = self.offset, self._view
            if self.dynamic_offset:
                used = 1.0 - view.free_blocks / view.num_blocks
                offset = 5 if used < self.memory_limit else 10
            safety_ns = offset * self._busy_ns // self._num_steps
            own_ns = self._own_targets_ns
            moments.note_tokens(plan, decoded, view, now_ns - safety_ns, self._target_ns, own_ns)
        if self._gone:  # of whom the plan still tells
            for state in self._gone:
                moments.dates_ns.pop(state, None)
                if state.status is RUNS:  # it was to go on elsewhere, and came back
                    moments.is_due(state)
            self._gone.clear()

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._moments.dates_ns.pop(state, None)
        self._own_targets_ns.pop(state, None)
        self._gone.append(state)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan critical decodes, prompts under way, new prompts, other decodes."""
        return plan_at_last_moment(
            view, builder, self._moments, self._place, self.token_budget, self.max_decodes
        )

    def _place(self, state: RequestState) -> tuple[int, int, int, int]:
        """Return where a request stands in the order of new prompts, ties broken."""
        return (*self.key(state, self._view.now_ns), state.request.arrival_ns, state.id)
