"""What cannot run in vLLM, and why."""

from __future__ import annotations

from typing import Any

from schedlab.gpu_backend.vllm import release
from schedlab.policies.policy import Policy
from schedlab.policies.static import Static
from schedlab.sim.errors import SpecError

_ASK_FOR_TIMES = ("fair_batching", "fastserve", "hygen", "qoserve", "scorpio")


def refuse_policy(policy: Policy, name: str, has_cost_model: bool = False) -> None:
    """Raise SpecError if a policy asks for what vLLM does not have."""
    if isinstance(policy, Static):
        raise SpecError(
            f"policy {name!r} seals batches and keeps rows of finished requests; vLLM has neither"
        )
    if name in _ASK_FOR_TIMES and not has_cost_model:
        raise SpecError(
            f"policy {name!r} asks how long steps take; give the server a cost model: "
            '\'{"schedlab": {"policy": ..., "cost_model": "roofline", "hardware": "h100-80gb"}}\''
        )


def refuse_server(scheduler: Any) -> None:  # noqa: ANN401 - vLLM's
    """Raise SpecError if a server has a feature that a policy's plans do not know."""
    config = scheduler.vllm_config
    model = config.model_config
    found = {
        "speculative decoding": config.speculative_config,
        "a KV connector": config.kv_transfer_config,
        "an encoder connector": config.ec_transfer_config,
        "LoRA": config.lora_config,
        "pipeline parallelism": scheduler.use_pp,
        "context parallelism": scheduler.dcp_world_size > 1 or scheduler.pcp_world_size > 1,
        "a pooling model": model.runner_type == "pooling",
        "a diffusion model": model.is_diffusion,
        "an encoder-decoder model": scheduler.is_encoder_decoder,
        "a multimodal model": model.supports_multimodal_inputs,
        "several groups of KV cache": len(scheduler.kv_cache_config.kv_cache_groups) != 1,
        "Mamba layers": scheduler.has_mamba_layers,
        **release.features(scheduler),
    }
    for feature, is_on in found.items():
        if is_on:
            raise SpecError(f"policies do not run in vLLM with {feature}")
