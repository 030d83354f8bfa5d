"""The engines of one point: each kind resolved, and built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedlab.experiments.running.resolved import Resolved, resolve
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.pools import engine_pools, pool_path
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.errors import SpecError
from schedlab.sim.record.fleet import EngineFacts
from schedlab.sim.yaml_lines import dotted


class Kind(NamedTuple):
    """Engines that are alike."""

    name: str
    num_engines: int
    point: Resolved
    pricing: Pricing


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
            Kind(pool.name, pool.num_engines, point, Pricing(point.cost_model, point.overhead))
        )
    sizes = {k.point.config.block_size for k in kinds if k.point.config.enable_prefix_caching}
    if len(sizes) > 1:
        raise SpecError(
            f"cluster.pools: engines with prefix caches must have one block_size, got "
            f"{sorted(sizes)}: the names of a prompt's blocks are of one size"
        )
    return kinds


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
                num_gpus=where.tensor_parallel_size,
                kv_capacity_tokens=config.num_blocks * config.block_size,
                usd_per_gpu_hour=where.gpu.usd_per_hour,
            )
        ] * kind.num_engines
    return tuple(facts)
