"""SwiGLU: the gate's SiLU times the up projection, halves of one GEMM's output."""

# Kernels are Triton's language: arguments have no Python types, compile-time ones are upper case.
# ruff: noqa: N803, ANN001, ANN201
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from schedlab.gpu_backend.kernels.launch import Launch, Plan, planned

_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    gate_up,
    out,
    stride_gate_up,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one block of columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    row = gate_up + token * stride_gate_up
    gate = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * WIDTH + columns, product.to(out.dtype.element_ty), mask=mask)


def silu_and_mul_launch(gate_up: Tensor, out: Tensor) -> Launch:
    """Return the launch of `gpu_backend.triton_ops.silu_and_mul` into a contiguous output."""
    return Launch(_plan(*out.shape, gate_up.stride(0)), (gate_up, out))


@planned
def _plan(num_tokens: int, width: int, stride_gate_up: int) -> Plan:
    return Plan(
        kernel=silu_and_mul_kernel,
        grid=(num_tokens, triton.cdiv(width, _BLOCK)),
        numbers={"stride_gate_up": stride_gate_up},
        constants={"WIDTH": width, "BLOCK": _BLOCK},
    )
