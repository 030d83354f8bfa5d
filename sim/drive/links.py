"""Links between engines, and what is on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import simpy

from schedlab.sim.drive.instant import COMES, at

_NS_PER_S = 1e9


@dataclass(frozen=True)
class Link:
    """What joins a device to devices of other engines, in one direction.

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


_LATENCY = "latency: order of magnitude, not measured"
LINKS = {
    "nvlink": Link(450e9, 2e-6, f"NVIDIA H100 datasheet: NVLink 4, 900 GB/s both ways; {_LATENCY}"),
    "pcie-4": Link(31.5e9, 5e-6, f"PCI Express 4.0, 16 lanes, 128b/130b; {_LATENCY}"),
    "pcie-5": Link(63e9, 5e-6, f"PCI Express 5.0, 16 lanes, 128b/130b; {_LATENCY}"),
    "infiniband-ndr": Link(
        50e9, 5e-6, f"NVIDIA ConnectX-7 datasheet: NDR, 400 Gb/s a port; {_LATENCY}"
    ),
    "ethernet-100g": Link(12.5e9, 20e-6, f"IEEE 802.3: 100 Gb/s; {_LATENCY}"),
}
"""By name: nominal bandwidth, so what comes out is a lower bound of times."""


@dataclass(eq=False)
class _Moving:
    """Bytes on their way."""

    sender: int
    receiver: int
    left_bytes: float
    num_devices: int
    done: Callable[[], None]
    bytes_per_ns: float = 0.0


class Links:
    """Transfers that share the links of their engines.

    Parameters
    ----------
    clock : simpy.Environment
        The time, in ns.
    link : Link
        What each device of each engine has.

    Notes
    -----
    A transfer goes out of all devices of the sender and into those of the receiver, as many as the
    engine with the fewer has. It gets ``bandwidth / n``, where n is the greater of the numbers of
    transfers that leave its sender and that enter its receiver.
    """

    def __init__(self, clock: simpy.Environment, link: Link) -> None:
        self._clock = clock
        self._link = link
        self._latency_ns = round(link.latency_s * _NS_PER_S)
        self._moving: list[_Moving] = []
        self._since_ns = 0
        self._next: simpy.Event | None = None

    def send(
        self, sender: int, receiver: int, num_bytes: int, num_devices: int, done: Callable[[], None]
    ) -> None:
        """Move bytes from engine to engine; `done` is called when the last one is there."""
        moving = _Moving(sender, receiver, float(num_bytes), num_devices, done)
        at(self._clock, self._latency_ns, COMES, lambda _: self._begin(moving))

    def _begin(self, moving: _Moving) -> None:
        self._advance()
        self._moving.append(moving)
        self._share()

    def _advance(self) -> None:
        """Move what was moved since the last change."""
        now_ns = int(self._clock.now)
        for moving in self._moving:
            moving.left_bytes -= moving.bytes_per_ns * (now_ns - self._since_ns)
        self._since_ns = now_ns

    def _share(self) -> None:
        """Share the bandwidth anew, and wait for whoever ends first."""
        leaving: dict[int, int] = {}
        entering: dict[int, int] = {}
        for moving in self._moving:
            leaving[moving.sender] = leaving.get(moving.sender, 0) + 1
            entering[moving.receiver] = entering.get(moving.receiver, 0) + 1
        self._next = None
        if not self._moving:
            return
        waits_ns = []
        for moving in self._moving:
            most = max(leaving[moving.sender], entering[moving.receiver])
            bandwidth = self._link.bytes_per_s * moving.num_devices
            moving.bytes_per_ns = bandwidth / most / _NS_PER_S
            waits_ns.append(ceil(max(moving.left_bytes, 0.0) / moving.bytes_per_ns))
        self._next = at(self._clock, min(waits_ns), COMES, self._end)

    def _end(self, event: simpy.Event) -> None:
        if event is not self._next:
            return
        self._advance()
        # Whole nanoseconds are waited for, so that of those that are done nothing is left.
        ended = [moving for moving in self._moving if moving.left_bytes <= 1e-6]
        self._moving = [moving for moving in self._moving if moving.left_bytes > 1e-6]
        self._share()
        for moving in ended:
            moving.done()
