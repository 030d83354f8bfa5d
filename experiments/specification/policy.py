"""The keys under `policy`: who schedules, and who predicts for it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedlab.experiments.specification.fields import Named, shorthand


class PredictorSpec(Named):
    """Who predicts output lengths, e.g. `oracle` or `{name: noisy, sigma: 0.5}`."""

    name: str = Field(min_length=1, description="A registered predictor, or `module:Class`.")


PredictorField = Annotated[PredictorSpec, shorthand("name")]


class PolicySpec(Named):
    """The scheduling policy and its knobs, e.g. `fcfs` or `{name: sjf, predictor: oracle}`."""

    name: str = Field(min_length=1, description="A registered policy, or `module:Class`.")
    predictor: PredictorField | None = Field(
        default=None, description="Who predicts output lengths for the policy; none if absent."
    )
    label: str | None = Field(
        default=None,
        min_length=1,
        description="What tables and figures call it; its name, and what tells it from others, "
        "if absent.",
    )
