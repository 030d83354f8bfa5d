"""Migrators by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

from schedlab.policies.migrators.migrator import Migrator
from schedlab.sim.construct import ClassRegistry, check_call


def _check(name: str, cls: type[Migrator]) -> None:
    check_call(f"migrator {name!r}: pairs", cls.pairs, 1, "one list")
    check_call(f"migrator {name!r}: victim", cls.victim, 1, "one list")


_MIGRATORS = ClassRegistry(
    "migrator", "schedlab.policies.migrators", "my_module:MyMigrator", Migrator, _check
)

register = _MIGRATORS.register
names = _MIGRATORS.names
migrator_class = _MIGRATORS.class_of
make = _MIGRATORS.make
