"""Proof that an engine's books are in order, and words for when it cannot go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlab.sim.errors import Stalled

if TYPE_CHECKING:
    from schedlab.sim.core.decode_batch import DecodeBatch
    from schedlab.sim.core.engine import Engine


def check_conservation(engine: Engine) -> None:
    """Prove conservation of requests, tokens and blocks between two steps.

    Everything the engine keeps incrementally is counted again request by request.

    Raises
    ------
    AssertionError
        If a count is off; names it.
    """
    requests = engine.requests
    computing = requests.in_pipeline
    seated = [*requests.running.values(), *requests.held.values(), *requests.leaving]
    seated += [*requests.fetching.values(), *requests.loading.values(), *computing]
    resident = [*seated, *requests.handed_over.values(), *requests.kept.values()]
    resident += requests.holding.values()
    for state in computing:  # memory is held for them already
        state._computed += computing.granted_tokens(state)
    requests.kv.check(resident)
    for state in computing:
        state._computed -= computing.granted_tokens(state)
    tokens = sum(state.num_computed_tokens for state in resident)
    assert requests.resident_tokens == tokens, f"{requests.resident_tokens} tokens, {tokens} are"
    known = requests.num_waiting + len(requests.running) + len(requests.unanswered)
    known += len(requests.fetching) + len(requests.loading) + len(computing)
    known -= len(requests.overrun)  # answered, though they run
    known += len(requests.ended)  # not answered, though they have left
    assert known == requests.num_in_flight, f"{requests.num_in_flight} in flight, {known} are"
    assert requests.num_seated == len(seated) <= engine.config.most_resident, "seats are off"
    block_size = engine.config.block_size
    swapped = sum(-(-s.num_computed_tokens // block_size) for s in requests.waiting if s.swapped)
    assert requests.free_swap_blocks + swapped == engine.config.swap_space_blocks, "host blocks"
    if requests.tiers is not None:
        requests.tiers.check(swapped, requests.kv.free_blocks)

    decoding = requests.decodes.members.keys() | requests.paused.keys()
    prefilling = requests.prefilling.keys()
    assert not decoding & prefilling, "a request is in prefill and decodes"
    assert decoding | prefilling == requests.running.keys(), "a request is in no phase"
    _check_decodes(requests.decodes)
    assert computing.size == sum(len(batch.running) for batch in computing.batches), "in flight"
    for away in computing.batches:
        if away.decodes is not None:
            _check_decodes(away.decodes)
            decoding = away.running.keys() - away.chunks.keys()
            assert away.decodes.members.keys() == decoding, "a request in flight is in no phase"


def _check_decodes(batch: DecodeBatch) -> None:
    """Count again what a decode batch adds up."""
    contexts = [state.num_computed_tokens for state in batch.members.values()]
    assert batch.context_sum_tokens == sum(contexts), "the context sum is off"
    assert batch.context_max_tokens == max(contexts, default=0), "the longest context is off"
    assert batch.context_min_tokens == min(contexts, default=0), "the shortest context is off"
    opening = sum(batch.blocks_of(state) for state in batch.members.values())
    assert batch.blocks_next_step() == opening, "the count of new blocks is off"


WAITS = (
    "the policy waits and nothing is left to happen (horizon(), or until_ns of a plan, says when "
    "to ask it again)"
)
"""Why a run has stalled whose policy lets everybody wait."""


def stalled(engine: Engine, why: str) -> Stalled:
    """Return the error of a run that cannot go on: who waits, and what denied them."""
    lines = [f"stalled at t = {engine.now_ns / 1e9:.6f} s: {why}"]
    waiting = list(engine.requests.waiting)
    denied = engine.builder.denied
    for state in waiting[:5]:
        reason = denied[1] if denied is not None and denied[0] is state else "not reached"
        lines.append(f"  {state!r}: {reason}")
    if len(waiting) > 5:
        lines.append(f"  and {len(waiting) - 5} more waiting")
    if engine.requests.running:
        lines.append(f"  {len(engine.requests.running)} running but not scheduled")
    return Stalled("\n".join(lines))
