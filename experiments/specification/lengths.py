"""Length distributions, by name or as a lone number."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedlab.experiments.specification.fields import POSITIVE, Named, Shorthand


class LengthsSpec(Named):
    """A length distribution in tokens, with its parameters beside the name."""

    distribution: str = Field(min_length=1, description="Name of the distribution.")


def _from_text(value: object) -> object:
    """Read a lone number as that many tokens for every request."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"distribution": "fixed", "tokens": value}
    return {"distribution": value} if isinstance(value, str) else value


LengthsField = Annotated[LengthsSpec, Shorthand(_from_text, POSITIVE)]
