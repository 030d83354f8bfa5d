"""The keys of a link between devices: a known one, or figures of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from schedlab.experiments.specification.fields import NonNegative, Positive, Section
from schedlab.sim.hardware.link import LINKS, Link


class LinkSpec(Section):
    """What joins devices that are not in one engine, or in one stage of it."""

    name: Literal["nvlink", "pcie-4", "pcie-5", "infiniband-ndr", "ethernet-100g"] | None = Field(
        default=None, description="A known link; see fleets.md."
    )
    gb_per_s: Positive | None = Field(
        default=None, description="Bandwidth of a device in one direction, 1e9 bytes a second."
    )
    latency_us: NonNegative | None = Field(
        default=None, description="Time before the first byte, in microseconds."
    )

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if self.name is None and self.gb_per_s is None:
            raise ValueError("give a name, e.g. name: infiniband-ndr, or gb_per_s")
        return self

    def link(self) -> Link:
        """Return the link."""
        link = LINKS[self.name] if self.name is not None else Link(0.0, 0.0, "the experiment")
        if self.gb_per_s is not None:
            link = replace(link, bytes_per_s=self.gb_per_s * 1e9)
        if self.latency_us is not None:
            link = replace(link, latency_s=self.latency_us * 1e-6)
        return link
