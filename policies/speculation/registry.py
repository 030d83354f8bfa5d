"""Draft lengths by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

from typing import Any

from schedlab.policies.speculation.draft_length import DraftLength
from schedlab.sim.construct import Registry, construct, import_class

_LENGTHS: Registry[type[DraftLength]] = Registry(
    "draft length", "schedlab.policies.speculation", "my_module:MyDraftLength"
)

register = _LENGTHS.register
names = _LENGTHS.names


def draft_length_class(name: str) -> type[DraftLength]:
    """Return the class of a registered name or of a ``module:Class`` path.

    Raises
    ------
    SpecError
        If there is no such draft length; names the nearest one.
    """
    return import_class("draft length", name, DraftLength) if ":" in name else _LENGTHS.get(name)


def make(name: str, **params: Any) -> DraftLength:  # noqa: ANN401 - whatever it takes
    """Construct a draft length by name.

    Raises
    ------
    SpecError
        If there is none of that name, or it does not take these parameters.
    """
    cls = draft_length_class(name)
    return construct(f"draft length {name!r}", cls, cls.knobs(), params)
