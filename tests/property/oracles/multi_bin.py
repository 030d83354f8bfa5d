"""Multi-bin batching: a bin of predicted lengths that is full is a batch, served in that order.

Source: arXiv:2412.04504, algorithm 1: bin i is of l(i-1) <= l < l(i). The time-out is that of the
docstring of the policy: where no bin is full, that of the oldest request is served once it has
waited for too long.
"""

from tests.property.oracles import sealed


def knobs(rng):
    edges = rng.choice([[8], [4, 10], [2, 5, 9, 20]])
    wait_s = rng.choice([0.0, 3e-6, 2e-5, 1e-4])
    return {"bin_edges": edges, "max_wait_s": wait_s, **sealed.knobs(rng)}


def decide(server, step, bin_edges, max_wait_s, **knobs):
    size = sealed.most_members(server, knobs["max_batch_size"])

    def members(state, queue):
        place = sum(edge <= state.request.predicted_tokens for edge in bin_edges)
        return [
            r for r in queue
            if sum(edge <= r.request.predicted_tokens for edge in bin_edges) == place
        ]  # fmt: skip

    def form():
        queue = server.waiting
        for i, state in enumerate(queue):
            full = members(state, queue[: i + 1])
            if len(full) == size:
                return full
        step.until_ns = queue[0].arrival_ns + round(max_wait_s * 1e9)
        return members(queue[0], queue) if step.until_ns <= server.now_ns else []

    sealed.decide(server, step, form, **knobs)
