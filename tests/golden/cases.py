"""A small fixed matrix of policies and workloads whose results are kept."""

import hashlib
import json
from pathlib import Path

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec

EXPECTED = Path(__file__).with_name("expected.json")

POLICIES = {
    "fcfs": "fcfs",
    "priority": "priority",
    "sjf": {"name": "sjf", "predictor": {"name": "noisy", "sigma": 0.5}},
    "prefill_first": "prefill_first",
    "static": {"name": "static", "max_batch_size": 16},
    "dynamic": {"name": "dynamic", "max_batch_size": 16, "max_queue_delay_s": 0.05},
}
WORKLOADS = {
    # A chat load near capacity; code with short answers all at once; so little memory that
    # requests are preempted.
    "chat": {"workload": {"trace": "azure-conv", "num_requests": 150, "request_rate": 6.0}},
    "burst": {"workload": {"trace": "azure-code", "num_requests": 150, "request_rate": "inf"}},
    "tight": {
        "workload": {"trace": "sharegpt", "num_requests": 80, "request_rate": 20.0},
        "engine": {"num_gpu_blocks_override": 500, "max_model_len": 8000},
    },
}
METRICS = (
    "completed", "rejected", "duration_s", "request_throughput", "output_throughput",
    "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms",
    "mean_e2el_ms", "p99_e2el_ms", "num_preemptions", "recomputed_tokens", "kv_utilization",
    "padding_share",
)  # fmt: skip


def result_of(policy: str, workload: str) -> dict:
    """Run one case; metrics for people, and a digest of every token time for the machine."""
    spec = make_spec({"name": "golden", "policy": POLICIES[policy], **WORKLOADS[workload]})
    result = run(spec)
    metrics = result.metrics()
    digest = hashlib.sha256()
    for request_id in result.requests["id"].tolist():
        digest.update(result.log.token_times(request_id).tobytes())
    return {
        **{name: metrics[name] for name in METRICS},
        "num_steps": result.provenance["num_steps"],
        "num_plans": result.provenance["num_plans"],
        "token_times_sha256": digest.hexdigest(),
    }


def cases() -> list[tuple[str, str]]:
    """List the matrix."""
    return [(policy, workload) for policy in POLICIES for workload in WORKLOADS]


def expected() -> dict:
    """Read what is kept."""
    return json.loads(EXPECTED.read_text(encoding="utf-8"))
