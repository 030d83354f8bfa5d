"""What policies, predictors and routers have in common: they are made by name, with knobs."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar


class Knobs:
    """The parameters of a constructor, which stores each under its name."""

    needs_targets: ClassVar[tuple[str, ...]] = ()
    """Latency targets without all of which it decides nothing: fields of `sim.request.Slo`."""

    def get_params(self) -> dict[str, Any]:
        """Return the constructor's parameters as they are now."""
        return {name: getattr(self, name) for name in type(self).knobs()}

    @classmethod
    def knobs(cls) -> dict[str, inspect.Parameter]:
        """Return the constructor's parameters by name; what it takes by any name is none."""
        if cls.__init__ is object.__init__:
            return {}
        any_name = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(cls.__init__).parameters
        return {
            name: parameter
            for name, parameter in parameters.items()
            if name != "self" and parameter.kind not in any_name
        }
