"""Text Generation Inference 3: prompts join decodes, the last one cut.

Source: text-generation-inference, backends/v3/src (`batching_task` and `State::next_batch`) and
server/text_generation_server/models/flash_causal_lm.py: a chunk under way leaves each other member
a token, new ones get what the step has left of the budget, padded to whole blocks; a decode follows
a prefill that joined others.
"""

from tests.property.oracles.tgi import fit_declared


def knobs(rng):
    return {
        "max_batch_prefill_tokens": rng.choice([1, 3, 6, 20, 45, 4096]),
        "max_batch_total_tokens": rng.choice([None, None, 40, 90]),
    }


def decide(server, step, max_batch_prefill_tokens, max_batch_total_tokens):
    for state in server.running:
        if state.decodes:
            step.give(state)
    left = max_batch_prefill_tokens - (len(server.running) - 1)
    for state in server.running:
        if not state.decodes:
            left -= step.give(state, max(left, 1))
    if server.running and joined_others(server):
        return
    left = max_batch_prefill_tokens - sum(step.tokens.values())
    left = server.blocks(left) * server.config.block_size
    for state, fits in fit_declared(server, max_batch_total_tokens):
        is_alone = not step.residents()
        if left <= 0 or not (fits or is_alone) or not step.give(state, left):
            break
        left -= step.tokens[state]


def joined_others(server):
    """Say whether the last step admitted somebody beside others."""
    last = server.steps[-1] if server.steps else None
    return bool(last and last.admitted) and len(last.admitted) < len(last.tokens)
