"""A kernel launch as a value: what the GPU is told, and what a compile check compiles."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

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
        """Enqueue the kernel on the current stream (or interpret it).

        Notes
        -----
        The JIT takes 10 to 50 us to find out, by name, what it compiled before. It does so for the
        first launch of each variant; later ones call what it returned. Changes of Triton's knobs in
        between, and of globals that a kernel reads, are not noticed.
        """
        variant = self._variant()
        if variant is None or (built := _BUILT.get(variant)) is None:
            built = self.kernel[self.grid](
                **self.args,
                **self.constants,
                num_warps=self.num_warps,
                num_stages=self.num_stages,
                # Triton is about to change the default, and with it every rounding.
                enable_fp_fusion=True,
            )
            if variant is not None and built is not None:
                _BUILT[variant] = built
            return
        x, y, z = (*self.grid, 1, 1)[:3]
        built.run(
            x, y, z, driver.active.get_current_stream(variant[0]),
            built.function, built.packed_metadata,
            None, None, None,  # nobody watches: see _variant
            *self.args.values(), *self.constants.values(),
        )  # fmt: skip

    def _variant(self) -> tuple[Any, ...] | None:
        """Return the device and all else by which the JIT tells binaries apart, at least.

        None if only the JIT knows: of a kernel that is interpreted, arguments in another order than
        the kernel's or of other kinds than ours, and while a profiler watches launches.
        """
        kernel, args, constants = self.kernel, self.args, self.constants
        if type(kernel) is not JITFunction or not _DIRECT or _is_watched():
            return None
        # Only in the kernel's order may names be left out, here and of the direct call.
        if [*args, *constants] != kernel.arg_names:
            return None
        parts: list[Any] = [
            driver.active.get_current_device(), kernel.fn, self.num_warps, self.num_stages
        ]  # fmt: skip
        for value in args.values():
            kind = type(value)
            if kind is int:
                # Elsewhere the types i32, i64 and u64 meet.
                if not 0 <= value < 2**31:
                    return None
                # A 1 is compiled into the code, and a multiple of 16 known as one.
                parts.append(1 if value == 1 else 16 if value % 16 == 0 else 0)
            elif kind is float:
                parts.append(float)
            elif isinstance(value, Tensor):
                parts += (value.dtype, value.data_ptr() % 16 == 0)
            else:
                return None
        return (*parts, *constants.values())


_BUILT: dict[tuple[Any, ...], Any] = {}
"""What the JIT compiled, by `Launch._variant`; referred to here, it stays loaded."""

_DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
"""Whether a compiled kernel is called as it is here: 3.6 and 3.9 are tested, 3.2 differs."""


def _is_watched() -> bool:
    """Tell whether somebody, such as a profiler, asked Triton to tell of every launch."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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
