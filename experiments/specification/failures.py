"""The keys under `cluster.failures` and `cluster.start_up`: engines that die, and that start."""

from __future__ import annotations

from pydantic import Field, model_validator

from schedlab.experiments.specification.fields import (
    CountOrZero,
    NonNegative,
    Positive,
    Seconds,
    Section,
)
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.drive.failures import Failures, Outage, Slowdown

EngineIndex = CountOrZero


class StartUp(Section):
    """How long an engine takes to start, when it is repaired or added."""

    load_gb_per_s: Positive = Field(
        default=2.0,
        description="At which weights are loaded into each device, 1e9 bytes a second; an "
        "assumption, to be measured.",
    )
    warm_up_s: Seconds = Field(
        default=20.0,
        description="From loaded weights to the first step: profiling, graphs, kernels; an "
        "assumption, to be measured.",
    )

    def ns(self, weight_bytes: int) -> int:
        """Return how long an engine takes whose devices hold so many bytes of weights each."""
        return round((weight_bytes / (self.load_gb_per_s * 1e9) + self.warm_up_s) * 1e9)


class EngineOutage(Section):
    """An engine that dies at a stated time."""

    engine: EngineIndex = Field(description="Which, as in the column `engine`.")
    at_s: Seconds = Field(description="When it dies, in seconds since the run began.")
    down_s: Seconds | None = Field(
        default=None, description="Until it starts again; it does not if absent."
    )


class LinkOutage(Section):
    """An engine that is cut off from the others; it goes on serving."""

    engine: EngineIndex = Field(description="Which, as in the column `engine`.")
    at_s: Seconds = Field(description="When its links go down.")
    down_s: Seconds = Field(description="Until they are up again.")


class Straggler(Section):
    """An engine that is slow for a time."""

    engine: EngineIndex = Field(description="Which, as in the column `engine`.")
    from_s: Seconds = Field(description="Its steps from then on take longer,")
    to_s: Seconds = Field(description="until then,")
    slowdown: Positive = Field(description="so many times as long.")

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Straggler:
        if self.to_s <= self.from_s:
            raise ValueError(f"to_s must be after from_s, got {self.to_s:g} and {self.from_s:g}")
        return self


class FailureKeys(Section):
    """What goes wrong in a fleet, and what becomes of requests then."""

    engines: list[EngineOutage] = Field(
        default_factory=list, description="Engines that die at stated times."
    )
    mtbf_s: Positive | None = Field(
        default=None,
        description="Mean time that an engine serves until it dies, exponential; it never does by "
        "chance if absent.",
    )
    mttr_s: Positive | None = Field(
        default=None,
        description="Mean time until it can start again, exponential; the start comes on top.",
    )
    stragglers: list[Straggler] = Field(
        default_factory=list, description="Engines that are slow for a time."
    )
    links: list[LinkOutage] = Field(
        default_factory=list,
        description="Engines whose links are down for a time; what is on them is sent again.",
    )
    max_retries: CountOrZero = Field(
        default=10, description="How often a request that loses its engine is sent again."
    )
    deadline_s: NonNegative | None = Field(
        default=None,
        description="A request that has no engine so long after its arrival fails; none does if "
        "absent.",
    )

    @model_validator(mode="after")
    def _repairs(self) -> FailureKeys:
        if (self.mtbf_s is None) != (self.mttr_s is None):
            raise ValueError("mtbf_s and mttr_s: give both, or neither")
        return self

    def failures(self, seed: int) -> Failures:
        """Return what the keys describe, for one seed of the experiment."""
        return Failures(
            outages=[
                Outage(o.engine, _ns(o.at_s), FOREVER if o.down_s is None else _ns(o.down_s))
                for o in self.engines
            ],
            mtbf_ns=float("inf") if self.mtbf_s is None else self.mtbf_s * 1e9,
            mttr_ns=0.0 if self.mttr_s is None else self.mttr_s * 1e9,
            slowdowns=[
                Slowdown(s.engine, _ns(s.from_s), _ns(s.to_s), s.slowdown) for s in self.stragglers
            ],
            link_outages=[Outage(o.engine, _ns(o.at_s), _ns(o.down_s)) for o in self.links],
            max_retries=self.max_retries,
            deadline_ns=FOREVER if self.deadline_s is None else _ns(self.deadline_s),
            seed=seed,
        )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
