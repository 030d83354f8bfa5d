"""The engines of one point: each kind resolved, and built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from schedlab.experiments.running.resolved import Resolved, resolve
from schedlab.experiments.specification.cluster import Role
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.pools import engine_pools, pool_path
from schedlab.policies.routers import registry as routers
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.handover import Disaggregation
from schedlab.sim.drive.links import LINKS, Link
from schedlab.sim.errors import SpecError
from schedlab.sim.record.fleet import EngineFacts
from schedlab.sim.yaml_lines import dotted


class Kind(NamedTuple):
    """Engines that are alike."""

    name: str
    num_engines: int
    point: Resolved
    pricing: Pricing
    role: Role = "mixed"


def resolve_fleet(spec: ExperimentSpec) -> list[Kind]:
    """Look up what the engines of one point are.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.

    Raises
    ------
    SpecError
        As `resolve`, naming the pool; or if pools with prefix caches differ in their block size.
    """
    kinds = []
    for pool in engine_pools(spec):
        try:
            point = resolve(pool.spec)
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
    if spec.cluster is not None and spec.cluster.is_disaggregated:
        kinds = _limited_alike(kinds)
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
        If the KV of one engine is of no use to another, or an answer would not fit where it goes.
    """
    cluster = spec.cluster
    if cluster is None or not cluster.is_disaggregated:
        return None
    parts = [kind.point for kind in kinds if kind.role != "mixed"]
    formats = sorted({part.deployment.kv_dtype for part in parts})
    if len(formats) > 1:
        raise SpecError(
            f"cluster.pools: kv_cache_dtype must be one where KV goes from engine to engine, got "
            f"{' and '.join(formats)}"
        )
    shape = parts[0].deployment.model
    chosen, own = cluster.decode_router, cluster.link
    link = LINKS[own.name] if own.name is not None else Link(0.0, 0.0, "the experiment")
    if own.gb_per_s is not None:
        link = replace(link, bytes_per_s=own.gb_per_s * 1e9)
    if own.latency_us is not None:
        link = replace(link, latency_s=own.latency_us * 1e-6)
    return Disaggregation(
        roles=[kind.role for kind in kinds for _ in range(kind.num_engines)],
        router=routers.make(chosen.name, spec.seed, **chosen.knobs),
        link=link,
        kv_bytes_per_token=shape.kv_bytes_per_token(formats[0], 1),
        num_devices=[
            kind.point.deployment.tensor_parallel_size
            for kind in kinds
            for _ in range(kind.num_engines)
        ],
    )


def engine_facts(kinds: Sequence[Kind]) -> tuple[EngineFacts, ...]:
    """Return what is told of each engine of a fleet, in order."""
    facts: list[EngineFacts] = []
    for kind in kinds:
        where, config = kind.point.deployment, kind.point.config
        facts += [
            EngineFacts(
                pool=kind.name,
                hardware=where.gpu.name,
                policy=kind.point.spec.policy.name,
                role=kind.role,
                num_gpus=where.tensor_parallel_size,
                kv_capacity_tokens=config.num_blocks * config.block_size,
                usd_per_gpu_hour=where.gpu.usd_per_hour,
            )
        ] * kind.num_engines
    return tuple(facts)
