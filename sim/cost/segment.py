"""The next k steps of one batch, priced at once and yet bit for bit as one by one."""

import numpy as np

_NUMPY_FROM = 128  # in Python a plain loop is faster up to 50 steps, compiled beyond 200


def segment_ns(
    base_ns: float,
    sum_ns: float,
    context_sum: int,
    num_decodes: int,
    max_ns: float,
    context_max: int,
    k: int,
) -> list[int]:
    """Return ``base + sum_ns * (context_sum + num_decodes*j) + max_ns * (context_max + j)``.

    Parameters
    ----------
    base_ns : float
        What does not change from step to step.
    sum_ns, max_ns : float
        Nanoseconds per token of the context sum and of the longest context.
    context_sum, context_max : int
        Their values in the first step, tokens.
    num_decodes : int
        Growth of the sum per step, tokens; the maximum grows by 1, or by 0 without decodes.
    k : int
        Steps, >= 1.

    Returns
    -------
    list of int
        Rounded half up, each >= 1.

    Notes
    -----
    The loop and the numpy branch do the same IEEE operations in the same order, so that results
    do not depend on `k`. A caller that prices single steps itself must write
    ``base + sum_ns * x + max_ns * y`` in that order, too.
    """
    grow = 1 if num_decodes else 0
    if k < _NUMPY_FROM:
        durations: list[int] = []
        for _ in range(k):
            durations.append(int(base_ns + sum_ns * context_sum + max_ns * context_max + 0.5) or 1)
            context_sum += num_decodes
            context_max += grow
        return durations
    steps = np.arange(k, dtype=np.int64)
    cost = (
        base_ns
        + sum_ns * (context_sum + num_decodes * steps)
        + max_ns * (context_max + grow * steps)
        + 0.5
    )
    by_numpy: list[int] = np.maximum(cost.astype(np.int64), 1).tolist()
    return by_numpy
