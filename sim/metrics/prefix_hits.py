"""What prefix caching saves."""

from __future__ import annotations

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import whole_numbers


@register(better="higher", label="prompt tokens found in the cache", every_run=True)
def prefix_hit_share(run: Observation) -> float:
    """Return the share of the prompt tokens of completed requests that the prefix cache held.

    As found at their first admission.
    """
    done = run.completed
    hits = int(whole_numbers(run.requests, "prefix_hit_tokens")[done].sum())
    return ratio(hits, int(whole_numbers(run.requests, "prompt_tokens")[done].sum()))
