"""Memory to come.

Source: MC-SF (arXiv:2502.07115) looks at every end t of a request: those still there at t hold
what they hold now and t tokens more. Past-Future (arXiv:2507.10150) at the same instants.
"""


def peak_tokens(requests):
    """Return the largest memory of (tokens now, tokens to come) of requests that all run on."""
    return max(
        (sum(used + end for used, more in requests if more >= end) for _, end in requests),
        default=0,
    )
