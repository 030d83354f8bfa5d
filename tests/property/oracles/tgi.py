"""Text Generation Inference 2: prefill batches interrupt decoding.

Source: text-generation-inference, router/src/infer/v2: `batching_task` and `State::next_batch`. A
decode follows a prefill that others were waiting for; after one that began a batch the queue is
looked at first. What is declared is allocated but for the last token, which is never cached. The
docstring of the policy says what becomes of a prompt above the prefill budget.
"""

from math import floor


def knobs(rng):
    return {
        "waiting_served_ratio": rng.choice([0.0, 0.3, 0.5, 1.0, 1.5]),
        "max_batch_prefill_tokens": rng.choice([6, 20, 45, 4096]),
        "max_waiting_tokens": rng.choice([1, 2, 3, 7, 20]),
        "max_batch_total_tokens": rng.choice([None, None, 40, 90]),
    }


def decide(
    server, step, waiting_served_ratio, max_batch_prefill_tokens, max_waiting_tokens,
    max_batch_total_tokens,
):  # fmt: skip
    if server.steps and not server.steps[-1].prompts:
        server.batch = []
    # A batch that outlasts a step goes on with those of whom nothing is computed yet.
    batch = [r for r in server.running if not r.decodes]
    batch += [r for r in server.batch if r in server.waiting]
    if not batch and not owes_decode(server):
        waiting_tokens = 1
        for done in server.steps:
            waiting_tokens = 1 if done.prompts else waiting_tokens + 1
        least = floor(len(server.running) * waiting_served_ratio)
        if waiting_tokens >= max_waiting_tokens:
            least = 0
        batch = next_batch(server, step, max_batch_prefill_tokens, max_batch_total_tokens)
        server.batch = batch = batch if len(batch) >= least else []
    for state in batch:
        step.give(state)
    if not step.tokens:
        for state in server.running:
            step.give(state)


def owes_decode(server):
    """Say whether a prefill ended with the last step that held up somebody who still runs."""
    was_prefill = bool(server.steps and server.steps[-1].prompts)
    return was_prefill and any(r not in server.batch for r in server.running)


def next_batch(server, step, most_prompt_tokens, most_tokens):
    """Return who fits the prefill budget, the seats and the memory at the declared ends."""
    batch, prompt_tokens = [], 0
    for state, fits in fit_declared(server, most_tokens):
        prompt_tokens += state.left
        has_seat = len(server.running) + len(batch) < server.config.most_resident
        has_seat = has_seat and len(batch) < server.config.max_num_seqs
        is_alone = not server.running and not batch
        if not (is_alone or (fits and has_seat and prompt_tokens <= most_prompt_tokens)):
            break
        batch.append(state)
    return batch


def fit_declared(server, most_tokens):
    """Say of each who waits whether all up to it fit whole blocks at their declared ends."""
    capacity = server.capacity_tokens
    capacity = min(most_tokens, capacity) if most_tokens else capacity
    taken = sum(declared(server, r) for r in server.running)
    for state in server.waiting:
        taken += declared(server, state)
        yield state, taken <= capacity


def declared(server, state):
    tokens = min(state.prompt + state.declared - 1, server.config.max_model_len)
    return server.blocks(tokens) * server.config.block_size
