"""The keys of `workload.sessions`: conversations and agents, drawn from stated distributions."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from schedlab.experiments.specification.fields import (
    Count,
    Fraction,
    Named,
    Section,
    Shorthand,
    whole,
)
from schedlab.experiments.specification.lengths import LengthsField
from schedlab.experiments.specification.traffic_class import SharedPrefix


class DurationsSpec(Named):
    """A distribution of times in seconds, with its parameters beside the name."""

    distribution: str = Field(min_length=1, description="Name of the distribution.")


def _from_number(value: object) -> object:
    """Read a lone number as that many seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"distribution": "fixed", "seconds": value}
    return {"distribution": value} if isinstance(value, str) else value


DurationsField = Annotated[DurationsSpec, Shorthand(_from_number, {"type": "number", "minimum": 0})]


class ToolSpec(Section):
    """A tool that answers call."""

    share: Fraction = Field(description="Of the answers, those that call it.")
    seconds: DurationsField = Field(description="How long it works.")
    tokens: LengthsField = Field(description="What it adds to the next prompt.")


class FanOutSpec(Section):
    """Answers that let several agents work side by side; another call joins what they say."""

    share: Fraction = Field(description="Of the answers, those that fan out.")
    width: LengthsField = Field(description="How many agents.")
    tokens: LengthsField = Field(description="What each is told beside all that was said.")


class SessionsSpec(Section):
    """What sessions look like; `workload.session_rate` or `arrivals` say when they start."""

    count: Annotated[int, Field(ge=1, le=100_000_000), BeforeValidator(whole)] = Field(
        description="Sessions."
    )
    turns: LengthsField = Field(description="What a user says in a session, times.")
    new_tokens: LengthsField = Field(description="What that adds to the prompt.")
    first_tokens: LengthsField | None = Field(
        default=None, description="New tokens of the first turn; `new_tokens` if absent."
    )
    output_tokens: LengthsField = Field(description="Every answer.")
    think_s: DurationsField = Field(
        description="Time from an answer for the user to what the user says next, in seconds."
    )
    tools: dict[str, ToolSpec] = Field(
        default_factory=dict,
        description="What answers call, by name; the next call follows when the tool is done.",
    )
    fan_out: FanOutSpec | None = Field(
        default=None, description="Answers that are worked on by several; none if absent."
    )
    max_calls: Count = Field(
        default=16, description="Most calls one behind the other in a turn; the last one answers."
    )
    shared_prefix: SharedPrefix | None = Field(
        default=None, description="The system prompt of a group; nothing if absent."
    )
