"""The experiment specification: every key of the YAML, its type, bounds, unit and default."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from experiments.spec.claim import Claim
from experiments.spec.fields import (
    Count,
    Data,
    Finite,
    Fraction,
    Named,
    NonNegative,
    Positive,
    Section,
    shorthand,
    whole,
)
from experiments.spec.search import FindField, Measurement, Tune
from experiments.spec.workload import Lengths, Workload
from sim.dtypes import dtype_name
from sim.errors import SpecError

__all__ = ["Data", "ExperimentSpec", "Lengths", "Workload", "spec_hash"]


class Predictor(Named):
    """Who predicts output lengths, e.g. `oracle` or `{name: noisy, sigma: 0.5}`."""

    name: str = Field(min_length=1, description="A registered predictor.")


PredictorField = Annotated[Predictor, shorthand("name")]


class Policy(Named):
    """The scheduling policy and its knobs, e.g. `fcfs` or `{name: sjf, predictor: oracle}`."""

    name: str = Field(min_length=1, description="A registered policy, or `module:Class`.")
    predictor: PredictorField | None = Field(
        default=None, description="Who predicts output lengths for the policy; none if absent."
    )


class CostModel(Section):
    """What a step takes: an analytic roofline, or a profile measured on a real device."""

    name: Literal["roofline"] | None = Field(default=None, description="An analytic model by name.")
    profile: str | None = Field(default=None, description="Folder of a measured profile.")
    compute_efficiency: Fraction | None = Field(
        default=None,
        description="Share of peak FLOP/s reached (roofline); the model's own if absent.",
    )
    memory_efficiency: Fraction | None = Field(
        default=None,
        description="Share of peak bytes/s reached (roofline); the model's own if absent.",
    )
    kernel_latency_s: NonNegative | None = Field(
        default=None, description="Start-up time of a kernel (roofline); the model's own if absent."
    )
    profiling_overhead_s: NonNegative = Field(
        default=0.0,
        description="Seconds that timing kernels one by one added to a step (imported tables); "
        "taken off.",
    )
    separate_prefills: bool | None = Field(
        default=None,
        description="Price the attention of several prefills in a step one by one, not pooled into "
        "one (imported attention tables).",
    )
    nearest_skew: bool | None = Field(
        default=None,
        description="Correct for unequal contexts beside a chunk of any size as beside the nearest "
        "measured size (imported attention tables).",
    )
    allow_mismatch: bool = Field(
        default=False, description="Accept a profile of another model or device than the run's."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> CostModel:
        if (self.name is None) == (self.profile is None):
            raise ValueError("give either name: roofline or profile: FOLDER")
        analytic = (self.compute_efficiency, self.memory_efficiency, self.kernel_latency_s)
        if self.profile is not None and analytic != (None, None, None):
            raise ValueError("efficiencies and latency belong to roofline, not to a profile")
        if self.name is not None and self.allow_mismatch:
            raise ValueError("allow_mismatch belongs to a profile, not to the roofline model")
        for key in ("profiling_overhead_s", "separate_prefills", "nearest_skew"):
            if self.name is not None and getattr(self, key):
                raise ValueError(f"{key} belongs to a profile, not to the roofline model")
        return self


def _cost_model(value: object) -> object:
    if isinstance(value, str):
        return {"name": value} if value == "roofline" else {"profile": value}
    return value


class SchedulingOverhead(Section):
    """CPU time of the scheduler per step, charged beside the kernel time."""

    base_s: NonNegative = Field(default=0.0, description="Seconds a step costs in any case.")
    per_running_s: NonNegative = Field(default=0.0, description="Seconds per running request.")
    per_waiting_s: NonNegative = Field(default=0.0, description="Seconds per waiting request.")
    per_prefill_step_s: NonNegative = Field(
        default=0.0, description="Seconds more of a step that computes prompt tokens."
    )
    first_step_s: NonNegative = Field(
        default=0.0, description="Seconds more of the very first step, without a warm-up."
    )


def _dtype(value: object) -> object:
    """Let vLLM's long names (bfloat16, half) stand for the short ones."""
    try:
        return dtype_name(value) if isinstance(value, str) and value != "auto" else value
    except SpecError:
        return value


Dtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"]
KVDtype = Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"]


ENGINE_PROFILES: dict[str, Data] = {
    "vllm-0.19": {
        "enable_prefix_caching": True,
        "scheduler_reserve_full_isl": True,
        "async_scheduling": True,
        "arrivals_between_steps": True,
        "cuda_graph_padding": True,
        "reserve_null_block": True,
    }
}
"""Switches that together behave like a released engine; keys written beside them win."""


class Engine(Section):
    """Limits and memory of the serving engine; vLLM's names mean what they mean in vLLM."""

    profile: Literal["vllm-0.19"] | None = Field(
        default=None, description="Switches of a released engine at once; see cost-models.md."
    )
    max_num_seqs: Count = Field(default=128, description="Most requests in one step.")
    max_num_batched_tokens: Count = Field(
        default=2048, description="Most tokens computed in one step."
    )
    block_size: Count = Field(default=16, description="Tokens in a KV block.")
    gpu_memory_utilization: Fraction = Field(
        default=0.9, description="Share of device memory the engine may use."
    )
    max_model_len: Count | None = Field(
        default=None,
        description="Most tokens of a request, prompt and output; "
        "if absent the model's limit, but no more than the KV cache holds.",
    )
    num_gpu_blocks_override: Count | None = Field(
        default=None, description="KV blocks, instead of the number that follows from memory."
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="Whether a prompt may take many steps."
    )
    long_prefill_token_threshold: Annotated[int, Field(ge=0), BeforeValidator(whole)] = Field(
        default=0, description="Most prompt tokens a request computes in one step; 0 is no limit."
    )
    watermark: Annotated[Finite, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of KV blocks kept free when a request is admitted."
    )
    scheduler_reserve_full_isl: bool = Field(
        default=False,
        description="Admit a request only if its whole sequence fits, not just its first chunk.",
    )
    kv_allocator: Literal["paged", "contiguous_max", "contiguous_pow2", "contiguous_exact"] = Field(
        default="paged", description="How KV memory is given out."
    )
    enable_prefix_caching: bool = Field(
        default=False,
        description="Reuse the KV blocks of equal prefixes and of preempted requests.",
    )
    async_scheduling: bool = Field(
        default=False,
        description="Plan each step while the one before it runs, without knowing its end.",
    )
    arrivals_between_steps: bool = Field(
        default=False,
        description="Take requests in when a step ends; validation counts their latency from then.",
    )
    cuda_graph_padding: bool = Field(
        default=False, description="Pad the tokens of a step to the sizes of vLLM's CUDA graphs."
    )
    reserve_null_block: bool = Field(
        default=False, description="Keep one KV block unused, as vLLM does."
    )
    preemption_mode: Literal["recompute", "swap"] = Field(
        default="recompute",
        description="What becomes of the KV of preempted requests: thrown away and computed "
        "again, or moved to host memory while there is room.",
    )
    swap_space: NonNegative = Field(
        default=4.0, description="Host memory for swapped KV, GiB on each device."
    )
    tensor_parallel_size: Count = Field(default=1, description="Devices a layer is split over.")
    data_parallel_size: Count = Field(
        default=1,
        description="Engines that share the requests and run every step together, as with shared "
        "experts; all limits are those of one engine.",
    )
    dtype: Annotated[Dtype, BeforeValidator(_dtype)] = Field(
        default="bf16", description="Number format of weights and activations."
    )
    kv_cache_dtype: Annotated[KVDtype, BeforeValidator(_dtype)] = Field(
        default="auto",
        description="Number format of the KV cache; `auto` is `dtype`, but no less than 16 bits.",
    )
    fast_forward: bool = Field(
        default=True, description="Take steps that cannot differ at once; exact, only faster."
    )
    check_horizon: bool = Field(
        default=False,
        description="Ask the policy again at every skipped step (slow, for debugging).",
    )
    scheduling_overhead: SchedulingOverhead | None = Field(
        default=None,
        description="CPU time of scheduling a step; if absent that of the profile, or none.",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_profile(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the YAML holds
        if isinstance(data, dict) and data.get("profile") in ENGINE_PROFILES:
            return {**ENGINE_PROFILES[data["profile"]], **data}
        return data

    @model_validator(mode="after")
    def _budget_holds_the_batch(self) -> Engine:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be >= "
                f"max_num_seqs ({self.max_num_seqs}): a step decodes one token per request"
            )
        return self


class Real(Section):
    """The real backend: where the kernels run, and what its clock shows."""

    device: str = Field(default="cpu", min_length=1, description="`cpu`, `cuda` or `cuda:INDEX`.")
    clock: Literal["virtual", "wall", "modelled"] = Field(
        default="virtual",
        description="`virtual`: steps take as long as measured, waiting takes no time; `wall`: "
        "time as it passes; `modelled`: kernels run, steps take what the cost model says.",
    )
    weights: str | None = Field(
        default=None, description="Folder with safetensors; seeded random weights if absent."
    )
    temperature: NonNegative = Field(default=0.0, description="Of sampling; 0 is greedy.")
    cuda_graphs: bool = Field(default=True, description="Replay CUDA graphs of decode steps.")
    threads: Count = Field(
        default=1, description="Threads of the kernels on a CPU; a profile is of one number."
    )
    repeats: Count = Field(
        default=3, description="Measured runs of each point in a comparison with the simulation."
    )


class Validation(Section):
    """A recorded run of a real engine, to hold the prediction against."""

    measured: str = Field(
        min_length=1, description="Its requests.jsonl: queued_ts, first_token_ts, last_token_ts."
    )


class SloTargets(Section):
    """Latency targets; a request is good if it meets every target given, with <=."""

    ttft_ms: Positive | None = Field(default=None, description="Time to first token, milliseconds.")
    tpot_ms: Positive | None = Field(
        default=None, description="Time per output token, milliseconds."
    )
    e2el_ms: Positive | None = Field(default=None, description="End-to-end latency, milliseconds.")


class ExperimentSpec(Section):
    """One experiment: everything that can change its result, and what to vary.

    Build it with `experiments.spec.loading.load_spec` or `make_spec`, whose errors name file, line
    and key; the constructor alone does not check names against the registries.
    """

    name: str = Field(min_length=1, description="Name in tables and figures.")
    seed: Annotated[int, Field(ge=0), BeforeValidator(whole)] = Field(
        default=0, description="Seed of every random stream; replication r uses seed + r."
    )
    model: str = Field(
        default="llama-3-8b",
        min_length=1,
        description="A known model, or a Hugging Face config.json.",
    )
    hardware: str = Field(
        default="a100-80gb", min_length=1, description="A known GPU, or a file that describes one."
    )
    cost_model: Annotated[CostModel, BeforeValidator(_cost_model)] = Field(
        default_factory=lambda: CostModel(name="roofline"),
        description="`roofline`, a profile folder, or a mapping.",
    )
    backend: Literal["sim", "real"] = Field(default="sim", description="Simulated or real device.")
    engine: Engine = Field(default_factory=Engine, description="The serving engine.")
    policy: Annotated[Policy, shorthand("name")] = Field(
        default_factory=lambda: Policy(name="fcfs"),
        description="The scheduling policy: a name, or a mapping with its knobs.",
    )
    workload: Workload = Field(description="The requests.")
    slo: SloTargets = Field(default_factory=SloTargets, description="Latency targets.")
    measure: Measurement | None = Field(
        default=None, description="What of a run is measured; all of it if absent."
    )
    real: Real = Field(default_factory=Real, description="The real backend.")
    validation: Validation | None = Field(
        default=None, description="A recorded real run, for `schedlab validate`."
    )
    replications: Count = Field(default=1, description="Runs of each point, with different seeds.")
    sweep: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Dotted keys and the values they take; all combinations are run. Keys joined "
        "by commas are linked: each value is a list with one for each.",
    )
    find: FindField | None = Field(
        default=None,
        description="A largest value, for `schedlab find`; a mapping, or `max KEY between A and B "
        "subject to METRIC <= X`.",
    )
    tune: Tune | None = Field(default=None, description="A best setting, for `schedlab tune`.")
    claim: Claim | None = Field(
        default=None, description="What a paper says of it, for `schedlab claims`."
    )

    def to_data(self) -> Data:
        """Return the specification as plain data that loads back to an equal one.

        Returns
        -------
        dict
            Every key with its value, defaults included; absent optional keys stay absent.
        """
        data = _plain(self)
        assert isinstance(data, dict)
        return data


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        declared = {key: getattr(value, key) for key in type(value).model_fields}
        data = {key: _plain(item) for key, item in declared.items() if item is not None}
        # A knob set to null says something (its default may differ), an absent section does not.
        data |= {key: _plain(item) for key, item in (value.model_extra or {}).items()}
        return {key: item for key, item in data.items() if key != "sweep" or item}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def spec_hash(spec: ExperimentSpec) -> str:
    """Return the identity of an experiment: equal hashes ask the same question.

    Parameters
    ----------
    spec : ExperimentSpec
        One point, or a whole sweep.

    Returns
    -------
    str
        SHA-256 (hex) of canonical JSON of every key but name and claim, with files replaced by the
        SHA-256 of what they contain: neither moving a trace nor renaming an experiment changes it.
        Program versions are not part of it; results carry them beside the hash.

    Raises
    ------
    OSError
        If a file the specification names cannot be read.
    """
    data = spec.to_data()
    del data["name"]
    data.pop("claim", None)
    return data_hash(data)


def data_hash(data: Data) -> str:
    """Return a hash of plain data in which files count by what they contain.

    Parameters
    ----------
    data : dict
        Nested plain data; absolute paths of what exists stand for its content.

    Returns
    -------
    str
        SHA-256 (hex) of canonical JSON.

    Raises
    ------
    OSError
        If a file that exists cannot be read.
    """
    return hashlib.sha256(
        json.dumps(_canonical(data), sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _canonical(value: object) -> object:
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and Path(value).is_absolute() and Path(value).exists():
        return _digest(Path(value))
    return value


def _digest(path: Path) -> str:
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        lines = [f"{p.relative_to(path).as_posix()} {_digest(p)}" for p in inside]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
