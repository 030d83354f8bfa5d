"""Every policy on small runs full of what rarely happens, under limits that bite.

A few requests of three tenants with priorities, targets and predictions that are off, on lengths
at the edges of blocks and bins, in bursts and after idle times. Of each run a digest is kept: any
rule of a policy or of the engine that changes, changes one.
"""

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from schedlab.policies.static import Static
from schedlab.sim.config import EngineConfig
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Slo
from tests import laws
from tests.policy_cases import CASES, make
from tests.staged_cost import StagedCost
from tests.workloads import EDGES

KEPT = Path(__file__).with_name("small_runs.json")
NUM_REQUESTS = 40
# Time between two requests, ns: what is drawn from. Steps take 1,000 ns and more.
GAPS_NS = (0, 0, 0, 1, 400, 1_010, 2_500, 9_000, 30_000)
CROWDED_NS = (0, 0, 0, 0, 0, 1, 400, 1_010, 2_500, 9_000)
LIMITS = {
    "tight": EngineConfig(
        num_blocks=27, max_model_len=100, block_size=4, max_num_seqs=5, max_num_batched_tokens=24
    ),
    "reserved": EngineConfig(
        num_blocks=48, max_model_len=100, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=32, watermark=0.1, long_prefill_token_threshold=9,
        scheduler_reserve_full_isl=True,
    ),
    "swap": EngineConfig(
        num_blocks=9, max_model_len=100, max_num_seqs=4, max_num_resident=6,
        max_num_batched_tokens=50, preemption_mode="swap", swap_space_blocks=5, kv_block_bytes=70,
    ),
    "switches": EngineConfig(
        num_blocks=40, max_model_len=100, block_size=4, max_num_seqs=9, max_num_batched_tokens=40,
        enable_prefix_caching=True, async_scheduling=True, arrivals_between_steps=True,
        cudagraph_capture_sizes=(1, 2, 4, 8), first_launch_ns=5_000,
    ),
    "contiguous": EngineConfig(
        num_blocks=60, max_model_len=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=48,
        kv_allocator="contiguous_pow2",
    ),
}  # fmt: skip
_STAGES = EngineConfig(
    num_blocks=30, max_model_len=100, block_size=4, max_num_seqs=4, max_num_resident=9,
    max_num_batched_tokens=24, enable_prefix_caching=True, pipeline_parallel_size=3,
)  # fmt: skip
PIPELINES = {
    "pipeline": _STAGES,
    "pipeline of vllm": replace(
        _STAGES, chunked_pipeline_parallelism=True, arrivals_between_steps=True,
        preempt_in_order=True, scheduler_reserve_full_isl=True,
    ),
    "pipeline planned ahead": replace(
        _STAGES, chunked_pipeline_parallelism=True, arrivals_between_steps=True,
        preempt_in_order=True, async_scheduling=True, overrun_at_stop=True,
    ),
}  # fmt: skip
REQUEST_COLUMNS = (
    "id", "status", "queued_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns",
    "finish_ns", "generated_tokens", "num_preemptions", "recomputed_tokens", "cached_tokens",
    "prefix_hit_tokens",
)  # fmt: skip
STEP_COLUMNS = (
    "start_ns", "end_ns", "num_decodes", "num_prefills", "prefill_tokens", "padding_tokens",
    "recomputed_tokens", "num_preempted", "num_running", "num_waiting", "kv_tokens",
    "kv_allocated_tokens", "kv_reserved_unused_tokens", "kv_fragmentation_tokens",
)  # fmt: skip


def workload(limits: str) -> list:
    """Draw the requests of one kind of limits, the same on every machine."""
    draw = random.Random(limits)
    gaps_ns = CROWDED_NS if limits in {"reserved", "swap"} else GAPS_NS
    now_ns, requests = 0, []
    for i in range(NUM_REQUESTS):
        now_ns += draw.choice(gaps_ns)
        prompt = draw.choice((*EDGES, draw.randint(1, 60)))
        output = draw.choice((1, *EDGES, draw.randint(1, 40)))
        document = draw.randrange(3)
        requests.append(
            laws.arrival(
                i,
                now_ns,
                prompt,
                output,
                tenant="abc"[draw.randrange(3)],
                application="xy"[draw.randrange(2)],
                priority=draw.randrange(3),
                predicted_tokens=output * draw.choice((0.5, 1.0, 1.0, 1.3)),
                slo=Slo(
                    ttft_ms=draw.choice((None, 0.004, 0.02)),
                    tpot_ms=draw.choice((None, 0.0015, 0.004)),
                    e2el_ms=draw.choice((None, 0.05, 0.2)),
                ),
                prefix_hash_ids=tuple(
                    document * 1000 + j if j < 3 * document else (i + 10) * 1000 + j
                    for j in range(prompt // 4)
                ),
            )
        )
    return requests


def digest(case: str, limits: str) -> str:
    """Run one policy under one kind of limits; return a digest of what came of it.

    Sealed batches set memory aside, which goes with no prefix cache: they are run without.
    """
    policy, cost = make(case), None
    if limits in PIPELINES:
        config = PIPELINES[limits]
        cost = StagedCost((10, 15, 5), link_ns=100, link_token_ns=1)
    else:
        config = LIMITS[limits]
    if isinstance(policy, Static):
        config = replace(config, enable_prefix_caching=False)
    return digest_of(laws.run(policy, workload(limits), config, cost, prove=False))


def limits_of(case: str) -> list[str]:
    """List the kinds of limits that a policy is run under."""
    return [*LIMITS, *PIPELINES] if make(case).can_pipeline else [*LIMITS]


def digest_of(log: RunLog) -> str:
    """Return a digest of a run's requests, steps and preemptions."""
    text = hashlib.sha256()
    for table, columns in (
        (log.requests(), REQUEST_COLUMNS),
        (log.steps(), STEP_COLUMNS),
        (log.preemptions(), ("id", "evicted_ns", "resumed_ns", "resumed_tokens")),
    ):
        for name in columns:
            text.update(np.asarray(table[name], dtype=np.int64).tobytes())
    return text.hexdigest()[:16]


def kept() -> dict[str, dict[str, str]]:
    """Read the digests, by case and limits."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


def write() -> None:
    """Write them anew, a line a case."""
    rows = [
        f"{json.dumps(case)}: {json.dumps({name: digest(case, name) for name in limits_of(case)})}"
        for case in CASES
    ]
    KEPT.write_text("{\n " + ",\n ".join(rows) + "\n}\n", encoding="utf-8")
