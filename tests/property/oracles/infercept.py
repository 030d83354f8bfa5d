"""InferCept: memory is kept while that wastes less than computing it again.

Source: arXiv:2402.01869, section 4: waste in tokens times time. Keeping wastes the own context,
recomputing that and the contexts of all others for as long as it takes; a tool is taken to work for
as long again as it has, so memory is kept until both are equal.
"""

from tests.property.oracles.sessions import recompute_ns


def knobs(rng):
    return {}


def keeps_until(server, state):
    if state.tool is None:
        return server.now_ns
    own = state.prompt + state.generated
    others = sum(r.computed for r in server.running)
    return server.now_ns + int(recompute_ns(server, state) * (own + others) / own)
