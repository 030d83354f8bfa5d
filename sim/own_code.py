"""What a class of the user's did or gave, as a message tells it and as a run goes on with it."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from numbers import Integral
from types import FrameType
from typing import Final

from schedlab.sim.errors import SpecError, described
from schedlab.sim.text import json_value

FAULTS: Final = (Exception, SystemExit)
"""What is a fault of who raises it: exit() as well, which would end a command without a word."""


def raised(error: BaseException, owner: Callable[..., object]) -> str:
    """Return what an exception says, and the last line of the code of its owner that it came by.

    Parameters
    ----------
    error : BaseException
        As it was caught, one of `FAULTS`.
    owner : callable
        The class whose hook raised it, or the function. The code of its bases counts as its own,
        but for ours.

    Raises
    ------
    SystemExit
        `error` itself, if it came out of this package: the answer to a signal.
    """
    if isinstance(error, SystemExit):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if is_ours(frame.f_globals.get("__name__", "")):
            raise error
    at = last_own_line(error, owner)
    return described(error) if at is None else f"{described(error)} ({at[1]})"


def last_own_line(error: BaseException, owner: Callable[..., object]) -> tuple[str, str] | None:
    """Return the function and the ``file:line`` that `raised` tells; None if there is none."""
    own = modules_of(owner)
    at = [
        (frame.f_code.co_name, place(frame, line))
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in own
    ]
    return at[-1] if at else None


def place(frame: FrameType, line: int) -> str:
    """Return a line of a function as ``file:line``."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{line}"


def modules_of(owner: Callable[..., object]) -> set[str]:
    """Return the names of the modules outside this package that an owner and its bases are of."""
    bases = owner.__mro__ if isinstance(owner, type) else (owner,)
    return {
        base.__module__ for base in bases if base is not object and not is_ours(base.__module__)
    }


def is_ours(module: str) -> bool:
    """Return whether a module is one of this package."""
    return module.partition(".")[0] == "schedlab"


def whole(value: object) -> int | None:
    """Return a whole number of any kind (numpy's, too) as an int; None if it is none.

    Examples
    --------
    >>> whole(3), whole(True), whole(3.0)
    (3, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def as_json(described: object, name: str) -> object:
    """Return what a class says of itself as JSON holds it; raise SpecError if it cannot.

    Parameters
    ----------
    described : object
        What its `describe` returned.
    name : str
        How a message calls the class.
    """
    try:
        told: object = json_value(described)
        json.dumps(told, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(
            f"{name}: describe() gives {short(described)}, which JSON cannot hold: {error}"
        ) from error
    return told


def short(value: object) -> str:
    """Return how a message writes a value, on one line that is not too long.

    Examples
    --------
    >>> short([1] * 50)
    '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1...'
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a class of the user's
        text = f"a {type(value).__name__}"
    return f"{text[:60]}..." if len(text) > 60 else text
