"""All figures in one style: colour-blind safe, and readable in grey.

Every function takes results and a title and returns a matplotlib figure, which
`experiments.plotting.style.save` writes. Which file each lives in matters to `experiments.plotting`
only.
"""

from experiments.plotting.agreement import measured_against_simulated
from experiments.plotting.claims import claim
from experiments.plotting.curves import (
    attainment_against_rate,
    latency_against_rate,
    throughput_against_p99,
)
from experiments.plotting.distributions import (
    latency_cdf,
    predictability,
    slowdown_against_length,
)
from experiments.plotting.gantt import batching, gantt, seats
from experiments.plotting.heat_map import heat_map
from experiments.plotting.rate_curves import RATE_KEYS, curve_name, is_saturated, rate_within
from experiments.plotting.theory import TheoryCheck, theory_against_simulation
from experiments.plotting.timelines import time_series
from experiments.plotting.trade_off import pareto

__all__ = [
    "RATE_KEYS",
    "TheoryCheck",
    "attainment_against_rate",
    "batching",
    "claim",
    "curve_name",
    "gantt",
    "heat_map",
    "is_saturated",
    "latency_against_rate",
    "latency_cdf",
    "measured_against_simulated",
    "pareto",
    "predictability",
    "rate_within",
    "seats",
    "slowdown_against_length",
    "theory_against_simulation",
    "throughput_against_p99",
    "time_series",
]
