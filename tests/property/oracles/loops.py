"""vLLM V1's loop, which several policies fill in.

Source: docs/architecture.md and the docstring of `ContinuousBatching`: running requests in the
order of admission, then those who wait; memory is never taken to admit; a step that preempted
admits nobody; the first who does not fit ends the admissions.
"""


def latest(running):
    """Return the latest admission."""
    return running[-1]


def continuous(server, step, candidates, victim=latest):
    """Serve who runs, at the cost of `victim` where memory is short, then the candidates."""
    while not all_served(server, step):
        step.preempt(victim([r for r in server.running if r not in step.preempted]))
    if not step.preempted:
        for state in candidates:
            if not step.give(state):
                break


def all_served(server, step):
    """Grant all who run, in order, as far as tokens and rows go; nothing if memory is short."""
    before = step.budget, step.rows
    for state in server.running:
        if state in step.preempted:
            continue
        if not step.budget or not step.rows:
            break
        if not step.give(state):
            step.tokens.clear()
            step.budget, step.rows = before
            return False
    return True
