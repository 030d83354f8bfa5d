"""MC-SF: shortest first, if memory suffices at every predicted end.

Source: arXiv:2502.07115, algorithm 1; the docstring of the policy says that the unused end of a
block counts as used, that a share of the memory is kept free and that the longest prediction is
preempted. Who would be alone starts whatever is predicted, and who outlives a prediction has one
token to come. A prompt is computed in as many steps as the budget needs for it and those before
it, less a token for each who runs and has one to compute, and its answer ends so much later.
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

    def futures(residents):
        """Return what each holds now and its steps to come, one in which a prompt is whole."""
        decodes = [state for state in server.running if state.left == 1]
        a_step = max(server.config.max_num_batched_tokens - len(decodes), 1)
        found, prompts = [], 0
        for state in residents:
            late = 0
            if state not in decodes:
                prompts += state.left
                late = len(range(a_step, prompts, a_step))
            used = state.prompt + state.generated + server.config.block_size - 1
            found.append((used - late, max(length(state) - state.generated, 1) + late))
        return found

    def candidates():
        queue = server.waiting
        if shortest_first:
            queue = sorted(queue, key=lambda r: (length(r), r.arrival_ns, r.id))
        for state in queue:
            there = [*step.residents(), state]
            is_alone = len(there) == 1
            most_tokens = (1 - margin) * server.capacity_tokens
            if not is_alone and peak_tokens(futures(there)) > most_tokens:
                return
            yield state

    def longest(running):
        return max(running, key=lambda r: (length(r), r.arrival_ns, r.id))

    continuous(server, step, candidates(), longest)
