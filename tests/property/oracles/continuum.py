"""Continuum: memory is kept for the time that gains the most by the tool's past.

Source: arXiv:2511.02230, and the objective in the docstring of the policy: calls that are back by
then save computing the context again, and until they are, or time is up, memory has a price.
"""

from tests.property.oracles.sessions import recompute_ns


def knobs(rng):
    return {
        "memory_price": rng.choice([0.0, 0.125, 0.5, 2.0]),
        "default_ttl_s": rng.choice([0.0, 2e-6, 2e-5, 1e-3]),
        "min_calls": rng.choice([1, 2, 5]),
    }


def keeps_until(server, state, memory_price, default_ttl_s, min_calls):
    if state.tool is None:
        return server.now_ns
    past_ns = []
    for later in server.arrived:
        if len(later.turn.parents) == 1:
            caller = server.everyone[later.turn.parents[0]]
            if caller.tool == state.tool:
                past_ns.append(later.arrival_ns - caller.answered_ns)
    if len(past_ns) < min_calls:
        return server.now_ns + round(default_ttl_s * 1e9)
    saved_ns = recompute_ns(server, state)

    def gain(ttl_ns):
        back = [call_ns for call_ns in past_ns if call_ns <= ttl_ns]
        held_ns = sum(min(call_ns, ttl_ns) for call_ns in past_ns)
        return len(back) * saved_ns - memory_price * held_ns

    best_ns = max(sorted(past_ns), key=gain)
    # A nanosecond more, or a call that takes just as long would come too late.
    return server.now_ns + best_ns + 1 if gain(best_ns) > 0 else server.now_ns
