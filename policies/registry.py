"""Policies by name, or by ``module:Class`` for those that live elsewhere."""

from __future__ import annotations

import inspect
from types import FunctionType

from schedlab.policies.policy import Policy
from schedlab.sim.construct import ClassRegistry, check_call
from schedlab.sim.errors import SpecError, look_alike

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
        check_call(what, own, num_arguments)


def _check_purpose(name: str, cls: type[Policy]) -> None:
    """Refuse a class that changes nothing, or means to by a method that nobody calls.

    Raises
    ------
    SpecError
        Names the method that was meant, or those that there are.
    """
    own = [one for one in cls.__mro__ if not one.__module__.startswith("schedlab.policies.")]
    own = own[: own.index(object)] if object in own else own
    written = {
        attribute: value
        for one in reversed(own)
        for attribute, value in vars(one).items()
        if not attribute.startswith("__") or attribute == "__init__"
    }
    base = next(one for one in cls.__mro__ if one not in own)
    called = {n for n in dir(base) if not n.startswith("_") and callable(getattr(base, n))}
    called |= _HOOKS.keys()
    # Whoever is mentioned somewhere in the class is called by it.
    mentioned = {
        n for f in written.values() if isinstance(f, FunctionType) for n in f.__code__.co_names
    }
    for attribute, value in written.items():
        if attribute in called or attribute in mentioned or attribute.startswith("_"):
            continue
        meant = look_alike(attribute, called - written.keys(), cutoff=0.8)
        if isinstance(value, FunctionType) and meant:
            raise SpecError(f"policy {name!r}: nobody calls {attribute}(); did you mean {meant}()?")
    # What a decorator of the class or a metaclass adds is not ours to judge.
    if own and not written.keys() - {"_knows_its_hooks", "_is_plain", "by_arrival"}:
        raise SpecError(
            f"policy {name!r} overrides nothing, so it is {base.__name__}; define one of "
            f"{', '.join(sorted(called & {'key', 'plan', 'victim', 'hold', 'chunk', 'order'}))}"
        )


def _check(name: str, cls: type[Policy]) -> None:
    _check_overrides(name, cls)
    _check_purpose(name, cls)


_POLICIES = ClassRegistry("policy", "schedlab.policies", "my_module:MyPolicy", Policy, _check)

register = _POLICIES.register
names = _POLICIES.names
policy_class = _POLICIES.class_of
make = _POLICIES.make
