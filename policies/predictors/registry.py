"""Predictors by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

from typing import Any

from schedlab.policies.predictors.predictor import Predictor
from schedlab.sim.construct import Registry, construct, import_class

_PREDICTORS: Registry[type[Predictor]] = Registry(
    "predictor", "schedlab.policies.predictors", "my_module:MyPredictor"
)

register = _PREDICTORS.register
names = _PREDICTORS.names


def predictor_class(name: str) -> type[Predictor]:
    """Return the class of a registered name or of a ``module:Class`` path.

    Raises
    ------
    SpecError
        If there is no such predictor; names the nearest one.
    """
    return import_class("predictor", name, Predictor) if ":" in name else _PREDICTORS.get(name)


def make(name: str, **params: Any) -> Predictor:  # noqa: ANN401 - whatever the predictor takes
    """Construct a predictor by name.

    Raises
    ------
    SpecError
        If there is no such predictor, or it does not take these parameters.
    """
    cls = predictor_class(name)
    return construct(f"predictor {name!r}", cls, cls.knobs(), params)
