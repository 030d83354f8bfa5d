"""What the tokens of running requests charge their tenants, counted after every step.

Functions of their own, which the compiled core has: they look at each running request.
"""

from __future__ import annotations

from collections.abc import Collection

from schedlab.sim.request import WAITS, RequestState

Tenant = str | None


def charge_generated(
    running: Collection[RequestState],
    charged_tokens: dict[int, int],
    counters: dict[Tenant, float],
    output_weight: float,
    weights: dict[Tenant, float],
) -> None:
    """Charge the tenants of requests for the tokens that came out since they were charged last.

    One request after the other: sums of what is no whole number depend on their order.
    """
    for state in running:
        generated = state.num_output_tokens
        new = generated - charged_tokens.get(state.id, 0)
        if new:
            tenant = state.request.tenant
            counters[tenant] += output_weight * new / weights.get(tenant, 1.0)
            charged_tokens[state.id] = generated


def is_waiting(queue: Collection[RequestState]) -> bool:
    """Whether any of these requests waits."""
    for state in queue:  # noqa: SIM110 - a generator takes longer than the loop
        if state.status is WAITS:
            return True
    return False
