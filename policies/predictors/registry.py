"""Predictors by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

from schedlab.policies.predictors.model_folder import META
from schedlab.policies.predictors.predictor import Predictor
from schedlab.sim.construct import ClassRegistry, looked_in
from schedlab.sim.errors import SpecError


class _Predictors(ClassRegistry[Predictor]):
    def get(self, name: str) -> type[Predictor]:
        if name not in self.names() and any((at / name / META).is_file() for at in looked_in()):
            raise SpecError(f"unknown predictor {name!r}; write {{name: trained, model: {name}}}")
        return super().get(name)


_PREDICTORS = _Predictors(
    "predictor", "schedlab.policies.predictors", "my_module:MyPredictor", Predictor
)

register = _PREDICTORS.register
names = _PREDICTORS.names
predictor_class = _PREDICTORS.class_of
make = _PREDICTORS.make
