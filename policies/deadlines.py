"""When the next tokens of requests are due, and whose are.

Functions of their own, which the compiled core has: they are asked of each running request.
"""

from __future__ import annotations

from collections.abc import Collection

from schedlab.sim.request import RequestState

Target = tuple[int, float, float]
"""Arrival in ns, time to the first token in ms, and time between tokens in ms."""


def due_ns(state: RequestState, targets: dict[RequestState, Target]) -> int:
    """Return when the next token of a request is due, by the number of those that it has."""
    arrival_ns, ttft_ms, tbt_ms = targets[state]
    return arrival_ns + round((ttft_ms + state.num_output_tokens * tbt_ms) * 1e6)


def due_by(
    states: Collection[RequestState], dates_ns: dict[RequestState, int], now_ns: int
) -> list[RequestState]:
    """Return whose token is due by now; those of whom nobody knows are among them."""
    due: list[RequestState] = []
    for state in states:
        at_ns = dates_ns.get(state)
        if at_ns is None or at_ns <= now_ns:
            due.append(state)
    return due
