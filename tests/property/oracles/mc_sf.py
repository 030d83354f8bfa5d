"""MC-SF: shortest first, if memory suffices at every predicted end.

Source: arXiv:2502.07115, algorithm 1; the docstring of the policy says that the unused end of a
block counts as used, that a share of the memory is kept free and that the longest prediction is
preempted. Who would be alone starts whatever is predicted, and who outlives a prediction has one
token to come.
"""

from tests.property.oracles.futures import peak_tokens
from tests.property.oracles.loops import continuous


def knobs(rng):
    return {
        "margin": rng.choice([0.0, 0.1, 0.4]),
        "shortest_first": rng.random() < 0.7,
    }


def decide(server, step, margin, shortest_first):
    def length(state):
        return state.request.predicted_tokens

    def future(state):
        used = state.prompt + state.generated + server.config.block_size - 1
        return used, max(length(state) - state.generated, 1)

    def candidates():
        queue = server.waiting
        if shortest_first:
            queue = sorted(queue, key=lambda r: (length(r), r.arrival_ns, r.id))
        for state in queue:
            futures = [future(r) for r in [*step.residents(), state]]
            is_alone = len(futures) == 1
            if not is_alone and peak_tokens(futures) > (1 - margin) * server.capacity_tokens:
                return
            yield state

    def longest(running):
        return max(running, key=lambda r: (length(r), r.arrival_ns, r.id))

    continuous(server, step, candidates(), longest)
