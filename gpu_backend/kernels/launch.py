"""A kernel launch as a value: what the GPU is told, and what a compile check compiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
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


@dataclass(eq=False)
class Plan:
    """What is the same of a kernel's launches on tensors of the same shapes and strides.

    Notes
    -----
    Triton's JIT takes 10 to 50 us a launch to find out, by name, what it compiled before. It does
    so for the first launch of each variant; later ones call what it returned, on whatever tensors.
    Triton's knobs, and globals that a kernel reads, are looked at by the first launch alone.
    """

    kernel: Any
    """Takes tensors first, then numbers, then constants."""
    grid: tuple[int, ...]
    numbers: Mapping[str, int | float]
    """Run-time arguments behind the tensors by name, in the kernel's order."""
    constants: Mapping[str, Any]
    """Compile-time arguments by name, in the kernel's order; each new combination is a
    compilation."""
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        self._grid = (*self.grid, 1, 1)[:3]
        self._values = (*self.numbers.values(), *self.constants.values())
        variant = self._variant()
        self._built = None if variant is None else _BUILT.setdefault(variant, {})

    def run(self, tensors: tuple[Tensor, ...]) -> None:
        """Enqueue the kernel on the current stream (or interpret it)."""
        if self._built is None or _is_watched():
            self._run_by_jit(tensors)
            return
        active = driver.active
        device = active.get_current_device()
        # With the plan's variant, all by which the JIT tells binaries apart.
        seen: list[Any] = [device]
        addresses = []
        for x in tensors:
            address = x.data_ptr()
            addresses.append(address)
            seen.append(x.dtype)
            seen.append(address % 16 == 0)
        key = tuple(seen)
        built = self._built.get(key)
        if built is None:
            self._built[key] = self._run_by_jit(tensors)
            return
        built.run(
            *self._grid, active.get_current_stream(device), built.function, built.packed_metadata,
            None, None, None,  # nobody watches
            # Of a tensor Triton would ask for its address, and the driver whose that is.
            *addresses, *self._values,
        )  # fmt: skip

    def _run_by_jit(self, tensors: tuple[Tensor, ...]) -> object:
        """Launch as Triton documents it; return what was compiled."""
        return self.kernel[self.grid](
            *tensors,
            **self.numbers,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            # Triton is about to change the default, and with it every rounding.
            enable_fp_fusion=True,
        )

    def _variant(self) -> tuple[Any, ...] | None:
        """Return all by which the JIT tells binaries apart but devices and tensors.

        None if only the JIT knows: of a kernel that is interpreted, and of numbers of other kinds
        than ours.

        Raises
        ------
        ValueError
            If numbers and constants are not the kernel's, in its order.
        """
        kernel, constants = self.kernel, [*self.constants]
        if type(kernel) is not JITFunction or not _DIRECT:
            return None
        names = [*self.numbers, *constants]
        if names != kernel.arg_names[len(kernel.arg_names) - len(names) :]:
            raise ValueError(f"{names} are not the last of {kernel.arg_names}")
        if constants != [param.name for param in kernel.params if param.is_constexpr]:
            raise ValueError(f"{constants} are not the constants of {kernel.arg_names}")
        kinds: list[Any] = []
        for number in self.numbers.values():
            if type(number) is float:
                kinds.append(float)
            # Beyond, the types i32, i64 and u64 meet.
            elif type(number) is int and 0 <= number < 2**31:
                # A 1 is compiled into the code, and a multiple of 16 known as one.
                kinds.append(1 if number == 1 else 16 if number % 16 == 0 else 0)
            else:
                return None
        return kernel, self.num_warps, self.num_stages, *kinds, *self.constants.values()


planned = lru_cache(maxsize=4096)
"""Remembers plans, so that all layers of a step share one, but for shapes not met for long."""


class Launch(NamedTuple):
    """One kernel launch, complete."""

    plan: Plan
    tensors: tuple[Tensor, ...]
    """The kernel's first arguments."""

    def run(self) -> None:
        """Enqueue the kernel on the current stream (or interpret it)."""
        self.plan.run(self.tensors)

    @property
    def args(self) -> dict[str, Any]:
        """Run-time arguments by name."""
        names = self.plan.kernel.arg_names
        return dict(zip(names, self.tensors, strict=False)) | dict(self.plan.numbers)

    @property
    def kernel(self) -> Any:  # noqa: ANN401
        """Of the plan."""
        return self.plan.kernel

    @property
    def grid(self) -> tuple[int, ...]:
        """Of the plan."""
        return self.plan.grid

    @property
    def constants(self) -> Mapping[str, Any]:
        """Of the plan."""
        return self.plan.constants

    @property
    def num_warps(self) -> int:
        """Of the plan."""
        return self.plan.num_warps

    @property
    def num_stages(self) -> int:
        """Of the plan."""
        return self.plan.num_stages


_BUILT: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
"""What the JIT compiled by variant and tensors; referred to here, it stays loaded."""

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_DIRECT = torch.version.hip is None and _VERSION >= (3, 6)
"""Whether kernels are told apart and called as they are here, by tests with 3.6 and 3.9. Triton 3.2
calls them otherwise, and for GPUs of AMD the sizes of tensors matter as well."""


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
