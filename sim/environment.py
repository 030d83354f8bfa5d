"""Numbers that the environment states, checked where they are read."""

import math
import os
from collections.abc import Callable

from schedlab.sim.errors import SpecError


def environment_number(
    variable: str, usual: float, must_be: str, holds: Callable[[float], bool]
) -> float:
    """Return the number in an environment variable, or the usual one if it is not set.

    Parameters
    ----------
    variable : str
        Its name.
    usual : float
        What holds if it is absent or empty.
    must_be : str
        What a message says that it must be.
    holds : callable
        Whether a number is such a one; false of NaN.

    Raises
    ------
    SpecError
        If it is no number, or not such a one.
    """
    stated = os.environ.get(variable, "")
    try:
        value = float(stated) if stated else usual
    except ValueError:
        value = math.nan
    if not holds(value):
        raise SpecError(f"{variable} must be {must_be}, got {stated!r}")
    return value
