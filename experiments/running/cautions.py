"""What can be said against the numbers of a point before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from schedlab.experiments.running.fleet import Kind
from schedlab.experiments.specification.cluster import Router
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.power_of_d import PowerOfD
from schedlab.traces.trace import Trace


def cautions(spec: ExperimentSpec, kinds: Sequence[Kind]) -> list[str]:
    """Return what a reader of its results must know of a point, whatever its requests are.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    kinds : sequence of Kind
        Its engines.

    Returns
    -------
    list of str
        Who goes by cached prefixes where no engine has a cache, who looks at more engines than
        there are, and engines that take longer requests than their model.
    """
    found = [
        f"{who} goes by cached prefixes, and here engines cache none; set "
        "engine.enable_prefix_caching: true"
        for who in _without_prefixes(spec, kinds)
    ]
    return [*found, *_too_many_looked_at(spec, kinds), *_beyond_models(kinds)]


def sure_to_be_rejected(trace: Trace, kinds: Sequence[Kind]) -> tuple[int, str]:
    """Return how many requests are too long for any engine, and an example of why.

    Parameters
    ----------
    trace : Trace
        The requests of a point.
    kinds : sequence of Kind
        Its engines.
    """
    longest = max(kind.point.config.max_model_len for kind in kinds)
    room = np.maximum(1, longest - trace.prompt_tokens)
    declared = room if trace.max_tokens is None else trace.max_tokens
    most = np.where(declared > 0, declared, room)
    tokens = trace.prompt_tokens + np.minimum(trace.output_tokens, most)
    over = tokens > longest
    if not over.any():
        return 0, ""
    first = int(tokens[over][0])
    return int(over.sum()), f"prompt and output take {first} tokens, max_model_len is {longest}"


def _without_prefixes(spec: ExperimentSpec, kinds: Sequence[Kind]) -> list[str]:
    """Return who goes by cached prefixes where no engine has a cache: by key, and its name."""
    points = [kind.point for kind in kinds]
    cached = {p.spec.policy.name for p in points if p.config.enable_prefix_caching}
    found = {
        f"policy {chosen.name}"
        for chosen in [p.spec.policy for p in points]
        if chosen.name not in cached and registry.make(chosen.name, **chosen.knobs).needs_prefixes
    }
    if not cached:
        found |= {
            f"{key} {router.name}"
            for key, router in _routers(spec)
            if routers.router_class(router.name).needs_prefixes
        }
    return sorted(found)


def _too_many_looked_at(spec: ExperimentSpec, kinds: Sequence[Kind]) -> Iterable[str]:
    cluster = spec.cluster
    if cluster is None or cluster.autoscaler is not None:
        return  # of those that scale there may be more
    if any(pool.autoscaler is not None for pool in cluster.pools.values()):
        return
    for key, router in _routers(spec):
        of_answers = key == "decode_router"
        num = sum(kind.num_engines for kind in kinds if (kind.role == "decode") == of_answers)
        made = routers.make(router.name, spec.seed, **router.knobs)
        if isinstance(made, PowerOfD) and made.d > num:
            yield f"{key} {router.name} draws d={made.d} of {num} engines: it looks at all of them"


def _beyond_models(kinds: Sequence[Kind]) -> Iterable[str]:
    for kind in kinds:
        model, longest = kind.point.deployment.model, kind.point.config.max_model_len
        if longest > model.max_model_len:
            yield (
                f"max_model_len is {longest:,}, and {model.name} is made for "
                f"{model.max_model_len:,} tokens: engines refuse that, or answers are of no use"
            )
            return


def _routers(spec: ExperimentSpec) -> list[tuple[str, Router]]:
    if spec.cluster is None:
        return []
    found = [("router", spec.cluster.router)]
    if spec.cluster.is_disaggregated:
        found.append(("decode_router", spec.cluster.decode_router))
    return found
