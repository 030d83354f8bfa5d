"""Memory below the GPU's as a specification asks for it, with its links looked up."""

from __future__ import annotations

from typing import Any

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.kv_offload import TierSpec
from schedlab.sim.config import KVTier
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.link import LINKS

_NVME_4 = 6.5e9, 3.5e9, 100e-6
"""Reading and writing, bytes/s, and seconds: Samsung PM9A3 U.2, PCIe 4.0, as announced in 2020
(computerbase.de/2020-05/samsung-pm9a3-e1.s-pcie-4.0-ssd); the latency is an assumption."""


def offload_limits(spec: ExperimentSpec, block_bytes: int) -> dict[str, Any]:
    """Return the limits of an engine that follow from `engine.kv_offload`; none without it.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    block_bytes : int
        Size of a KV block on one GPU.

    Raises
    ------
    SpecError
        If a tier holds no block, or engines cannot have tiers here.
    """
    asked = spec.engine.kv_offload
    if asked is None:
        return {}
    if spec.engine.data_parallel_size > 1 and spec.engine.data_parallel_lockstep:
        raise SpecError(
            "engine.kv_offload: not simulated with engines that run every step together; set "
            "engine.data_parallel_lockstep: false"
        )
    try:
        tiers = tuple(_tier(tier, block_bytes) for tier in asked.tiers)
    except ValueError as error:
        raise SpecError(f"engine.kv_offload: {error}") from None
    return {
        "kv_tiers": tiers,
        "kv_load": asked.load,
        "load_takes_seat": not spec.engine.offloading_connector,
        "swap_space_blocks": tiers[0].num_blocks,
    }


def _tier(asked: TierSpec, block_bytes: int) -> KVTier:
    load, store, latency_s = 0.0, 0.0, 0.0
    if asked.link == "nvme-4":
        load, store, latency_s = _NVME_4
    elif asked.link is not None:
        link = LINKS[asked.link]
        load = store = link.bytes_per_s
        latency_s = link.latency_s
    if asked.load_gb_per_s is not None:
        load = asked.load_gb_per_s * 1e9
    if asked.store_gb_per_s is not None:
        store = asked.store_gb_per_s * 1e9
    if asked.latency_us is not None:
        latency_s = asked.latency_us * 1e-6
    latency_ns = round(latency_s * 1e9)
    num_blocks = asked.num_blocks or int((asked.gib or 0.0) * 2**30 / block_bytes)
    return KVTier(asked.name, num_blocks, load, store, latency_ns, latency_ns, asked.write)
