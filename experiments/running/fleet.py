"""The engines of one point: each kind resolved, and built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from schedlab.experiments.running.resolved import Resolved, resolve
from schedlab.experiments.specification.cluster import Cluster, Role
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.failures import StartUp
from schedlab.experiments.specification.pools import engine_pools, pool_path
from schedlab.policies.autoscalers import registry as autoscalers
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.routers import registry as routers
from schedlab.sim.core.engine import Engine
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import Changes
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.links import Interconnect
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.migration import MigrationPlan
from schedlab.sim.drive.scaling import PoolScaling
from schedlab.sim.errors import SpecError
from schedlab.sim.record.cluster_log import Place
from schedlab.sim.record.fleet import EngineFacts
from schedlab.sim.yaml_lines import dotted


class Kind(NamedTuple):
    """Engines that are alike."""

    name: str
    num_engines: int
    point: Resolved
    pricing: Pricing
    role: Role = "mixed"


def resolve_fleet(spec: ExperimentSpec, cost_model: CostModel | None = None) -> list[Kind]:
    """Look up what the engines of one point are.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    cost_model : CostModel, optional
        Prices the steps of all of them, instead of the specification's.

    Raises
    ------
    SpecError
        As `resolve`, naming the pool; or if pools with prefix caches differ in their block size.
    """
    kinds = []
    for pool in engine_pools(spec):
        try:
            point = resolve(pool.spec, cost_model)
        except SpecError as error:
            path = pool_path(spec, pool.name)
            raise SpecError(f"{dotted(path)}: {error}" if path else str(error)) from error
        kinds.append(
            Kind(
                pool.name,
                pool.num_engines,
                point,
                Pricing(point.cost_model, point.overhead),
                pool.role,
            )
        )
    if spec.cluster is not None and (spec.cluster.is_disaggregated or spec.cluster.migration):
        kinds = _limited_alike(kinds)
    looking_up = [kind.point.config for kind in kinds if kind.role != "decode"]
    if len({(config.kv_tiers, config.kv_load) for config in looking_up}) > 1:
        raise SpecError("cluster.pools: engine.kv_offload must come to the same tiers in all pools")
    sizes = {k.point.config.block_size for k in kinds if k.point.config.enable_prefix_caching}
    if len(sizes) > 1:
        raise SpecError(
            f"cluster.pools: engines with prefix caches must have one block_size, got "
            f"{sorted(sizes)}: the names of a prompt's blocks are of one size"
        )
    return kinds


def _limited_alike(kinds: Sequence[Kind]) -> list[Kind]:
    """Let every engine refuse what one of them could not hold: requests go from one to another."""
    most = min(kind.point.config.max_model_len for kind in kinds)
    return [
        kind._replace(
            point=replace(kind.point, config=replace(kind.point.config, max_model_len=most))
        )
        for kind in kinds
    ]


def disaggregation(spec: ExperimentSpec, kinds: Sequence[Kind]) -> Disaggregation | None:
    """Return which engines of one point do what, None if each serves requests whole.

    Raises
    ------
    SpecError
        If the KV of one engine is of no use to another, an answer would not fit where it goes, or
        what is served whole depends on caches that no engine has.
    """
    cluster = spec.cluster
    if cluster is None or not cluster.is_disaggregated:
        return None
    parts = [kind.point for kind in kinds if kind.role != "mixed"]
    _one_kv_format(parts)
    _one_drafter(parts)
    chosen, local = cluster.decode_router, cluster.local
    if local is not None and local.max_uncached_tokens is not None:
        _has_cache([kind for kind in kinds if kind.role == "decode"])
    return Disaggregation(
        roles=[kind.role for kind in kinds for _ in range(kind.num_engines)],
        router=routers.make(chosen.name, spec.seed, **chosen.knobs),
        local_prompt_tokens=0 if local is None else local.max_prompt_tokens,
        local_queue_tokens=None if local is None else local.max_queued_tokens,
        keeps_when_full=local is not None and local.when_full,
        first_token=cluster.first_token,
        local_uncached_tokens=None if local is None else local.max_uncached_tokens,
        local_queue_requests=None if local is None else local.max_queued_requests,
        overhead_ns=round(cluster.handover_overhead_ms * 1e6),
    )


def _has_cache(kinds: Sequence[Kind]) -> None:
    """Require that an engine that goes on with prompts has a cache to look at."""
    if not any(kind.point.config.enable_prefix_caching for kind in kinds):
        raise SpecError(
            "cluster.local.max_uncached_tokens: no pool of role decode has a prefix cache; set "
            f"cluster.pools.{kinds[0].name}.engine.enable_prefix_caching: true, or "
            "cluster.local.max_prompt_tokens"
        )


def _one_kv_format(points: Sequence[Resolved]) -> None:
    formats = sorted({point.deployment.kv_dtype for point in points})
    if len(formats) > 1:
        raise SpecError(
            f"cluster.pools: kv_cache_dtype must be one where KV goes from engine to engine, got "
            f"{' and '.join(formats)}"
        )


def _one_drafter(points: Sequence[Resolved]) -> None:
    """Require that a drafter with a cache of its own finds the KV of prompts in it."""
    drafters = {point.speculation.cached_drafter if point.speculation else None for point in points}
    if len(drafters) > 1:
        raise SpecError(
            "cluster.pools: where KV goes from engine to engine that of the drafter goes with it: "
            "engine.speculation must have one drafter in all pools, got "
            f"{' and '.join(sorted(drafter or 'none' for drafter in drafters))}; set it for the "
            "experiment, or draft by method: ngram"
        )


def interconnect(cluster: Cluster, kinds: Sequence[Kind]) -> Interconnect:
    """Return what joins the engines of one point: what goes over it is KV, and a drafter's."""
    own = cluster.link
    sender = next((kind.point for kind in kinds if kind.role != "mixed"), kinds[0].point)
    where, drafts = sender.deployment, sender.speculation
    drafted_bytes = 0 if drafts is None else drafts.drafter.whole_kv_bytes_per_token
    return Interconnect(
        link=own.link(),
        kv_bytes_per_token=where.model.kv_bytes_per_token(where.kv_dtype, 1) + drafted_bytes,
        num_devices=[kind.point.deployment.num_devices for kind in kinds],
        num_layers=where.model.num_layers if own.by_layer else 1,
    )


def changes(
    spec: ExperimentSpec, kinds: Sequence[Kind], new_engine: Callable[[int], Engine]
) -> Changes | None:
    """Return what becomes of the engines of one point while it runs, None if nothing does.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    kinds : sequence of Kind
        Its engines.
    new_engine : callable
        Takes the number of a kind and returns a fresh engine of it.
    """
    cluster = spec.cluster
    if cluster is None:
        return None
    plans = scaling(cluster, kinds)
    moves = migration(cluster, kinds)
    if cluster.failures is None and not plans and moves is None:
        return None
    start_up = cluster.start_up or StartUp()
    return Changes(
        Supply(
            new_engine,
            [kind.role for kind in kinds],
            [start_up.ns(kind.point.memory.weight_bytes) for kind in kinds],
        ),
        None if cluster.failures is None else cluster.failures.failures(spec.seed),
        plans,
        moves,
    )


def migration(cluster: Cluster, kinds: Sequence[Kind]) -> MigrationPlan | None:
    """Return which requests of a cluster move while they decode, None if none does.

    Raises
    ------
    SpecError
        If the KV of one engine is of no use to another.
    """
    chosen = cluster.migration
    if chosen is None:
        return None
    points = [kind.point for kind in kinds]
    _one_kv_format(points)
    _one_drafter(points)
    return MigrationPlan(
        migrators.make(chosen.name, **chosen.knobs),
        round(chosen.every_ms * 1e6),
        chosen.last_stage_blocks,
        chosen.max_stages,
    )


def scaling(cluster: Cluster, kinds: Sequence[Kind]) -> list[PoolScaling]:
    """Return how the pools of a cluster grow and shrink, of those that do."""
    plans = []
    pools = cluster.kinds()
    for number, kind in enumerate(kinds):
        chosen = pools[kind.name].autoscaler or cluster.autoscaler
        if chosen is not None:
            made = autoscalers.make(chosen.name, **chosen.knobs)
            every_ns = round(chosen.every_s * 1e9)
            plans.append(PoolScaling(number, made, every_ns, chosen.min, chosen.max))
    return plans


def engine_facts(kinds: Sequence[Kind], places: Sequence[Place] = ()) -> tuple[EngineFacts, ...]:
    """Return what is told of each engine of a fleet, in order.

    Parameters
    ----------
    kinds : sequence of Kind
        The engines that are there from the start.
    places : sequence of Place
        All that ever were, if that changes.
    """
    if not places:
        return tuple(_facts(kind) for kind in kinds for _ in range(kind.num_engines))
    return tuple(
        _facts(kinds[place.pool])._replace(paid=place.paid, served=place.served) for place in places
    )


def _facts(kind: Kind) -> EngineFacts:
    where, config = kind.point.deployment, kind.point.config
    return EngineFacts(
        pool=kind.name,
        hardware=where.gpu.name,
        policy=kind.point.spec.policy.name,
        role=kind.role,
        num_gpus=where.num_devices,
        kv_capacity_tokens=config.num_blocks * config.block_size,
        usd_per_gpu_hour=where.gpu.usd_per_hour,
    )
