"""The keys of one class under `workload.classes`."""

from __future__ import annotations

from pydantic import Field, model_validator

from experiments.spec.fields import Count, Positive, Section
from experiments.spec.lengths import LengthsField
from experiments.spec.slo import SloTargets


class SharedPrefix(Section):
    """What the prompts of a class begin with, for prefix caching."""

    tokens: Count = Field(
        description="First prompt tokens in common with the group, in blocks of 16; of a shorter "
        "prompt all but the last."
    )
    groups: Count = Field(default=1, description="Groups, all equally likely.")


class TrafficClass(Section):
    """Some of the requests, and what tells them from the others."""

    share: Positive = Field(default=1.0, description="Weight among the classes.")
    priority: int | None = Field(
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

    @model_validator(mode="after")
    def _lengths_from_one_place(self) -> TrafficClass:
        if self.trace is not None and self.prompt_tokens and self.output_tokens:
            raise ValueError("give trace, or both prompt_tokens and output_tokens")
        return self
