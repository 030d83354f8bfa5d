"""The keys under `cost_model`: what a step takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from schedlab.experiments.specification.fields import TEXT, Named, Shorthand


class CostModelSpec(Named):
    """What a step takes: a cost model by name, or a profile measured on a real device.

    The knobs are checked against the constructor of the cost model, not here.
    """

    name: str | None = Field(
        default=None,
        min_length=1,
        description="A cost model (`schedlab cost-models`), or `module:Class`; that of the profile "
        "if absent.",
    )
    profile: str | None = Field(
        default=None, min_length=1, description="Folder of a measured profile."
    )

    @model_validator(mode="after")
    def _says_which(self) -> CostModelSpec:
        if self.name is None and self.profile is None:
            raise ValueError("give a name, e.g. name: roofline, or profile: FOLDER")
        return self

    @property
    def given(self) -> dict[str, object]:
        """Return the arguments of the cost model: its knobs, and the profile where there is one."""
        return self.knobs | ({} if self.profile is None else {"profile": self.profile})


def key_of(text: object) -> str:
    """Return the key that a lone scalar is the value of: ``name`` or ``profile``.

    Parameters
    ----------
    text : object
        What stands at `cost_model`, if it is no mapping.
    """
    from schedlab.sim.cost.registry import is_name

    return "name" if isinstance(text, str) and is_name(text) else "profile"


def _from_text(value: object) -> object:
    return {key_of(value): value} if isinstance(value, str) else value


CostModelField = Annotated[CostModelSpec, Shorthand(_from_text, TEXT)]
