"""What is told of each engine of a fleet, beside what it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

STILL = -1
"""The end of a span that lasts until the run is over."""


class Span(NamedTuple):
    """A stretch of time, half-open."""

    from_ns: int
    until_ns: int = STILL


class EngineFacts(NamedTuple):
    """One engine."""

    pool: str
    """Its kind."""
    hardware: str
    policy: str
    role: str
    """``mixed``, ``prefill`` or ``decode``."""
    num_gpus: int
    kv_capacity_tokens: int
    usd_per_gpu_hour: float | None
    """None where the hardware has no price."""
    paid: tuple[Span, ...] = ()
    """When its devices were there; empty: during the whole run."""
    served: tuple[Span, ...] = ()
    """When it was up, starting and dead ones are not; empty: during the whole run."""

    def to_data(self) -> dict[str, object]:
        """Return what result.json says: times only where there are any."""
        data = self._asdict()
        return {key: value for key, value in data.items() if value != ()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> EngineFacts:
        """Read what `to_data` wrote."""
        times = {
            key: tuple(Span(*span) for span in data[key])
            for key in ("paid", "served")
            if key in data
        }
        return cls(**{**data, **times})
