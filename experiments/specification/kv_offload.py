"""The keys under `engine.kv_offload`: memory below the GPU's, and what is loaded from there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schedlab.experiments.specification.fields import Count, NonNegative, Positive, Section
from schedlab.sim.config import KVLoad, KVWrite

TierLink = Literal["pcie-4", "pcie-5", "nvme-4", "infiniband-ndr", "ethernet-100g", "measured"]


class TierSpec(Section):
    """One tier of memory, e.g. `{name: cpu, gib: 64, link: pcie-5}`."""

    name: str = Field(min_length=1, description="How results call it.")
    gib: Positive | None = Field(default=None, description="Its size, GiB for each device.")
    num_blocks: Count | None = Field(default=None, description="Its size in KV blocks, instead.")
    link: TierLink | None = Field(
        default=None,
        description="What joins it to each device: a known link, or `measured`, what the profile "
        "of cost_model says of copies; see kv-tiers.md.",
    )
    load_gb_per_s: Positive | None = Field(
        default=None,
        description="Bandwidth towards each device, 1e9 bytes a second; if absent the link's.",
    )
    store_gb_per_s: Positive | None = Field(
        default=None, description="Bandwidth away from each device; if absent the link's."
    )
    latency_us: NonNegative | None = Field(
        default=None,
        description="Time of a copy beside that of its bytes, in microseconds; if absent the "
        "link's, or 0.",
    )
    write: KVWrite = Field(
        default="through",
        description="When blocks come here: `through`, as soon as they are in the memory above; "
        "`back`, only when they lose their place there.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="With `backend: real`, of a tier below the first: folder on the disk that it "
        "lies on; the system's temporary directory if absent.",
    )
    shared: bool = Field(
        default=False,
        description="Whether all engines of a cluster have it together; the last of several tiers.",
    )

    @model_validator(mode="after")
    def _says_size_and_link(self) -> TierSpec:
        if self.name == "all":
            raise ValueError("no tier is called all: metrics mean all of them by that")
        if (self.gib is None) == (self.num_blocks is None):
            raise ValueError("give gib or num_blocks")
        if self.link is None and (self.load_gb_per_s is None or self.store_gb_per_s is None):
            raise ValueError("give a link, e.g. link: pcie-5, or load_gb_per_s and store_gb_per_s")
        return self


class KVOffloadSpec(Section):
    """KV blocks in memory below the GPU's, and copies to and from there beside the steps."""

    tiers: Annotated[list[TierSpec], Field(min_length=1, max_length=4)] = Field(
        description="That memory, the nearest first."
    )
    load: KVLoad = Field(
        default="when_faster",
        description="Whether a prefix found there is loaded only where that takes less time than "
        "computing it.",
    )

    @model_validator(mode="after")
    def _fits_its_place(self) -> KVOffloadSpec:
        if self.tiers[0].path is not None:
            raise ValueError("tiers[0].path: the first tier is the host's memory")
        for place, tier in enumerate(self.tiers):
            if tier.shared and not 0 < place == len(self.tiers) - 1:
                raise ValueError(
                    f"tiers[{place}].shared: only the last tier can be shared, below one that each "
                    "engine has for itself"
                )
        return self
