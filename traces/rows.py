"""Requests of rows: what is made of the columns of a trace, one object a row."""

from __future__ import annotations

from collections.abc import Iterable

from schedlab.sim.request import Arrival, Refinement, Request, Slo, Turn


def arrivals_of(
    ids: Iterable[int],
    arrival_ns: Iterable[int],
    prompt_tokens: Iterable[int],
    max_tokens: Iterable[int],
    priorities: Iterable[int],
    slos: Iterable[Slo | None],
    applications: Iterable[str | None],
    sessions: Iterable[str | None],
    tenants: Iterable[str | None],
    predicted_tokens: Iterable[float | None],
    prefixes: Iterable[tuple[int, ...]],
    prompts: Iterable[str | None],
    refinements: Iterable[Refinement | None],
    predicted_session_tokens: Iterable[float | None],
    output_tokens: Iterable[int],
    ready_ns: Iterable[int],
    turns: Iterable[Turn | None],
) -> list[Arrival]:
    """Return the arrivals of some rows, from their columns; the shortest ends it.

    Notes
    -----
    A function of its own, which the compiled core has: to hand a constructor seventeen arguments
    takes longer than what it does with them.
    """
    return [
        Arrival(
            Request(
                request_id, at_ns, prompt, most, priority, slo, application, session, tenant,
                predicted, prefix, text, refinement, of_session,
            ),
            output, seen_ns, turn,
        )
        for (
            request_id, at_ns, prompt, most, priority, slo, application, session, tenant,
            predicted, prefix, text, refinement, of_session, output, seen_ns, turn,
        ) in zip(
            ids, arrival_ns, prompt_tokens, max_tokens, priorities, slos, applications, sessions,
            tenants, predicted_tokens, prefixes, prompts, refinements, predicted_session_tokens,
            output_tokens, ready_ns, turns,
            strict=False,
        )
    ]  # fmt: skip
