"""The steps that vLLM's own scheduler takes on a workload, without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.track import Outcome
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.request import Request
from tests.vllm.schedlab_steps import Step
from tests.vllm.workloads import STEP_NS, Workload

init_none_hash(sha256)

STOP = 63
"""The token that ends an answer; no prompt has it."""


class SameTime(CostModel):
    """Every step takes the same time."""

    def __init__(self, deployment: Deployment) -> None:
        pass

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return it, `k` times."""
        return [STEP_NS] * k

    def describe(self) -> dict[str, object]:
        """Return its name."""
        return {"name": "same time"}


COSTS = {
    "cost_model": "tests.vllm.vllm_steps:SameTime", "hardware": "a100-80gb", "model": "llama-3-8b",
}  # fmt: skip


class Nothing(SimpleNamespace):
    """A configuration in which all that is not named is off."""

    def __getattr__(self, name: str) -> None:
        """Answer for what is not named."""
        if name.startswith("__"):
            raise AttributeError(name)


def vllm_config(config: EngineConfig, policy: str) -> Any:
    """Return as much of a VllmConfig as the scheduler reads."""
    return Nothing(
        scheduler_config=Nothing(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy="priority" if policy == "priority" else "fcfs",
            async_scheduling=config.async_scheduling,
            scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
            watermark=config.watermark,
            prefill_schedule_interval=1,
        ),
        cache_config=Nothing(
            num_gpu_blocks=config.num_blocks + config.null_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        model_config=Nothing(max_model_len=config.max_model_len, runner_type="generate"),
        parallel_config=Nothing(
            pipeline_parallel_size=config.pipeline_parallel_size,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
            data_parallel_rank=0,
        ),
        observability_config=Nothing(per_request_spec_decode_metrics="none"),
        ec_manager_config=Nothing(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Nothing(enabled=False),
        speculative_config=_speculative_config(config),
        num_speculative_tokens=config.num_speculative_tokens,
        num_lookahead_tokens=config.num_lookahead_tokens,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=_most_batches(config) * config.max_num_batched_tokens,
        max_concurrent_batches=_most_batches(config),
        use_v2_model_runner=config.pipeline_parallel_size > 1 and config.async_scheduling,
        additional_config={"schedlab": {"policy": policy, **COSTS}},
    )


def _most_batches(config: EngineConfig) -> int:
    """Return what `VllmConfig.max_concurrent_batches` is, of the V2 model runner."""
    # Of config/vllm.py: one batch a stage, and with asynchronous scheduling one more.
    return config.pipeline_parallel_size + config.async_scheduling


def _speculative_config(config: EngineConfig) -> Any:
    if not config.num_speculative_tokens:
        return None
    most = config.num_speculative_tokens
    return Nothing(
        use_eagle=lambda: False,
        use_eagle_block_drop=lambda: False,
        needs_eagle_block_drop=lambda: False,
        max_num_new_slots_for_drafting=0,
        # A schedule, the same at any batch size: without one, 0.32 computes rows for drafts that
        # are not there of whoever is admitted with one token to compute.
        num_speculative_tokens_per_batch_size=[(1, config.max_num_seqs, most)],
    )


def make_scheduler(workload: Workload, cls: type[Scheduler] | None = None) -> Scheduler:
    """Construct a scheduler, vLLM's own by default."""
    return scheduler_with(workload, vllm_config(workload.config, workload.policy), cls)


def scheduler_with(workload: Workload, vllm: Any, cls: type[Scheduler] | None = None) -> Scheduler:
    """Construct a scheduler from as much of a VllmConfig as it reads."""
    config = workload.config
    if cls is None:
        cls = AsyncScheduler if config.async_scheduling else Scheduler
    spec = FullAttentionSpec(
        block_size=config.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=config.num_blocks + config.null_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return cls(
        vllm,
        kv_cache_config,
        Nothing(
            should_advance=lambda request: False,
            accept_tokens=lambda *arguments: True,
            validate_tokens=lambda request, tokens: tokens,
        ),
        block_size=config.block_size,
    )


def vllm_request(request: Request, output_tokens: int, block_size: int) -> VllmRequest:
    """Write a request down as vLLM does; equal block hashes become equal tokens."""
    tokens = [block * 64 + i for block in request.prefix_hash_ids for i in range(1, block_size + 1)]
    tokens += [-1 - request.id] * (request.prompt_tokens - len(tokens))
    carried = {"predicted_tokens": request.predicted_tokens, "tenant": request.tenant}
    carried["slo"] = request.slo._asdict() if request.slo else None
    return VllmRequest(
        str(request.id),
        tokens,
        SamplingParams(
            max_tokens=request.max_tokens,
            ignore_eos=True,
            stop_token_ids=[STOP] if output_tokens < request.max_tokens else [],
            extra_args={"schedlab": carried},
        ),
        None,
        arrival_time=float(request.arrival_ns),
        priority=request.priority,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


class _Batch(NamedTuple):
    """A step under way."""

    scheduled: SchedulerOutput
    sampled: list[str]
    """Who gets a token at its end."""
    end_ns: int


class Model:
    """Made-up tokens, all different, so that no block is found but by who wrote it.

    Parameters
    ----------
    lengths : mapping of str to int, optional
        After how many tokens a request's answer ends by a token.
    """

    def __init__(
        self, lengths: Mapping[str, int] | None = None, drafts: Mapping[str, Outcome] | None = None
    ) -> None:
        self._lengths = lengths or {}
        self._drafts = drafts or {}
        self._next = 1 << 40

    def run_nothing(self) -> ModelRunnerOutput:
        """Return the output of a step without requests."""
        return ModelRunnerOutput(req_ids=[], req_id_to_index={})

    def run(self, batch: _Batch, known: Mapping[str, VllmRequest]) -> ModelRunnerOutput:
        """Return the output of a batch; `known` are the requests that vLLM still has."""
        ids = list(batch.scheduled.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for request_id in ids:
            request = known.get(request_id)
            place = request.num_output_tokens if request else -1
            sampled = []
            if request_id in batch.sampled:
                drafted = len(batch.scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
                accepted = self._drafts[request_id].verify(place, drafted)[1] if drafted else 0
                for i in range(1, accepted + 2):
                    self._next += 1
                    is_last = place + i == self._lengths.get(request_id)
                    sampled.append(STOP if is_last else self._next)
            tokens.append(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def draft(self, known: Mapping[str, VllmRequest], most: int) -> DraftTokenIds:
        """Return drafts for those who have begun to answer, which vLLM cuts where it must."""
        begun = [request for request in known.values() if request.num_output_tokens]
        drafts = []
        for request in begun:
            outcome = self._drafts[request.request_id]
            drafted, _ = outcome.verify(request.num_output_tokens, most)
            drafts.append([1] * drafted)
        return DraftTokenIds([request.request_id for request in begun], drafts)


class _Stages:
    """When a batch has passed the stages of a pipeline, each of which serves one at a time."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self._took_ns = [share * STEP_NS // 10 for share in shares]
        self._free_ns = [0] * len(shares)

    def pass_through(self, now_ns: int) -> int:
        """Send a batch in, and return when it is back."""
        for i, took_ns in enumerate(self._took_ns):
            now_ns = self._free_ns[i] = max(now_ns, self._free_ns[i]) + took_ns
        return now_ns


def _sampled_ns(scheduler: Scheduler, batches: deque[_Batch], config: EngineConfig) -> int:
    """Return when those tokens are there that the first stage waits for with the next batch."""
    stages = config.pipeline_parallel_size
    if stages == 1 or not config.async_scheduling or len(batches) < stages:
        return 0
    before = batches[-stages]
    known = [scheduler.requests[i] for i in before.sampled if i in scheduler.requests]
    goes_on = [r for r in known if r.status == RequestStatus.RUNNING and r.max_tokens > 1]
    return before.end_ns if goes_on else 0


def steps_of(workload: Workload, cls: type[Scheduler] | None = None) -> list[Step]:
    """Run vLLM's engine loop on a workload, every step taking the same time.

    Source: vLLM, vllm/v1/engine/core.py, step() and step_with_batch_queue(): the queue holds two
    batches with async scheduling, so that each is scheduled while the one before it runs, and as
    many as stages in a pipeline, empty ones among them; one more with both. Then the first stage
    waits for what was sampled as many batches before as there are stages
    (vllm/v1/worker/gpu/pp_utils.py, get_prev_sampled_outputs()).
    """
    scheduler = make_scheduler(workload, cls)
    block_size = workload.config.block_size
    most_batches = _most_batches(workload.config)
    stages = _Stages(workload.shares)
    is_pipeline = len(workload.shares) > 1
    preempted: list[int] = []
    take_memory = scheduler._preempt_request

    def preempt(request: VllmRequest, *arguments: Any, **options: Any) -> None:
        preempted.append(int(request.request_id))
        take_memory(request, *arguments, **options)

    scheduler._preempt_request = preempt
    coming = deque(workload.arrivals)
    aborts = deque(workload.aborts)
    batches: deque[_Batch] = deque()
    lengths = {str(a.request.id): a.output_tokens for a in workload.arrivals}
    outcomes: dict[str, Outcome] = {}
    if workload.drafts is not None:
        for a in workload.arrivals:
            outcomes[str(a.request.id)] = workload.drafts.outcome(a.request, a.output_tokens)
    model = Model(lengths, outcomes)
    steps, now_ns, idle = [], 0, 0
    while True:
        while coming and coming[0].ready_ns <= now_ns:
            arrival = coming.popleft()
            request, output_tokens = arrival.request, arrival.output_tokens
            scheduler.virtual_ns = request.arrival_ns
            scheduler.add_request(vllm_request(request, output_tokens, block_size))
        while aborts and aborts[0][0] <= now_ns:
            scheduler.finish_requests(str(aborts.popleft()[1]), RequestStatus.FINISHED_ABORTED)
        if not batches and not scheduler.has_requests():
            if not coming:
                return steps
            now_ns = coming[0].ready_ns
            continue
        if scheduler.has_requests():
            follows = batches and not is_pipeline
            start_ns = max(now_ns, batches[-1].end_ns) if follows else now_ns
            scheduler.virtual_ns = start_ns
            known_ns = _sampled_ns(scheduler, batches, workload.config)
            scheduled = scheduler.schedule()
            tokens = scheduled.num_scheduled_tokens
            end_ns = stages.pass_through(max(start_ns, known_ns)) if tokens else start_ns
            if batches:
                end_ns = max(end_ns, batches[-1].end_ns)
            sampled = [i for i in tokens if not scheduler.requests[i].is_prefill_chunk]
            batches.append(_Batch(scheduled, sampled, end_ns))
            idle = 0 if tokens else idle + 1
            assert idle < 1000, "vLLM schedules nobody although requests are there"
            if tokens:
                steps.append(Step({int(i): n for i, n in tokens.items()}, tuple(preempted)))
                preempted.clear()
            if len(batches) < most_batches and (tokens or scheduler.has_requests()):
                continue
        batch = batches.popleft()
        now_ns = max(now_ns, batch.end_ns)
        scheduler.update_from_output(batch.scheduled, model.run(batch, scheduler.requests))
        if outcomes and not workload.config.async_scheduling:
            most = workload.config.num_speculative_tokens
            scheduler.update_draft_token_ids(model.draft(scheduler.requests, most))
