"""What joins devices that are not on one board: networks and buses, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What joins a device to devices of other engines or stages, in one direction.

    Attributes
    ----------
    bytes_per_s : float
        Bandwidth of each device, out of it and into it.
    latency_s : float
        Time before the first byte.
    source : str
        Where the figures come from.
    """

    bytes_per_s: float
    latency_s: float
    source: str


LINKS = {
    "nvlink": Link(
        450e9,
        2e-6,
        "bandwidth: NVIDIA H100 datasheet, NVLink 4, 900 GB/s both ways; latency: 1-2 us, "
        "fridayswithfaraday.com/posts/gpu-hw-nvlink-nvswitch-interconnect",
    ),
    "pcie-4": Link(
        31.5e9, 5e-6, "bandwidth: PCI Express 4.0, 16 lanes, 128b/130b; latency: as PCIe 5"
    ),
    "pcie-5": Link(
        63e9,
        5e-6,
        "bandwidth: PCI Express 5.0, 16 lanes, 128b/130b; latency: 4.1 us alone and 6.1 us under "
        "load, measured between GPUs, github.com/lukealonso/p2pmark",
    ),
    "infiniband-ndr": Link(
        50e9,
        5e-6,
        "bandwidth: NVIDIA ConnectX-7 datasheet, NDR, 400 Gb/s a port; latency: 1-5 us, "
        "fridayswithfaraday.com/posts/gpu-hw-nvlink-nvswitch-interconnect",
    ),
    "ethernet-100g": Link(
        12.5e9,
        20e-6,
        "bandwidth: IEEE 802.3, 100 Gb/s; latency: 10-30 us one way through a kernel's TCP/IP "
        "(with RDMA about 1), kentino.com, Latency Dissection",
    ),
}
"""By name: nominal bandwidth in one direction, so what comes out is a lower bound of times."""
