"""SLAI: decodes run as late as their deadlines allow, so that prompts go first."""

import math

from schedlab.policies.deadlines import due_by
from schedlab.policies.policy import Policy
from schedlab.policies.preemption import grant_all_decodes, grant_or_preempt
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

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
    itself. Use it with ``engine.scheduler_reserve_full_isl: true``, which is how the original
    admits. RAD, the theoretical scheduler of the same paper, is not modelled.

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
        self._busy_ns = 0
        self._num_steps = 0
        self._last_schedulable_ns: dict[RequestState, int] = {}
        self._own_targets_ns: dict[RequestState, int] = {}
        self._gone: list[RequestState] = []

    def key(self, state: RequestState, now_ns: int) -> tuple[int, int]:
        """Order new prompts."""
        request = state.request
        if self.order == "fcfs":
            return 0, request.arrival_ns
        paying = request.priority if self.order == "paying_first" else 0
        return paying, request.prompt_tokens

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to see how full the memory is."""
        self._view = view

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note its own target, if it has one."""
        slo = state.request.slo
        if slo is not None and slo.tpot_ms is not None:
            self._own_targets_ns[state] = round(slo.tpot_ms / 1e3 * 1e9)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Set the last schedulable time of everyone who got a token."""
        self._busy_ns += now_ns - plan.start_ns
        self._num_steps += num_steps
        offset = self.offset
        if self.dynamic_offset:
            used = 1.0 - self._view.free_blocks / self._view.num_blocks
            offset = 5 if used < self.memory_limit else 10
        safety_ns = offset * self._busy_ns // self._num_steps
        base_ns, target_ns = now_ns - safety_ns, round(self.tbt_s * 1e9)
        # Where the plan lists nobody, all who run took part.
        decoded = self._view.running if plan.decodes is None else plan.decodes
        if plan.chunks:
            decoded = [*decoded, *(state for state, _ in plan.chunks if state.is_decoding)]
        due, own_ns = self._last_schedulable_ns, self._own_targets_ns
        due.update(dict.fromkeys(decoded, base_ns + target_ns))
        if own_ns:
            due.update((state, base_ns + own_ns.get(state, target_ns)) for state in decoded)
        if self._gone:  # of whom the plan still tells
            for state in self._gone:
                due.pop(state, None)
            self._gone.clear()

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._last_schedulable_ns.pop(state, None)
        self._own_targets_ns.pop(state, None)
        self._gone.append(state)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan critical decodes, prompts under way, new prompts, other decodes."""
        due = self._last_schedulable_ns
        idle = not (view.prefilling or len(view.waiting) or view.num_paused)
        at_most = min(self.max_decodes, self.token_budget)
        if idle and len(view.running) <= at_most:
            speculates = view.config.num_speculative_tokens > 0  # then not all drafts may fit
            if (
                builder.grant_all(view.running)
                if speculates
                else grant_all_decodes(view.running, builder, view)
            ):
                return builder.build(max_steps=FOREVER)  # it matters to nobody who is due
        now_ns = view.now_ns
        decodes = view.decoding
        critical = due_by(decodes, due, now_ns)
        floor = max(builder.tokens_left - self.token_budget, 0)
        paused = list(view.prefilling)

        room = self.max_decodes
        room -= self._decode(critical, room, paused, builder, floor)
        for state in tuple(paused):
            if builder.tokens_left > floor and builder.grant(state, builder.tokens_left - floor):
                paused.remove(state)
        # Who was evicted in this step is back in the queue of the original, and does not fit: only
        # those before it in the order may take the memory it left.
        first_gone = min((self._place(s, view.now_ns) for s in builder.preempted), default=None)
        for state in view.waiting:
            left = builder.tokens_left - floor
            overtakes = first_gone is not None and self._place(state, view.now_ns) > first_gone
            if left < 1 or overtakes or not builder.grant(state, left):
                break
        if builder.tokens_left > floor and builder.rows_left:
            others = decodes
            if critical:
                served = set(critical)
                others = [state for state in decodes if state not in served]
            room -= self._decode(others, room, paused, builder, floor)
        if paused and not builder.preempted and len(paused) == len(view.running):
            # Prompts under way block each other for memory; the original reserves them whole.
            builder.preempt(paused[-1])
        # Which decodes are due changes with time: it changes nothing only while all of them run
        # and nobody has a prompt to go before them.
        all_run = self.max_decodes - room == len(decodes)
        may_prefill = view.prefilling or (len(view.waiting) and builder.residents_left)
        return builder.build(max_steps=FOREVER if all_run and not may_prefill else 1)

    def _place(self, state: RequestState, now_ns: int) -> tuple[int, int, int, int]:
        return (*self.key(state, now_ns), state.request.arrival_ns, state.id)

    def _decode(
        self,
        states: list[RequestState],
        room: int,
        paused: list[RequestState],
        builder: PlanBuilder,
        floor: int,
    ) -> int:
        """Grant up to `room` of some decodes, those due first before others, and count them."""
        if not states:
            return 0
        if len(states) > room:
            states = self._by_due(states)[:room]
        if len(states) <= builder.tokens_left - floor and builder.grant_all(states):
            return len(states)
        granted = 0
        for state in self._by_due(states):
            if builder.tokens_left <= floor or builder.rows_left < 1:
                break
            victims = [state, *paused]
            granted += grant_or_preempt(builder, state, victims)
            paused[:] = [victim for victim in victims if victim is not state]
        return granted

    def _by_due(self, states: list[RequestState]) -> list[RequestState]:
        due = self._last_schedulable_ns
        return sorted(states, key=lambda s: (due.get(s, 0), s.request.arrival_ns, s.id))
