"""A step as vLLM's workers are told of it."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from schedlab.gpu_backend.vllm import release


def step_output(
    scheduler: Any,  # noqa: ANN401 - vLLM's, as all below
    new: list[Any],
    resumed: list[Any],
    running: list[Any],
    tokens: dict[str, int],
    blocks: dict[str, Any],
    preempted: set[str],
) -> SchedulerOutput:
    """Write a step down as vLLM does; what is not set here keeps the release's default.

    Parameters
    ----------
    scheduler : vllm Scheduler
        Counts the step's tokens as computed.
    new, resumed, running : list of vllm Request
        Who takes part: requests that workers do not know, those that come back after a preemption,
        and the others.
    tokens : dict of str to int
        vLLM's id of each to the tokens it computes.
    blocks : dict of str to KVCacheBlocks
        The blocks that the step gives to those that workers know.
    preempted : set of str
        Whose memory the plan took.
    """
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [release.new_request_data(scheduler, one) for one in new]
    output.scheduled_cached_reqs = scheduler._make_cached_request_data(
        running, resumed, tokens, {}, blocks
    )
    output.num_scheduled_tokens = tokens
    output.total_num_scheduled_tokens = sum(tokens.values())
    output.preempted_req_ids = release.preempted_ids(scheduler, preempted)
    output.finished_req_ids = scheduler.finished_req_ids
    output.new_block_ids_to_zero = release.blocks_to_zero(scheduler)
    if not scheduler.use_v2_model_runner:
        scheduler.prev_step_scheduled_req_ids.clear()
        scheduler.prev_step_scheduled_req_ids.update(tokens)
    scheduler._update_after_schedule(output)
    return output
