"""What drafted tokens bring, and what they cost; not a number in a run without any."""

from __future__ import annotations

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio


@register(better="higher", about="engine", label="tokens a step of a request")
def mean_tokens_per_step(run: Observation) -> float:
    """Return the mean number of tokens that a decode step yields for a request.

    1 + accepted draft tokens / decode steps of all requests, those without a draft included.
    """
    accepted, decodes = _sum(run, "accepted_tokens"), run.step_totals.sums["num_decodes"]
    return 1.0 + ratio(accepted, decodes)


@register(better="higher", about="engine", label="acceptance length")
def mean_acceptance_length(run: Observation) -> float:
    """Return the mean number of tokens that a verification yields.

    1 + accepted draft tokens / drafts: vLLM's "mean acceptance length". Tokens accepted behind the
    end of an answer are not counted.
    """
    return 1.0 + ratio(_sum(run, "accepted_tokens"), _sum(run, "num_drafts"))


@register(unit="%", scale=100.0, better="higher", about="engine")
def draft_acceptance_share(run: Observation) -> float:
    """Return the share of drafted tokens that came out: vLLM's "draft acceptance rate"."""
    return ratio(_sum(run, "accepted_tokens"), _sum(run, "draft_tokens"))


@register(about="engine", better="lower")
def wasted_draft_tokens(run: Observation) -> float:
    """Return how many drafted tokens were verified and did not come out."""
    return _sum(run, "draft_tokens") - _sum(run, "accepted_tokens")


def _sum(run: Observation, name: str) -> float:
    return run.step_totals.sums.get(name, float("nan"))
