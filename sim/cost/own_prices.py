"""What a cost model of somebody else's says, looked at before it is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.cost.step_spread import StepSpread
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.own_code import FAULTS, as_json, is_ours, raised, short, whole

_KINDS = {"scheduling_overhead": SchedulingOverhead, "step_spread": StepSpread}


def is_own(cost_model: CostModel) -> bool:
    """Return whether a cost model is of a module outside this package."""
    return not is_ours(type(cost_model).__module__)


def check_own(cost_model: CostModel) -> None:
    """Look at what a cost model says of itself, before anything runs.

    Raises
    ------
    SpecError
        If one of its attributes is of another kind than `CostModel` says, or `describe` raises or
        returns what no result can hold.
    """
    cls = type(cost_model)
    name = f"cost model {cls.__module__}:{cls.__qualname__}"
    for attribute, kind in _KINDS.items():
        value = getattr(cost_model, attribute)
        if value is not None and not isinstance(value, kind):
            raise SpecError(
                f"{name}: {attribute} is {short(value)}, expected a {kind.__name__} or None"
            )
    for attribute in ("num_stages", "draw"):
        if whole(getattr(cost_model, attribute)) is None:
            value = short(getattr(cost_model, attribute))
            raise SpecError(f"{name}: {attribute} is {value}, expected a whole number")
    try:
        described: object = cost_model.describe()
    except SchedlabError:
        raise
    except FAULTS as error:
        raise SpecError(f"{name}: describe() raised {raised(error, cls)}") from error
    if not isinstance(as_json(described, name), dict):
        raise SpecError(f"{name}: describe() gives {short(described)}, expected a dict")


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
    except FAULTS as error:
        raise SpecError(f"{name}: {call} raised {raised(error, cls)}") from error
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
