"""vLLM's own scheduler is the judge: ours, and ours inside it, must take the same steps."""

import os
from dataclasses import replace

import pytest
import vllm

from schedlab.experiments.specification.engine import ENGINE_PROFILES
from schedlab.gpu_backend.vllm.scheduler import PolicyScheduler
from tests.vllm import schedlab_steps, vllm_steps, workloads

WORKLOADS = int(os.environ.get("SCHEDLAB_VLLM_WORKLOADS", "2000"))
CHUNK = 50
RELEASE = ".".join(vllm.__version__.split(".")[:2])
PROFILE = ENGINE_PROFILES[f"vllm-{RELEASE}"]
SWITCHES = {
    name: bool(PROFILE.get(name, False))
    for name in (
        "preempt_in_order",
        "threshold_spares_lone_request",
        "free_uncached_first",
        "serve_behind_preempted",
        "names_accepted_drafts",
    )
}


def first_difference(ours, theirs):
    for i in range(max(len(ours), len(theirs))):
        one = ours[i] if i < len(ours) else None
        other = theirs[i] if i < len(theirs) else None
        if one != other:
            return f"step {i} of {len(ours)} and {len(theirs)}: {one} against {other}"
    return None


class Virtual(PolicyScheduler):
    """On the clock of the test."""

    virtual_ns = 0

    def now_ns(self):
        return self.virtual_ns

    def arrival_ns(self, request):
        return int(request.arrival_time)


@pytest.mark.parametrize("first", range(0, WORKLOADS, CHUNK))
def test_fcfs_and_priority_take_the_steps_of_vllm(first):
    for seed in range(first, min(first + CHUNK, WORKLOADS)):
        workload = workloads.draw(seed, SWITCHES, has_watermark=RELEASE != "0.19")
        theirs = vllm_steps.steps_of(workload)
        ours = {
            "simulated": schedlab_steps.steps_of(workload),
            "inside vLLM": vllm_steps.steps_of(workload, Virtual),
        }
        for where, steps in ours.items():
            difference = first_difference(steps, theirs)
            assert difference is None, f"{where}, workload {seed} ({workload.kind}): {difference}"


def _with_ends_unforeseen(seed):
    """Draw a workload; every other one is planned ahead and has answers that end early."""
    workload = workloads.draw(seed, SWITCHES, has_watermark=RELEASE != "0.19")
    if seed % 2 == 0:
        return workload
    workload = workload._replace(config=replace(workload.config, async_scheduling=True))
    return workloads.cut_short(workload, seed, may_abort=False)


@pytest.mark.parametrize("first", range(0, WORKLOADS // 2, CHUNK))
def test_batches_in_a_pipeline_are_those_of_vllm(first):
    for seed in range(first, min(first + CHUNK, WORKLOADS // 2)):
        workload = workloads.draw(seed, SWITCHES, has_watermark=RELEASE != "0.19")
        workload = workloads.divide(workload, seed)
        ours, theirs = schedlab_steps.steps_of(workload), vllm_steps.steps_of(workload)
        difference = first_difference(ours, theirs)
        stages = workload.shares
        assert difference is None, f"workload {seed} ({workload.kind}, {stages}): {difference}"


@pytest.mark.parametrize("first", range(0, WORKLOADS // 2, CHUNK))
@pytest.mark.skipif(
    RELEASE in ("0.19", "0.24"), reason="who is preempted in flight does not wait there"
)
def test_batches_that_a_pipeline_plans_ahead_are_those_of_vllm(first):
    for seed in range(first, min(first + CHUNK, WORKLOADS // 2)):
        workload = _with_ends_unforeseen(seed)
        workload = workloads.divide(workload, seed, ahead=True)
        ours, theirs = schedlab_steps.steps_of(workload), vllm_steps.steps_of(workload)
        difference = first_difference(ours, theirs)
        stages = workload.shares
        assert difference is None, f"workload {seed} ({workload.kind}, {stages}): {difference}"


@pytest.mark.parametrize("first", range(0, WORKLOADS // 2, CHUNK))
def test_drafts_are_verified_in_the_steps_of_vllm(first):
    for seed in range(first, min(first + CHUNK, WORKLOADS // 2)):
        workload = workloads.draw(seed, SWITCHES, has_watermark=RELEASE != "0.19")
        if seed % 2:
            workload = workloads.cut_short(workload, seed, may_abort=False)
        workload = workloads.speculate(workload, seed)
        ours, theirs = schedlab_steps.steps_of(workload), vllm_steps.steps_of(workload)
        difference = first_difference(ours, theirs)
        assert difference is None, f"workload {seed} ({workload.kind}): {difference}"


@pytest.mark.parametrize("first", range(0, WORKLOADS // 2, CHUNK))
def test_drafts_that_are_planned_ahead_are_verified_in_the_steps_of_vllm(first):
    for seed in range(first, min(first + CHUNK, WORKLOADS // 2)):
        workload = _with_ends_unforeseen(seed)
        workload = workloads.speculate(workload, seed, ahead=True)
        ours, theirs = schedlab_steps.steps_of(workload), vllm_steps.steps_of(workload)
        difference = first_difference(ours, theirs)
        assert difference is None, f"workload {seed} ({workload.kind}): {difference}"


@pytest.mark.parametrize("first", range(0, WORKLOADS // 4, CHUNK))
def test_answers_that_end_early_leave_the_batch_as_in_vllm(first):
    for seed in range(first, min(first + CHUNK, WORKLOADS // 4)):
        workload = workloads.draw(seed, SWITCHES, has_watermark=RELEASE != "0.19")
        workload = workloads.cut_short(workload, seed, may_abort=bool(seed % 2))
        theirs = vllm_steps.steps_of(workload)
        ours = {"inside vLLM": vllm_steps.steps_of(workload, Virtual)}
        if not workload.aborts:
            ours["simulated"] = schedlab_steps.steps_of(workload)
        for where, steps in ours.items():
            difference = first_difference(steps, theirs)
            assert difference is None, f"{where}, workload {seed} ({workload.kind}): {difference}"
