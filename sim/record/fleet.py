"""What is told of each engine of a fleet, beside what it did."""

from __future__ import annotations

from typing import NamedTuple


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
