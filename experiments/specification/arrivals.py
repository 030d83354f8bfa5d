"""Arrival processes, by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schedlab.experiments.specification.fields import Named, shorthand


class Arrivals(Named):
    """The arrival process, with its parameters beside the name."""

    process: Literal[
        "poisson",
        "gamma",
        "linear_ramp",
        "on_off",
        "varying",
        "constant",
        "all_at_once",
        "replay",
        "closed_loop",
    ] = Field(
        description="Name of the process; `replay` keeps the trace's times, `closed_loop` sends "
        "a request as soon as one of `max_concurrency` places is free."
    )


ArrivalsField = Annotated[Arrivals, shorthand("process")]
