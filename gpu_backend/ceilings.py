"""What the device can do at best: measured, not read from a datasheet."""

from __future__ import annotations

from typing import NamedTuple

import torch

from schedlab.gpu_backend.device_timer import Timer, Timing


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
    """
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    timing = timer(lambda: target.copy_(source))
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
