"""Residual addition and RMSNorm in one pass over the activations."""

# Kernels are Triton's language: arguments have no Python types, compile-time ones are upper case.
# ruff: noqa: N803, ANN001, ANN201
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from schedlab.gpu_backend.kernels.launch import Launch, Plan, planned


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    eps,
    stride_x,
    stride_residual,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add and normalise one token's activations."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    wide = tl.load(x + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        more = tl.load(residual + token * stride_residual + columns, mask=mask, other=0.0)
        # Rounded before it is normalised: the next layer sees the stored sum, not this one.
        rounded = (wide + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + token * HIDDEN + columns, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / HIDDEN
    scaled = wide * tl.rsqrt(mean_square + eps)
    scaled = scaled * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + token * HIDDEN + columns, scaled.to(normed.dtype.element_ty), mask=mask)


def add_rms_norm_launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    total: Tensor,
) -> Launch:
    """Return the launch of `gpu_backend.triton_ops.add_rms_norm` into two contiguous outputs.

    Without a residual, `total` is `x` itself and is not written.
    """
    stride_residual = None if residual is None else residual.stride(0)
    plan = _plan(*x.shape, x.stride(0), stride_residual, eps)
    return Launch(plan, (x, x if residual is None else residual, weight, normed, total))


@planned
def _plan(
    num_tokens: int, hidden: int, stride_x: int, stride_residual: int | None, eps: float
) -> Plan:
    block = triton.next_power_of_2(hidden)
    return Plan(
        kernel=add_rms_norm_kernel,
        grid=(num_tokens,),
        numbers={"eps": eps, "stride_x": stride_x, "stride_residual": stride_residual or 0},
        constants={"HIDDEN": hidden, "BLOCK": block, "HAS_RESIDUAL": stride_residual is not None},
        # 16 elements a thread: two 128-bit accesses of 16-bit numbers.
        num_warps=min(16, max(1, block // 512)),
    )
