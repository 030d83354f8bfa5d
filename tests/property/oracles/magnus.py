"""Magnus: batches of the least wasted memory access, served by response ratio.

Source: arXiv:2406.04785; waste in the form of a public implementation for vLLM: padding read while
a member generates, and what it reads for nothing until the longest answer has ended. Steps are
priced at half of the longest answer.
"""

from tests.property.oracles import sealed


def knobs(rng):
    return {"wma_threshold": rng.choice([0.0, 30.0, 300.0, 1e4]), **sealed.knobs(rng)}


def decide(server, step, wma_threshold, **knobs):
    size = sealed.most_members(server, knobs["max_batch_size"])
    for state in server.arrived:
        if not hasattr(state, "batch"):
            join(server, state, size, wma_threshold)

    def form():
        batches = {id(r.batch): r.batch for r in server.waiting}.values()
        left = [[r for r in server.waiting if r in batch] for batch in batches]
        return max(left, key=lambda batch: (response_ratio(server, batch), -batch[0].id))

    sealed.decide(server, step, form, **knobs)


def join(server, state, size, wma_threshold):
    """Add a request to the batch that it wastes least in, of those not begun, or to its own."""
    begun = [r for r in server.arrived if any(r.id in done.admitted for done in server.steps)]
    there = [r for r in server.arrived if hasattr(r, "batch")]
    batches = {id(r.batch): r.batch for r in there if r.batch[0] not in begun}
    found = []
    for batch in batches.values():
        both = [*batch, state]
        longest = max(r.prompt for r in both)
        last = max(length(r) for r in both)
        fits = len(both) <= size and len(both) * (longest + last) <= server.capacity_tokens
        if fits and wasted_tokens(both) < wma_threshold:
            found.append((wasted_tokens(both), batch))
    state.batch = min(found, key=lambda pair: pair[0])[1] if found else []
    state.batch.append(state)


def length(state):
    return state.request.predicted_tokens


def wasted_tokens(batch):
    longest, last = max(r.prompt for r in batch), max(length(r) for r in batch)
    padding = sum(length(r) * (longest - r.prompt) for r in batch)
    waiting = sum(
        (last * (last - 1) - length(r) * (length(r) - 1)) / 2 + (last - length(r)) * longest
        for r in batch
    )
    return padding + waiting


def response_ratio(server, batch):
    size, longest = len(batch), max(r.prompt for r in batch)
    last = max(length(r) for r in batch)
    context = round(longest + last / 2)
    time_ns = server.cost.price(size * longest, 0)
    time_ns += last * server.cost.price(size, size * context, context)
    wait_ns = (size * server.now_ns - sum(r.arrival_ns for r in batch)) / size
    return 1.0 + wait_ns / time_ns
