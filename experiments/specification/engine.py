"""The keys under `engine`: limits, memory and switches of the serving engine."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from schedlab.experiments.specification.fields import (
    Count,
    CountOrZero,
    Data,
    Finite,
    Fraction,
    NonNegative,
    Seconds,
    Section,
    measurable,
    shorthand,
    whole,
)
from schedlab.experiments.specification.kv_offload import KVOffloadSpec
from schedlab.experiments.specification.link import LinkSpec
from schedlab.experiments.specification.speculation import SpeculationSpec
from schedlab.sim.config import EngineConfig, KVAllocator, PreemptionMode
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.dtypes import dtype_name


class SchedulingOverheadSpec(Section):
    """CPU time of the scheduler per step, charged beside the kernel time."""

    base_s: Seconds = Field(default=0.0, description="Seconds a step costs in any case.")
    per_running_s: Seconds = Field(default=0.0, description="Seconds per running request.")
    per_waiting_s: Seconds = Field(default=0.0, description="Seconds per waiting request.")
    per_prefill_step_s: Seconds = Field(
        default=0.0, description="Seconds more of a step that computes prompt tokens."
    )
    first_step_s: Seconds = Field(
        default=0.0, description="Seconds more of the very first step, without a warm-up."
    )
    per_queued_step_s: Seconds = Field(
        default=0.0, description="Seconds more of a step while anybody waits."
    )


def _dtype(value: object) -> object:
    """Let vLLM's long names (bfloat16, half) stand for the short ones."""
    try:
        return dtype_name(value) if isinstance(value, str) and value != "auto" else value
    except SpecError:
        return value


Dtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"]
AutoDtype = Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"]


_VLLM_0_19: Data = {
    "enable_prefix_caching": True,
    "scheduler_reserve_full_isl": True,
    "preempt_in_order": True,
    "async_scheduling": True,
    "arrivals_between_steps": True,
    "chunked_pipeline_parallelism": True,
    "cuda_graph_padding": True,
    "reserve_null_block": True,
}
_VLLM_0_32: Data = {
    **_VLLM_0_19,
    "threshold_spares_lone_request": True,
    "free_uncached_first": True,
    "offloading_connector": True,
}
ENGINE_PROFILES: dict[str, Data] = {
    "vllm-0.19": _VLLM_0_19,
    "vllm-0.24": {**_VLLM_0_19, "free_uncached_first": True},
    "vllm-0.32": _VLLM_0_32,
    "vllm-0.33": {**_VLLM_0_32, "serve_behind_preempted": True, "names_accepted_drafts": True},
}
"""Switches that together behave like a released engine; keys written beside them win."""


_LIMITS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}


def _limit(name: str, description: str) -> Any:  # noqa: ANN401 - as `Field`
    """Return a field with the default that the engine itself has."""
    return Field(default=_LIMITS[name], description=description)


_Length = Annotated[int, Field(ge=2), BeforeValidator(whole), AfterValidator(measurable)]
"""A prompt and an answer have a token each."""


class EngineSpec(Section):
    """Limits and memory of the serving engine; vLLM's names mean what they mean in vLLM."""

    profile: Literal["vllm-0.19", "vllm-0.24", "vllm-0.32", "vllm-0.33"] | None = Field(
        default=None, description="Switches of a released engine at once; see cost-models.md."
    )
    max_num_seqs: Count = _limit("max_num_seqs", "Most requests in one step.")
    max_num_resident: Count | None = _limit(
        "max_num_resident",
        "Most requests with KV memory; if absent `max_num_seqs`, or what memory holds "
        "with policies that pause requests (`atlas`, `fastserve`, `gittins`, `ltr`, `plas`, "
        "`program_srpt`, `srtf`).",
    )
    max_num_batched_tokens: Count = _limit(
        "max_num_batched_tokens", "Most tokens computed in one step."
    )
    block_size: Count = _limit("block_size", "Tokens in a KV block.")
    gpu_memory_utilization: Fraction = Field(
        default=0.9, description="Share of device memory the engine may use."
    )
    max_model_len: _Length | None = Field(
        default=None,
        description="Most tokens of a request, prompt and output; "
        "if absent the model's limit, but no more than the KV cache holds.",
    )
    num_gpu_blocks_override: Count | None = Field(
        default=None, description="KV blocks, instead of the number that follows from memory."
    )
    enable_chunked_prefill: bool = _limit(
        "enable_chunked_prefill",
        "Whether the token budget may cut prompts into pieces (rules of policies may in any case).",
    )
    long_prefill_token_threshold: CountOrZero = _limit(
        "long_prefill_token_threshold",
        "Most prompt tokens a request computes in one step; 0 is no limit.",
    )
    threshold_spares_lone_request: bool = _limit(
        "threshold_spares_lone_request", "Do not apply that limit to the only request there is."
    )
    watermark: Annotated[Finite, Field(ge=0, lt=1)] = _limit(
        "watermark", "Share of KV blocks kept free when a request is admitted."
    )
    scheduler_reserve_full_isl: bool = _limit(
        "scheduler_reserve_full_isl",
        "Admit a request only if its whole sequence fits, not just its first chunk.",
    )
    kv_allocator: KVAllocator = _limit("kv_allocator", "How KV memory is given out.")
    enable_prefix_caching: bool = _limit(
        "enable_prefix_caching",
        "Reuse the KV blocks of equal prefixes and of preempted requests.",
    )
    free_uncached_first: bool = _limit(
        "free_uncached_first",
        "Hand out freed blocks that no prefix can find before all others.",
    )
    names_accepted_drafts: bool = _limit(
        "names_accepted_drafts",
        "Let a prefix find the blocks of accepted drafts as soon as they are verified, as vLLM "
        "does from 0.33 on; off = once the request is scheduled anew.",
    )
    async_scheduling: bool = _limit(
        "async_scheduling",
        "Plan each step while the one before it runs, without knowing its end; in a pipeline, each "
        "batch while the one before it of the same requests is in flight.",
    )
    overrun_at_stop: bool = _limit(
        "overrun_at_stop",
        "Compute a token too many of answers that end before `max_tokens`, as vLLM does with "
        "`async_scheduling`.",
    )
    arrivals_between_steps: bool = _limit(
        "arrivals_between_steps",
        "Take requests in when a step ends; validation counts their latency from then.",
    )
    cuda_graph_padding: bool = Field(
        default=False, description="Pad the tokens of a step to the sizes of vLLM's CUDA graphs."
    )
    reserve_null_block: bool = Field(
        default=False, description="Keep one KV block unused, as vLLM does."
    )
    preempt_in_order: bool = _limit(
        "preempt_in_order",
        "Serve running requests one by one and preempt then and there, as vLLM does.",
    )
    serve_behind_preempted: bool = _limit(
        "serve_behind_preempted",
        "Then also serve running requests behind one that preempted itself, as vLLM does from "
        "0.33 on.",
    )
    preemption_mode: PreemptionMode = _limit(
        "preemption_mode",
        "What becomes of the KV of preempted requests: thrown away and computed "
        "again, or moved to host memory while there is room.",
    )
    swap_space: NonNegative = Field(
        default=4.0, description="Host memory for swapped KV, GiB on each device."
    )
    tensor_parallel_size: Count = Field(default=1, description="Devices a layer is split over.")
    chunked_pipeline_parallelism: bool = _limit(
        "chunked_pipeline_parallelism",
        "Let the next chunk of a prompt follow while those before it are in the pipeline, as vLLM "
        "and SGLang do; off = once they are back, as in Sarathi-Serve.",
    )
    pipeline_parallel_size: Count = Field(
        default=1,
        description="Stages that the layers are divided among, each of `tensor_parallel_size` "
        "devices; as many batches are in flight. See pipelines.md.",
    )
    pipeline_link: Annotated[LinkSpec, shorthand("name")] | None = Field(
        default=None,
        description="What joins each device of a stage to one of the next; if absent what joins "
        "the devices of the stage itself.",
    )
    data_parallel_size: Annotated[int, Field(ge=1, le=1024), BeforeValidator(whole)] = Field(
        default=1,
        description="Engines that share the requests; all limits are those of one engine.",
    )
    data_parallel_lockstep: bool | None = Field(
        default=None,
        description="Whether the engines run every step together and share the experts of a "
        "mixture; by default of such models only, as vLLM's do.",
    )
    enable_expert_parallel: bool | None = Field(
        default=None,
        description="Whether devices share experts by spreading whole ones, and not by slicing "
        "each; an imported profile must be of the same, and says it if this is absent.",
    )
    dtype: Annotated[Dtype, BeforeValidator(_dtype)] = Field(
        default="bf16",
        description="Number format of arithmetic, and of weights and activations; activations keep "
        "at least 16 bits.",
    )
    weight_dtype: Annotated[AutoDtype, BeforeValidator(_dtype)] = Field(
        default="auto",
        description="Number format in which the weights of the layers are stored: `auto` is "
        "`dtype`, a narrower one is widened as it is read (`int4` with `bf16` is W4A16).",
    )
    kv_cache_dtype: Annotated[AutoDtype, BeforeValidator(_dtype)] = Field(
        default="auto",
        description="Number format of the KV cache; `auto` is `dtype`, but no less than 16 bits.",
    )
    fast_forward: bool = _limit(
        "fast_forward", "Take steps that cannot differ at once; exact, only faster."
    )
    check_horizon: bool = _limit(
        "check_horizon",
        "Ask the policy again at every skipped step (slow, for debugging).",
    )
    trial_requests: CountOrZero = Field(
        default=300,
        description="Requests on which a policy given as module:Class is tried before a run: with "
        "check_horizon, and whether skipping ahead changes anything. 0 tries nothing.",
    )
    scheduling_overhead: SchedulingOverheadSpec | None = Field(
        default=None,
        description="CPU time of scheduling a step; if absent that of the profile, or none.",
    )

    kv_offload: KVOffloadSpec | None = Field(
        default=None,
        description="Keep KV blocks in memory below the GPU's as well, copied beside the steps; "
        "none if absent.",
    )
    offloading_connector: bool = _limit(
        "offloading_connector",
        "With `kv_offload`: store, load and seat as vLLM's OffloadingConnector does; see "
        "kv-tiers.md.",
    )
    speculation: SpeculationSpec | None = Field(
        default=None,
        description="Draft tokens and verify several in a step (speculative decoding); none if "
        "absent.",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_profile(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the YAML holds
        profile = data.get("profile") if isinstance(data, dict) else None
        if isinstance(profile, str) and profile in ENGINE_PROFILES:
            return {**ENGINE_PROFILES[profile], **data}
        return data

    @model_validator(mode="after")
    def _budget_holds_the_batch(self) -> EngineSpec:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be >= "
                f"max_num_seqs ({self.max_num_seqs}): a step decodes one token per request"
            )
        return self

    @model_validator(mode="after")
    def _stages_have_a_link(self) -> EngineSpec:
        if self.pipeline_link is not None and self.pipeline_parallel_size == 1:
            raise ValueError(
                "pipeline_link joins the stages of a pipeline, and there is one stage; set "
                "pipeline_parallel_size above 1"
            )
        return self
