"""What a cost model of somebody else's says, looked at before it is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.errors import SchedlabError, SpecError, told


def is_own(cost_model: CostModel) -> bool:
    """Return whether a cost model is of a module outside this package."""
    return not type(cost_model).__module__.startswith("schedlab.")


def looked_at(cost_model: CostModel) -> Callable[[BatchShape, int], list[int]]:
    """Return what gives the prices of `CostModel.pricer`, and refuses what are none.

    Raises
    ------
    SpecError
        If the model raises, or gives anything but a list of so many whole numbers >= 1.
    """
    price: Callable[[BatchShape, int], object] = cost_model.pricer()

    def step_ns(shape: BatchShape, k: int = 1) -> list[int]:
        return _prices(cost_model, f"step_ns(shape, {k})", k, price, shape, k)

    return step_ns


def uneven_looked_at(cost_model: CostModel) -> Callable[[UnevenSteps], list[int]]:
    """Return the same of `CostModel.uneven_pricer`."""
    price: Callable[[UnevenSteps], object] = cost_model.uneven_pricer()

    def uneven_ns(steps: UnevenSteps) -> list[int]:
        return _prices(cost_model, "uneven_ns(steps)", len(steps), price, steps)

    return uneven_ns


def _prices(
    cost_model: CostModel,
    call: str,
    num_steps: int,
    price: Callable[..., object],
    *asked: object,
) -> list[int]:
    cls = type(cost_model)
    name = f"cost model {cls.__module__}:{cls.__qualname__}"
    try:
        found: Any = price(*asked)
    except SchedlabError:
        raise
    except Exception as error:
        raise SpecError(f"{name}: {call} raised {told(error, cls.__module__)}") from error
    # A number of numpy's would overflow where Python's does not.
    if type(found) is list and set(map(type, found)) == {int} and min(found) >= 1:
        prices: list[int] = found
        if len(prices) == num_steps:
            return prices
    raise SpecError(
        f"{name}: {call} gives {_short(found)}, expected a list of {num_steps} "
        f"whole number{'s' if num_steps > 1 else ''} of nanoseconds, each >= 1"
    )


def _short(found: object) -> str:
    text = " ".join(repr(found).split())
    many = f" ({len(found)} of them)" if isinstance(found, list) and len(found) > 3 else ""
    return f"{text[:60]}...{many}" if len(text) > 60 else text
