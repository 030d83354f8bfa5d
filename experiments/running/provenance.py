"""What a result says of where it comes from."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path

from schedlab import core
from schedlab.experiments.running.cautions import cautions
from schedlab.experiments.running.fleet import Kind
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.paths import relative_paths
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.sim.config import EngineConfig


def provenance(spec: ExperimentSpec, kinds: Sequence[Kind]) -> dict[str, object]:
    """Return all that can be said of a run before it begins; paths from the working directory.

    Parameters
    ----------
    spec : ExperimentSpec
        What is run.
    kinds : sequence of Kind
        Its engines. What is told of one engine is told of the first kind, and of each kind of
        several.
    """
    point, load = kinds[0].point, spec.workload
    rate = load.request_rate
    pools: dict[str, object] = {}
    if spec.cluster is not None:
        cls = routers.router_class(spec.cluster.router.name)
        pools["router_source"] = cls.source
        if len(kinds) > 1:
            pools["pools"] = {kind.name: _of_engines(kind) for kind in kinds}
    between = {} if point.frontend is None else {"frontend": asdict(point.frontend)}
    return {
        "spec": relative_paths(spec.to_data()),
        "spec_hash": spec_hash(spec),
        "seed": spec.seed,
        "backend": f"schedlab-{spec.backend}",
        "model": point.deployment.model.name,
        "hardware": point.deployment.gpu.name,
        "request_rate": rate,
        "burstiness": load.burstiness if rate is None else load.burstiness or 1.0,
        "max_concurrency": load.max_concurrency,
        "policy_source": registry.policy_class(spec.policy.name).source,
        "versions": versions(),
        "core": core.running(),
        "git_commit": _git_commit(),
        "cost_model": relative_paths(point.cost_model.describe()),
        "scheduling_overhead": asdict(point.overhead),
        **between,
        **pools,
        **({"cautions": told} if (told := cautions(spec, kinds)) else {}),
        "engine": _limits(point.config),
        "memory": asdict(point.memory),
    }


def _limits(config: EngineConfig) -> dict[str, object]:
    """Return the limits of an engine; of speculation and pipelines only where there is one."""
    limits = asdict(config)
    if config.pipeline_parallel_size == 1:
        del limits["pipeline_parallel_size"]
    if not config.num_speculative_tokens:
        del limits["num_speculative_tokens"], limits["num_lookahead_tokens"]
    return limits


def _of_engines(kind: Kind) -> dict[str, object]:
    point = kind.point
    return {
        "num_engines": kind.num_engines,
        "hardware": point.deployment.gpu.name,
        "policy_source": registry.policy_class(point.spec.policy.name).source,
        "cost_model": relative_paths(point.cost_model.describe()),
        "scheduling_overhead": asdict(point.overhead),
        "engine": _limits(point.config),
        "memory": asdict(point.memory),
    }


@cache
def versions() -> dict[str, str]:
    """Return the versions of what computes a result, by package."""
    found = {"python": platform.python_version()}
    for package in ("schedlab", "numpy", "scipy", "simpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed: run from a checkout"
    return found


@cache
def _git_commit() -> str | None:
    """Return the commit of the checkout this runs from, marked if it has changes."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
