"""Predictors by name."""

from __future__ import annotations

from typing import Any

from schedlab.policies.predictors.bert_errors import BertErrors
from schedlab.policies.predictors.bucketed import Bucketed
from schedlab.policies.predictors.constant import Constant
from schedlab.policies.predictors.noisy import Noisy
from schedlab.policies.predictors.oracle import Oracle
from schedlab.policies.predictors.predictor import Predictor
from schedlab.policies.predictors.refined import Refined
from schedlab.policies.predictors.trained import Trained
from schedlab.sim.construct import construct
from schedlab.sim.errors import SpecError, nearest

_PREDICTORS: dict[str, type[Predictor]] = {
    "bert_errors": BertErrors,
    "bucketed": Bucketed,
    "constant": Constant,
    "noisy": Noisy,
    "oracle": Oracle,
    "refined": Refined,
    "trained": Trained,
}


def names() -> list[str]:
    """Return the names of all predictors, sorted."""
    return sorted(_PREDICTORS)


def predictor_class(name: str) -> type[Predictor]:
    """Return the class of a predictor.

    Raises
    ------
    SpecError
        If there is no such predictor; names the nearest one.
    """
    if name not in _PREDICTORS:
        raise SpecError(f"unknown predictor {name!r}; {nearest(name, _PREDICTORS)}")
    return _PREDICTORS[name]


def make(name: str, **params: Any) -> Predictor:  # noqa: ANN401 - whatever the predictor takes
    """Construct a predictor by name.

    Raises
    ------
    SpecError
        If there is no such predictor, or it does not take these parameters.
    """
    cls = predictor_class(name)
    return construct(f"predictor {name!r}", cls, cls.knobs(), params)
