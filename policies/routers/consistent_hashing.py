"""Consistent hashing, with bounded loads or without."""

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from typing import Literal

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import column
from schedlab.sim.request import Request

_Key = Literal["session", "tenant", "application", "prefix"]


@register("consistent_hashing")
class ConsistentHashing(Router):
    """The engine that follows the hash of the request's key on a ring, unless it is too busy.

    Equal keys meet on one engine without anybody remembering them, and an engine more or less
    moves few keys. With bounded loads no engine has more than `load_factor` times the mean number
    of requests in flight: a request goes on to the next engine on the ring that has room. A request
    without the key is spread by its id.

    Parameters
    ----------
    key : {"session", "tenant", "application", "prefix"}
        What is hashed; ``prefix`` is the first block of the prompt.
    load_factor : float or None
        Most load of an engine in units of the mean, > 1; None = loads do not matter.
    num_points : int
        Points of each engine on the ring.
    """

    source = "Karger et al. 1997; Mirrokni, Thorup & Zadimoghaddam 2018 (arXiv:1608.01350)"

    def __init__(
        self, key: _Key = "session", load_factor: float | None = 1.25, num_points: int = 100
    ) -> None:
        if key not in ("session", "tenant", "application", "prefix"):
            raise ValueError(f"key must be session, tenant, application or prefix, got {key!r}")
        if load_factor is not None and not load_factor > 1:
            raise ValueError(f"load_factor must be > 1, or null, got {load_factor!r}")
        if isinstance(num_points, bool) or not isinstance(num_points, int) or num_points < 1:
            raise ValueError(f"num_points must be a whole number >= 1, got {num_points!r}")
        self.key = key
        self.load_factor = load_factor
        self.num_points = num_points
        self.looks_at_engines = load_factor is not None
        self._points: list[int] = []
        self._engines: list[int] = []
        self._on_ring: tuple[int, ...] = ()

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Walk around the ring from the key's hash."""
        indices = tuple(column(engines, "index"))
        if indices != self._on_ring:
            self._place_on_ring(indices)
        most = float("inf")
        if self.load_factor is not None:
            in_flight = sum(column(engines, "num_in_flight")) + 1
            most = ceil(self.load_factor * in_flight / len(engines))
        at = bisect_left(self._points, _hash(self._name(request)))
        for i in range(len(self._points)):
            place = indices.index(self._engines[(at + i) % len(self._engines)])
            if self.load_factor is None or engines[place].num_in_flight < most:
                return place
        raise AssertionError("the least loaded engine is below the mean")

    def _name(self, request: Request) -> str:
        if self.key == "prefix":
            ids = request.prefix_hash_ids
            return f"prefix {ids[0]}" if ids else f"request {request.id}"
        key: str | None = getattr(request, self.key)
        return f"request {request.id}" if key is None else f"{self.key} {key}"

    def _place_on_ring(self, indices: tuple[int, ...]) -> None:
        points = sorted(
            (_hash(f"engine {index} {i}"), index)
            for index in indices
            for i in range(self.num_points)
        )
        self._points = [point for point, _ in points]
        self._engines = [index for _, index in points]
        self._on_ring = indices


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
