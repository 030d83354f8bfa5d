"""Construct what a user has named and given parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from schedlab.sim.errors import SpecError, nearest

T = TypeVar("T")


def construct(
    what: str, cls: Callable[..., T], knobs: Iterable[str], params: Mapping[str, Any]
) -> T:
    """Return ``cls(**params)``, or say which parameter is wrong.

    Parameters
    ----------
    what : str
        How a message calls it, e.g. ``"policy 'sjf'"``.
    cls : callable
        What to construct.
    knobs : iterable of str
        The parameters that it takes.
    params : mapping
        The parameters that it is given.

    Raises
    ------
    SpecError
        If it does not take a parameter (names the nearest one), or refuses a value.

    Examples
    --------
    >>> construct("number", complex, ["real", "imag"], {"real": 1.0})
    (1+0j)
    """
    known = list(knobs)
    for name in params:
        if name not in known:
            raise SpecError(f"{what} has no parameter {name!r}; {nearest(name, known)}")
    try:
        return cls(**params)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{what}: {error}") from error
