"""How many tokens of KV cache fit on a GPU beside the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.dtypes import dtype_bytes
from schedlab.sim.hardware.gpus import Gpu
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.stage import Stage, stage_weight_bytes, stages

_GIB = 1024**3

RUNTIME_RESERVE_BYTES = int(0.6 * _GIB)
"""CUDA context, cuBLAS workspaces and allocator slack of one GPU. Chosen so that
`activation_reserve_bytes` agrees with the one vLLM 0.19 run for which the block count is public
(RTX 4090, Llama-3.1-8B: 2588 blocks), so that run does not test it; see docs/cost-models.md for
those that do."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where the memory of one GPU goes.

    Attributes
    ----------
    usable_bytes : int
        ``gpu_memory_utilization * memory``.
    weight_bytes, activation_bytes, kv_bytes : int
        Its three parts.
    kv_bytes_per_token : int
        On this one GPU.
    block_size : int
        Tokens of one block.
    """

    usable_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Whole blocks that fit into `kv_bytes`."""
        return self.kv_bytes // (self.kv_bytes_per_token * self.block_size)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into those blocks."""
        return self.num_blocks * self.block_size


def activation_reserve_bytes(
    model: ModelShape,
    *,
    dtype: str,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """Return an estimate of what vLLM's profiling run finds in use besides weights.

    Parameters
    ----------
    model : ModelShape
        The model.
    dtype : str
        Format of the activations.
    tensor_parallel_size : int
        GPUs that share the model.
    max_num_batched_tokens, max_num_seqs : int
        The engine's limits; the profiling run fills both.

    Returns
    -------
    int
        Bytes on one GPU.

    Notes
    -----
    ``0.6 GiB + T * (4 * hidden_size + 3 * intermediate_size / tp) * bytes
    + S * vocab_size * (bytes + 8)``

    with T = max_num_batched_tokens and S = max_num_seqs: the residual stream and the widest MLP
    tensors live together, then the logits, once in `dtype` and twice in fp32 for the sampler.
    For a mixture of experts the MLP width is ``experts_per_token * moe_intermediate_size`` and that
    of the shared expert, or the width of its dense layers where that is more.
    """
    width = model.intermediate_size
    if model.num_experts:
        width = model.experts_per_token * model.moe_intermediate_size
        width += model.shared_intermediate_size
        if model.num_dense_layers:
            width = max(width, model.intermediate_size)
    size = max(dtype_bytes(dtype), 2.0)  # 8-bit and 4-bit models keep 16-bit activations
    tokens = 4 * model.hidden_size + model.num_mlp_matrices * width / tensor_parallel_size
    logits = model.vocab_size * (size + 8)
    return math.ceil(
        RUNTIME_RESERVE_BYTES + max_num_batched_tokens * tokens * size + max_num_seqs * logits
    )


def memory_budget(
    model: ModelShape,
    gpu: Gpu,
    *,
    gpu_memory_utilization: float,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    dtype: str = "bf16",
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    activation_bytes: int | None = None,
) -> MemoryBudget:
    """Divide the memory of one GPU among weights, activations and KV cache.

    Of a pipeline it is a GPU of the stage in which the fewest KV blocks fit: a block of a request
    is in all stages, each with the keys and values of its layers.

    Parameters
    ----------
    model, gpu : ModelShape, Gpu
        What runs where.
    gpu_memory_utilization : float
        Share of the memory the engine may use, in (0, 1].
    block_size : int
        Tokens of one block.
    max_num_batched_tokens, max_num_seqs : int
        Engine limits, from which the activation reserve is estimated.
    dtype : str
        Format of arithmetic and activations (these have at least 16 bits).
    weight_dtype : str or None
        Format of the weights of the layers; `None` means `dtype`.
    kv_dtype : str or None
        Format of the cache; `None` means that of the activations (`dtype`, at least 16 bits).
    tensor_parallel_size : int
        GPUs that share the model.
    data_parallel_size : int
        Engines that share the experts of a mixture; all else each has for itself.
    pipeline_parallel_size : int
        Stages that the layers are divided among.
    activation_bytes : int or None
        The reserve itself, if it is known.

    Raises
    ------
    SpecError
        If an argument is out of range, or weights, reserve and one block do not fit; the message
        says how much is missing and what would help.

    Notes
    -----
    ``kv_bytes = gpu_memory_utilization * memory - weights - activation reserve`` with
    ``weights = (experts / dp + all others) / tp``

    `activation_reserve_bytes` gives the reserve; only the last stage has logits in it.
    """
    _check(gpu_memory_utilization, block_size, max_num_batched_tokens, max_num_seqs)
    check_tensor_parallel(model, tensor_parallel_size)
    usable = int(gpu_memory_utilization * gpu.memory_bytes)
    stored = weight_dtype or dtype
    cached = kv_dtype or default_kv_dtype(dtype)

    def of_stage(stage: Stage) -> MemoryBudget:
        reserve = activation_bytes
        if reserve is None:
            reserve = activation_reserve_bytes(
                model,
                dtype=dtype,
                tensor_parallel_size=tensor_parallel_size,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs if stage.is_last else 0,
            )
        elsewhere = model.routed_expert_bytes(stored) * (1 - 1 / data_parallel_size)
        held = stage_weight_bytes(model, stage, stored) - elsewhere
        weights = math.ceil(held / tensor_parallel_size)
        per_token = model.kv_bytes_per_token(cached, tensor_parallel_size, stage.num_layers)
        kv = usable - weights - reserve
        return MemoryBudget(usable, weights, reserve, kv, per_token, block_size)

    budgets = [of_stage(stage) for stage in stages(model, pipeline_parallel_size)]
    tightest = min(budgets, key=lambda budget: budget.kv_bytes / budget.kv_bytes_per_token)
    missing = tightest.kv_bytes_per_token * block_size - tightest.kv_bytes
    if missing > 0:
        place = f"{gpu.name}"
        if len(budgets) > 1:
            place += f" in stage {budgets.index(tightest) + 1} of {len(budgets)}"
        raise SpecError(
            f"{model.name} does not fit on {place}: weights {tightest.weight_bytes / _GIB:.1f} GiB "
            f"and activations {tightest.activation_bytes / _GIB:.1f} GiB leave no KV block of "
            f"{usable / _GIB:.1f} GiB usable; {missing / _GIB:.1f} GiB are "
            f"missing. Raise tensor_parallel_size (now {tensor_parallel_size}), use a smaller "
            f"weight_dtype (now {stored}) or a larger GPU."
        )
    return tightest


def default_kv_dtype(dtype: str) -> str:
    """Return the cache format vLLM's ``auto`` takes: 16 bits unless the model is wider."""
    return dtype if dtype_bytes(dtype) >= 2 else "bf16"


def check_tensor_parallel(model: ModelShape, tensor_parallel_size: int) -> None:
    """Raise `SpecError` unless the model's heads can be split over that many GPUs."""
    size = tensor_parallel_size
    if size < 1 or model.num_heads % size:
        divisors = [n for n in (1, 2, 4, 8, 16) if model.num_heads % n == 0]
        raise SpecError(
            f"tensor_parallel_size {size} does not divide the {model.num_heads} heads of "
            f"{model.name}; possible: {', '.join(map(str, divisors))}"
        )


def _check(utilization: float, block_size: int, tokens: int, seqs: int) -> None:
    if not 0 < utilization <= 1:
        raise SpecError(f"gpu_memory_utilization must be in (0, 1], got {utilization!r}")
    counts = (
        ("block_size", block_size),
        ("max_num_batched_tokens", tokens),
        ("max_num_seqs", seqs),
    )
    for key, value in counts:
        if value < 1:
            raise SpecError(f"{key} must be >= 1, got {value!r}")
