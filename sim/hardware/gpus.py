"""GPUs by their datasheets: memory, bandwidth, dense arithmetic, links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.files import read_json_object
from schedlab.sim.hardware.dtypes import dtype_name
from schedlab.sim.yaml_lines import read_yaml

_MIB, _GIB = 1024**2, 1024**3
L2_BYTES = {
    "a100-80gb": 40 * _MIB, "a100-80gb-pcie": 40 * _MIB, "h100-80gb": 50 * _MIB,
    "h100-80gb-pcie": 50 * _MIB, "h200": 50 * _MIB, "b200": 126 * _MIB, "l4": 48 * _MIB,
    "l40s": 96 * _MIB, "rtx-4090": 72 * _MIB, "rtx-pro-6000": 128 * _MIB,
}  # fmt: skip
"""Second-level caches, by the vendor's architecture papers, of the GPUs whose tables are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What a datasheet says of one GPU.

    Attributes
    ----------
    name : str
        How results name it.
    memory_bytes : int
        Memory a CUDA program sees (``torch.cuda.mem_get_info``), a little below the nominal size.
    memory_bytes_per_s : float
        Peak memory bandwidth.
    flops_per_s : mapping of str to float
        Dense (not sparse) tensor-core peak by number format; fp32 accumulation for 16-bit formats.
    interconnect_bytes_per_s : float
        GPU-to-GPU bandwidth of one GPU in ONE direction (NVLink, or PCIe where there is none).
    pcie_bytes_per_s : float
        Host link in one direction.
    num_sms : int
        Streaming multiprocessors.
    source : str
        The datasheet.
    architecture : str
        Whose kernels it runs: ``ampere``, ``ada``, ``hopper``, ``blackwell`` (data centre) or
        ``blackwell-rtx``; the roofline takes kernels that were not measured on this GPU from others
        of the same.
    usd_per_hour : float or None
        What an hour of it costs to rent; None where no price is known.
    price_source : str
        Whose price, and of when.

    Raises
    ------
    SpecError
        If a number is not positive and finite, or a format is unknown.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    interconnect_bytes_per_s: float
    pcie_bytes_per_s: float
    num_sms: int
    source: str
    architecture: str = "unknown"
    usd_per_hour: float | None = None
    price_source: str = ""

    def __post_init__(self) -> None:
        for key in (
            "memory_bytes", "memory_bytes_per_s", "interconnect_bytes_per_s", "pcie_bytes_per_s",
            "num_sms",
        ):  # fmt: skip
            _positive(self.name, key, getattr(self, key))
        if self.usd_per_hour is not None:
            _positive(self.name, "usd_per_hour", self.usd_per_hour)
        peaks = {dtype_name(key): value for key, value in self.flops_per_s.items()}
        for key, value in peaks.items():
            _positive(self.name, f"flops_per_s.{key}", value)
        object.__setattr__(self, "flops_per_s", MappingProxyType(peaks))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled, and sweeps send GPUs to worker processes.
        values = tuple(getattr(self, f.name) for f in fields(self))
        return _rebuild, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the dense peak in `dtype`.

        Raises
        ------
        SpecError
            If the GPU has no arithmetic in that format.
        """
        key = dtype_name(dtype)
        if key not in self.flops_per_s:
            raise SpecError(
                f"{self.name} does not compute in {key}; it has {_list(self.flops_per_s)} "
                "(narrower weights alone: weight_dtype)"
            )
        return self.flops_per_s[key]


def _rebuild(*values: Any) -> Gpu:  # noqa: ANN401
    return Gpu(**dict(zip((f.name for f in fields(Gpu)), values, strict=True)))


def _list(names: Mapping[str, float]) -> str:
    return ", ".join(names)


def _positive(name: str, key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"hardware {name}: {key} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f"hardware {name}: {key} must be positive and finite, got {value!r}")


def _gpu(
    name: str,
    memory_gib: float,
    gb_per_s: float,
    tflops: dict[str, float],
    link_gb_per_s: float,
    pcie_gb_per_s: float,
    num_sms: int,
    architecture: str,
    source: str,
) -> Gpu:
    """One line of the table, in datasheet units."""
    return Gpu(
        name=name,
        memory_bytes=int(memory_gib * _GIB),
        memory_bytes_per_s=gb_per_s * 1e9,
        flops_per_s={dtype: value * 1e12 for dtype, value in tflops.items()},
        interconnect_bytes_per_s=link_gb_per_s * 1e9,
        pcie_bytes_per_s=pcie_gb_per_s * 1e9,
        num_sms=num_sms,
        source=f"{source}; memory as CUDA reports it",
        architecture=architecture,
        usd_per_hour=_USD_PER_HOUR_OF_EIGHT[name] / 8 if name in _USD_PER_HOUR_OF_EIGHT else None,
        price_source=_PRICE_SOURCE if name in _USD_PER_HOUR_OF_EIGHT else "",
    )


def _tensor(half: float, fp8: float = 0.0, int8: float = 0.0, fp4: float = 0.0) -> dict[str, float]:
    """Dense TFLOP/s; bf16 and fp16 are equal on every GPU of the table."""
    peaks = {"bf16": half, "fp16": half, "fp8": fp8, "int8": int8, "fp4": fp4}
    return {dtype: value for dtype, value in peaks.items() if value}


_PRICE_SOURCE = (
    "CoreWeave, list price on demand of an instance with eight, February 2026 (quoted by "
    "kaelresearch.com, GPU Economics: What Inference Actually Costs in 2026), divided by eight"
)
_USD_PER_HOUR_OF_EIGHT = {
    "a100-80gb": 21.60, "h100-80gb": 49.24, "h200": 50.44, "b200": 68.80, "l40s": 18.00,
    "rtx-pro-6000": 20.00,
}  # fmt: skip
"""Of one provider and one month, so that they compare; the others are not in that list."""


# Datasheets print sparse peaks since Hopper: the dense ones here are half of those. They print
# links as the sum of both directions: here it is one.
_TABLE = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb-pcie", 39.39, 1555, _tensor(312, int8=624), 300, 32, 108, "ampere",
             "NVIDIA A100 datasheet (2020), PCIe 40GB"),
        _gpu("a100-40gb", 39.39, 1555, _tensor(312, int8=624), 300, 32, 108, "ampere",
             "NVIDIA A100 datasheet (2020), SXM 40GB"),
        _gpu("a100-80gb-pcie", 79.15, 1935, _tensor(312, int8=624), 300, 32, 108, "ampere",
             "NVIDIA A100 datasheet (2021), PCIe 80GB"),
        _gpu("a100-80gb", 79.15, 2039, _tensor(312, int8=624), 300, 32, 108, "ampere",
             "NVIDIA A100 datasheet (2021), SXM 80GB"),
        _gpu("h100-80gb", 79.19, 3350, _tensor(989.4, 1978.9, 1978.9), 450, 64, 132, "hopper",
             "NVIDIA H100 datasheet, SXM5"),
        _gpu("h100-80gb-pcie", 79.19, 2000, _tensor(756, 1513, 1513), 300, 64, 114, "hopper",
             "NVIDIA H100 datasheet, PCIe"),
        _gpu("h200", 139.8, 4800, _tensor(989.4, 1978.9, 1978.9), 450, 64, 132, "hopper",
             "NVIDIA H200 datasheet, SXM"),
        _gpu("b200", 178.35, 8000, _tensor(2250, 4500, 4500, 9000), 900, 64, 148, "blackwell",
             "NVIDIA DGX B200 datasheet, one of eight GPUs"),
        _gpu("l40s", 44.4, 864, _tensor(362.05, 733, 733), 32, 32, 142, "ada",
             "NVIDIA L40S datasheet"),
        _gpu("l4", 22.03, 300, _tensor(121, 242.5, 242.5), 32, 32, 58, "ada",
             "NVIDIA L4 datasheet"),
        _gpu("a10", 22.18, 600, _tensor(125, int8=250), 32, 32, 72, "ampere",
             "NVIDIA A10 datasheet"),
        _gpu("rtx-a6000", 47.54, 768, _tensor(154.8, int8=309.7), 56.25, 32, 84, "ampere",
             "NVIDIA RTX A6000 datasheet and Ampere GA102 whitepaper"),
        _gpu("rtx-4090", 25_250_627_584 / _GIB, 1008, _tensor(165.2, 330.3, 660.6), 32, 32, 128,
             "ada", "NVIDIA Ada GPU architecture whitepaper"),
        _gpu("rtx-pro-6000", 94.97, 1597, _tensor(503.8, 1007.6, 1007.6, 2015.2), 64, 64, 188,
             "blackwell-rtx",
             "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet (memory), "
             "RTX Blackwell PRO whitepaper, Workstation Edition (arithmetic)"),
        _gpu("rtx-pro-6000-workstation", 94.97, 1792, _tensor(503.8, 1007.6, 1007.6, 2015.2), 64,
             64, 188, "blackwell-rtx",
             "RTX Blackwell PRO whitepaper, RTX PRO 6000 Workstation Edition"),
        # Not a GPU and no datasheet: one core of a server, so that the real backend's CPU path can
        # be named. Only a measured profile says what such a machine does.
        _gpu("cpu", 8.0, 10, {"fp32": 0.05, "bf16": 0.05, "fp16": 0.05}, 10, 10, 1, "processor",
             "nominal figures of one processor core, no datasheet: calibrate before you believe"),
    )
}  # fmt: skip

_TEXTS = ("name", "source", "architecture", "price_source")
_OPTIONAL = ("architecture", "usd_per_hour", "price_source")

_ALIASES = {
    "a100": "a100-80gb",
    "a100-80gb-sxm": "a100-80gb",
    "a100-40gb-sxm": "a100-40gb",
    "h100": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "h100-80gb-sxm": "h100-80gb",
    "h100-pcie": "h100-80gb-pcie",
    "h200-141gb": "h200",
    "h200-sxm": "h200",
    "b200-180gb": "b200",
    "rtx4090": "rtx-4090",
    "4090": "rtx-4090",
    "geforce-rtx-4090": "rtx-4090",
    "a6000": "rtx-a6000",
    "rtxpro6000": "rtx-pro-6000",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-server-edition": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-workstation-edition": "rtx-pro-6000-workstation",
    # As drivers name those of the table, where that is not one of the above.
    "a100-pcie-40gb": "a100-40gb-pcie",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-sxm4-80gb": "a100-80gb",
    "h100-80gb-hbm3": "h100-80gb",
}


def gpu_names() -> list[str]:
    """Return the names in the GPU table, in its order."""
    return list(_TABLE)


def gpu(name: str) -> Gpu:
    """Return a GPU, by name or from a YAML or JSON file with the fields of `Gpu`.

    Parameters
    ----------
    name : str
        A name of the table or an alias (``"a100-80gb"``, ``"NVIDIA H200"``), or the path of a
        ``.yaml``, ``.yml`` or ``.json`` file.

    Raises
    ------
    SpecError
        If the name is unknown (with the nearest name), or the file is wrong (naming the key).

    Examples
    --------
    >>> gpu("a100").memory_bytes_per_s
    2039000000000.0
    """
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        return _read(Path(name))
    key = canonical_gpu(name)
    if key in _TABLE:
        return _TABLE[key]
    hint = nearest(key, [*_TABLE, *_ALIASES])
    raise SpecError(f"hardware {name!r} is unknown; {hint} (or the path of a YAML file)")


def canonical_gpu(name: str) -> str:
    """Return the table's spelling of a GPU name.

    Examples
    --------
    >>> canonical_gpu("NVIDIA H200")
    'h200'
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    return _ALIASES.get(key, key)


def _read(path: Path) -> Gpu:
    """Read one GPU from a file; only name, source and architecture may be left out."""
    data = read_json_object(path) if path.suffix == ".json" else read_yaml(path).data
    if not isinstance(data, dict):
        raise SpecError(f"{path}: a hardware file maps field names to values")
    known = [f.name for f in fields(Gpu)]
    for key in data:
        if key not in known:
            raise SpecError(f"{path}: unknown key {key!r}; {nearest(key, known)}")
    data = {"name": path.stem, "source": str(path), **data}
    for key in _TEXTS:
        if not isinstance(data.get(key, ""), str):
            raise SpecError(f"{path}: {key} must be a text, got {data[key]!r}")
    for key in ("memory_bytes", "num_sms"):
        value = data.get(key)
        if isinstance(value, float) and value.is_integer():
            data[key] = int(value)
        elif isinstance(value, float) and math.isfinite(value):
            raise SpecError(f"{path}: {key} must be a whole number, got {value!r}")
    for key in known:
        if key not in data and key not in _OPTIONAL:
            raise SpecError(f"{path}: key {key!r} is missing")
    if not isinstance(data["flops_per_s"], dict) or not data["flops_per_s"]:
        raise SpecError(
            f"{path}: flops_per_s maps number formats to FLOP/s, e.g. {{bf16: 312.0e+12}}"
        )
    try:
        return Gpu(**data)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error
