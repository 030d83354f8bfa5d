"""A kernel launch as a value: what the GPU is told, and what a compile check compiles."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedlab.sim.errors import SpecError


class Device(NamedTuple):
    """What a launch depends on besides its arguments."""

    arch: int
    """Compute capability times ten, e.g. 90 for an H200."""
    num_sms: int
    """Streaming multiprocessors."""


INTERPRETER = Device(arch=80, num_sms=2)
"""What a CPU tensor is launched for: Triton's interpreter has no multiprocessors to fill."""


class Launch(NamedTuple):
    """One kernel launch, complete."""

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    """Run-time arguments by name."""
    constants: Mapping[str, Any]
    """Compile-time arguments by name; each new combination is a compilation."""
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Enqueue the kernel on the current stream (or interpret it)."""
        self.kernel[self.grid](
            **self.args,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            # Triton is about to change the default, and with it every rounding.
            enable_fp_fusion=True,
        )


def device_of(tensor: Tensor) -> Device:
    """Return what launches on a tensor's device depend on.

    Raises
    ------
    SpecError
        If the GPU is older than Ampere (compute capability 8.0), which the kernels need.
    """
    if not tensor.is_cuda:
        return INTERPRETER
    return _cuda_device(tensor.get_device())


@cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    arch = 10 * properties.major + properties.minor
    if arch < 80:
        raise SpecError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}; "
            "the kernels need 8.0 or later (Ampere, Ada, Hopper)"
        )
    return Device(arch, properties.multi_processor_count)
