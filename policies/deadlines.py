"""When the next tokens of requests are due, and whose are.

Functions of their own, which the compiled core has: they are asked of each running request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.request import RequestState

Target = tuple[int, list[int], float, float]
"""Arrival in ns; in how many ns from then on the next token is due, by the number of those that are
there, as far as anybody asked; time to the first token in ms, and time between tokens in ms.
Requests of the same target share the list."""


def due_ns(state: RequestState, targets: dict[RequestState, Target]) -> int:
    """Return when the next token of a request is due, by the number of those that it has."""
    target = targets[state]
    num_tokens = state.num_output_tokens
    if num_tokens >= len(target[1]):
        _look_ahead(target, num_tokens)
    return target[0] + target[1][num_tokens]


def all_due_ns(
    states: Sequence[RequestState], num_tokens: Sequence[int], targets: dict[RequestState, Target]
) -> list[int]:
    """Return what `due_ns` says of requests that have so many tokens each."""
    of_states = [*map(targets.__getitem__, states)]
    try:
        return [target[0] + target[1][n] for target, n in zip(of_states, num_tokens, strict=True)]
    except IndexError:
        for target, n in zip(of_states, num_tokens, strict=True):
            _look_ahead(target, n)
    return [target[0] + target[1][n] for target, n in zip(of_states, num_tokens, strict=True)]


def _look_ahead(target: Target, num_tokens: int) -> None:
    """Work out when tokens are due, up to the one after so many."""
    _, offsets_ns, ttft_ms, tbt_ms = target
    for n in range(len(offsets_ns), num_tokens + 1):
        offsets_ns.append(round((ttft_ms + n * tbt_ms) * 1e6))


def due_by(
    states: Collection[RequestState],
    dates_ns: dict[RequestState, int],
    others_ns: int,
    now_ns: int,
) -> tuple[list[RequestState], int]:
    """Return whose token is due by now, and the least date of those not due, FOREVER if all are.

    Those without a date of their own have that of all others.
    """
    due: list[RequestState] = []
    least_ns = FOREVER
    for state in states:
        at_ns = dates_ns.get(state, others_ns)
        if at_ns <= now_ns:
            due.append(state)
        elif at_ns < least_ns:
            least_ns = at_ns
    return due, least_ns
