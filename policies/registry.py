"""Policies by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import FunctionType
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
        cls = import_class("policy", name, Policy)
        _check_overrides(name, cls)
        return cls
    known = names()
    if name not in _POLICIES:
        hint = nearest(name, known)
        raise SpecError(f"unknown policy {name!r}; {hint} (or a path like my_module:MyPolicy)")
    return _POLICIES[name]


_HOOKS = {"on_start": 1, "on_arrival": 2, "on_tokens": 3, "on_finish": 2, "on_reject": 2}
"""How many arguments the engine calls them with; the base class has none of them."""


def _check_overrides(name: str, cls: type[Policy]) -> None:
    """Refuse a class one of whose methods cannot be called as the engine will.

    Raises
    ------
    SpecError
        Names the method and what it is called with.
    """
    for attribute, own in inspect.getmembers_static(cls):
        theirs = inspect.getattr_static(Policy, attribute, None)
        is_hook = attribute in _HOOKS and own is not None
        is_method = callable(getattr(Policy, attribute, None)) and not attribute.startswith("__")
        if own is theirs or not (is_hook or is_method):
            continue
        what = f"policy {name!r}: {attribute}"
        if not callable(getattr(cls, attribute)):
            raise SpecError(f"{what} must be a method, not {own!r}")
        if not isinstance(own, FunctionType):
            continue
        num_arguments = (
            _HOOKS[attribute] if is_hook else len(inspect.signature(theirs).parameters) - 1
        )
        try:
            inspect.signature(own).bind(*range(num_arguments + 1))
        except TypeError:
            raise SpecError(
                f"{what}() is called with {num_arguments} arguments, and takes "
                f"{inspect.signature(own)}"
            ) from None


def make(name: str, **params: Any) -> Policy:  # noqa: ANN401 - whatever the policy takes
    """Construct a policy by name.

    Raises
    ------
    SpecError
        If there is no such policy, or it does not take these parameters.
    """
    cls = policy_class(name)
    return construct(f"policy {name!r}", cls, cls.knobs(), params)
