"""The keys under `cost_model`: what a step takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schedlab.experiments.specification.fields import (
    TEXT,
    Fraction,
    NonNegative,
    Section,
    Shorthand,
)


class CostModel(Section):
    """What a step takes: an analytic roofline, or a profile measured on a real device."""

    name: Literal["roofline"] | None = Field(default=None, description="An analytic model by name.")
    profile: str | None = Field(default=None, description="Folder of a measured profile.")
    compute_efficiency: Fraction | None = Field(
        default=None,
        description="Share of peak FLOP/s reached (roofline); the model's own if absent.",
    )
    memory_efficiency: Fraction | None = Field(
        default=None,
        description="Share of peak bytes/s reached (roofline); the model's own if absent.",
    )
    kernel_latency_s: NonNegative | None = Field(
        default=None, description="Start-up time of a kernel (roofline); the model's own if absent."
    )
    profiling_overhead_s: NonNegative = Field(
        default=0.0,
        description="Seconds that timing kernels one by one added to a step (imported tables); "
        "taken off.",
    )
    separate_prefills: bool | None = Field(
        default=None,
        description="Price the attention of several prefills in a step one by one, not pooled into "
        "one (imported attention tables).",
    )
    nearest_skew: bool | None = Field(
        default=None,
        description="Correct for unequal contexts beside a chunk of any size as beside the nearest "
        "measured size (imported attention tables).",
    )
    allow_mismatch: bool = Field(
        default=False, description="Accept a profile of another model or device than the run's."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> CostModel:
        if (self.name is None) == (self.profile is None):
            raise ValueError("give either name: roofline or profile: FOLDER")
        analytic = (self.compute_efficiency, self.memory_efficiency, self.kernel_latency_s)
        if self.profile is not None and analytic != (None, None, None):
            raise ValueError("efficiencies and latency belong to roofline, not to a profile")
        if self.name is not None and self.allow_mismatch:
            raise ValueError("allow_mismatch belongs to a profile, not to the roofline model")
        for key in ("profiling_overhead_s", "separate_prefills", "nearest_skew"):
            if self.name is not None and getattr(self, key):
                raise ValueError(f"{key} belongs to a profile, not to the roofline model")
        return self


def _from_text(value: object) -> object:
    if isinstance(value, str):
        return {"name": value} if value == "roofline" else {"profile": value}
    return value


CostModelField = Annotated[CostModel, Shorthand(_from_text, TEXT)]
