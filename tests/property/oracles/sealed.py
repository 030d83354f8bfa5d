"""Sealed batches: nobody joins or leaves until the last member has ended.

Source: FasterTransformer's batching as Orca (OSDI'22, section 2) describes it, and the docstring of
`Static`: prompts before the first decode, each computed at the length of the longest, padding
spread over its tokens; members who have ended keep seat and memory; the latest admission gives way.
"""

from tests.property.oracles.loops import all_served


def knobs(rng):
    return {
        "max_batch_size": rng.choice([None, 1, 2, 3, 5]),
        "pad_prompts": rng.random() < 0.7,
        "pad_decodes": rng.random() < 0.7,
        "return_early": rng.random() < 0.5,
    }


def decide(server, step, form, max_batch_size, pad_prompts, pad_decodes, return_early):
    """Go on with the batch, or begin with those of ``form()`` who fit, if it names any."""
    step.holds, step.pads_held = True, pad_decodes
    if not server.running:
        chosen = form()
        for state in chosen[: max_batch_size or len(chosen)]:
            if not step.admit(state):
                break
        prefill(step, step.admitted, pad_prompts, 0)
        return
    prompts = [r for r in server.running if not r.decodes]
    done = max((r.computed for r in server.running + server.held if r not in prompts), default=0)
    while prompts and not step.tokens:
        prefill(step, prompts, pad_prompts, done)
        if not step.tokens:
            done = max(done, prompts[-1].computed)
            step.preempt(prompts.pop())
    while not step.tokens and not all_served(server, step):
        step.preempt([r for r in server.running if r not in step.preempted][-1])


def prefill(step, prompts, pads, longest_done):
    longest = max([longest_done, *[r.prompt + r.generated for r in prompts]]) if pads else 0
    for state in prompts:
        length = state.prompt + state.generated
        padding = max(longest - length, 0)
        n = step.budget * length // (length + padding)
        if (not n and step.tokens) or not step.give(state, max(n, 1)):
            return
        done, end = state.computed, state.computed + step.tokens[state]
        more = padding * end // length - padding * done // length
        step.padding += more
        step.budget = max(step.budget - more, 0)


def most_members(server, max_batch_size):
    return min(max_batch_size or server.config.max_num_seqs, server.config.max_num_seqs)
