"""Latency targets that are asked for by what a specification chooses, and who gives them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from schedlab.experiments.specification.checks import Fail
from schedlab.experiments.specification.cluster import Cluster, Pool
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.slo import SloTargets
from schedlab.sim.yaml_lines import KeyPath

_OF_ROWS = {"slo_ttft_ms": "ttft_ms", "slo_tpot_ms": "tpot_ms", "deadline_s": "e2el_ms"}
_OF_METRICS: dict[str, Collection[str]] = {
    **{f"{key.removesuffix('_ms')}_slo_attainment": (key,) for key in SloTargets.model_fields},
    **dict.fromkeys(
        ("slo_attainment", "request_goodput", "deadline_misses"), tuple(SloTargets.model_fields)
    ),
}
_SIDES = ("at_most", "at_least")

Choices = Iterator[tuple[KeyPath, str, Collection[str]]]


def check_targets(spec: ExperimentSpec, columns: Collection[str], fail: Fail) -> None:
    """Refuse what decides by latency targets where no request has one.

    Parameters
    ----------
    spec : ExperimentSpec
        With names that exist.
    columns : collection of str
        Those of the trace that its requests are of.
    fail : callable
        Called with the key at fault and what is wrong with it; must raise.
    """
    given = {_OF_ROWS[name] for name in columns if name in _OF_ROWS}
    for slo in (spec.slo, *(one.slo for one in spec.workload.classes.values())):
        given |= slo.model_dump(exclude_none=True).keys()
    _check(_choices(spec), given, "decides by", fail)
    # A search may set targets itself: min slo.ttft_ms subject to slo_attainment >= 0.9.
    _check(_searched(spec), given | {key.rpartition(".")[2] for key in _set(spec)}, "is of", fail)


def may_have_targets(spec: ExperimentSpec) -> Collection[str]:
    """Return the columns of targets that the trace of a specification may have, unread."""
    from schedlab.experiments.specification.paths import is_preset, is_published

    trace = spec.workload.trace
    is_file = trace is not None and not is_preset(trace) and not is_published(trace)
    return tuple(_OF_ROWS) if is_file else ()


def _check(choices: Choices, given: Collection[str], does: str, fail: Fail) -> None:
    for path, name, needs in choices:
        if needs and set(given).isdisjoint(needs):
            wanted = " or ".join(f"slo.{key}" for key in SloTargets.model_fields if key in needs)
            fail(path, f"{name} {does} targets, and no request has one; add {wanted}")


def _searched(spec: ExperimentSpec) -> Choices:
    """Yield the key, the name and the targets of metrics that a search goes by."""
    for section, asked in (("find", spec.find), ("tune", spec.tune)):
        if asked is None:
            continue
        named: list[tuple[KeyPath, str | None]] = [
            ((side, name), name) for side in _SIDES for name in getattr(asked, side)
        ]
        named += [((side,), getattr(asked, side)) for side in ("maximize", "minimize")]
        for path, name in named:
            yield (section, *path), str(name), _OF_METRICS.get(str(name), ())


def _set(spec: ExperimentSpec) -> set[str]:
    """Return the keys that a search sets."""
    keys = set() if spec.find is None else {spec.find.key}
    return keys if spec.tune is None else {*keys, spec.tune.goal, *spec.tune.over}


def _choices(spec: ExperimentSpec) -> Choices:
    """Yield the key, the name and the targets of what may decide by some."""
    from schedlab.policies.autoscalers.registry import autoscaler_class
    from schedlab.policies.routers.registry import router_class
    from schedlab.policies.speculation.registry import draft_length_class

    if (drafts := spec.engine.speculation) is not None:
        name = drafts.draft_length.name
        path: KeyPath = ("engine", "speculation", "draft_length")
        yield path, name, draft_length_class(name).needs_targets
    if spec.cluster is None:
        return
    name = spec.cluster.router.name
    yield ("cluster", "router"), name, router_class(name).needs_targets
    if spec.cluster.is_disaggregated:
        name = spec.cluster.decode_router.name
        yield ("cluster", "decode_router"), name, router_class(name).needs_targets
    holders: dict[KeyPath, Cluster | Pool] = {("cluster",): spec.cluster}
    for pool, kind in spec.cluster.pools.items():
        holders["cluster", "pools", pool] = kind
    for path, holder in holders.items():
        if (chosen := holder.autoscaler) is not None:
            yield (*path, "autoscaler"), chosen.name, autoscaler_class(chosen.name).needs_targets
