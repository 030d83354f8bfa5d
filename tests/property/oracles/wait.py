"""WAIT: a step runs when enough new requests of some type have gathered.

Source: arXiv:2504.11320 and its authors' `modified_booking_limit` scheduler (vidur_or): a type's
share of the limit goes by rate and stages, its threshold is what each stage may have of that, and
any type that fills its free places, be these none, starts a batch. The time-outs are those of the
docstring of the policy: a step takes what there is once somebody has waited for too long, in the
queue or under way.
"""

from tests.property.oracles.loops import all_served


def knobs(rng):
    edges = rng.choice([[5], [4, 12], [8, 30], [2, 6, 15]])
    return {
        "output_edges": edges,
        "request_rates": rng.choice([None, [rng.randint(1, 9) / 4 for _ in edges]]),
        "total_limit": rng.choice([1, 6, 12, 40, 100]),
        "max_wait_s": rng.choice([0.0, 2e-6, 5e-6, 2e-5, 1e-4]),
        "drain": rng.random() < 0.6,
        "only_cap": rng.random() < 0.2,
    }


def decide(
    server, step, output_edges, request_rates, total_limit, max_wait_s, drain, only_cap
):  # fmt: skip
    types = range(len(output_edges))

    def kind(state):
        return next((j for j in types if state.request.predicted_tokens <= output_edges[j]), -1)

    def count(states):
        found = [kind(state) % len(output_edges) for state in states]
        return [found.count(j) for j in types]

    rates = request_rates or count(server.arrived)
    weights = [rate * (edge + 1) for rate, edge in zip(rates, output_edges, strict=True)]
    limits = [max(1, int(total_limit * weight / sum(weights))) for weight in weights]
    stages = [max(1, int(limits[j] / (output_edges[j] + 1))) for j in types]
    free = [max(limits[j] - count(server.running)[j], 0) for j in types]
    thresholds = [min(stages[j], free[j]) for j in types]

    starts = only_cap or (drain and not server.waiting)
    starts = starts or any(count(server.waiting)[j] >= thresholds[j] for j in types)
    max_wait_ns = round(max_wait_s * 1e9)
    since = [server.steps[-1].end_ns] if server.running else []
    oldest = [min(state.arrival_ns for state in server.waiting)] if server.waiting else []
    overdue = any(server.now_ns - at_ns >= max_wait_ns for at_ns in oldest)
    if not (starts or overdue or any(server.now_ns - at_ns >= max_wait_ns for at_ns in since)):
        step.until_ns = min(since + oldest) + max_wait_ns
        return
    while not all_served(server, step):
        step.preempt([r for r in server.running if r not in step.preempted][-1])
    if step.preempted:
        return
    room = list(thresholds if starts and not overdue and not only_cap else free)
    for state in server.waiting:
        if room[kind(state)]:
            if not step.give(state):
                return
            room[kind(state)] -= 1
