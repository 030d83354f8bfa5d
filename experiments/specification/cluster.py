"""The keys under `cluster`: several engines that share a workload, and who sends what where."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from schedlab.experiments.specification.cost_model import CostModelField
from schedlab.experiments.specification.engine import EngineSpec
from schedlab.experiments.specification.failures import FailureKeys, StartUp
from schedlab.experiments.specification.fields import (
    CountOrZero,
    Data,
    Finite,
    Named,
    NonNegative,
    Section,
    Shorthand,
    shorthand,
    whole,
)
from schedlab.experiments.specification.link import LinkSpec
from schedlab.experiments.specification.policy import PolicySpec

Role = Literal["mixed", "prefill", "decode"]
EngineCount = Annotated[int, Field(ge=1, le=1024), BeforeValidator(whole)]


class Router(Named):
    """Who sends requests to engines, e.g. `round_robin` or `{name: power_of_d, d: 2}`."""

    name: str = Field(min_length=1, description="A registered router, or `module:Class`.")
    staleness_ms: NonNegative = Field(
        default=0.0,
        description="How often engines report to the router; 0 = it sees them as they are. What "
        "it sends itself it counts at once.",
    )


class AutoscalerKeys(Named):
    """Who adds and drains engines, e.g. `{name: hpa, max: 8, target: 5}`."""

    name: str = Field(min_length=1, description="A registered autoscaler, or `module:Class`.")
    min: EngineCount = Field(default=1, description="Engines that there are at least.")
    max: EngineCount = Field(default=16, description="Engines that there are at most.")
    every_s: Annotated[Finite, Field(ge=1e-3, le=1e9)] = Field(
        default=15.0, description="How often it is asked; every millisecond at most."
    )

    @model_validator(mode="after")
    def _has_range(self) -> AutoscalerKeys:
        if self.min > self.max:
            raise ValueError(f"min must be at most max, got {self.min} and {self.max}")
        return self


class MigratorKeys(Named):
    """Who moves while it decodes, e.g. `llumnix` or `{name: llumnix, leave_below: 5}`."""

    name: str = Field(min_length=1, description="A registered migrator, or `module:Class`.")
    every_ms: Annotated[Finite, Field(ge=1e-2, le=1e12)] = Field(
        default=100.0, description="How often it is asked; every 10 microseconds at most."
    )
    last_stage_blocks: EngineCount = Field(
        default=16,
        description="A request stops when no more KV blocks than these are left to send.",
    )
    max_stages: EngineCount = Field(
        default=3, description="After so many stages a move that does not end is given up."
    )


class Local(Section):
    """Requests that one engine serves whole though prompts and answers have engines of their own.

    All keys but `when_full` are about those whose prompt an engine of role `decode` computes.
    """

    max_prompt_tokens: CountOrZero = Field(default=0, description="Those with no longer a prompt.")
    max_uncached_tokens: CountOrZero | None = Field(
        default=None,
        description="Those of whose prompt no more tokens are not in the cache of the engine that "
        "would go on with them, which `decode_router` then chooses when they come; none if absent.",
    )
    max_queued_tokens: CountOrZero | None = Field(
        default=None,
        description="Those that would find more prompt tokens before them wherever prompts are "
        "computed; none if absent.",
    )
    max_queued_requests: CountOrZero | None = Field(
        default=None,
        description="Those that come while more requests wait where prompts are computed, in all "
        "of these engines together; none if absent.",
    )
    when_full: bool = Field(
        default=False,
        description="Those for which no engine of role `decode` has a seat and memory when their "
        "prompt is computed go on where that was.",
    )


class Pool(Section):
    """Engines that are alike; a key that is absent is that of the experiment."""

    count: EngineCount = Field(default=1, description="Engines of this kind.")
    role: Role = Field(
        default="mixed",
        description="`mixed`: serves requests whole; `prefill`: computes their prompts; `decode`: "
        "goes on from there.",
    )
    hardware: str | None = Field(
        default=None, min_length=1, description="As the key of the experiment."
    )
    cost_model: CostModelField | None = Field(
        default=None, description="As the key of the experiment."
    )
    policy: Annotated[PolicySpec, shorthand("name")] | None = Field(
        default=None, description="As the key of the experiment; predictions are of its `policy`."
    )
    autoscaler: Annotated[AutoscalerKeys, shorthand("name")] | None = Field(
        default=None, description="As the key of the cluster, for this pool."
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


class Link(LinkSpec):
    """What joins the devices of engines; a name, or figures of its own."""

    by_layer: bool = Field(
        default=False,
        description="Send the KV of a prompt while it is computed, layer by layer, instead of all "
        "after the prompt.",
    )


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
    decode_router: Annotated[Router, shorthand("name")] = Field(
        default_factory=lambda: Router(name="least_outstanding_requests"),
        description="Which engine of role `decode` goes on with a request whose prompt is "
        "computed; `staleness_ms` is that of `router`.",
    )
    first_token: Literal["prefill", "transfer", "decode"] = Field(
        default="prefill",
        description="Where the first token of an answer comes from. `prefill`: it is told when the "
        "prompt is computed; `transfer`: when its KV is where the answer goes on (SGLang, "
        "TensorRT-LLM); `decode`: it is dropped, and the engine that goes on computes the last "
        "prompt token again (behind the proxies of vLLM and llm-d).",
    )
    link: Annotated[Link, shorthand("name")] = Field(
        default_factory=lambda: Link(name="infiniband-ndr"),
        description="What KV is sent over: a name, or a mapping.",
    )
    handover_overhead_ms: NonNegative = Field(
        default=0.0,
        description="What each hand-over of a prompt takes beside the latency of the link and the "
        "bytes, with the link idle: handshakes, metadata, polling, dispatch by a proxy.",
    )
    start_up: StartUp | None = Field(
        default=None, description="How long an engine takes to start; see its keys."
    )
    autoscaler: Annotated[AutoscalerKeys, shorthand("name")] | None = Field(
        default=None,
        description="Who adds and drains engines, in every pool by itself: a name, or a mapping "
        "with its knobs. The count of a pool is that at the start.",
    )
    migration: Annotated[MigratorKeys, shorthand("name")] | None = Field(
        default=None,
        description="Which requests move from engine to engine while they decode: a name, or a "
        "mapping with its knobs; none if absent.",
    )
    local: Local | None = Field(
        default=None,
        description="Which requests are served whole though prompts have engines of their own; "
        "none if absent.",
    )
    failures: FailureKeys | None = Field(
        default=None, description="Engines that die, slow down or are cut off; none if absent."
    )

    @model_validator(mode="after")
    def _can_serve(self) -> Cluster:
        roles = {pool.role for pool in self.pools.values()}
        if "prefill" in roles and "decode" not in roles:
            raise ValueError("pools of role prefill need a pool of role decode to go on")
        if "decode" in roles and "prefill" not in roles:
            raise ValueError("pools of role decode need a pool of role prefill before them")
        if self.link.by_layer and "prefill" not in roles:
            raise ValueError("link.by_layer is about prompts, and no pool has the role prefill")
        return self

    @model_validator(mode="after")
    def _starts_within_limits(self) -> Cluster:
        for name, pool in self.kinds().items():
            limits = pool.autoscaler or self.autoscaler
            if limits is not None and not limits.min <= pool.count <= limits.max:
                where = f"pools.{name}.count" if self.pools else "count"
                raise ValueError(
                    f"{where}: must be between min ({limits.min}) and max ({limits.max}) of the "
                    f"autoscaler, got {pool.count}"
                )
        return self

    @model_validator(mode="after")
    def _has_named_engines(self) -> Cluster:
        failures = self.failures or FailureKeys()
        size = sum(pool.count for pool in self.kinds().values())
        for key in ("engines", "stragglers", "links"):
            for place, failing in enumerate(getattr(failures, key)):
                if failing.engine >= size:
                    raise ValueError(
                        f"failures.{key}[{place}].engine: there are engines 0 to {size - 1}, got "
                        f"{failing.engine}"
                    )
        return self

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> Cluster:
        default = Cluster.model_fields
        if not self.is_disaggregated:
            if self.local is not None:
                raise ValueError(
                    "local: only where prompts have engines of their own (role prefill)"
                )
            if self.decode_router != default["decode_router"].get_default(
                call_default_factory=True
            ):
                raise ValueError(
                    "decode_router: only where answers have engines of their own (role decode)"
                )
            for key in ("first_token", "handover_overhead_ms"):
                if getattr(self, key) != default[key].default:
                    raise ValueError(
                        f"{key}: only where answers have engines of their own (role decode)"
                    )
            if self.migration is None:
                has_link = self.link != default["link"].get_default(call_default_factory=True)
                if has_link or (self.failures is not None and self.failures.links):
                    key = "link" if has_link else "failures.links"
                    raise ValueError(f"{key}: nothing is sent from engine to engine")
        return self

    @model_validator(mode="after")
    def _can_keep(self) -> Cluster:
        if self.first_token != "prefill" and self.local is not None and self.local.when_full:
            raise ValueError(
                f"local.when_full: must be false with first_token: {self.first_token}: no token is "
                "told where a prompt is computed, and so no request goes on there"
            )
        return self

    @model_validator(mode="after")
    def _can_move(self) -> Cluster:
        if self.migration is None:
            return self
        size = 0
        for pool in self.kinds().values():
            scaler = pool.autoscaler or self.autoscaler
            if pool.role != "prefill":
                size += pool.count if scaler is None else scaler.max
        if size < 2:
            raise ValueError("migration: only one engine decodes, so nobody can move; count >= 2")
        return self

    @model_validator(mode="after")
    def _has_engines(self) -> Cluster:
        if (self.count is None) == (not self.pools):
            raise ValueError(
                "needs `count` (equal engines) or `pools` (kinds of engines), not both"
            )
        return self

    def kinds(self) -> dict[str, Pool]:
        """Return the pools by name, in the order of their engines: along the way of a request.

        Equal engines are one without a name of its own.
        """
        if not self.pools:
            return {"engines": Pool(count=self.count or 1)}
        order = ("prefill", "mixed", "decode")
        return dict(sorted(self.pools.items(), key=lambda item: order.index(item[1].role)))

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts and answers are computed on different engines."""
        return any(pool.role == "decode" for pool in self.pools.values())


_NUMBER: Data = {"type": "integer", "minimum": 1}
ClusterField = Annotated[Cluster, Shorthand(_pools, _NUMBER)]
