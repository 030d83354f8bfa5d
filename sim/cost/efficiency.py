"""What kernels reach of a device's peaks: a few numbers a GPU, learnt from public kernel tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.files import read_json_object
from schedlab.sim.hardware.gpus import Gpu, gpu, gpu_names
from schedlab.sim.sums import in_order

Kernel = TypeVar("Kernel")

SCHEMA = "schedlab-kernels-1"
SHIPPED = Path(__file__).with_name("kernels.json")
"""What was learnt, from which tables, and how far it is from them (docs/cost-models.md)."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """Matrix products in one pair of formats.

    Attributes
    ----------
    latency_s : float
        What the smallest product takes.
    bandwidth_share, flops_share : float
        Reachable share of each peak, in (0, 1].
    tile_share : float
        Share of the arithmetic that whole tiles of rows cost rather than the rows themselves.
    wave_share : float
        Share of it that whole waves of tiles cost, one tile for each multiprocessor.
    """

    latency_s: float
    bandwidth_share: float
    flops_share: float
    tile_share: float = 0.0
    wave_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention over a paged cache.

    Attributes
    ----------
    latency_s : float
        What the smallest call takes.
    row_s : float
        What a decode row costs whatever its context, by the KV heads that one multiprocessor has of
        it.
    row_share : float
        Share of that which reading the cache does not hide.
    bandwidth_share : float
        Share of the bandwidth at which the cache is read.
    ramp_s : float
        How long decodes read at half of that rate before they reach it: the first thread blocks
        wait for memory, and the last ones do not use all of it.
    query_block : int
        Query tokens that prompts are padded to.
    block_s : float
        What `TILE` query tokens of one head cost whatever their context, on one multiprocessor.
    flops_share : float
        Share of the peak that pairs of tokens are computed at.
    key_s : float
        What one key costs a thread block that has a whole sequence to itself: no call is shorter
        than its longest prompt needs.
    mixed_rows : float
        Query rows of every head that a decode row is computed as beside prompts: kernels of one
        query token, which read the cache once for all heads of a group, do not run then. 0 where
        prompts and decodes have a call each, or groups are packed in both.
    """

    latency_s: float
    row_s: float
    row_share: float
    bandwidth_share: float
    ramp_s: float
    query_block: int
    block_s: float
    flops_share: float
    key_s: float
    mixed_rows: float


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Norms, rotary positions, activations, cache writes: traffic alone."""

    latency_s: float
    bandwidth_share: float


@dataclass(frozen=True, slots=True)
class Sampler:
    """From logits to tokens: a start, and bytes moved for each logit at the peak bandwidth."""

    latency_s: float
    bytes_per_logit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """The products of a mixture's experts: traffic and arithmetic one after the other."""

    latency_s: float
    bandwidth_share: float
    flops_share: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sums over devices, in a ring.

    Attributes
    ----------
    latency_s, hop_s : float
        What the smallest takes, and more for each further device.
    link_share : float
        Reachable share of the link, in (0, 1].
    crowding : float
        How much slower it gets with each device beyond two, where they share the way.
    """

    latency_s: float
    hop_s: float
    link_share: float
    crowding: float

    def seconds(self, devices: int, moved_bytes: float, link_bytes_per_s: float) -> float:
        """Return what devices take to move so many bytes each over their link."""
        slower = 1.0 + self.crowding * (devices - 2)
        start = self.latency_s + self.hop_s * (devices - 1)
        return start + moved_bytes * slower / (link_bytes_per_s * self.link_share)


@dataclass(frozen=True, slots=True)
class Host:
    """What one operation takes that is launched on its own and not in a captured graph."""

    call_s: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """All kernels of one GPU.

    Attributes
    ----------
    gemm : mapping of str to Gemm
        By format, as `gemm_format` names it; ``bf16`` is always there.
    attention, elementwise, sampler, experts, all_reduce, host
        The other kernels.
    origin : mapping of str to str
        Of each kernel, the GPUs it was learnt on.
    """

    gemm: Mapping[str, Gemm]
    attention: Attention
    elementwise: Elementwise
    sampler: Sampler
    experts: Experts
    all_reduce: AllReduce
    host: Host
    origin: Mapping[str, str]

    def gemm_of(self, dtype: str, weight_dtype: str) -> Gemm:
        """Return the products of these formats, or of 16 bits where nobody measured them."""
        return self.gemm.get(gemm_format(dtype, weight_dtype), self.gemm["bf16"])

    def with_shares(self, flops: float | None, bandwidth: float | None) -> Efficiency:
        """Return the same with other shares of the peaks for every kernel.

        Raises
        ------
        SpecError
            If one is not in (0, 1].
        """
        for key, value in (("compute_efficiency", flops), ("memory_efficiency", bandwidth)):
            if value is not None and not 0 < value <= 1:
                raise SpecError(f"roofline: {key} must be in (0, 1], got {value!r}")

        def changed(kernel: Kernel) -> Kernel:
            given = {"flops_share": flops, "bandwidth_share": bandwidth}
            own = {
                key: value
                for key, value in given.items()
                if value is not None and hasattr(kernel, key)
            }
            return replace(kernel, **own)  # type: ignore[type-var]  # dataclasses all

        return replace(
            self,
            gemm={key: changed(gemm) for key, gemm in self.gemm.items()},
            attention=changed(self.attention),
            experts=changed(self.experts),
            elementwise=changed(self.elementwise),
        )


KINDS = {
    "attention": Attention, "elementwise": Elementwise, "sampler": Sampler, "experts": Experts,
    "all_reduce": AllReduce, "host": Host,
}  # fmt: skip
"""Kernels but the products, by the name of their section in a file."""

Learnt = Mapping[str, Mapping[str, Any]]
"""What was measured of each GPU, by its name: kernels as in `KINDS`, and ``gemm`` by format."""


def gemm_format(dtype: str, weight_dtype: str) -> str:
    """Return the name of a pair of formats; 16-bit and wider ones are one.

    Examples
    --------
    >>> gemm_format("fp16", "fp16"), gemm_format("bf16", "int4")
    ('bf16', 'bf16/int4')
    """
    wide = ("bf16", "fp16", "fp32")
    computed = "bf16" if dtype in wide else dtype
    stored = "bf16" if weight_dtype in wide else weight_dtype
    return computed if computed == stored else f"{computed}/{stored}"


def read_learnt(path: Path) -> dict[str, dict[str, Any]]:
    """Return what a file of learnt kernels says of each GPU.

    Raises
    ------
    SpecError
        If it cannot be read, or a section or number is missing, unknown or impossible.
    """
    data = read_json_object(path)
    if data.get("schema") != SCHEMA:
        raise SpecError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA!r}")
    learnt: dict[str, dict[str, Any]] = {}
    for name, sections in data["gpus"].items():
        learnt[name] = {}
        for kind, values in sections.items():
            where = f"{path}: {name}.{kind}"
            if kind == "gemm":
                learnt[name][kind] = {
                    key: _kernel(f"{where}.{key}", Gemm, each) for key, each in values.items()
                }
            elif kind in KINDS:
                learnt[name][kind] = _kernel(where, KINDS[kind], values)
            else:
                raise SpecError(f"{where}: unknown kernel; {nearest(kind, ['gemm', *KINDS])}")
    return learnt


def efficiency_of(device: Gpu, path: Path | str | None = None) -> Efficiency:
    """Return what the kernels of a GPU reach.

    Parameters
    ----------
    device : Gpu
        The GPU.
    path : Path or str, optional
        What was learnt; what comes with this package if absent.

    Raises
    ------
    SpecError
        If the file is wrong.

    Notes
    -----
    Of a kernel that was not measured on this GPU: the mean of those of its architecture, or else of
    all GPUs on which it was.
    """
    return composed(device, _shipped() if path is None else read_learnt(Path(path)))


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    return read_learnt(SHIPPED)


def composed(device: Gpu, learnt: Learnt) -> Efficiency:
    """Return the kernels of a GPU from what was measured of it and of others.

    Parameters
    ----------
    device : Gpu
        The GPU.
    learnt : mapping
        What was measured; each kind of kernel at least of one GPU.
    """
    kin = [n for n in gpu_names() if n in learnt and gpu(n).architecture == device.architecture]
    choices = ([device.name] if device.name in learnt else [], kin, list(learnt))
    origin: dict[str, str] = {}

    def find(kind: str, key: str | None = None) -> Any:  # noqa: ANN401 - a kernel of any kind
        for names in choices:
            found = {
                name: learnt[name][kind] if key is None else learnt[name][kind][key]
                for name in names
                if kind in learnt[name] and (key is None or key in learnt[name][kind])
            }
            if found:
                origin[kind if key is None else f"{kind} {key}"] = ", ".join(found)
                return _mean(list(found.values()))
        raise SpecError(f"no GPU has kernels of kind {kind}")

    formats = {key for sections in learnt.values() for key in sections.get("gemm", {})}
    gemm = {key: find("gemm", key) for key in sorted(formats)}
    return Efficiency(gemm=gemm, **{kind: find(kind) for kind in KINDS}, origin=origin)


def _mean(kernels: Sequence[Kernel]) -> Kernel:
    if len(kernels) == 1:
        return kernels[0]
    first = kernels[0]
    means = {
        f.name: in_order(getattr(kernel, f.name) for kernel in kernels) / len(kernels)
        for f in fields(first)  # type: ignore[arg-type]  # dataclasses all
    }
    if "query_block" in means:  # it has no mean: most kernels' own
        blocks = [getattr(kernel, "query_block") for kernel in kernels]  # noqa: B009
        means["query_block"] = max(sorted(set(blocks)), key=blocks.count)
    return type(first)(**means)


def _kernel(where: str, kind: type[Kernel], values: object) -> Kernel:
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]  # dataclasses all
    if not isinstance(values, dict):
        raise SpecError(f"{where}: must map {', '.join(known)} to numbers")
    for key, value in values.items():
        if key not in known:
            raise SpecError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{where}.{key} must be a number, got {value!r}")
        if not (math.isfinite(value) and value >= 0):
            raise SpecError(f"{where}.{key} must be >= 0, got {value!r}")
        is_reachable = key.endswith(("bandwidth_share", "flops_share", "link_share"))
        if is_reachable and not 0 < value <= 1:
            raise SpecError(f"{where}.{key} must be in (0, 1], got {value!r}")
    if missing := [key for key in known if key not in values]:
        raise SpecError(f"{where}: key {missing[0]!r} is missing")
    if values.get("row_share", 0) > 1:
        raise SpecError(f"{where}.row_share must be at most 1, got {values['row_share']!r}")
    if values.get("tile_share", 0) + values.get("wave_share", 0) > 1:
        raise SpecError(f"{where}: tile_share and wave_share must be at most 1 together")
    return kind(**values)
