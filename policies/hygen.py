"""HyGen: offline requests fill what online ones leave of a step's time."""

import math
from collections import deque
from collections.abc import MutableSequence
from typing import Any

from schedlab.policies.policy import Policy
from schedlab.policies.preemption import grant_all_decodes
from schedlab.policies.registry import register
from schedlab.policies.step_load import StepLoad
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

OFFLINE_ORDERS = ("fcfs", "prefix")


@register("hygen")
class HyGen(Policy):
    """Serve online requests first, and offline ones as far as a step's predicted time allows.

    Optimises the throughput of offline work while online latency stays near what it was. Needs to
    know who is offline (`priority` of at least `offline_priority`), the calibrated step-time
    estimate, and a latency budget that was tried out: the paper searches the largest one that keeps
    the targets by test runs, as ``schedlab tune`` over ``policy.latency_budget_s`` does. Each step
    has two phases. Online: decodes, prompts under way and new prompts in order of arrival, up to
    `chunk_size` tokens; where seats or memory do not suffice, the offline request admitted last
    loses its own. Offline: decodes, prompts under way and new prompts, as long as the whole step is
    predicted to end within the budget; where memory does not suffice for a token, the offline
    request admitted last loses its own, one that the budget pauses before one that it serves.
    Without an online request in the step one offline request runs whatever it takes, so that a
    budget too small stops nobody for ever.

    Offline requests starve while online ones fill the budget. Online latency suffers where the
    estimate is too low, and where memory is full of offline requests that have to be moved out:
    ``engine.preemption_mode: swap`` keeps their state, as HyGen does. With ``offline_order:
    prefix`` new offline requests come in the order of a depth-first walk through the trie of their
    prefixes (needs ``enable_prefix_caching``); the paper's fair variant of it, which compares with
    the oldest request, is not modelled. The code (UIUC-MLSys/HyGen) was not at hand: the rules are
    those of the abstract and of a detailed account of the paper.

    A decision is linear in the running batch and asks for O(log n) step times. Skip-ahead is honest
    because a step promises only if all who run decode and all of them do, nobody who waits could be
    taken, and, with offline requests in it, for as many steps as are priced within the budget.

    Parameters
    ----------
    latency_budget_s : float
        Predicted time of a step up to which offline requests are added.
    offline_priority : int
        Requests of this or a higher `priority` number are offline.
    chunk_size : int
        Tokens of a step, those of both phases together.
    offline_order : {"fcfs", "prefix"}
        Order of new offline requests.
    """

    source = "HyGen, Sun, Wang, Lai, NeurIPS 2025 (arXiv:2501.14808), as described by others"
    starves = True

    def __init__(
        self,
        latency_budget_s: float = 0.05,
        offline_priority: int = 1,
        chunk_size: int = 512,
        offline_order: str = "fcfs",
    ) -> None:
        if not 0.0 < latency_budget_s < math.inf:
            raise ValueError(f"latency_budget_s must be finite and > 0, got {latency_budget_s}")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        if offline_order not in OFFLINE_ORDERS:
            known = ", ".join(OFFLINE_ORDERS)
            raise ValueError(f"offline_order must be one of {known}; got {offline_order!r}")
        self.latency_budget_s = latency_budget_s
        self.offline_priority = offline_priority
        self.chunk_size = chunk_size
        self.offline_order = offline_order
        self._offline_ids: set[int] = set()

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note who is offline: while nobody is, most of a plan need not look at who runs."""
        if self._is_offline(state):
            self._offline_ids.add(state.id)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._offline_ids.discard(state.id)

    def on_reject(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._offline_ids.discard(state.id)

    def key(self, state: RequestState, now_ns: int) -> tuple[bool, Any]:
        """Order online requests by arrival, then offline ones by arrival or prefix."""
        if not self._is_offline(state):
            return False, ()
        return True, state.request.prefix_hash_ids if self.offline_order == "prefix" else ()

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan the online requests, then the offline ones within the budget."""
        offline: list[RequestState] = []
        decodes, prompts = view.decoding, list(view.prefilling)
        if self._offline_ids:
            offline = [state for state in view.running if self._is_offline(state)]
            decodes = [state for state in decodes if not self._is_offline(state)]
            prompts = [state for state in prompts if not self._is_offline(state)]
        elif not prompts and not view.waiting.size and grant_all_decodes(decodes, builder, view):
            return builder.build(max_steps=FOREVER)
        load = StepLoad(view)
        floor = max(builder.tokens_left - self.chunk_size, 0)
        num_decodes, load = self._serve_online(decodes, prompts, offline, load, builder, floor)
        is_open = self._admit_online(offline, load, view, builder, floor)
        if offline:
            num_offline, load = self._serve_offline(offline, load, builder, floor)
            num_decodes += num_offline
        if is_open and not builder.preempted:
            self._admit_offline(load, view, builder, floor)
        could_admit = builder.seats_left and builder.tokens_left > floor
        if could_admit:
            head = next(iter(builder.undeferred(view.waiting)), None)
            could_admit = head is not None and self._is_offline(head)
        if could_admit or num_decodes < len(view.running):
            return builder.build()
        if not offline:
            return builder.build(max_steps=FOREVER)
        return builder.build(max_steps=max(load.steps_within(self._budget_ns), 1))

    def _serve_online(
        self,
        decodes: list[RequestState],
        prompts: list[RequestState],
        offline: list[RequestState],
        load: StepLoad,
        builder: PlanBuilder,
        floor: int,
    ) -> tuple[int, StepLoad]:
        """Grant all decodes, then prompts within the chunk; return how many decodes it were."""
        num_decodes = 0
        if builder.grant_all(decodes):
            num_decodes = len(decodes)
            load = load.with_decodes(decodes)
            decodes = []
        queue = deque(sorted(decodes, key=_arrival) + sorted(prompts, key=_arrival))
        while queue and builder.tokens_left and builder.rows_left:
            state = queue.popleft()
            left = 1 if state.is_decoding else builder.tokens_left - floor
            if left < 1:
                break
            granted = _grant(builder, state, left, offline, queue)
            if granted:
                load.add(state, granted)
                num_decodes += state.is_decoding
        return num_decodes, load

    def _admit_online(
        self,
        offline: list[RequestState],
        load: StepLoad,
        view: EngineView,
        builder: PlanBuilder,
        floor: int,
    ) -> bool:
        """Admit new prompts, at the cost of offline requests; return whether none is left out."""
        if not all(self._is_offline(state) for state in builder.preempted):
            return False
        for state in builder.undeferred(view.waiting):
            if self._is_offline(state):
                return True
            left = builder.tokens_left - floor
            if left < 1 or not builder.rows_left:
                return False
            granted = builder.grant(state, left)
            if not granted and not builder.fits_without(offline, state):
                return False
            while not granted and offline:
                builder.preempt(offline.pop())
                granted = builder.grant(state, left)
            if not granted:
                return False
            load.add(state, granted)
        return True

    def _serve_offline(
        self, offline: list[RequestState], load: StepLoad, builder: PlanBuilder, floor: int
    ) -> tuple[int, StepLoad]:
        """Grant decodes and prompts within the budget; return how many decodes it were."""
        decodes = [state for state in offline if state.is_decoding]
        within = load.decodes_within(decodes, self._budget_ns) or int(load.is_empty)
        paused = decodes[within:]
        del decodes[within:]
        num_decodes = 0
        if len(decodes) <= builder.tokens_left - floor and builder.grant_all(decodes):
            num_decodes = len(decodes)
            load = load.with_decodes(decodes)
            decodes = []
        queue, prompts = deque(decodes), deque(s for s in offline if not s.is_decoding)
        while (queue or prompts) and builder.tokens_left > floor and builder.rows_left:
            state = (queue or prompts).popleft()
            want = 1 if state.is_decoding else self._chunk(state, load, builder, floor)
            if not want:
                break
            later = (prompts, paused, queue) if state.is_decoding else (prompts,)
            granted = _grant(builder, state, want, *later)
            if granted:
                load.add(state, granted)
                num_decodes += state.is_decoding
        return num_decodes, load

    def _admit_offline(
        self, load: StepLoad, view: EngineView, builder: PlanBuilder, floor: int
    ) -> None:
        """Admit offline prompts within the budget."""
        for state in builder.undeferred(view.waiting):
            if not self._is_offline(state):
                continue
            if not builder.seats_left or builder.tokens_left <= floor:
                return
            want = self._chunk(state, load, builder, floor)
            granted = builder.grant(state, want) if want else 0
            if not granted:
                return
            load.add(state, granted)

    def _chunk(self, state: RequestState, load: StepLoad, builder: PlanBuilder, floor: int) -> int:
        most = min(state.num_uncomputed_tokens, builder.tokens_left - floor)
        return load.chunk_within(state, most, self._budget_ns) or int(load.is_empty)

    @property
    def _budget_ns(self) -> float:
        return self.latency_budget_s * 1e9

    def _is_offline(self, state: RequestState) -> bool:
        return state.request.priority >= self.offline_priority


def _arrival(state: RequestState) -> tuple[int, int]:
    return state.request.arrival_ns, state.id


def _grant(
    builder: PlanBuilder, state: RequestState, want: int, *spare: MutableSequence[RequestState]
) -> int:
    """Grant a running request tokens, preempting from the ends of `spare`, at last itself."""
    while not (granted := builder.grant(state, want)):
        victim = next((states.pop() for states in spare if states), state)
        builder.preempt(victim)
        if victim is state:
            break
    return granted
