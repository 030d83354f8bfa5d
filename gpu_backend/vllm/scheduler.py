r"""The class for vLLM's ``--scheduler-cls``: any policy decides, vLLM does everything else.

    vllm serve MODEL --scheduler-cls schedlab.gpu_backend.vllm.scheduler.PolicyScheduler \
        --additional-config '{"schedlab": {"policy": {"name": "sjf"}}}'

What a request carries for a policy travels in ``SamplingParams.extra_args["schedlab"]`` (over HTTP
``vllm_xargs``, as JSON text): `predicted_tokens`, `slo` (a mapping of `ttft_ms`, `tpot_ms`,
`e2el_ms`), `tenant`, `application`, `session`. ``"predictor"`` within ``"policy"`` names one that
is run as requests arrive; ``"cost_model"`` beside it (with ``"hardware"`` and, if need be,
``"model"``) answers policies that ask what a step would take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from itertools import count
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from schedlab.gpu_backend.vllm import release
from schedlab.gpu_backend.vllm.arrivals import Arrivals, bare, checked_keys
from schedlab.gpu_backend.vllm.builder import VllmPlanBuilder
from schedlab.gpu_backend.vllm.refusals import refuse_policy, refuse_server
from schedlab.gpu_backend.vllm.requests import Requests
from schedlab.gpu_backend.vllm.step_estimates import pricing
from schedlab.gpu_backend.vllm.step_output import step_output
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.executor import Executor
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import InfeasiblePlan, PolicyError, SpecError, described, look_alike
from schedlab.sim.own_code import raised
from schedlab.sim.request import Request, RequestState, Status

_KEYS = ("policy", "cost_model", "hardware", "model")
_EXAMPLE = 'write \'{"schedlab": {"policy": {"name": "fcfs"}}}\''
_log = logging.getLogger("vllm.schedlab")
"""Shown as vLLM shows its own."""


class _Estimates(Executor):
    """What policies ask of an executor; vLLM carries steps out itself."""

    def __init__(self, estimate_step_ns: Callable[[BatchShape, int], int]) -> None:
        self._estimate_step_ns = estimate_step_ns

    def estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Estimate a step, or the longest of so many like it."""
        return self._estimate_step_ns(shape, num_steps)


class PolicyScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler with its decisions taken by a policy, with or without async scheduling.

    `schedule()` is replaced; queues, preemption, block pool, prefix cache, sampling and stopping
    are vLLM's own.

    Raises
    ------
    SpecError
        If ``additional_config`` names no policy, or one that cannot run here, or the server has a
        feature that is not honoured; says which and why.
    PolicyError
        If the policy raises, or asks for the impossible. vLLM then ends, with its name.
    """

    has_cost_model = False
    """Whether policies may ask what a step would take, also where no cost model is given."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - as vLLM's
        super().__init__(*arguments, **options)
        refuse_server(self)
        given = _given(self.vllm_config.additional_config)
        spec = _policy_spec(given)
        self._arrivals = Arrivals(
            spec.pop("predictor", None), lambda: release.tokenizer(self.vllm_config.model_config)
        )
        self._ids = count()
        self.engine_config = config = self._engine_config()
        self._pricing = pricing(given, self.vllm_config, config)
        self._policy = _make_policy(spec, self.has_cost_model or self._pricing is not None)
        self._started_ns = time.monotonic_ns()
        self.plan_requests = Requests(self, config, self._policy, self._take_memory)
        self._engine = SimpleNamespace(
            requests=self.plan_requests,
            config=config,
            now_ns=0,
            executor=_Estimates(self._estimate_step_ns),
        )
        self._view = EngineView(self._engine)  # type: ignore[arg-type]
        self._builder = VllmPlanBuilder(self.plan_requests)
        self._last_plan: BatchPlan | None = None
        self._blocked: list[RequestState] = []
        self._rejected: list[Any] = []
        self._preempted: set[str] = set()
        if self._policy.on_start is not None:
            self._policy.on_start(self._view)

    def now_ns(self) -> int:
        """Return the policy's clock: nanoseconds since the server began."""
        return time.monotonic_ns() - self._started_ns

    def seen(self, request: Any) -> Request:  # noqa: ANN401 - vLLM's
        """Return what a policy sees of a request.

        Raises
        ------
        SpecError
            If it carries what nobody understands, or its answer cannot be predicted.
        """
        return self._arrivals.seen(request, next(self._ids), self.arrival_ns(request))

    def arrival_ns(self, request: Any) -> int:  # noqa: ANN401 - vLLM's
        """Return when the front end got a request, by that clock."""
        return self.now_ns() - int((time.time() - request.arrival_time) * 1e9)

    def _engine_config(self) -> EngineConfig:
        limits = self.scheduler_config
        num_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        config = EngineConfig(
            num_blocks=num_blocks,
            null_blocks=1,
            max_model_len=min(self.max_model_len, num_blocks * self.block_size),
            block_size=self.block_size,
            max_num_seqs=self.max_num_running_reqs,
            max_num_resident=release.most_resident(self),
            max_num_batched_tokens=self.max_num_scheduled_tokens,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
            watermark=limits.watermark,
            scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
            enable_prefix_caching=self.cache_config.enable_prefix_caching,
            async_scheduling=bool(limits.async_scheduling),
        )
        return release.with_switches(config)

    def _estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        if self._pricing is None:
            raise InfeasiblePlan("the server has no cost model, so steps cannot be estimated")
        return self._pricing.estimate_ns(shape, num_steps)

    # -- requests in and out -------------------------------------------------------------------

    def add_request(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        """Take a request in; see vLLM's `Scheduler.add_request`."""
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            now_ns = self.now_ns()
            refused = None
            try:
                seen = self.seen(request)
            except Exception as error:  # of one request, whatever it is
                seen = bare(request, next(self._ids), now_ns)
                refused = str(error) if isinstance(error, SpecError) else described(error)
            state = self.plan_requests.add(request, seen, now_ns)
            if refused is not None:
                self._reject(request, refused)
            elif self._policy.needs_prediction and seen.predicted_tokens is None:
                what = (
                    "orders by predicted output: give it a predictor, or every request "
                    "predicted_tokens in extra_args['schedlab'] (over HTTP in vllm_xargs)"
                )
                self._reject(request, f"policy {self._name} {what}")
            else:
                # A policy hears of the end of the last step first; or its grammar is not ready.
                self._blocked.append(state)

    def _reject(self, request: Any, reason: str) -> None:  # noqa: ANN401 - vLLM's
        # Over HTTP a client learns of an internal error, whatever the reason.
        _log.warning("request %s is refused: %s", request.request_id, reason)
        request.stop_reason = reason
        state = self.plan_requests.state_of(request.request_id)
        if state in self.plan_requests.waiting:
            self.plan_requests.waiting.remove(state, self.now_ns())
        state.status = Status.REJECTED
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        self._rejected.append(request)

    def _take_memory(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        self.running.remove(request)
        self._preempted.add(request.request_id)
        self._preempt_request(request, time.monotonic())

    @property
    def _name(self) -> str:
        return type(self._policy).__name__

    # -- one step ------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Let the policy plan a step, and carry the plan out; see vLLM's `Scheduler.schedule`."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return super().schedule(throttle_prefills)
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        plan = self._make_plan()
        requests, now_ns = self.plan_requests, self._engine.now_ns
        requests.apply(plan.preempted, now_ns)
        for state, reason in plan.rejected:
            request = requests.vllm_request(state)
            self._reject(request, reason)
            if self._policy.on_reject is not None:
                self._policy.on_reject(state, now_ns)
        new: list[Any] = []
        resumed: list[Any] = []
        for state in plan.admitted:
            request = requests.vllm_request(state)
            fresh = request.status == RequestStatus.WAITING or release.resumed_are_new(self)
            (new if fresh else resumed).append(request)
            cached = self._builder.cached_tokens.get(state.id, 0)
            requests.admit(state, cached, now_ns)
            self.waiting.remove_request(request)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = cached
        granted = {state.id: 1 for state in plan.decoding()} | {s.id: n for s, n in plan.chunks}
        admitted = {request.request_id for request in (*new, *resumed)}
        running: list[Any] = []
        tokens: dict[str, int] = {}
        for request in self.running:
            num_tokens = granted.get(requests.id_of(request))
            if num_tokens is None:
                continue
            tokens[request.request_id] = num_tokens
            if request.request_id not in admitted:
                running.append(request)
        return self._output(new, resumed, running, tokens)

    def _make_plan(self) -> BatchPlan:
        policy, requests = self._policy, self.plan_requests
        now_ns = self._engine.now_ns = self.now_ns()
        try:
            self._tell(now_ns)
            blocked = [s for s in self._blocked if requests.is_known(s)]
            self._blocked = [s for s in blocked if not self._is_ready(s)]
            for state in blocked:
                if state not in self._blocked:
                    requests.enqueue(state, now_ns)
            requests.admits_nobody = self._pause_state != PauseState.UNPAUSED
            if not policy.static_keys:
                requests.waiting.sort(now_ns)
            elif policy.rekeyed:
                requests.waiting.rekey(policy.rekeyed, now_ns)
            self._builder.reset(now_ns)
            plan: BatchPlan | None = policy.plan(self._view, self._builder)
        except Exception as error:
            said = raised(error, type(policy))
            raise PolicyError(f"policy {self._name}: {said}") from error
        if plan is None or plan is not self._builder.plan:
            raise PolicyError(f"policy {self._name}: plan() must return what builder.build() gave")
        if plan.finished != "leave":
            raise PolicyError(f"policy {self._name}: vLLM keeps no finished request in its batch")
        self._last_plan = plan
        return plan

    def _tell(self, now_ns: int) -> None:
        """Let the policy know who has finished, and that the last plan was executed."""
        policy, requests = self._policy, self.plan_requests
        finished = requests.look(now_ns)
        left = requests.forget_the_gone(now_ns)
        gone = [
            s for s in left
            if s.last_token_ns < 0 and s.status is not Status.REJECTED and s not in self._blocked
        ]  # fmt: skip
        for state in (*finished, *gone):
            state.last_token_ns = now_ns
            if policy.on_finish is not None:
                policy.on_finish(state, now_ns)
        plan, self._last_plan = self._last_plan, None
        if plan is not None and policy.on_tokens is not None and (plan.chunks or plan.decoding()):
            self._engine.durations_ns = [now_ns - plan.start_ns]
            policy.on_tokens(plan, 1, now_ns)

    def _is_ready(self, state: RequestState) -> bool:
        request = self.plan_requests.vllm_request(state)
        return request.status == RequestStatus.WAITING or release.is_ready(self, request)

    def _output(
        self, new: list[Any], resumed: list[Any], running: list[Any], tokens: dict[str, int]
    ) -> SchedulerOutput:
        """Tell the workers of a step."""
        blocks = self.plan_requests.kv.new_blocks
        for request in resumed:
            blocks[request.request_id] = self.kv_cache_manager.get_blocks(request.request_id)
        preempted, self._preempted = self._preempted, set()
        return step_output(self, new, resumed, running, tokens, blocks, preempted)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: Any,  # noqa: ANN401 - vLLM's
    ) -> dict[int, EngineCoreOutputs]:
        """Account for a step; clients whose requests were rejected hear of it."""
        outputs: dict[int, EngineCoreOutputs]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in self._rejected:
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=request.stop_reason,
                )
            )
        self._rejected.clear()
        return outputs


def _given(additional_config: object) -> Mapping[str, Any]:
    """Return what a server was given for its policy."""
    found = additional_config or {}
    if not isinstance(found, Mapping):
        raise SpecError(f"--additional-config must be a mapping, got {found!r:.80}; {_EXAMPLE}")
    # Other keys may be meant for others.
    if "schedlab" not in found and (near := look_alike("schedlab", map(str, found))):
        raise SpecError(f"--additional-config: unknown key {near!r:.80}; did you mean schedlab?")
    return checked_keys(found.get("schedlab", {}), _KEYS, "schedlab")


def _policy_spec(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, knobs and predictor of the policy that the server was given."""
    spec = given.get("policy")
    if isinstance(spec, str):
        spec = {"name": spec}
    if spec is None:
        raise SpecError(f"--additional-config names no policy; {_EXAMPLE}")
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise SpecError(
            f"schedlab.policy must be a name, or a mapping with one, got {spec!r:.80}; {_EXAMPLE}"
        )
    return dict(spec)


def _make_policy(spec: dict[str, Any], has_cost_model: bool) -> Any:  # noqa: ANN401 - a Policy
    name = spec.pop("name")
    policy = registry.make(name, **spec)
    refuse_policy(policy, str(name), has_cost_model)
    return policy
