"""Routers by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

from typing import Any

from schedlab.policies.routers.router import Router
from schedlab.sim.construct import ClassRegistry, check_call
from schedlab.sim.rng import stream


def _check(name: str, cls: type[Router]) -> None:
    check_call(f"router {name!r}: route", cls.route, 2, "a request and the engines")


_ROUTERS = ClassRegistry(
    "router", "schedlab.policies.routers", "my_module:MyRouter", Router, _check
)

register = _ROUTERS.register
names = _ROUTERS.names
router_class = _ROUTERS.class_of


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
    router = _ROUTERS.make(name, **params)
    router.rng = stream(seed, "router")
    return router
