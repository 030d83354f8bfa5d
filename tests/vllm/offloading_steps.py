"""The steps and copies of two schedulers on a workload with host memory below the GPU's.

vLLM's offloading worker needs a GPU. Its scheduler does not: `OffloadingConnector` decides what is
stored and loaded, and `_Worker` says when each copy is done, by the same links as ours.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.kv.tier import Link
from tests import laws
from tests.vllm.vllm_steps import Model, Nothing, _Batch, scheduler_with, vllm_config, vllm_request
from tests.vllm.workloads import STEP_NS, Workload

_PAGE_BYTES = CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT
_BLOCK_BYTES = 1000
"""Of a KV block; the times of copies follow from it, here and there."""


class Step(NamedTuple):
    """When it was planned, who computes how many tokens, and who was preempted since the last."""

    now_ns: int
    tokens: dict[int, int]
    preempted: tuple[int, ...]


class Copy(NamedTuple):
    """When blocks began to be copied, for whom, in which direction, and how many."""

    start_ns: int
    request: int
    is_load: bool
    num_blocks: int


class Done(NamedTuple):
    """What a scheduler did."""

    steps: list[Step]
    copies: list[Copy]


def with_host_memory(workload: Workload, seed: int, slow_stores: bool) -> Workload:
    """Put a host tier below an engine that plans step by step.

    With `slow_stores` blocks may be given away while they are still being stored; otherwise a store
    takes less than a step.
    """
    rng = Random(f"host memory {seed}")
    store_ns = rng.choice((900, 2500)) if slow_stores else rng.choice((1, 20))
    tier = KVTier(
        "cpu",
        num_blocks=rng.choice((2, 5, 12, 40, 400)),
        load_bytes_per_s=_BLOCK_BYTES * 1e9 / rng.choice((1, 130, 700, 2900)),
        store_bytes_per_s=_BLOCK_BYTES * 1e9 / store_ns,
        load_latency_ns=rng.choice((0, 350)),
        store_latency_ns=0,
    )
    config = replace(
        workload.config,
        async_scheduling=False,
        enable_prefix_caching=True,
        kv_tiers=(tier,),
        kv_load="always",
        kv_block_bytes=_BLOCK_BYTES,
        swap_space_blocks=tier.num_blocks,
        offloading_connector=True,
        load_takes_seat=False,
    )
    return workload._replace(config=config)


# -- ours ----------------------------------------------------------------------------------------


def ours(workload: Workload) -> Done:
    """Simulate, every step taking the same time."""
    steps: list[Step] = []
    preempted: list[int] = []
    base = registry.policy_class(workload.policy)

    class Recorded(base):
        seats_loaded = True

        def plan(self, view: Any, builder: Any) -> Any:
            plan = super().plan(view, builder)
            preempted.extend([state.id for state in plan.preempted])
            tokens = plan.num_scheduled_tokens()
            if tokens:
                steps.append(Step(view.now_ns, tokens, tuple(preempted)))
                preempted.clear()
            return plan

    cost = laws.LinearCost(base_ns=STEP_NS, token_ns=0, context_ns=0)
    log = laws.run(Recorded(), workload.arrivals, laws.slow(workload.config), cost)
    rows = log.copies.columns()
    copies = [
        Copy(int(at), int(whose), bool(is_load), int(count))
        for at, whose, is_load, count in zip(
            rows["start_ns"], rows["id"], rows["is_load"], rows["num_blocks"], strict=True
        )
    ]
    return Done(steps, sorted(copies))


# -- theirs --------------------------------------------------------------------------------------


class _Worker:
    """When copies are done; vLLM's submits a store at the beginning of the next step.

    Source: vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py, handle_preemptions(),
    start_kv_transfers() and prepare_store_kv().
    """

    def __init__(self, tier: KVTier) -> None:
        self._load = Link(tier.load_bytes_per_s, tier.load_latency_ns)
        self._store = Link(tier.store_bytes_per_s, tier.store_latency_ns)
        self._unsubmitted: dict[int, Any] = {}
        self._under_way: list[tuple[int, int, str]] = []
        self.copies: list[Copy] = []

    def begin(self, metadata: OffloadingConnectorMetadata, now_ns: int) -> int:
        """Submit copies; return when the step can begin, which waits for some of them."""
        flushed = metadata.jobs_to_flush or set()
        for job in flushed:
            if job in metadata.store_jobs:
                self._unsubmitted[job] = metadata.store_jobs.pop(job)
        for job, entry in self._unsubmitted.items():
            self._submit(self._store, False, job, entry.req_id, entry.src_spec, now_ns)
        self._unsubmitted = dict(metadata.store_jobs)
        start_ns = max([now_ns, *[done for done, job, _ in self._under_way if job in flushed]])
        for job, entry in metadata.load_jobs.items():
            self._submit(self._load, True, job, entry.req_id, entry.dst_spec, start_ns)
        return start_ns

    def _submit(
        self, link: Link, is_load: bool, job: int, whose: str, spec: Any, now_ns: int
    ) -> None:
        count = len(spec.block_ids)
        start_ns, done_ns = link.send(count * _BLOCK_BYTES, now_ns)
        self.copies.append(Copy(start_ns, int(whose), is_load, count))
        heappush(self._under_way, (done_ns, job, whose if is_load else ""))

    @property
    def next_done_ns(self) -> int:
        """When something is done next; what is submitted with the next step is so at once."""
        if self._unsubmitted:
            return 0
        return self._under_way[0][0] if self._under_way else FOREVER

    def end(self, now_ns: int) -> KVConnectorOutput:
        """Return what is done by now."""
        done, came = OffloadingWorkerMetadata(), set()
        while self._under_way and self._under_way[0][0] <= now_ns:
            _, job, whose = heappop(self._under_way)
            done.mark_completed(job)
            if whose:
                came.add(whose)
        return KVConnectorOutput(finished_recving=came, kv_connector_worker_meta=done)


def _connector_config(config: EngineConfig, policy: str) -> Any:
    vllm = vllm_config(config, policy)
    vllm.kv_transfer_config = Nothing(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        is_kv_consumer=True,
        engine_id="judge",
        kv_connector_extra_config={"cpu_bytes_to_use": config.kv_tiers[0].num_blocks * _PAGE_BYTES},
    )
    vllm.parallel_config.world_size = 1
    vllm.parallel_config.rank = 0
    vllm.parallel_config.tensor_parallel_size = 1
    vllm.parallel_config.data_parallel_size = 1
    vllm.model_config.get_total_num_kv_heads = lambda: 1
    vllm.model_config.model = "none"
    vllm.model_config.dtype = "float32"
    vllm.cache_config.cache_dtype = "auto"
    return vllm


def make_scheduler(workload: Workload) -> Scheduler:
    """Construct vLLM's scheduler with its offloading connector."""
    return scheduler_with(workload, _connector_config(workload.config, workload.policy))


def theirs(workload: Workload) -> Done:
    """Run vLLM's engine loop on a workload, every step taking the same time.

    Source: vLLM, vllm/v1/engine/core.py, step(). It turns while copies are under way; here its
    clock then jumps to the end of the next one.
    """
    scheduler = make_scheduler(workload)
    worker = _Worker(workload.config.kv_tiers[0])
    preempted: list[int] = []
    take_memory = scheduler._preempt_request

    def preempt(request: Any, *arguments: Any, **options: Any) -> None:
        preempted.append(int(request.request_id))
        take_memory(request, *arguments, **options)

    scheduler._preempt_request = preempt
    coming = deque(workload.arrivals)
    model = Model({str(a.request.id): a.output_tokens for a in workload.arrivals})
    steps: list[Step] = []
    now_ns, idle = 0, 0
    while True:
        while coming and coming[0].ready_ns <= now_ns:
            arrival = coming.popleft()
            request, output_tokens = arrival.request, arrival.output_tokens
            scheduler.add_request(vllm_request(request, output_tokens, workload.config.block_size))
        if not scheduler.has_requests():
            if not coming:
                return Done(steps, sorted(worker.copies))
            now_ns = coming[0].ready_ns
            continue
        scheduled: SchedulerOutput = scheduler.schedule()
        tokens = scheduled.num_scheduled_tokens
        start_ns = worker.begin(scheduled.kv_connector_metadata, now_ns)
        if tokens:
            steps.append(Step(now_ns, {int(i): n for i, n in tokens.items()}, tuple(preempted)))
            preempted.clear()
            end_ns = start_ns + STEP_NS
        else:
            next_ns = min(worker.next_done_ns, coming[0].ready_ns if coming else FOREVER)
            turns_at_once = scheduled.preempted_req_ids or next_ns == FOREVER
            end_ns = start_ns if turns_at_once else max(start_ns, next_ns)
        idle = 0 if tokens else idle + 1
        assert idle < 1000, "vLLM schedules nobody although requests are there"
        sampled = [i for i in tokens if not scheduler.requests[i].is_prefill_chunk]
        batch = _Batch(scheduled, sampled, end_ns)
        output: ModelRunnerOutput = (
            model.run(batch, scheduler.requests) if tokens else model.run_nothing()
        )
        now_ns = end_ns
        output.kv_connector_output = worker.end(now_ns)
        scheduler.update_from_output(scheduled, output)
