"""Routers by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from schedlab.policies.routers.router import Router
from schedlab.sim.construct import construct, import_class
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.rng import stream

_ROUTERS: dict[str, type[Router]] = {}
_MODULES = (
    "consistent_hashing", "jsq", "least_kv", "least_outstanding_requests",
    "least_outstanding_tokens", "llm_d", "power_of_d", "predicted_length", "prefix_aware",
    "random", "round_robin", "session_affinity", "slo_aware", "vllm",
)  # fmt: skip


def register(name: str) -> Callable[[type[Router]], type[Router]]:
    """Make a router known under `name` (class decorator).

    Raises
    ------
    ValueError
        If another class has the name.
    """

    def decorate(cls: type[Router]) -> type[Router]:
        if _ROUTERS.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"router name {name!r} is taken by {_ROUTERS[name].__qualname__}")
        _ROUTERS[name] = cls
        return cls

    return decorate


def names() -> list[str]:
    """Return the names of all registered routers, sorted."""
    for module in _MODULES:
        importlib.import_module(f"schedlab.policies.routers.{module}")
    return sorted(_ROUTERS)


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
    known = names()
    if name not in _ROUTERS:
        hint = nearest(name, known)
        raise SpecError(f"unknown router {name!r}; {hint} (or a path like my_module:MyRouter)")
    return _ROUTERS[name]


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
