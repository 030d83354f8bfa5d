"""A metric of somebody's own, as it would lie beside an experiment."""


def tokens_per_request(run, at_least: int = 0):
    """Return the output tokens of a request, of those with at least so many."""
    tokens = run.requests["generated_tokens"][run.completed]
    return float(tokens[tokens >= at_least].mean())


tokens_per_request.unit = "tokens"
tokens_per_request.better = "neither"


def requests_served(run):
    return int(run.completed.sum())


def sideways(run):
    return 0.0


sideways.better = "sideways"


class Served:
    """Called like a metric, and none."""

    def __init__(self, run):
        self.run = run


SERVED = 3
