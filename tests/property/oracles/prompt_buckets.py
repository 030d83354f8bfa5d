"""Sealed batches of one bucket of prompt lengths, that of the oldest request.

Source: design of padded serving with buckets; an edge is the longest prompt of its bucket.
"""

from tests.property.oracles import sealed


def knobs(rng):
    edges = rng.choice([[10], [3, 8], [2, 5, 12, 30]])
    return {"bucket_edges": edges, **sealed.knobs(rng)}


def decide(server, step, bucket_edges, **knobs):
    def bucket(state):
        return sum(edge < state.prompt for edge in bucket_edges)

    def form():
        return [r for r in server.waiting if bucket(r) == bucket(server.waiting[0])]

    sealed.decide(server, step, form, **knobs)
