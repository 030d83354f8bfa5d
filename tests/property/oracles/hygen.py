"""HyGen: online requests first, offline ones within what a step may take.

Source: the account of the paper (NeurIPS 2025) in the docstring of the policy: two phases, each
decodes, prompts under way, new prompts; memory and seats for online requests come from the offline
request admitted last. Among those of one phase who lacks memory takes it from the last whose turn
is to come, at last from itself.
"""


def knobs(rng):
    return {
        "latency_budget_s": rng.choice([1.05e-6, 1.2e-6, 2e-6, 6e-6]),
        "offline_priority": rng.choice([1, 1, 2, 9]),
        "chunk_size": rng.choice([1, 5, 16, 60]),
        "offline_order": rng.choice(["fcfs", "fcfs", "prefix"]),
    }


def decide(server, step, latency_budget_s, offline_priority, chunk_size, offline_order):
    def is_offline(state):
        return state.request.priority >= offline_priority

    def by_arrival(state):
        return state.arrival_ns, state.id

    def place(state):
        names = state.request.prefix_hash_ids if offline_order == "prefix" else ()
        return names, state.arrival_ns, state.id

    def room():
        """Return the tokens of the chunk that are left; decodes may have used up more."""
        return min(chunk_size, server.config.max_num_batched_tokens) - sum(step.tokens.values())

    def within(more):
        return server.cost({**step.tokens, **more}) <= latency_budget_s * 1e9

    def piece(state):
        """Return the largest chunk of an offline prompt in time; one token if nobody else runs."""
        most = min(state.left, room())
        in_time = [n for n in range(1, most + 1) if within({state: n})]
        return max(in_time, default=int(not step.tokens))

    def serve(state, tokens, *spare):
        """Grant tokens, at the cost of the last of each list in turn, or of itself."""
        while not step.give(state, tokens):
            victim = next((states.pop() for states in spare if states), state)
            step.preempt(victim)
            if victim is state:
                return

    online = [r for r in server.running if not is_offline(r)]
    offline = [r for r in server.running if is_offline(r)]

    # Phase 1. Where memory suffices for all decodes it does not matter who comes first.
    queue = [r for r in online if r.decodes]
    if needs_nobody(step, queue):
        for state in queue:
            step.give(state)
        queue = []
    queue = sorted(queue, key=by_arrival)
    queue += sorted([r for r in online if not r.decodes], key=by_arrival)
    while queue and step.budget and step.rows:
        state = queue.pop(0)
        if not state.decodes and room() < 1:
            break
        serve(state, 1 if state.decodes else room(), offline, queue)
    is_open = all(is_offline(state) for state in step.preempted)
    for state in sorted([r for r in server.waiting if not is_offline(r)], key=by_arrival):
        if not is_open:
            break
        is_open = room() > 0 and step.rows > 0
        if is_open and not step.give(state, room()):
            held = sum(server.blocks(r.computed) for r in offline)
            kept = server.config.watermark_blocks
            is_open = server.blocks(state.left) <= step.free_blocks + held - kept
            while is_open and offline and state not in step.tokens:
                step.preempt(offline.pop())
                step.give(state, room())
            is_open = state in step.tokens

    # Phase 2.
    decodes, in_time = [r for r in offline if r.decodes], []
    for state in decodes:
        if not within({r: 1 for r in [*in_time, state]}) and (in_time or step.tokens):
            break
        in_time.append(state)
    if len(in_time) <= room() and needs_nobody(step, in_time):
        for state in in_time:
            step.give(state)
        in_time = []
    paused = [r for r in decodes if r not in in_time and r not in step.tokens]
    queue, prompts = in_time, [r for r in offline if not r.decodes]
    while (queue or prompts) and room() > 0 and step.rows:
        state = (queue or prompts).pop(0)
        tokens = 1 if state.decodes else piece(state)
        if not tokens:
            break
        later = [prompts, paused, queue] if state.decodes else [prompts]
        serve(state, tokens, *later)
    if not is_open or step.preempted:
        return
    for state in sorted([r for r in server.waiting if is_offline(r)], key=place):
        tokens = piece(state) if room() > 0 else 0
        if not tokens or not step.give(state, tokens):
            return


def needs_nobody(step, decodes):
    """Say whether tokens, rows and memory suffice for a token of each."""
    blocks = step.server.blocks
    need = sum(blocks(r.computed + 1) - blocks(r.computed) for r in decodes)
    return len(decodes) <= min(step.budget, step.rows) and need <= step.free_blocks
