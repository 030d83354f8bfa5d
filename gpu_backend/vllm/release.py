"""What differs between releases of vLLM."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import vllm
from vllm.v1.core.sched.output import NewRequestData

from schedlab.sim.config import EngineConfig

_RULES = {
    "0.24": ("preempt_in_order", "free_uncached_first"),
    "0.32": ("threshold_spares_lone_request",),
    "0.33": ("serve_behind_preempted",),
}
"""Releases with which the tests of the adapter pass, oldest first, and what each schedules by that
the one before it does not."""


def with_switches(config: EngineConfig) -> EngineConfig:
    """Return limits with the rules of this release, warning of one that was not tested."""
    major, minor = (int(part) for part in vllm.__version__.split(".")[:2])
    release = f"{major}.{minor}"
    if release not in _RULES:
        warnings.warn(
            f"schedlab was not tested with vLLM {vllm.__version__}, only with {', '.join(_RULES)}",
            stacklevel=2,
        )
    known = [name for name in _RULES if _numbers(name) <= (major, minor)] or [*_RULES][:1]
    rules: dict[str, Any] = {rule: name in known for name in _RULES for rule in _RULES[name]}
    return replace(config, **rules)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def is_ready(scheduler: Any, request: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Whether a waiting request may be admitted: its grammar, if any, is compiled."""
    if hasattr(scheduler, "_handle_blocked_waiting_request"):
        return bool(scheduler._handle_blocked_waiting_request(request))
    return bool(scheduler._try_promote_blocked_waiting_request(request))  # 0.24


def most_resident(scheduler: Any) -> int:  # noqa: ANN401 - vLLM's
    """Most requests with KV memory; 0.24 has only the limit of a step."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def preempted_ids(scheduler: Any, by_plan: set[str]) -> set[str]:  # noqa: ANN401 - vLLM's
    """Whom workers are to forget: 0.32 notes them itself, also those of a reset."""
    noted: set[str] = getattr(scheduler, "reset_preempted_req_ids", by_plan)
    return noted


def blocks_to_zero(scheduler: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Blocks that workers must clear before use, or None."""
    if hasattr(scheduler, "_get_new_block_ids_to_zero"):
        return scheduler._get_new_block_ids_to_zero()
    if scheduler.needs_kv_cache_zeroing:  # 0.24
        return scheduler.kv_cache_manager.take_new_block_ids() or None
    return None


def features(scheduler: Any) -> dict[str, bool]:  # noqa: ANN401 - vLLM's
    """Features that only some releases have and a plan does not know: name to whether it is on."""
    interval = getattr(scheduler.scheduler_config, "prefill_schedule_interval", None) or 1
    return {
        "an adaptive long_prefill_token_threshold": bool(
            getattr(scheduler, "adaptive_long_prefill_threshold", False)
        ),
        "prefills in turns (prefill_schedule_interval)": interval > 1,
    }


def new_request_data(scheduler: Any, request: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Describe a request to workers that do not know it."""
    blocks = scheduler.kv_cache_manager.get_blocks(request.request_id).get_block_ids()
    if scheduler.use_v2_model_runner:
        return NewRequestData.from_request(request, blocks, request._all_token_ids)
    return NewRequestData.from_request(request, blocks)


def resumed_are_new(scheduler: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Whether workers forget preempted requests."""
    return bool(scheduler.use_v2_model_runner)


def tokenizer(model_config: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Return the tokenizer of a server, or None if it has none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)
