"""The claim section of a specification: what a paper says, and what would confirm it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from schedlab.experiments.specification.fields import (
    NUMBER,
    Finite,
    Named,
    Section,
    Shorthand,
    shorthand,
)


def _pair(value: object) -> object:
    """Read a lone number as a band without width, and a list as a pair."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), float(value)
    if isinstance(value, list):
        return tuple(
            float(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in value
        )
    return value


Band = Annotated[tuple[float, float], Shorthand(_pair, NUMBER)]
Compare = Literal["value", "ratio", "increase", "reduction", "difference"]


class Measure(Named):
    """A metric of a run, e.g. `p99_ttft_ms` or `{name: finished_within, seconds: 600}`."""

    name: str = Field(min_length=1, description="A metric, or a measure (metrics page).")


class Capacity(Section):
    """The largest value of a swept key at which every constraint holds."""

    over: str = Field(
        min_length=1,
        description="Swept key with rising numbers, e.g. `workload.request_rate`; between the "
        "last that holds and the first that does not, the constraint is interpolated.",
    )
    at_most: dict[str, Finite] = Field(
        default_factory=dict, description="Metric to the most it may be."
    )
    at_least: dict[str, Finite] = Field(
        default_factory=dict, description="Metric to the least it may be."
    )

    @model_validator(mode="after")
    def _some_bar(self) -> Capacity:
        if not self.at_most and not self.at_least:
            raise ValueError("give at_most or at_least: a capacity needs a constraint")
        return self


class Variation(Section):
    """A figure measured again with something varied: what is not given is as in the figure."""

    name: str = Field(min_length=1, description="What is varied, as the page shows it.")
    change: dict[str, Any] = Field(
        default_factory=dict,
        description="Dotted keys of the experiment to other values, for this measurement only, "
        "e.g. `workload.prompt_tokens: 16`; `sweep.KEY` replaces the values of a swept key.",
    )
    metric: Annotated[Measure, shorthand("name")] | None = Field(
        default=None, description="Another metric."
    )
    of: dict[str, Any] | None = Field(default=None, description="Another setting of the claimed.")
    against: dict[str, Any] | None = Field(
        default=None, description="Another thing to compare with."
    )
    at: dict[str, Any] | None = Field(
        default=None, description="Other settings that both have in common."
    )
    compare: Compare | None = Field(default=None, description="Another comparison.")
    accept: Band = Field(description="Band in which the number shows what the sentence says.")


class Cause(Section):
    """Why a figure is not reproduced, and the measurements that show it."""

    sentence: str = Field(min_length=1, description="The cause, with its numbers.")
    shown_by: Annotated[list[Variation], Field(min_length=1)] = Field(
        description="The figure again, with one thing varied each time."
    )


class Figure(Section):
    """One number of the paper, what it is measured by here, and when it counts as confirmed."""

    name: str = Field(min_length=1, description="What the number is, as tables show it.")
    metric: Annotated[Measure, shorthand("name")] | None = Field(
        default=None, description="What is measured, a name or a mapping with its parameters."
    )
    capacity: Capacity | None = Field(
        default=None,
        description="Measured instead of a metric: the largest load within constraints.",
    )
    of: dict[str, Any] = Field(
        default_factory=dict,
        description="Swept key to its value (or a part of it that tells it apart) where the "
        "claimed thing is.",
    )
    against: dict[str, Any] | None = Field(
        default=None, description="The same where the thing compared with is."
    )
    at: dict[str, Any] = Field(
        default_factory=dict, description="Swept keys and values that both have in common."
    )
    compare: Compare = Field(
        default="value",
        description="`value` of; `ratio` of / against; `increase` of / against - 1; `reduction` "
        "1 - of / against; `difference` of - against.",
    )
    paper: Band | None = Field(
        default=None, description="What the source says, a number or a band; absent if nothing."
    )
    stated_by: Literal["paper", "post"] = Field(
        default="paper",
        description="Who says it: a `paper` or its code, or a `post`: a blog, a vendor, hearsay. "
        "Pages count them apart.",
    )
    accept: Band = Field(description="Band in which the number counts as reproduced.")
    why: Cause | None = Field(
        default=None, description="If it is not reproduced: the cause, found by measurements."
    )

    def varied(self, variation: Variation) -> Figure:
        """Return the figure that a variation of this one measures."""
        compare = variation.compare or self.compare
        against = self.against if variation.against is None else variation.against
        return Figure(
            name=variation.name,
            metric=variation.metric or self.metric,
            capacity=None if variation.metric else self.capacity,
            of=self.of if variation.of is None else variation.of,
            against=None if compare == "value" else against,
            at=self.at if variation.at is None else variation.at,
            compare=compare,
            accept=variation.accept,
        )

    @model_validator(mode="after")
    def _one_kind(self) -> Figure:
        if (self.metric is None) == (self.capacity is None):
            raise ValueError("give either metric or capacity")
        if (self.against is None) != (self.compare == "value"):
            raise ValueError(
                f"compare: {self.compare} "
                + ("takes no against" if self.against else "needs against")
            )
        for key in ("paper", "accept"):
            band = getattr(self, key)
            if band is not None and not band[0] <= band[1]:
                raise ValueError(f"{key} must go from low to high, got {list(band)}")
        return self


class Claim(Section):
    """What a paper says of a system; `schedlab claims` holds it against the runs."""

    system: str = Field(min_length=1, description="Name of the system in tables.")
    statement: str = Field(min_length=1, description="The claim in a sentence, as its source has.")
    source: str = Field(min_length=1, description="Where it stands.")
    scaled_down: str = Field(
        min_length=1, description="What differs from the source's setup, and why; or `nothing`."
    )
    comment: str | None = Field(
        default=None, description="What a reader of the verdicts should know."
    )
    figures: Annotated[list[Figure], Field(min_length=1)] = Field(
        description="The numbers that are checked."
    )
