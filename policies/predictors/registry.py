"""Predictors by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

from schedlab.policies.predictors.predictor import Predictor
from schedlab.sim.construct import ClassRegistry

_PREDICTORS = ClassRegistry(
    "predictor", "schedlab.policies.predictors", "my_module:MyPredictor", Predictor
)

register = _PREDICTORS.register
names = _PREDICTORS.names
predictor_class = _PREDICTORS.class_of
make = _PREDICTORS.make
