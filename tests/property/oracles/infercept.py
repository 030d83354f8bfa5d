"""InferCept: memory is kept while that wastes less than computing it again.

Source: arXiv:2402.01869, section 4.3, in tokens times time. Keeping a context wastes it for as long
as the tool works. Discarding it wastes it for half of the time of computing it again, chunk by
chunk, and what all others hold for all of that time. As the docstring of the policy says, a tool is
taken to work for as long again as it has, so memory is kept until both are equal; then it is
decided anew, by the others of then.
"""

from tests.property.oracles.sessions import recompute_ns


def knobs(rng):
    return {}


def keeps_until(server, state):
    if state.tool is None:
        return server.now_ns
    own = state.prompt + state.generated
    others = sum(r.computed for r in server.running)
    return state.answered_ns + recompute_ns(server, state) * (own + 2 * others) // (2 * own)


keeps_longer = keeps_until
