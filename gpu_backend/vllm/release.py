"""What differs between releases of vLLM."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import vllm
from vllm.v1.core.sched.output import NewRequestData

from schedlab.sim.config import EngineConfig

TESTED = ("0.32",)
"""Releases with which the tests of the adapter pass."""


def with_switches(config: EngineConfig) -> EngineConfig:
    """Return limits with the rules of this release, warning of one that was not tested."""
    release = ".".join(vllm.__version__.split(".")[:2])
    if release not in TESTED:
        warnings.warn(
            f"schedlab was not tested with vLLM {vllm.__version__}, only with {', '.join(TESTED)}",
            stacklevel=2,
        )
    return replace(
        config,
        preempt_in_order=True,
        threshold_spares_lone_request=True,
        free_uncached_first=True,
    )


def is_ready(scheduler: Any, request: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Whether a waiting request may be admitted: its grammar, if any, is compiled."""
    return bool(scheduler._handle_blocked_waiting_request(request))


def new_request_data(scheduler: Any, request: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Describe a request to workers that do not know it."""
    blocks = scheduler.kv_cache_manager.get_blocks(request.request_id).get_block_ids()
    if scheduler.use_v2_model_runner:
        return NewRequestData.from_request(request, blocks, request._all_token_ids)
    return NewRequestData.from_request(request, blocks)


def resumed_are_new(scheduler: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Whether workers forget preempted requests."""
    return bool(scheduler.use_v2_model_runner)
