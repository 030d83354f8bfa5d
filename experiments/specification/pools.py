"""An experiment as each kind of its engines sees it."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import ValidationError

from schedlab.experiments.specification.cluster import Pool, Role
from schedlab.experiments.specification.engine import ENGINE_PROFILES, EngineSpec
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.key_errors import describe_error
from schedlab.experiments.specification.kv_offload import KVOffloadSpec
from schedlab.experiments.specification.policy import PolicySpec
from schedlab.sim.errors import SpecError
from schedlab.sim.yaml_lines import KeyPath, dotted

_NOT_DISAGGREGATED = {
    "kv_allocator": "paged", "async_scheduling": False, "arrivals_between_steps": False,
}  # fmt: skip
"""What an engine that hands requests over, or is handed them, cannot do otherwise."""


class EnginePool(NamedTuple):
    """Engines that are alike, and the experiment as they see it."""

    name: str
    """Empty without a `cluster`."""
    num_engines: int
    spec: ExperimentSpec
    """Without `cluster`, its keys being those of the pool."""
    role: Role = "mixed"


def engine_pools(spec: ExperimentSpec) -> list[EnginePool]:
    """Return the engines of one point, by kind.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.

    Raises
    ------
    SpecError
        If what a pool changes does not fit the rest; names the key.
    """
    if spec.cluster is None:
        return [EnginePool("", spec.engine.data_parallel_size, spec)]
    return [
        EnginePool(name, pool.count, _as_seen_by(spec, name, pool), pool.role)
        for name, pool in spec.cluster.kinds().items()
    ]


def pool_path(spec: ExperimentSpec, name: str) -> KeyPath:
    """Return the key under which the keys of a pool stand; none if it has only the experiment's."""
    return ("cluster", "pools", name) if spec.cluster is not None and spec.cluster.pools else ()


def _as_seen_by(spec: ExperimentSpec, name: str, pool: Pool) -> ExperimentSpec:
    path: KeyPath = ("cluster", "pools", name)
    try:
        engine = EngineSpec.model_validate(
            {
                **spec.engine.model_dump(exclude_none=True),
                **ENGINE_PROFILES.get(str(pool.engine.get("profile")), {}),
                **pool.engine,
            }
        )
    except ValidationError as error:
        key, message = describe_error(error, EngineSpec)
        raise SpecError(f"{dotted((*path, 'engine', *key))}: {message}") from None
    cluster = spec.cluster
    if cluster is None or not cluster.pools:
        path = ()  # equal engines have the keys of the experiment
    moves = cluster is not None and cluster.migration is not None
    if pool.role != "mixed" or moves:
        for switch, value in _NOT_DISAGGREGATED.items():
            if getattr(engine, switch) != value:
                by_profile = switch in ENGINE_PROFILES.get(str(engine.profile), {})
                raise SpecError(
                    f"{dotted((*path, 'engine', switch))}: must be {str(value).lower()} in a pool "
                    + ("whose requests move" if moves else f"of role {pool.role}")
                    + (f" (profile {engine.profile} switches it on)" if by_profile else "")
                )
    caches = engine.enable_prefix_caching
    if pool.role == "decode":  # it is the pool's to say: its prompts come from elsewhere
        caches = caches and "enable_prefix_caching" in pool.engine
    if moves and pool.role != "prefill" and caches:
        raise SpecError(
            f"{dotted((*path, 'engine', 'enable_prefix_caching'))}: must be false in a pool whose "
            "requests move: the blocks of one that comes from elsewhere have no names"
        )
    if engine.kv_offload is not None and (moves or pool.role != "mixed"):
        where = path if "kv_offload" in pool.engine else ()
        if engine.offloading_connector and (moves or pool.role == "prefill"):
            raise SpecError(
                f"{dotted((*path, 'engine', 'offloading_connector'))}: not simulated where KV goes "
                "from engine to engine; must be false"
            )
        if pool.role != "prefill":
            offload = _to_swap_to(engine)
            if offload is None and (where or pool.role == "mixed"):
                whose = "whose requests move" if pool.role == "mixed" else "of role decode"
                raise SpecError(
                    f"{dotted((*where, 'engine', 'kv_offload'))}: engines {whose} look nothing up: "
                    "they have tiers to swap to; set preemption_mode: swap, or leave it out"
                )
            if offload is not None and pool.role == "decode" and caches:
                raise SpecError(
                    f"{dotted((*path, 'engine', 'enable_prefix_caching'))}: must be false in a "
                    "pool of role decode with engine.kv_offload: what lies in lower tiers is not "
                    "looked up for prompts that come from elsewhere"
                )
            engine = engine.model_copy(update={"kv_offload": offload})
    if pool.role == "decode":
        engine = engine.model_copy(
            update={"enable_prefix_caching": caches, "offloading_connector": False}
        )
    if pool.policy is not None and pool.policy.predictor is not None:
        raise SpecError(
            f"{dotted((*path, 'policy', 'predictor'))}: a request is predicted once, for all "
            "engines and the router; give the predictor under policy of the experiment"
        )
    policy = spec.policy
    if pool.policy is not None:
        policy = PolicySpec(**{**pool.policy.model_dump(), "predictor": spec.policy.predictor})
    return spec.model_copy(
        update={
            "cluster": None,
            "engine": engine,
            "policy": policy,
            "hardware": pool.hardware or spec.hardware,
            "cost_model": pool.cost_model or spec.cost_model,
        }
    )


def _to_swap_to(engine: EngineSpec) -> KVOffloadSpec | None:
    """Return the tiers that are of use where no prompt is looked up; None if none is."""
    if engine.kv_offload is None or engine.preemption_mode != "swap":
        return None
    own = [tier for tier in engine.kv_offload.tiers if not tier.shared]
    return engine.kv_offload.model_copy(update={"tiers": own})
