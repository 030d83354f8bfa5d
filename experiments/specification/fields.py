"""What the sections of a specification are made of: bounded numbers, and kinds of mappings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Data = dict[str, Any]
"""Plain nested data, as YAML gives it."""


def whole(value: object) -> object:
    """Let 1e3 stand for 1000 where a count is asked for."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=1), BeforeValidator(whole)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0)]
NonNegative = Annotated[Finite, Field(ge=0)]
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


def shorthand(key: str) -> BeforeValidator:
    """Return a validator that reads a lone scalar as the value of `key`."""

    def expand(value: object) -> object:
        return {key: value} if isinstance(value, str | int | float) else value

    return BeforeValidator(expand)
