"""Migrators by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

import inspect
from typing import Any

from schedlab.policies.migrators.migrator import Migrator
from schedlab.sim.construct import Registry, construct, import_class
from schedlab.sim.errors import SpecError

_MIGRATORS: Registry[type[Migrator]] = Registry(
    "migrator", "schedlab.policies.migrators", "my_module:MyMigrator"
)

register = _MIGRATORS.register
names = _MIGRATORS.names


def migrator_class(name: str) -> type[Migrator]:
    """Return the class of a registered name or of a ``module:Class`` path.

    Raises
    ------
    SpecError
        If there is no such migrator, or it cannot be asked; names the nearest one.
    """
    if ":" in name:
        cls = import_class("migrator", name, Migrator)
        for method in (cls.pairs, cls.victim):
            try:
                inspect.signature(method).bind(None, None)
            except TypeError:
                raise SpecError(
                    f"migrator {name!r}: {method.__name__}() is called with one list, and takes "
                    f"{inspect.signature(method)}"
                ) from None
        return cls
    return _MIGRATORS.get(name)


def make(name: str, **params: Any) -> Migrator:  # noqa: ANN401 - whatever it takes
    """Construct a migrator by name.

    Raises
    ------
    SpecError
        If there is no such migrator, or it does not take these parameters.
    """
    cls = migrator_class(name)
    return construct(f"migrator {name!r}", cls, cls.knobs(), params)
