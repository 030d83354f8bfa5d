"""QoServe: all decodes in each step, and as much of the prompts as their deadlines leave time for.

Source: arXiv:2503.22562 with the rules of its code as the docstring of the policy tells them. A
chunk is priced as if all of it were of the first prompt.
"""

from statistics import fmean, pstdev


def knobs(rng):
    return {
        "ttft_s": rng.choice([5e-6, 2e-5, 1e-4]),
        "tbt_s": rng.choice([1e-6, 2e-6, 6e-6]),
        "batch_tbt_s": rng.choice([1.5e-6, 3e-6, 8e-6]),
        "alpha_ms_per_token": rng.choice([0.0, 1e-5, 1e-3]),
        "safety": rng.choice([1.0, 1.2, 2.0]),
        "chunk_sizes": rng.choice([[4, 16, 60], [8], [1, 2, 3, 5, 9, 17, 33]]),
        "scarce_chunk_sizes": rng.choice([[3, 12], [2], [1, 4, 7]]),
        "scarce_tokens": rng.choice([0, 30, 60]),
    }


def decide(
    server, step, ttft_s, tbt_s, batch_tbt_s, alpha_ms_per_token, safety, chunk_sizes,
    scarce_chunk_sizes, scarce_tokens,
):  # fmt: skip
    for state in server.arrived:
        if not hasattr(state, "first_due_ns"):
            give_targets(server, state, ttft_s, tbt_s, batch_tbt_s)

    def place(state):
        wait_ns = alpha_ms_per_token * 1e6 * state.left
        return is_relegated(server, state), state.first_due_ns + wait_ns, state.arrival_ns, state.id

    while not all_decodes(server, step):
        there = [r for r in server.running if r not in step.preempted]
        step.preempt(max(there, key=lambda r: (r.arrival_ns, r.id)))
    decodes = [r for r in step.residents() if r.decodes]
    prompts = [r for r in step.residents() if not r.decodes]
    waiting = [] if step.preempted else server.waiting

    left = None
    for state in sorted(prompts + waiting, key=place):
        if state not in prompts and len(step.residents()) >= server.config.most_resident:
            continue
        if left is None:
            scarce = step.free_blocks * server.config.block_size < scarce_tokens
            sizes = scarce_chunk_sizes if scarce else chunk_sizes
            left = max(size_in_time(server, decodes, state, sizes, safety) - len(decodes), 0)
        granted = step.give(state, left) if left else 0
        left -= granted
        if not granted:
            break
    if prompts and len(prompts) == len(server.running) and not step.tokens:
        step.preempt(max(prompts, key=place))


def give_targets(server, state, ttft_s, tbt_s, batch_tbt_s):
    slo = state.request.slo
    ttft_ms, tbt_ms, end_ms = slo or (None, None, None)
    if end_ms is not None and ttft_ms is None and tbt_ms is None:
        past = [
            r.generated for r in server.finished
            if r.request.application == state.request.application and r.end_ns <= state.arrival_ns
        ]  # fmt: skip
        most_tokens = fmean(past) + 2 * pstdev(past) if past else 0
        ttft_ms, tbt_ms = end_ms - most_tokens * batch_tbt_s * 1e3, batch_tbt_s * 1e3
    ttft_ms = ttft_s * 1e3 if ttft_ms is None else ttft_ms
    state.tbt_ms = tbt_s * 1e3 if tbt_ms is None else tbt_ms
    state.first_due_ns = state.arrival_ns + round(ttft_ms * 1e6)
    state.seated_ns = None


def is_relegated(server, state):
    alone_ns = server.cost.price(state.prompt, 0)
    first_ns = [done.start_ns for done in server.steps if state.id in done.tokens]
    return min(first_ns, default=server.now_ns) > state.first_due_ns - alone_ns


def all_decodes(server, step):
    """Grant all decodes, in the order of admission, or none if memory is short."""
    before = step.budget, step.rows
    for state in step.residents():
        if not (state.decodes and step.budget and step.rows):
            continue
        if not step.give(state):
            step.tokens.clear()
            step.budget, step.rows = before
            return False
    return True


def size_in_time(server, decodes, first, sizes, safety):
    """Return the largest size of a step that ends before each decode is due."""
    if not decodes:
        return sizes[-1]
    slack_ns = min(
        max(r.first_due_ns, r.first_token_ns) + round(r.generated * r.tbt_ms * 1e6)
        for r in decodes
    ) - server.now_ns  # fmt: skip
    in_time = []
    for size in sizes:
        tokens = max(size, len(decodes))
        contexts = sum(r.computed for r in decodes)
        contexts += first.computed if size > len(decodes) else 0
        longest = max(r.computed for r in decodes)
        if server.cost.price(tokens, contexts, longest) * safety <= slack_ns:
            in_time.append(size)
    return max(in_time, default=sizes[0])
