"""What steps of an engine are expected to take, as far as a router can tell."""

from __future__ import annotations

from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.engine_state import EngineState

_MOST_PROMPTS = 32


def first_token_ms(engine: EngineState, new_tokens: int) -> float:
    """Estimate when a first token comes out: after the prompts in front, in steps with decodes.

    Parameters
    ----------
    engine : EngineState
        Where.
    new_tokens : int
        What of the prompt is to be computed there.
    """
    num_prompts = min(engine.num_waiting + 1, _MOST_PROMPTS)
    tokens = engine.backlog_tokens + new_tokens
    chunk = -(-tokens // num_prompts)
    chunks = ((chunk, 0),) * num_prompts
    return engine.estimate_step_ns(step_shape(engine, engine.num_running, 0, chunks)) / 1e6


def decode_ms(engine: EngineState, context_tokens: int) -> float:
    """Estimate a step of the decodes there and of one more with this context."""
    shape = step_shape(engine, engine.num_running + 1, context_tokens, ())
    return engine.estimate_step_ns(shape) / 1e6


def prefill_ms(engine: EngineState, new_tokens: int, context_tokens: int) -> float:
    """Estimate a step of one chunk alone, in front of which so many tokens are cached."""
    shape = step_shape(engine, 0, 0, ((new_tokens, context_tokens),))
    return engine.estimate_step_ns(shape) / 1e6


def step_shape(
    engine: EngineState, num_decodes: int, more_tokens: int, chunks: tuple[tuple[int, int], ...]
) -> BatchShape:
    """Return the shape of a step of decodes that share what is held, and `more_tokens`, evenly."""
    context = engine.used_blocks * engine.block_size + more_tokens if num_decodes else 0
    mean = -(-context // num_decodes) if num_decodes else 0
    return BatchShape(
        num_decodes,
        context,
        mean,
        chunks,
        rows_sampled=num_decodes + len(chunks),
        num_running=num_decodes,
        decode_context_min_tokens=mean,
    )
