"""What the device can do at best: measured, not read from a datasheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from schedlab.gpu_backend.device_timer import Timer, Timing
from schedlab.sim.hardware.model_shape import ModelShape


class Ceiling(NamedTuple):
    """One measured limit."""

    name: str
    rate: float
    unit: str
    timing: Timing


def device_copy(device: torch.device, timer: Timer, num_bytes: int = 2**31) -> Ceiling:
    """Measure copying within the device's memory, counting bytes read and bytes written.

    Parameters
    ----------
    device : torch.device
    timer : Timer
    num_bytes : int
        To copy; should be many times the L2 cache.

    Notes
    -----
    The faster of two ways: the driver's copy, as it is called, and a kernel that reads and writes
    as much. In a captured graph the driver's copy is another one, on an H200 a third slower than
    either: kernels would seem to be faster than memory.
    """
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    copied = timer(lambda: target.copy_(source), captured=False)
    computed = timer(lambda: torch.neg(source, out=target))
    timing = min(copied, computed, key=lambda timing: timing.median_s)
    return Ceiling("device copy", 2 * num_bytes / timing.median_s, "B/s", timing)


def matrix_product(
    device: torch.device, timer: Timer, dtype: torch.dtype = torch.bfloat16, size: int = 8192
) -> Ceiling:
    """Measure a square matrix product on random numbers (zeros would run faster)."""
    a, b = (torch.empty(size, size, dtype=dtype, device=device).normal_() for _ in "ab")
    out = torch.empty_like(a)
    timing = timer(lambda: torch.mm(a, b, out=out))
    name = f"GEMM {size}x{size}x{size} {str(dtype).removeprefix('torch.')}"
    return Ceiling(name, 2 * size**3 / timing.median_s, "FLOP/s", timing)


def layer_products(
    device: torch.device,
    timer: Timer,
    shape: ModelShape,
    rows: Sequence[int] = (1, 16, 64, 128, 256),
    dtype: torch.dtype = torch.bfloat16,
    rotated_bytes: int = 2**29,
) -> Iterator[Ceiling]:
    """Measure the matrix products of a decode step: what attention and the small kernels add to.

    Parameters
    ----------
    device : torch.device
    timer : Timer
    shape : ModelShape
        Whose layer and output head to multiply by.
    rows : sequence of int
        Tokens of a step.
    dtype : torch.dtype
    rotated_bytes : int
        Weights that a measurement goes round: several times any L2 cache.

    Yields
    ------
    Ceiling
        The bytes of the weights over the time. As in a step, no product finds its weights in a
        cache.
    """
    heads = shape.num_heads + 2 * shape.num_kv_heads
    sizes = {
        "qkv": (heads * shape.head_dim, shape.hidden_size),
        "o": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "head": (shape.vocab_size, shape.hidden_size),
    }
    for name, (width, depth) in sizes.items():
        weight_bytes = width * depth * dtype.itemsize
        copies = max(1, -(-rotated_bytes // weight_bytes))
        weights = torch.empty(copies, width, depth, dtype=dtype, device=device).normal_()
        for count in rows:
            x = torch.empty(count, depth, dtype=dtype, device=device).normal_()
            out = torch.empty(count, width, dtype=dtype, device=device)
            timing = timer(lambda: _multiply(x, weights, out), copies)  # noqa: B023 - run at once
            title = f"{name} {width}x{depth} M={count}"
            yield Ceiling(title, weight_bytes / timing.median_s, "B/s", timing)


def _multiply(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    for weight in weights:
        torch.mm(x, weight.T, out=out)


def host_copies(
    device: torch.device, timer: Timer, num_bytes: int = 2**28
) -> tuple[Ceiling, Ceiling]:
    """Measure copying from pinned host memory to the device, and back."""
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    down = timer(lambda: there.copy_(here, non_blocking=True))
    up = timer(lambda: here.copy_(there, non_blocking=True))
    return (
        Ceiling("host to device", num_bytes / down.median_s, "B/s", down),
        Ceiling("device to host", num_bytes / up.median_s, "B/s", up),
    )
