"""Past-Future: admission by the largest memory of drawn futures.

Source: arXiv:2507.10150, section 4, and the docstring of the policy: a running request ends where
it is drawn among the past lengths above what it has generated, between these and its own declared
end; a candidate is drawn from all of them. The draws are those of numpy's generator of the seed
and the number of the step, all who run first and then each candidate. With `max_waiting_tokens`
(LightLLM's router manager, `_step`) decodes are counted since the last prompt or eviction, and
while somebody runs only every so many of them the queue is looked at.
"""

import numpy as np

from tests.property.oracles.futures import peak_tokens
from tests.property.oracles.loops import continuous


def knobs(rng):
    return {
        "window": rng.choice([1, 4, 9, 200]),
        "reserved": rng.choice([0.0, 0.0, 0.05, 0.3]),
        "samples": rng.choice([1, 2, 2, 5, 40]),
        "initial_tokens": rng.choice([1, 5, 20, 1024]),
        "seed": rng.randint(0, 9),
        "max_waiting_tokens": rng.choice([0, 0, 1, 2, 3, 10]),
    }


def looks(server, max_waiting_tokens):
    """Say whether the queue is looked at in this step."""
    waited = 0
    for done in server.steps:
        if done.prompts:
            waited = 0
            continue
        if waited == max_waiting_tokens or done.preempted:
            waited = 0
        waited += 1
    return not server.running or waited >= max_waiting_tokens


def decide(server, step, window, reserved, samples, initial_tokens, seed, max_waiting_tokens):
    lengths = [initial_tokens] * (window // 2) + [r.generated for r in server.finished]
    past = sorted(lengths[-window:])
    random = np.random.default_rng([seed, len(server.steps)])

    def declared(state):
        return min(state.declared, server.config.max_model_len - state.prompt)

    def used(state):
        return state.prompt + state.generated + server.config.block_size - 1

    def end(state, at):
        """Return where an answer ends by a draw in [0, 1)."""
        places = [state.generated] + [tokens for tokens in past if tokens > state.generated]
        if len(places) == 1 or places[-1] < declared(state):
            places.append(declared(state))
        whole, part = divmod(at * (len(places) - 1), 1)
        before, behind = places[int(whole)], places[int(whole) + 1]
        return min(round(before + (behind - before) * part), declared(state))

    def candidates():
        running = step.residents()
        count = min(samples, 200 // len(running) + 1) if running else 1
        draws = random.random((count, len(running)))
        futures = [
            [
                (used(r), max(end(r, at) - r.generated, 1))
                for r, at in zip(running, row, strict=True)
            ]
            for row in draws
        ]
        for state in server.waiting:
            ends = random.choice(past, count) if past else [declared(state)] * count
            for future, drawn in zip(futures, ends, strict=True):
                to_come = min(int(drawn), declared(state)) - state.generated
                future.append((used(state), max(to_come, 1)))
            peak = max(peak_tokens(future) for future in futures)
            if len(futures[0]) > 1 and peak > server.capacity_tokens * (1 - reserved):
                return
            yield state

    continuous(server, step, candidates() if looks(server, max_waiting_tokens) else ())
