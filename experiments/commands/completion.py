"""What the shell offers after a Tab: experiments, keys with their values, and other names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import typer


def experiments(incomplete: str) -> list[str]:
    """Return the experiments that come with schedlab, and YAML files that are here."""
    from schedlab.experiments.specification.shipped import shipped_experiments

    return _starting(incomplete, [*shipped_experiments(), *_files(incomplete)])


def shipped(incomplete: str) -> list[str]:
    """Return the experiments that come with schedlab."""
    from schedlab.experiments.specification.shipped import shipped_experiments

    return _starting(incomplete, shipped_experiments())


def changes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return keys of an experiment, or names that the key before the sign may have."""
    given = [str(word) for word in ctx.params.get("overrides") or ()]
    # Bash hands over KEY, = and VALUE as three words, and takes back what stands for the last.
    if given and given[-1] in _NAMED and not incomplete:
        return _NAMED[given[-1]]("")
    if len(given) > 1 and given[-1] == "=" and given[-2] in _NAMED:
        return _NAMED[given[-2]](incomplete)
    key, sign, value = incomplete.partition("=")
    if sign:
        return [f"{key}={name}" for name in _NAMED[key](value)] if key in _NAMED else []
    from schedlab.experiments.specification.schema import keys

    found = _starting(incomplete, keys())
    if len(found) > 1:
        return found
    # Several, so that a shell stops behind the sign and adds no space.
    names = [name for key in found for name in (_NAMED[key]("") if key in _NAMED else ("", "..."))]
    return [f"{key}={name}" for key in found for name in names]


def policies(incomplete: str) -> list[str]:
    """Return the names of policies."""
    from schedlab.policies import registry

    return _starting(incomplete, registry.names())


def predictors(incomplete: str) -> list[str]:
    """Return the names of predictors."""
    from schedlab.policies.predictors import registry

    return _starting(incomplete, registry.names())


def models(incomplete: str) -> list[str]:
    """Return the names of models."""
    from schedlab.sim.hardware.models import model_names

    return _starting(incomplete, model_names())


def gpus(incomplete: str) -> list[str]:
    """Return the names of GPUs."""
    from schedlab.sim.hardware.gpus import gpu_names

    return _starting(incomplete, gpu_names())


def metrics(incomplete: str) -> list[str]:
    """Return the names of metrics."""
    from schedlab.sim.metrics.registry import names

    return _starting(incomplete, names())


def figures(incomplete: str) -> list[str]:
    """Return the names of figures."""
    from schedlab.experiments.figures.chosen import FIGURES, SEARCHES

    return _starting(incomplete, [*FIGURES, *SEARCHES])


def presets(incomplete: str) -> list[str]:
    """Return the names of workloads that need no file."""
    from schedlab.traces import PRESETS

    return _starting(incomplete, PRESETS)


def cost_models(incomplete: str) -> list[str]:
    """Return the names of cost models and of measured profiles."""
    from schedlab.experiments.specification.shipped import shipped_profiles
    from schedlab.sim.cost import registry

    return _starting(incomplete, [*registry.names(), *shipped_profiles()])


_NAMED: dict[str, Callable[[str], list[str]]] = {
    "policy": policies,
    "policy.name": policies,
    "policy.predictor": predictors,
    "model": models,
    "hardware": gpus,
    "cost_model": cost_models,
    "workload.trace": presets,
}
"""Keys of an experiment whose values go by names."""


def _files(incomplete: str) -> list[str]:
    folder, slash, _ = incomplete.rpartition("/")
    try:
        there = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        return []
    return [
        f"{folder}{slash}{path.name}"
        for path in there
        if path.suffix in (".yaml", ".yml") and path.is_file()
    ]


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
