"""SCORPIO: guards for the time to a first token and between tokens, and credits for steps.

Source: arXiv:2505.23022, and the authors' code (MisterBrookT/Scorpio) for what the paper leaves
open: the rows of a virtual batch have the mean length of its members now and half the answer of the
newcomer, and the wait for a first token follows from the number of tokens ahead, those of all
prompts together.
"""

from math import ceil

ROUNDING = 1e-9


def knobs(rng):
    return {
        "ttft_s": rng.choice([8e-6, 3e-5, 1.0]),
        "tbt_s": rng.choice([1.005e-6, 1.5e-6, 2.5e-6, 4e-6, 2e-5]),
        "ttft_margin_s": rng.choice([0.0, 5e-7, 4e-6]),
        "safety": rng.choice([1.0, 1.2, 0.5]),
        "prefill_first": rng.random() < 0.4,
    }


def decide(server, step, ttft_s, tbt_s, ttft_margin_s, safety, prefill_first):
    book_last_step(server, prefill_first)

    def target_s(state):
        slo = state.request.slo
        return tbt_s if slo is None or slo.tpot_ms is None else slo.tpot_ms / 1e3

    def deadline_ns(state):
        slo = state.request.slo
        own_s = ttft_s if slo is None or slo.ttft_ms is None else slo.ttft_ms / 1e3
        return state.arrival_ns + round(own_s * 1e9)

    decodes = [r for r in server.running if r.decodes]
    prompts = [r for r in server.running if not r.decodes]
    tightest_s = min(map(target_s, decodes), default=0.0)
    for state in decodes:
        state.credit = getattr(state, "credit", 0.0)
        state.pace = tightest_s / target_s(state)

    # Guard of the first token: all tokens ahead at once, in steps as full as they may be.
    full = server.config.max_num_batched_tokens
    waiting = sorted(server.waiting, key=lambda r: (deadline_ns(r), r.arrival_ns, r.id))
    kept = []
    for state in list(waiting):
        tokens = sum(r.left for r in [*prompts, *kept, state])
        steps = [full] * (tokens // full) + [tokens % full] * (tokens % full > 0)
        first_ns = server.now_ns + sum(server.cost.price(n, 0) for n in steps)
        if first_ns > deadline_ns(state) - ttft_margin_s * 1e9 and not state.generated:
            step.rejected.append(state)
            waiting.remove(state)
        else:
            kept.append(state)

    def prefill():
        for state in prompts:
            if state not in step.preempted:
                step.give(state)
        members = step.residents()
        if step.preempted:
            return
        for state in waiting:
            members = [*members, state]
            if not is_in_time(server, members, target_s, safety) or not step.give(state):
                return

    if prefill_first:
        prefill()
    if not step.tokens:
        serve(server, step, [r for r in decodes if r.credit + r.pace >= 1 - ROUNDING])
        if not prefill_first:
            prefill()
    if step.preempted and not step.tokens:  # a step of nobody would earn no credits
        for state in decodes:
            if state not in step.preempted:
                step.give(state)
    left = [r for r in prompts if r not in step.preempted]
    if left and len(left) == len(server.running) and not step.tokens:
        step.preempt(max(left, key=lambda r: (r.arrival_ns, r.id)))


def book_last_step(server, prefill_first):
    """Let those who decoded earn their pace, and pay for the step if they ran."""
    done = server.steps[-1] if server.steps else None
    if done is None or getattr(server, "booked", None) is done:
        return
    server.booked = done
    for state in server.arrived:
        if hasattr(state, "pace"):
            if not (prefill_first and done.prompts):
                credit = state.credit + (state.pace - (state.id in done.tokens))
                state.credit = credit if credit >= -ROUNDING else 0.0
            del state.pace
    for state in server.waiting:  # who lost its memory begins anew
        state.__dict__.pop("credit", None)


def is_in_time(server, members, target_s, safety):
    """Say whether a step of the virtual batch meets the tightest target; one alone may run."""
    tightest_s = min(map(target_s, members))
    rows = ceil(sum(tightest_s / target_s(r) for r in members) - ROUNDING)
    now = sum(r.prompt + r.generated for r in members) / len(members)
    mean = now + members[-1].request.predicted_tokens / 2
    step_s = server.cost.price(rows, round(rows * mean), round(mean)) / 1e9
    return len(members) == 1 or step_s * safety < 0.99 * tightest_s


def serve(server, step, ready):
    """Let decodes run, at the cost of the latest arrival where memory is short."""
    victims = sorted(server.running, key=lambda r: (r.arrival_ns, r.id))
    for state in ready:
        if state in step.preempted or not (step.budget and step.rows):
            continue
        while not step.give(state):
            victim = victims.pop()
            step.preempt(victim)
            if victim is state:
                break
        else:
            victims.remove(state)
