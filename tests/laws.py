"""The laws every run obeys; they live in `schedlab.testing`, where others can use them as well."""

from schedlab.sim.cost.shape import BatchShape
from schedlab.testing.laws import (
    LinearCost,
    arrival,
    check,
    check_conservation,
    check_never_idle,
    cut_at_arrivals,
    difference,
    run,
    signature,
    slow,
)

__all__ = [
    "BatchShape",
    "LinearCost",
    "arrival",
    "check",
    "check_conservation",
    "check_never_idle",
    "cut_at_arrivals",
    "difference",
    "run",
    "signature",
    "slow",
]
