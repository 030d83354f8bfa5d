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
    tenant: Tenant = None
    counter, weight = 0.0, 1.0
    has_counter = False
    for state in running:
        generated = state.num_output_tokens
        new = generated - charged_tokens.get(state.id, 0)
        if not new:
            continue
        charged_tokens[state.id] = generated
        if not has_counter or state.request.tenant != tenant:
            if has_counter:
                counters[tenant] = counter
            tenant = state.request.tenant
            counter, weight, has_counter = counters[tenant], weights.get(tenant, 1.0), True
        counter += output_weight * new / weight
    if has_counter:
        counters[tenant] = counter


def is_waiting(queue: Collection[RequestState]) -> bool:
    """Whether any of these requests waits."""
    for state in queue:  # noqa: SIM110 - a generator takes longer than the loop
        if state.status is WAITS:
            return True
    return False
