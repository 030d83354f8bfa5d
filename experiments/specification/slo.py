"""Latency targets."""

from __future__ import annotations

from pydantic import Field

from schedlab.experiments.specification.fields import Milliseconds, Section


class SloTargets(Section):
    """Latency targets; a request is good if it meets every target given, with <=."""

    ttft_ms: Milliseconds | None = Field(
        default=None, description="Time to first token, milliseconds."
    )
    tpot_ms: Milliseconds | None = Field(
        default=None, description="Time per output token, milliseconds."
    )
    e2el_ms: Milliseconds | None = Field(
        default=None, description="End-to-end latency, milliseconds."
    )
