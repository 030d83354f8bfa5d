"""Links between engines, and what is on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from schedlab.sim.drive.clock import COMES, Clock, Event
from schedlab.sim.hardware.link import Link

if TYPE_CHECKING:
    from schedlab.sim.drive.members import Member

_NS_PER_S = 1e9


@dataclass(frozen=True)
class Interconnect:
    """What joins the engines of a fleet, and how much a token is.

    Attributes
    ----------
    link : Link
        What each device has.
    kv_bytes_per_token : int
        Size of the keys and values of a token, over all devices of an engine.
    num_devices : sequence of int
        Of an engine of each pool.
    num_layers : int
        In how many parts, one after the other, the KV of a prompt is computed and can be sent; 1 =
        it is sent after the whole prompt.
    """

    link: Link
    kv_bytes_per_token: int
    num_devices: Sequence[int]
    num_layers: int = 1


@dataclass(eq=False)
class Moving:
    """Bytes on their way."""

    sender: int
    receiver: int
    num_bytes: int
    num_devices: int
    done: Callable[[], None]
    left_bytes: float = 0.0
    bytes_per_ns: float = 0.0
    is_cancelled: bool = False


class Links:
    """Transfers that share the links of their engines.

    Parameters
    ----------
    clock : Clock
        The time, in ns.
    joins : Interconnect
        What each device of each engine has.

    Notes
    -----
    A transfer goes out of all devices of the sender and into those of the receiver, as many as the
    engine with the fewer has. It gets ``bandwidth / n``, where n is the greater of the numbers of
    transfers that leave its sender and that enter its receiver. While the links of either are down
    it waits, and begins anew when they are up again.
    """

    def __init__(self, clock: Clock, joins: Interconnect) -> None:
        self._clock = clock
        self.joins = joins
        self._latency_ns = round(joins.link.latency_s * _NS_PER_S)
        self._moving: list[Moving] = []
        self._down: dict[int, int] = {}
        self._since_ns = 0
        self._next: Event | None = None

    def send(
        self,
        sender: int,
        receiver: int,
        num_bytes: int,
        num_devices: int,
        done: Callable[[], None],
        wait_ns: int = 0,
    ) -> Moving:
        """Move bytes from engine to engine; `done` is called when the last one is there."""
        moving = Moving(sender, receiver, num_bytes, num_devices, done, float(num_bytes))
        self._clock.at(wait_ns + self._latency_ns, COMES, lambda _: self._begin(moving))
        return moving

    def send_kv(
        self,
        sender: Member,
        receiver: Member,
        num_tokens: int,
        done: Callable[[], None],
        wait_ns: int = 0,
    ) -> Moving:
        """Move keys and values of tokens, over as many devices as the smaller engine has."""
        num_bytes = num_tokens * self.joins.kv_bytes_per_token
        num_devices = self._num_devices(sender, receiver)
        return self.send(sender.index, receiver.index, num_bytes, num_devices, done, wait_ns)

    def kv_alone_ns(self, sender: Member, receiver: Member, num_tokens: float) -> float:
        """Return how long keys and values of tokens take where nothing else is sent."""
        bandwidth = self.joins.link.bytes_per_s * self._num_devices(sender, receiver)
        return num_tokens * self.joins.kv_bytes_per_token / bandwidth * _NS_PER_S

    def _num_devices(self, sender: Member, receiver: Member) -> int:
        devices = self.joins.num_devices
        return min(devices[sender.pool], devices[receiver.pool])

    def cancel(self, moving: Moving) -> None:
        """Stop a transfer that is not done."""
        moving.is_cancelled = True
        if moving in self._moving:
            self._advance()
            self._moving.remove(moving)
            self._share()

    def fail(self, engine: int) -> None:
        """Let all links of an engine go down: what is on them is lost, and sent again later."""
        self._advance()
        self._down[engine] = self._down.get(engine, 0) + 1
        for moving in self._moving:
            if engine in (moving.sender, moving.receiver):
                moving.left_bytes = float(moving.num_bytes)
        self._share()

    def repair(self, engine: int) -> None:
        """Take back one `fail`; the links are up if there is none left."""
        self._advance()
        self._down[engine] -= 1
        self._share()

    def _begin(self, moving: Moving) -> None:
        if moving.is_cancelled:
            return
        self._advance()
        self._moving.append(moving)
        self._share()

    def _advance(self) -> None:
        """Move what was moved since the last change."""
        now_ns = self._clock.now_ns
        for moving in self._moving:
            moving.left_bytes -= moving.bytes_per_ns * (now_ns - self._since_ns)
        self._since_ns = now_ns

    def _is_down(self, moving: Moving) -> bool:
        return self._down.get(moving.sender, 0) > 0 or self._down.get(moving.receiver, 0) > 0

    def _share(self) -> None:
        """Share the bandwidth anew, and wait for whoever ends first."""
        leaving: dict[int, int] = {}
        entering: dict[int, int] = {}
        flowing = []
        for moving in self._moving:
            moving.bytes_per_ns = 0.0
            if self._down and self._is_down(moving):
                continue
            flowing.append(moving)
            leaving[moving.sender] = leaving.get(moving.sender, 0) + 1
            entering[moving.receiver] = entering.get(moving.receiver, 0) + 1
        self._next = None
        if not flowing:
            return
        waits_ns = []
        for moving in flowing:
            most = max(leaving[moving.sender], entering[moving.receiver])
            bandwidth = self.joins.link.bytes_per_s * moving.num_devices
            moving.bytes_per_ns = bandwidth / most / _NS_PER_S
            waits_ns.append(ceil(max(moving.left_bytes, 0.0) / moving.bytes_per_ns))
        self._next = self._clock.at(min(waits_ns), COMES, self._end)

    def _end(self, event: Event) -> None:
        if event is not self._next:
            return
        self._advance()
        # Whole nanoseconds are waited for, so that of those that are done nothing is left.
        ended = [m for m in self._moving if m.left_bytes <= 1e-6 and not self._is_down(m)]
        self._moving = [moving for moving in self._moving if moving not in ended]
        self._share()
        for moving in ended:
            if not moving.is_cancelled:
                moving.done()
