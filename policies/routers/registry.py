"""Routers by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

import inspect
from typing import Any

from schedlab.policies.routers.router import Router
from schedlab.sim.construct import Registry, construct, import_class
from schedlab.sim.errors import SpecError
from schedlab.sim.rng import stream

_ROUTERS: Registry[type[Router]] = Registry(
    "router", "schedlab.policies.routers", "my_module:MyRouter"
)

register = _ROUTERS.register
names = _ROUTERS.names


def router_class(name: str) -> type[Router]:
    """Return the class of a registered name or of a ``module:Class`` path.

    Raises
    ------
    SpecError
        If there is no such router, or its `route` cannot be called; names the nearest one.
    """
    if ":" in name:
        cls = import_class("router", name, Router)
        try:
            inspect.signature(cls.route).bind(None, None, None)
        except TypeError:
            raise SpecError(
                f"router {name!r}: route() is called with a request and the engines, and takes "
                f"{inspect.signature(cls.route)}"
            ) from None
        return cls
    return _ROUTERS.get(name)


def make(name: str, seed: int = 0, **params: Any) -> Router:  # noqa: ANN401 - whatever it takes
    """Construct a router by name.

    Parameters
    ----------
    name : str
        A registered name or a ``module:Class`` path.
    seed : int
        Of the experiment; a router draws from a stream of its own.
    **params
        Its knobs.

    Raises
    ------
    SpecError
        If there is no such router, or it does not take these parameters.
    """
    cls = router_class(name)
    router = construct(f"router {name!r}", cls, cls.knobs(), params)
    router.rng = stream(seed, "router")
    return router
