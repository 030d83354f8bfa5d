"""Draft lengths by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

from schedlab.policies.speculation.draft_length import DraftLength
from schedlab.sim.construct import ClassRegistry

_LENGTHS = ClassRegistry(
    "draft length", "schedlab.policies.speculation", "my_module:MyDraftLength", DraftLength
)

register = _LENGTHS.register
names = _LENGTHS.names
draft_length_class = _LENGTHS.class_of
make = _LENGTHS.make
