"""Autoscalers by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

import inspect
from typing import Any

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.sim.construct import Registry, construct, import_class
from schedlab.sim.errors import SpecError

_AUTOSCALERS: Registry[type[Autoscaler]] = Registry(
    "autoscaler", "schedlab.policies.autoscalers", "my_module:MyAutoscaler"
)

register = _AUTOSCALERS.register
names = _AUTOSCALERS.names


def autoscaler_class(name: str) -> type[Autoscaler]:
    """Return the class of a registered name or of a ``module:Class`` path.

    Raises
    ------
    SpecError
        If there is no such autoscaler, or it cannot be asked; names the nearest one.
    """
    if ":" in name:
        cls = import_class("autoscaler", name, Autoscaler)
        try:
            inspect.signature(cls.num_engines).bind(None, None)
        except TypeError:
            raise SpecError(
                f"autoscaler {name!r}: num_engines() is called with the pool, and takes "
                f"{inspect.signature(cls.num_engines)}"
            ) from None
        return cls
    return _AUTOSCALERS.get(name)


def make(name: str, **params: Any) -> Autoscaler:  # noqa: ANN401 - whatever it takes
    """Construct an autoscaler by name.

    Raises
    ------
    SpecError
        If there is no such autoscaler, or it does not take these parameters.
    """
    cls = autoscaler_class(name)
    return construct(f"autoscaler {name!r}", cls, cls.knobs(), params)
