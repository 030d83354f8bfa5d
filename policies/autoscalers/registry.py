"""Autoscalers by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.sim.construct import ClassRegistry, check_call


def _check(name: str, cls: type[Autoscaler]) -> None:
    check_call(f"autoscaler {name!r}: num_engines", cls.num_engines, 1, "the pool")


_AUTOSCALERS = ClassRegistry(
    "autoscaler", "schedlab.policies.autoscalers", "my_module:MyAutoscaler", Autoscaler, _check
)

register = _AUTOSCALERS.register
names = _AUTOSCALERS.names
autoscaler_class = _AUTOSCALERS.class_of
make = _AUTOSCALERS.make
