"""Virtual token counter: fair shares of service among tenants."""

from collections.abc import Collection, Iterator, Mapping

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.policies.tenant_service import Tenant, charge_generated, is_waiting
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RUNS, RequestState


@register("vtc")
class VirtualTokenCounter(ContinuousBatching):
    """Admit the oldest request of the tenant that has been served least.

    Optimises fairness: between two tenants that always have requests waiting, the service
    received never differs by more than ``2 * max(w_p * longest input, w_q * tokens in memory)``.
    Needs to know nothing of lengths: prompts are charged at admission, output tokens as they come
    out. Within a tenant it is first come, first served, and nobody starves; a tenant that floods
    the server only delays itself. Who comes back from idleness is lifted to the least counter of
    those waiting (or to that of whoever left the queue last), so that idle time cannot be saved
    up. Requests without a tenant share one.

    The authors' code admits only what fits at its declared end, and so never evicts; here memory is
    taken as it is needed, from the latest admission when it runs out, and whoever comes back from
    an eviction is not charged again for its prompt. Nor is who comes from another engine, for
    prompt or tokens: each engine charges what it served. In that code 10 decode steps pass after an
    admission before the queue is looked at again, as a prefill stops the batch there; here prompts
    share steps, so by default it is looked at in every step (`max_waiting_tokens`).

    A decision costs O(running + tenants); accounting is linear in the running batch.

    Skip-ahead is honest because a step in which someone could be admitted promises nothing:
    counters grow with every token, and another tenant's request may fit. The step in which the
    queue is looked at again is counted down in the promise.

    Parameters
    ----------
    input_weight, output_weight : float
        Charge of an input and of an output token.
    tenant_weights : mapping of str to float, optional
        Shares of the tenants; 1 for those not named.
    max_waiting_tokens : int
        Decode steps after an admission before the next look at the queue, unless nobody runs; 0 to
        look in every step, 10 in the authors' code. First tokens wait for that.
    """

    source = "VTC, Sheng et al., OSDI 2024 (arXiv:2401.00588), algorithm 2"
    seats_loaded = True

    def __init__(
        self,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        tenant_weights: Mapping[str, float] | None = None,
        max_waiting_tokens: int = 0,
    ) -> None:
        if not (input_weight >= 0.0 and output_weight >= 0.0):
            raise ValueError("input_weight and output_weight must be >= 0")
        if any(not weight > 0.0 for weight in (tenant_weights or {}).values()):
            raise ValueError("tenant_weights must be > 0")
        if max_waiting_tokens < 0:
            raise ValueError(f"max_waiting_tokens must be >= 0, got {max_waiting_tokens}")
        self.input_weight = input_weight
        self.output_weight = output_weight
        self.tenant_weights = tenant_weights
        self.max_waiting_tokens = max_waiting_tokens
        self._decode_steps = 0  # since the last admission
        self.counters: dict[Tenant, float] = {}
        self._weights: dict[Tenant, float] = {}
        self._queues: dict[Tenant, dict[RequestState, None]] = {}
        self._new: list[RequestState] = []
        self._charged_tokens: dict[int, int] = {}
        self._charged_prompts: set[int] = set()
        self._gone: list[int] = []  # of whom the plan still tells
        self._last_to_leave: Tenant = None

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to charge what running requests generate."""
        self._view = view
        self._weights.update((self.tenant_weights or {}).items())

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Let the tenant take part; while a step is under way, from its end on."""
        self._new.append(state)
        generated = state.num_output_tokens
        if state.status is RUNS or state.num_preemptions or generated:
            self._charged_prompts.add(state.id)  # charged where it was before, as are its tokens
        if generated:
            self._charged_tokens[state.id] = generated
        if not (self._view.running or self._view.in_pipeline):
            self._take_in_new()

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Let those take part who came since the last step ended, then plan as vLLM does."""
        if self._new and not view.in_pipeline:
            self._take_in_new()
        return super().plan(view, builder)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Charge admitted prompts and new output tokens."""
        charged, admitted = self._charged_prompts, plan.admitted
        self._decode_steps = 0 if plan.chunks or admitted else self._decode_steps + num_steps
        # No step tells of a plan that only loads: whom it loads is seen with his first chunk.
        loaded = [s for s, _ in plan.chunks if s.id not in charged and s not in admitted]
        for state in (*admitted, *loaded):
            if state.id not in charged:
                charged.add(state.id)
                self._charge(state, self.input_weight * state.request.prompt_tokens)
            if not self._is_waiting(state.request.tenant):
                self._last_to_leave = state.request.tenant
        charged.difference_update(self._gone)
        self._gone.clear()
        self._charge_output(self._view.running)
        if self._new:
            self._take_in_new()

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Charge the last tokens."""
        self._charge_output((state,))
        self._charged_tokens.pop(state.id, None)
        self._gone.append(state.id)
        del self._queues[state.request.tenant][state]

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise nothing where someone could be admitted: counters grow."""
        return max(self._steps_to_look(view), 1), FOREVER

    def promise(self, view: EngineView, hooks_matter: bool = True) -> tuple[int, int]:
        """Promise one step where somebody takes part from its end on: counters say how."""
        return (1, FOREVER) if self._new else super().promise(view, hooks_matter)

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Yield the oldest request of the least served tenant, charging each prompt."""
        if self._steps_to_look(view):
            return
        counters = dict(self.counters)
        queues = {t: filter(view.waits, queue) for t, queue in self._queues.items()}
        heads = {t: state for t, queue in queues.items() if (state := next(queue, None))}
        while heads:
            tenant, state = min(
                heads.items(),
                key=lambda item: (counters[item[0]], item[1].request.arrival_ns, item[1].id),
            )
            yield state
            if state.id not in self._charged_prompts:
                charge = self.input_weight * state.request.prompt_tokens
                counters[tenant] += charge / self._weight(tenant)
            following = next(queues[tenant], None)
            if following is None:
                del heads[tenant]
            else:
                heads[tenant] = following

    def _steps_to_look(self, view: EngineView) -> int:
        """Return how many steps pass before the queue is looked at; 0 if it is in this one."""
        left = self.max_waiting_tokens - self._decode_steps
        return left if left > 0 and (view.running or view.in_pipeline) else 0

    def _weight(self, tenant: Tenant) -> float:
        return self._weights.get(tenant, 1.0)

    def _charge(self, state: RequestState, service: float) -> None:
        tenant = state.request.tenant
        self.counters[tenant] += service / self._weight(tenant)

    def _charge_output(self, states: Collection[RequestState]) -> None:
        charge_generated(
            states, self._charged_tokens, self.counters, self.output_weight, self._weights
        )

    def _is_waiting(self, tenant: Tenant) -> bool:
        return is_waiting(self._queues.get(tenant, ()))

    def _take_in_new(self) -> None:
        for state in self._new:
            tenant = state.request.tenant
            counter = self.counters.get(tenant, 0.0)
            if not self._is_waiting(tenant):
                others = [c for t, c in self.counters.items() if self._is_waiting(t)]
                last = self.counters.get(self._last_to_leave, 0.0)
                counter = max(counter, min(others, default=last))
            self.counters[tenant] = counter
            self._queues.setdefault(tenant, {})[state] = None
        self._new.clear()
