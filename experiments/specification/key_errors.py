"""What a pydantic error means to someone who wrote the YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from schedlab.sim.errors import nearest
from schedlab.sim.yaml_lines import KeyPath

_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
_ELSEWHERE = {
    "scheduling_policy": "policy, at the top",
    "scheduler": "policy, at the top",
    "scheduler_cls": "policy, at the top",
    "gpu": "hardware, at the top",
    "tp": "engine.tensor_parallel_size",
    "tp_size": "engine.tensor_parallel_size",
    "dp": "engine.data_parallel_size, or cluster for engines behind a router of your choice",
    "replicas": "cluster, at the top",
    "trace": "workload.trace",
    "num_prompts": "workload.num_requests",
    "qps": "workload.request_rate",
    "request_rates": "sweep: {workload.request_rate: [...]}",
}
"""What other programs call keys, and where they are here."""
_SHOWN = 2
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a word or quoted text",
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of names to values, {NAME: ..., NAME: ...}",
    "list_type": "a list",
    "tuple_type": "a list",
}


def describe_error(error: ValidationError, model: type[BaseModel]) -> tuple[KeyPath, str]:
    """Return the key of the most telling error and a sentence about it.

    Parameters
    ----------
    error : ValidationError
        What pydantic found.
    model : type of BaseModel
        The model that was validated, for the names of its keys.

    Returns
    -------
    path : KeyPath
        Key at fault.
    message : str
        What is wrong with it, with the nearest valid name where there is one.
    """
    errors = error.errors()
    # A misspelt key explains the missing one, so it is told first.
    errors.sort(key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    others = [error for error in errors[1:] if error["loc"] != first["loc"]]
    more = [f"also {_dotted(error['loc'])}: {sentence(error, model)}" for error in others[:_SHOWN]]
    more += [f"and {len(others) - _SHOWN} more"] if len(others) > _SHOWN else []
    path, said = _at_its_key(first["loc"], sentence(first, model), model)
    return path, said + (f" ({'; '.join(more)})" if more else "")


def _at_its_key(path: KeyPath, said: str, model: type[BaseModel]) -> tuple[KeyPath, str]:
    """Move the key of a section that a sentence begins with to where the section is named."""
    key, colon, rest = said.partition(": ")
    if colon and key in section_at(path, model).model_fields:
        return (*path, key), rest
    return path, said


def sentence(error: ErrorDetails, model: type[BaseModel] = BaseModel) -> str:
    """Return what is wrong with a value.

    Parameters
    ----------
    error : ErrorDetails
        What pydantic found.
    model : type of BaseModel
        The model that was validated, for the names of its keys.

    Returns
    -------
    str
        A clause that goes behind the key.
    """
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {_nearest_key(error['loc'], model)}"
    if kind == "missing":
        return "is required"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"{value!r} is not a choice here; {nearest(value, choices)}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _BOUNDS:
        sign, bound = _BOUNDS[kind]
        return f"must be {sign} {context[bound]:g}, got {value!r}"
    if kind == "finite_number":
        return f"must be finite, got {value!r}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind in ("too_long", "too_short") or (kind == "missing_argument"):
        return f"has the wrong number of values: {value!r}"
    if isinstance(value, list) and kind not in ("list_type", "dict_type"):
        return f"takes one value, got {value!r:.60}; to run several, put them under sweep"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, got {value!r}"
    return f"{error['msg']}, got {value!r}"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _nearest_key(path: KeyPath, model: type[BaseModel]) -> str:
    known = section_at(path[:-1], model).model_fields
    if path[-1] == "replicas" and "count" in known:
        return "did you mean count?"
    if path[-1] in _ELSEWHERE:
        return f"here it is {_ELSEWHERE[str(path[-1])]}"
    for name in model.model_fields:
        inner = section_at((name,), model)
        if inner is not model and path[-1] in inner.model_fields:
            return f"did you mean {name}.{path[-1]}?"
    return nearest(path[-1], known if len(path) > 1 else [*known, "extends"])


def section_at(path: Sequence[str | int], model: type[BaseModel]) -> type[BaseModel]:
    """Return the model of the section at `path` below `model`, or of the innermost one known."""
    for part in path:
        if isinstance(part, int):
            continue  # an item of a list is of the model that the list is of
        field = model.model_fields.get(part)
        inner = model_in(field.annotation) if field else None
        if inner is None:
            return model
        model = inner
    return model


def model_in(annotation: object) -> type[BaseModel] | None:
    """Return the pydantic model inside a type such as ``Annotated[Model, ...] | None``.

    Parameters
    ----------
    annotation : object
        A type annotation.

    Returns
    -------
    type of BaseModel or None
        The first model found in it.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (model_in(argument) for argument in get_args(annotation))
    return next((model for model in found if model), None)
