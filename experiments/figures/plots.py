"""All figures in one style: colour-blind safe, and readable in grey.

Every function takes results and a title and returns a matplotlib figure, which
`experiments.figures.style.save` writes. Which file each lives in matters to `experiments.figures`
only.
"""

from schedlab.experiments.analysis.rate_curves import (
    RATE_KEYS,
    curve_name,
    is_saturated,
    rate_bracket,
)
from schedlab.experiments.figures.agreement import measured_against_simulated
from schedlab.experiments.figures.claims import claim
from schedlab.experiments.figures.curves import (
    attainment_against_rate,
    latency_against_rate,
    throughput_against_p99,
)
from schedlab.experiments.figures.distributions import (
    latency_cdf,
    predictability,
    slowdown_against_length,
)
from schedlab.experiments.figures.fleets import (
    engine_shares,
    engines_over_time,
    goodput_per_dollar,
    transfers,
)
from schedlab.experiments.figures.gantt import batching, gantt, seats
from schedlab.experiments.figures.heat_map import heat_map
from schedlab.experiments.figures.lines import lines
from schedlab.experiments.figures.timelines import time_series
from schedlab.experiments.figures.trade_off import gpu_frontier, pareto

__all__ = [
    "RATE_KEYS",
    "attainment_against_rate",
    "batching",
    "claim",
    "curve_name",
    "engine_shares",
    "engines_over_time",
    "gantt",
    "goodput_per_dollar",
    "gpu_frontier",
    "heat_map",
    "is_saturated",
    "latency_against_rate",
    "latency_cdf",
    "lines",
    "measured_against_simulated",
    "pareto",
    "predictability",
    "rate_bracket",
    "seats",
    "slowdown_against_length",
    "throughput_against_p99",
    "time_series",
    "transfers",
]
