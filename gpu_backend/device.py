"""Where the decoder runs: device, number format, and how much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.dtypes import dtype_name

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_device(name: str) -> torch.device:
    """Return a device by name, ``cpu``, ``cuda`` or ``cuda:1``.

    Raises
    ------
    SpecError
        If the name is unknown or there is no such device; says what to do.
    """
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise SpecError(f"device {name!r} is unknown; use cpu, cuda or cuda:INDEX")
    if kind == "cuda":
        if not torch.cuda.is_available():
            built = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
            raise SpecError(
                f"device {name!r}: torch {torch.__version__} {built}; run on a machine with an "
                "NVIDIA GPU and a CUDA build of torch, or use device cpu"
            )
        if index and int(index) >= torch.cuda.device_count():
            raise SpecError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs")
    return torch.device(name)


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the number format of weights, activations and KV cache.

    Raises
    ------
    SpecError
        If the backend has no kernels for it on that device.
    """
    key = dtype_name(name)
    known = ("bf16", "fp16") if device.type == "cuda" else ("fp32",)
    if key not in known:
        raise SpecError(f"the real backend on {device.type} computes in {' or '.join(known)}, "
                        f"not in {key}")  # fmt: skip
    return _DTYPES[key]


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device now (all of it where no system says)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(needed_bytes: int, device: torch.device, what: str) -> None:
    """Check that an allocation will fit before it is made.

    Raises
    ------
    SpecError
        If it does not; says how much is there and what to change.
    """
    free = free_bytes(device)
    if needed_bytes > free:
        raise SpecError(
            f"{what} needs {needed_bytes / 2**30:.2f} GiB and {device} has {free / 2**30:.2f} GiB "
            "free; lower engine.num_gpu_blocks_override, gpu_memory_utilization or swap_space, "
            "choose a smaller model, or free the device"
        )
