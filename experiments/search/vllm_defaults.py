"""What `vllm serve` sets where nobody says: limits by GPU and release, and where each stands."""

from __future__ import annotations

from typing import NamedTuple

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.hardware.gpus import Gpu

_GIB = 1024**3


class Limits(NamedTuple):
    """Limits of a step that a server starts with.

    Attributes
    ----------
    max_num_seqs, max_num_batched_tokens : int
        As vLLM's options.
    source : str
        File and lines of that release.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    source: str


class Release(NamedTuple):
    """Defaults of one release of vLLM, of its OpenAI server (``UsageContext.OPENAI_API_SERVER``).

    Attributes
    ----------
    huge, large, other : Limits
        Of GPUs with 160 GiB at least, with 70 GiB at least that are no A100, and of all others.
    gpu_memory_utilization : float
        Share of the memory of a device.
    """

    huge: Limits
    large: Limits
    other: Limits
    gpu_memory_utilization: float


_FILE = "vllm/engine/arg_utils.py, get_batch_defaults()"

RELEASES = {
    "0.32": Release(
        huge=Limits(1024, 16384, f"{_FILE}, lines 2923-2932 of 0.32.0"),
        large=Limits(1024, 8192, f"{_FILE}, lines 2933-2942 of 0.32.0"),
        other=Limits(256, 2048, f"{_FILE}, lines 2943-2952 of 0.32.0"),
        gpu_memory_utilization=0.92,  # vllm/config/cache.py, line 102 of 0.32.0
    ),
    "0.33": Release(
        huge=Limits(1024, 16384, f"{_FILE}, lines 2973-2982 of 0.33.0"),
        large=Limits(1024, 8192, f"{_FILE}, lines 2983-2996 of 0.33.0"),
        other=Limits(256, 2048, f"{_FILE}, lines 2997-3006 of 0.33.0"),
        gpu_memory_utilization=0.92,  # vllm/config/cache.py, line 215 of 0.33.0
    ),
}
"""Read off the source of each release; a key is also the end of an engine profile's name."""


def release(name: str) -> Release:
    """Return the defaults of a release.

    Raises
    ------
    SpecError
        If it is not in the table.
    """
    if name not in RELEASES:
        raise SpecError(f"no defaults of vLLM {name} are known; {nearest(name, RELEASES)}")
    return RELEASES[name]


def default_limits(gpu: Gpu, of: Release) -> Limits:
    """Return what a server on a GPU starts with.

    Examples
    --------
    >>> from schedlab.sim.hardware.gpus import gpu
    >>> default_limits(gpu("h100"), RELEASES["0.32"])[:2]
    (1024, 8192)
    >>> default_limits(gpu("a100"), RELEASES["0.32"])[:2]
    (256, 2048)
    """
    if gpu.memory_bytes >= 160 * _GIB:
        return of.huge
    if gpu.memory_bytes >= 70 * _GIB and "a100" not in gpu.name.lower():
        return of.large
    return of.other
