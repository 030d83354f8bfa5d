"""Policies by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from schedlab.policies.policy import Policy
from schedlab.sim.construct import construct, import_class
from schedlab.sim.errors import SpecError, nearest

_POLICIES: dict[str, type[Policy]] = {}
_MODULES = (
    "aged", "boosted", "dynamic", "edf", "fair_batching", "fastserve", "fcfs", "gittins", "hrrn",
    "hygen", "ltr", "magnus", "mc_sf", "multi_bin", "nested_wait", "orca", "past_future",
    "prefill_first", "priority", "prompt_buckets", "qoserve", "sarathi", "scorpio",
    "shortest_prompt", "sjf", "slai", "srtf", "static", "tensorrt_llm", "tgi", "tgi3",
    "trail", "vtc", "wait",
)  # fmt: skip


def register(name: str) -> Callable[[type[Policy]], type[Policy]]:
    """Make a policy known under `name` (class decorator).

    Raises
    ------
    ValueError
        If another class has the name.
    """

    def decorate(cls: type[Policy]) -> type[Policy]:
        if _POLICIES.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"policy name {name!r} is taken by {_POLICIES[name].__qualname__}")
        _POLICIES[name] = cls
        return cls

    return decorate


def names() -> list[str]:
    """Return the names of all registered policies, sorted."""
    for module in _MODULES:
        importlib.import_module(f"schedlab.policies.{module}")
    return sorted(_POLICIES)


def policy_class(name: str) -> type[Policy]:
    """Return the class of a registered name or of a ``module:Class`` path.

    Raises
    ------
    SpecError
        If there is no such policy; names the nearest one.
    """
    if ":" in name:
        return import_class("policy", name, Policy)
    known = names()
    if name not in _POLICIES:
        hint = nearest(name, known)
        raise SpecError(f"unknown policy {name!r}; {hint} (or a path like my_module:MyPolicy)")
    return _POLICIES[name]


def make(name: str, **params: Any) -> Policy:  # noqa: ANN401 - whatever the policy takes
    """Construct a policy by name.

    Raises
    ------
    SpecError
        If there is no such policy, or it does not take these parameters.
    """
    cls = policy_class(name)
    return construct(f"policy {name!r}", cls, cls.knobs(), params)
