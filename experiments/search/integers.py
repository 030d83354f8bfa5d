"""Whether a key takes integers only."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from schedlab.experiments.search.constraints import with_values
from schedlab.experiments.specification.cluster import AutoscalerKeys, MigratorKeys, Router
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.policy import PolicySpec, PredictorSpec
from schedlab.policies import registry as policies
from schedlab.policies.autoscalers import registry as autoscalers
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.predictors import registry as predictors
from schedlab.policies.routers import registry as routers
from schedlab.sim.errors import SpecError


def takes_integers(spec: ExperimentSpec, key: str, near: Sequence[float]) -> bool:
    """Say whether a key takes integers only: its knob says so, or it refuses what lies between.

    How a value is written does not tell: seconds may be written as 1.

    Parameters
    ----------
    spec : ExperimentSpec
        A point.
    key : str
        Dotted key.
    near : sequence of float
        Values that it may have; fractions are tried among and beside them.
    """
    kind = _kind_of_knob(spec, key)
    if kind:
        return "int" in kind and "float" not in kind
    beside = [(one - 0.5, one + 0.5) if float(one).is_integer() else (one,) for one in near]
    return not any(_takes(spec, key, one) for some in beside for one in some)


def _takes(spec: ExperimentSpec, key: str, value: float) -> bool:
    try:
        with_values(spec, {key: value})
    except SpecError:
        return False
    return True


def _kind_of_knob(spec: ExperimentSpec, key: str) -> set[str]:
    """Return the names in the annotation of a knob; of one without, the type of its default."""
    *outer, name = key.split(".")
    section: object = spec
    for part in outer:
        section = section.get(part) if isinstance(section, dict) else getattr(section, part, None)
    knobs: dict[str, inspect.Parameter] = {}
    if isinstance(section, PolicySpec):
        knobs = policies.policy_class(section.name).knobs()
    elif isinstance(section, PredictorSpec):
        knobs = predictors.predictor_class(section.name).knobs()
    elif isinstance(section, Router):
        knobs = routers.router_class(section.name).knobs()
    elif isinstance(section, AutoscalerKeys):
        knobs = autoscalers.autoscaler_class(section.name).knobs()
    elif isinstance(section, MigratorKeys):
        knobs = migrators.migrator_class(section.name).knobs()
    if name not in knobs:
        return set()
    annotation, default = knobs[name].annotation, knobs[name].default
    if annotation is not inspect.Parameter.empty:
        return set(re.findall(r"\w+", str(annotation)))
    return set() if default in (None, inspect.Parameter.empty) else {type(default).__name__}
