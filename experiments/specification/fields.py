"""What the sections of a specification are made of: bounded numbers, and kinds of mappings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from schedlab.sim.request import LARGEST, SHORTEST_TARGET_MS

Data = dict[str, Any]
"""Plain nested data, as YAML gives it."""


def whole(value: object) -> object:
    """Let 1e3 stand for 1000 where a count is asked for."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_MOST = 2**40


def measurable(value: float) -> float:
    """Refuse what no count or measure of an engine is: products of two of them must not overflow.

    These limits are too far away to be told with every key.
    """
    most = _MOST if isinstance(value, int) else LARGEST
    if abs(value) > most:
        raise ValueError(f"must be at most {most:g}, got {value:g}")
    return value


def _countable(value: float) -> float:
    """Refuse a time that is shorter than time is counted in."""
    if value < SHORTEST_TARGET_MS:
        raise ValueError(f"must be at least {SHORTEST_TARGET_MS:g}, got {value:g}")
    return value


Count = Annotated[int, Field(ge=1), BeforeValidator(whole), AfterValidator(measurable)]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(whole), AfterValidator(measurable)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0), AfterValidator(measurable)]
Milliseconds = Annotated[Positive, AfterValidator(_countable)]
NonNegative = Annotated[Finite, Field(ge=0), AfterValidator(measurable)]
Seconds = Annotated[Finite, Field(ge=0, le=1e9)]
Fraction = Annotated[Finite, Field(gt=0, le=1)]


class Section(BaseModel):
    """A mapping that accepts only its own keys, exact types, and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Named(Section):
    """A thing chosen by name, with the knobs of that thing beside the name.

    The knobs are checked against the constructor of the named class, not here.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def knobs(self) -> Data:
        """Return the arguments given beside the declared keys."""
        return dict(self.model_extra or {})


@dataclass(frozen=True, eq=False)
class Shorthand:
    """An annotation of a type: what may be written instead of its full form.

    Attributes
    ----------
    expand : callable
        Returns the full form of what stands there; anything but a shorthand as it is. Raises
        ValueError where neither can be meant.
    schema : dict
        JSON Schema of the short form.
    """

    expand: Callable[[object], object]
    schema: Data

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Expand before validating."""
        return core_schema.no_info_before_validator_function(self.expand, handler(source))


TEXT: Data = {"type": "string", "minLength": 1}
NUMBER: Data = {"type": "number"}
POSITIVE: Data = {"type": "number", "exclusiveMinimum": 0}


def shorthand(key: str) -> Shorthand:
    """Return the shorthand of a mapping by a lone text, the value of its `key`."""

    def expand(value: object) -> object:
        return {key: value} if isinstance(value, str | int | float) else value

    return Shorthand(expand, TEXT)


def shorthand_of(field: FieldInfo) -> Shorthand | None:
    """Return what may be written instead of the full form of a field, if anything."""
    return _first_shorthand((*field.metadata, field.annotation))


def _first_shorthand(parts: tuple[object, ...]) -> Shorthand | None:
    for part in parts:
        found = part if isinstance(part, Shorthand) else _first_shorthand(get_args(part))
        if found is not None:
            return found
    return None
