"""Memory below the GPU's as a specification asks for it, with its links looked up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.kv_offload import TierSpec
from schedlab.sim.config import KVTier
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object
from schedlab.sim.hardware.link import LINKS


class _OneWay(NamedTuple):
    """One direction of a link."""

    bytes_per_s: float
    latency_s: float


_NVME_4 = _OneWay(6.5e9, 100e-6), _OneWay(3.5e9, 100e-6)
"""Reading and writing: Samsung PM9A3 U.2, PCIe 4.0, as announced in 2020
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
        If a tier holds no block.
    """
    asked = spec.engine.kv_offload
    if asked is None:
        return {}
    try:
        tiers = tuple(_tier(tier, block_bytes, spec.cost_model.profile) for tier in asked.tiers)
    except ValueError as error:
        raise SpecError(f"engine.kv_offload: {error}") from None
    return {
        "kv_tiers": tiers,
        "kv_load": asked.load,
        "load_takes_seat": not spec.engine.offloading_connector,
        "swap_space_blocks": tiers[0].num_blocks,
    }


def _tier(asked: TierSpec, block_bytes: int, profile: str | None) -> KVTier:
    load, store = _OneWay(0.0, 0.0), _OneWay(0.0, 0.0)
    if asked.link == "nvme-4":
        load, store = _NVME_4
    elif asked.link == "measured":
        load, store = _measured(profile, asked.name)
    elif asked.link is not None:
        link = LINKS[asked.link]
        load = store = _OneWay(link.bytes_per_s, link.latency_s)
    if asked.load_gb_per_s is not None:
        load = load._replace(bytes_per_s=asked.load_gb_per_s * 1e9)
    if asked.store_gb_per_s is not None:
        store = store._replace(bytes_per_s=asked.store_gb_per_s * 1e9)
    if asked.latency_us is not None:
        load = load._replace(latency_s=asked.latency_us * 1e-6)
        store = store._replace(latency_s=asked.latency_us * 1e-6)
    num_blocks = asked.num_blocks or int((asked.gib or 0.0) * 2**30 / block_bytes)
    return KVTier(
        asked.name, num_blocks, load.bytes_per_s, store.bytes_per_s,
        round(load.latency_s * 1e9), round(store.latency_s * 1e9), asked.write,
        asked.shared,
    )  # fmt: skip


def _measured(profile: str | None, tier: str) -> tuple[_OneWay, _OneWay]:
    """Return what a calibration measured of copies to the host and back."""
    where = f"engine.kv_offload: tier {tier}: link: measured"
    if profile is None:
        raise SpecError(f"{where} is that of a profile; set cost_model to its folder, or a link")
    times = read_json_object(Path(profile) / "meta.json").get("swap_times")
    if not times:
        raise SpecError(
            f"{where}, and {profile} has no swap_times; measure it again, or set a link"
        )
    return _fitted(times, "in"), _fitted(times, "out")


def _fitted(times: list[dict[str, Any]], direction: str) -> _OneWay:
    """Fit bandwidth and latency to copies of several sizes: least squares in relative error."""
    rows = [time for time in times if time["direction"] == direction]
    seconds = np.array([row["seconds"] for row in rows], dtype=np.float64)
    num_bytes = np.array([row["num_bytes"] for row in rows], dtype=np.float64)
    a, b, ones = 1 / seconds, num_bytes / seconds, np.ones(len(rows))
    latency_s, byte_s = np.linalg.lstsq(np.stack([a, b], axis=1), ones, rcond=None)[0].tolist()
    if latency_s < 0.0 or byte_s <= 0.0:
        latency_s, byte_s = 0.0, float(b.sum() / (b**2).sum())
    return _OneWay(1 / byte_s, latency_s)
