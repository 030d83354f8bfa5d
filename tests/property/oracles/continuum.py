"""Continuum: memory is kept for the time that gains the most by the tool's past.

Source: arXiv:2511.02230v6, sections 4.1 and 4.2, and the docstring of the policy for what these
leave open and for the rule of the authors' preview.
"""

from fractions import Fraction
from math import log, sqrt

from tests.property.oracles.sessions import recompute_ns


def knobs(rng):
    return {
        "ttl": rng.choice(["paper", "paper", "preview"]),
        "min_calls": rng.randint(0, 5),
        "fixed_ttl_s": rng.choice([0.0, 3e-6, 2e-5, 3.0, 20.0]),
    }


def keeps_until(server, state, ttl, min_calls, fixed_ttl_s):
    if state.tool is None:
        return server.now_ns
    calls = list(past_calls(server))
    own_ns = [call_ns for tool, call_ns in calls if tool == state.tool]
    if ttl == "preview":
        fixed_ns = round(fixed_ttl_s * 1e9)
        is_slow = own_ns and Fraction(sum(own_ns), len(own_ns)) > fixed_ns
        return server.now_ns + (0 if is_slow else fixed_ns)
    restore_ns, delay_ns = recompute_ns(server, state), mean_delay_ns(server)
    if len(calls) <= min_calls:
        # Of exp(-ttl), the share of calls not yet back, times what is saved, and ttl: the least.
        saved_s = (restore_ns + delay_ns) / 1e9
        return server.now_ns + max(round(log(saved_s) * 1e9), 0)
    past_ns = own_ns if len(own_ns) > min_calls else [call_ns for _, call_ns in calls]
    saved_ns = restore_ns + round(delay_ns * memoryfulness(server))

    def gain(ttl_ns):
        share = Fraction(sum(call_ns <= ttl_ns for call_ns in past_ns), len(past_ns))
        return share * saved_ns - ttl_ns

    best_ns = max(sorted(past_ns), key=gain)
    # A nanosecond more, or a call that takes just as long would come too late.
    return server.now_ns + (best_ns + 1 if gain(best_ns) > 0 else 0)


def awaited_tool(server, state):
    """Return the tool that a request waited for; None without, or if it needs several answers."""
    parents = state.turn.parents
    return server.everyone[parents[0]].tool if len(parents) == 1 else None


def past_calls(server):
    """Yield the tools, and how long they took, of requests that came."""
    for state in server.arrived:
        tool = awaited_tool(server, state)
        if tool is not None:
            yield tool, state.arrival_ns - server.everyone[state.turn.parents[0]].answered_ns


def mean_delay_ns(server):
    """Return the mean time in the queue of those answered who came back to memory given up."""
    delays_ns = [
        server.first_ns[state] - state.arrival_ns
        for state in server.finished
        if awaited_tool(server, state) is not None and not state.found_kept
    ]
    return sum(delays_ns) / len(delays_ns) if delays_ns else 0.0


def memoryfulness(server):
    """Return how well the number of requests served foretold that to come, of sessions over."""
    pairs, served = [], {}
    for state in server.finished:
        name = state.request.session
        served[name] = served.get(name, 0) + 1
        if state.tool is None:
            total = served.pop(name)
            pairs += [(k, total - k) for k in range(1, total + 1)]
    if not pairs:
        return 1.0
    mean_k = Fraction(sum(k for k, _ in pairs), len(pairs))
    mean_left = Fraction(sum(left for _, left in pairs), len(pairs))
    both = sum((k - mean_k) * (left - mean_left) for k, left in pairs)
    variances = sum((k - mean_k) ** 2 for k, _ in pairs)
    variances *= sum((left - mean_left) ** 2 for _, left in pairs)
    if not variances:
        return 1.0
    return sqrt(both**2 / variances) * (-1 if both > 0 else 1)
