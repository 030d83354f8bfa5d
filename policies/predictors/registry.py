"""Predictors by name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from policies.predictors.bucketed import Bucketed
from policies.predictors.constant import Constant
from policies.predictors.noisy import Noisy
from policies.predictors.oracle import Oracle
from policies.predictors.predictor import Predictor
from sim.errors import SpecError

_PREDICTORS: dict[str, type[Predictor]] = {
    "bucketed": Bucketed,
    "constant": Constant,
    "noisy": Noisy,
    "oracle": Oracle,
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
        near = get_close_matches(name, _PREDICTORS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
        raise SpecError(f"unknown predictor {name!r}; {hint}")
    return _PREDICTORS[name]


def make(name: str, **params: Any) -> Predictor:  # noqa: ANN401 - whatever the predictor takes
    """Construct a predictor by name.

    Raises
    ------
    SpecError
        If there is no such predictor, or it does not take these parameters.
    """
    cls = predictor_class(name)
    unknown = params.keys() - cls.knobs().keys()
    if unknown:
        knobs = ", ".join(cls.knobs())
        raise SpecError(
            f"predictor {name!r} has no parameter {sorted(unknown)[0]!r}; it has: {knobs}"
        )
    try:
        return cls(**params)
    except (TypeError, ValueError) as error:
        raise SpecError(f"predictor {name!r}: {error}") from error
