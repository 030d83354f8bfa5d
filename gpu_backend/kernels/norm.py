"""Residual addition and RMSNorm in one pass over the activations."""

# Kernels are Triton's language: arguments have no Python types, compile-time ones are upper case.
# ruff: noqa: N803, ANN001, ANN201
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from schedlab.gpu_backend.kernels.launch import Launch


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
    num_tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    return Launch(
        kernel=add_rms_norm_kernel,
        grid=(num_tokens,),
        args={
            "x": x,
            "residual": x if residual is None else residual,
            "weight": weight,
            "normed": normed,
            "total": total,
            "eps": eps,
            "stride_x": x.stride(0),
            "stride_residual": 0 if residual is None else residual.stride(0),
        },
        constants={"HIDDEN": hidden, "BLOCK": block, "HAS_RESIDUAL": residual is not None},
        # 16 elements a thread: two 128-bit accesses of 16-bit numbers.
        num_warps=min(16, max(1, block // 512)),
    )
