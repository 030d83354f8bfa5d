"""How busy the stages of a pipeline are; not a number in a run without one.

Of several engines those that are pipelines count, all of their stages alike.
"""

from __future__ import annotations

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio


@register(about="engine", label="pipeline bubbles")
def pipeline_bubble_share(run: Observation) -> float:
    """Return the share of the stages' time that they stand still while a batch is in flight.

    1 - time that stages compute / (stages * time in which at least one batch is in flight). It
    counts the time for which a stage waits for a batch that another one still has, and for links;
    not the time in which nobody has anything to do.
    """
    totals = run.step_totals
    return 1.0 - ratio(sum(totals.stages_ns), totals.staged_ns)


@register(better="higher", about="engine", label="stage utilization")
def mean_stage_utilization(run: Observation) -> float:
    """Return time that stages compute / (stages * time from the first step to the last end)."""
    totals = run.step_totals
    span_ns = totals.last_end_ns - totals.first_start_ns
    return ratio(sum(totals.stages_ns), float(sum(totals.num_stages.values()) * span_ns))


@register(better="higher", about="engine")
def stage_utilization(run: Observation, stage: int) -> float:
    """Return time that one stage computes / time from the first step to the last end.

    Parameters
    ----------
    run : Observation
        A finished run.
    stage : int
        Which, counted from 0.
    """
    totals = run.step_totals
    if not 0 <= stage < len(totals.stages_ns):
        return float("nan")
    engines = sum(stage < count for count in totals.num_stages.values())
    return ratio(
        totals.stages_ns[stage], float(engines * (totals.last_end_ns - totals.first_start_ns))
    )
