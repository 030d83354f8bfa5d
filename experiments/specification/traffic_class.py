"""The keys of one class under `workload.classes`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from schedlab.experiments.specification.arrivals import ArrivalsField
from schedlab.experiments.specification.fields import Count, Positive, Section, whole
from schedlab.experiments.specification.lengths import LengthsField
from schedlab.experiments.specification.slo import SloTargets


class SharedPrefix(Section):
    """What the prompts of a class begin with, for prefix caching."""

    tokens: Count = Field(
        description="First prompt tokens in common with the group, in blocks of 16; of a shorter "
        "prompt all but the last."
    )
    groups: Annotated[int, Field(ge=1, le=100_000_000), BeforeValidator(whole)] = Field(
        default=1, description="Groups, all equally likely."
    )


class TrafficClassSpec(Section):
    """Some of the requests, and what tells them from the others."""

    share: Positive | None = Field(
        default=None, description="Weight among the classes; 1 if absent."
    )
    request_rate: Positive | None = Field(
        default=None, description="Poisson arrivals of this class alone, instead of a share."
    )
    arrivals: ArrivalsField | None = Field(
        default=None, description="Another arrival process of this class alone."
    )
    priority: Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000)] | None = Field(
        default=None, description="Lower is more urgent; the trace's own if absent."
    )
    slo: SloTargets = Field(
        default_factory=SloTargets, description="Latency targets, instead of the experiment's."
    )
    trace: str | None = Field(
        default=None, description="Preset whose lengths the class has, instead of the workload's."
    )
    prompt_tokens: LengthsField | None = Field(
        default=None, description="Prompt lengths of the class."
    )
    output_tokens: LengthsField | None = Field(
        default=None, description="Output lengths of the class."
    )
    shared_prefix: SharedPrefix | None = Field(
        default=None, description="What its prompts have in common; nothing if absent."
    )

    @property
    def has_arrivals(self) -> bool:
        """Whether the class has an arrival process of its own."""
        return self.request_rate is not None or self.arrivals is not None

    @model_validator(mode="after")
    def _arrivals_from_one_place(self) -> TrafficClassSpec:
        if self.request_rate is not None and self.arrivals is not None:
            raise ValueError("give request_rate or arrivals, not both")
        if self.has_arrivals and self.share is not None:
            raise ValueError("share divides the workload's arrivals; this class has its own")
        process = self.arrivals.process if self.arrivals else None
        if process in ("all_at_once", "replay", "closed_loop"):
            raise ValueError(f"arrivals: {process} is of a whole workload, not of a class")
        return self

    @model_validator(mode="after")
    def _lengths_from_one_place(self) -> TrafficClassSpec:
        if self.trace is not None and self.prompt_tokens and self.output_tokens:
            raise ValueError("give trace, or both prompt_tokens and output_tokens")
        return self
