"""Proof that an engine's books are in order, and words for when it cannot go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlab.sim.errors import Stalled

if TYPE_CHECKING:
    from schedlab.sim.core.engine import Engine


def check_conservation(engine: Engine) -> None:
    """Prove conservation of requests, tokens and blocks between two steps.

    Everything the engine keeps incrementally is counted again request by request.

    Raises
    ------
    AssertionError
        If a count is off; names it.
    """
    resident = [*engine.running.values(), *engine.held.values(), *engine.leaving]
    engine.kv.check(resident)
    tokens = sum(state.num_computed_tokens for state in resident)
    assert engine.resident_tokens == tokens, f"{engine.resident_tokens} tokens kept, {tokens} are"
    known = engine.num_waiting + len(engine.running) + len(engine.unanswered)
    assert known == engine.num_in_flight, f"{engine.num_in_flight} in flight, {known} are"
    assert len(resident) <= engine.config.max_num_seqs, "more requests than seats"
    block_size = engine.config.block_size
    swapped = sum(-(-s.num_computed_tokens // block_size) for s in engine.waiting if s.swapped)
    assert engine.free_swap_blocks + swapped == engine.config.swap_space_blocks, "host blocks lost"

    batch = engine.decode_batch
    decoding = batch.members.keys() | engine.paused.keys()
    assert not decoding & engine.prefilling.keys(), "a request is in prefill and decodes"
    assert decoding | engine.prefilling.keys() == engine.running.keys(), "a request is in no phase"
    contexts = [state.num_computed_tokens for state in batch.members.values()]
    assert batch.context_sum_tokens == sum(contexts), "the context sum is off"
    assert batch.context_max_tokens == max(contexts, default=0), "the longest context is off"
    opening = sum(context % batch.block_size == 0 for context in contexts)
    assert batch.blocks_next_step() == opening, "the count of new blocks is off"


def stalled(engine: Engine, why: str) -> Stalled:
    """Return the error of a run that cannot go on: who waits, and what denied them."""
    lines = [f"stalled at t = {engine.now_ns / 1e9:.6f} s: {why}"]
    waiting = list(engine.waiting)
    denied = engine.builder.denied
    for state in waiting[:5]:
        reason = denied[1] if denied is not None and denied[0] is state else "not reached"
        lines.append(f"  {state!r}: {reason}")
    if len(waiting) > 5:
        lines.append(f"  and {len(waiting) - 5} more waiting")
    if engine.running:
        lines.append(f"  {len(engine.running)} running but not scheduled")
    return Stalled("\n".join(lines))


def difference(what: str, first: tuple[object, ...], second: tuple[object, ...]) -> str:
    """Say in which parts two decisions (see `BatchPlan.decision`) differ."""
    names = (
        "tokens", "admitted", "preempted", "swapped", "rejected", "padding", "finished",
        "pad_finished",
    )  # fmt: skip
    pairs = zip(names, first, second, strict=True)
    changed = "; ".join(f"{name}: {a} then {b}" for name, a, b in pairs if a != b)
    return f"{what}: {changed}"
