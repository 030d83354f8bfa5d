"""The keys under `cluster`: several engines that share a workload, and who sends what where."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from schedlab.experiments.specification.cost_model import CostModelField
from schedlab.experiments.specification.engine import EngineSpec
from schedlab.experiments.specification.fields import (
    Data,
    Named,
    NonNegative,
    Section,
    Shorthand,
    shorthand,
    whole,
)
from schedlab.experiments.specification.policy import PolicySpec

EngineCount = Annotated[int, Field(ge=1, le=1024), BeforeValidator(whole)]


class Router(Named):
    """Who sends requests to engines, e.g. `round_robin` or `{name: power_of_d, d: 2}`."""

    name: str = Field(min_length=1, description="A registered router, or `module:Class`.")
    staleness_ms: NonNegative = Field(
        default=0.0,
        description="How often engines report to the router; 0 = it sees them as they are. What "
        "it sends itself it counts at once.",
    )


class Pool(Section):
    """Engines that are alike; a key that is absent is that of the experiment."""

    count: EngineCount = Field(default=1, description="Engines of this kind.")
    hardware: str | None = Field(
        default=None, min_length=1, description="As the key of the experiment."
    )
    cost_model: CostModelField | None = Field(
        default=None, description="As the key of the experiment."
    )
    policy: Annotated[PolicySpec, shorthand("name")] | None = Field(
        default=None, description="As the key of the experiment; predictions are of its `policy`."
    )
    engine: dict[str, Any] = Field(
        default_factory=dict, description="Keys of `engine` that differ from the experiment's."
    )

    @model_validator(mode="after")
    def _known_engine_keys(self) -> Pool:
        from schedlab.sim.errors import nearest

        for key in self.engine:
            if key not in EngineSpec.model_fields:
                raise ValueError(
                    f"engine: unknown key {key!r}; {nearest(key, EngineSpec.model_fields)}"
                )
        return self


def _pools(value: object) -> object:
    """Let a number stand for so many equal engines."""
    return {"count": value} if isinstance(value, int | float) else value


class Cluster(Section):
    """Several engines that share the workload."""

    count: EngineCount | None = Field(
        default=None, description="Equal engines, all as the experiment says; instead of `pools`."
    )
    pools: dict[str, Pool] = Field(
        default_factory=dict, description="Kinds of engines by name: a heterogeneous fleet."
    )
    router: Annotated[Router, shorthand("name")] = Field(
        default_factory=lambda: Router(name="least_outstanding_requests"),
        description="Which engine a request goes to: a name, or a mapping with its knobs.",
    )

    @model_validator(mode="after")
    def _has_engines(self) -> Cluster:
        if (self.count is None) == (not self.pools):
            raise ValueError(
                "needs `count` (equal engines) or `pools` (kinds of engines), not both"
            )
        return self

    def kinds(self) -> dict[str, Pool]:
        """Return the pools by name; equal engines are one without a name of its own."""
        return self.pools or {"engines": Pool(count=self.count or 1)}


_NUMBER: Data = {"type": "integer", "minimum": 1}
ClusterField = Annotated[Cluster, Shorthand(_pools, _NUMBER)]
