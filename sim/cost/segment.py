"""The next k steps of one batch, priced at once and yet bit for bit as one by one."""

from __future__ import annotations

from typing import Final

import numpy as np
from librt.strings import BytesWriter, write_i64_le
from mypy_extensions import mypyc_attr

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is: then steps are added up sooner than written down one by one."""

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


@mypyc_attr(free_list_len=1, acyclic=True)
class StepTimes:
    """What successive steps of decodes take, of which none is written down before it is asked for.

    Reading the contexts takes twice as long as at full rate until that takes `ramp_ns`, and
    `ramp_ns` longer from then on; no step takes less than `least_ns`. A fleet prices twice as many
    steps as are taken: the others are cut off by who comes.

    Parameters
    ----------
    base_ns : float
        What does not change from step to step.
    ramp_ns : float
        See above.
    ns_per_token : float
        Of the context sum, at full rate.
    least_ns : float
        What a step takes at least.
    context_sum : int
        That of the first step, tokens.
    num_decodes : int
        Its growth per step, tokens.
    """

    __slots__ = (
        "_at_rate_ns", "_base_ns", "_context_sum", "_least_ns", "_ns_per_token", "_num_decodes",
        "_ramp_ns",
    )  # fmt: skip

    def __init__(
        self,
        base_ns: float,
        ramp_ns: float,
        ns_per_token: float,
        least_ns: float,
        context_sum: int,
        num_decodes: int,
    ) -> None:
        self._base_ns = base_ns
        self._at_rate_ns = base_ns + ramp_ns
        self._ramp_ns = ramp_ns
        self._ns_per_token = ns_per_token
        self._least_ns = least_ns
        self._context_sum = context_sum
        self._num_decodes = num_decodes

    def _at(self, context: int) -> int:
        """Return what a step with so many tokens of context takes."""
        read_ns = self._ns_per_token * context
        if read_ns > self._ramp_ns:
            cost_ns = self._at_rate_ns + read_ns
        else:
            cost_ns = self._base_ns + 2.0 * read_ns
        least_ns = self._least_ns
        return int((cost_ns if cost_ns > least_ns else least_ns) + 0.5) or 1

    def durations_ns(self, num_steps: int) -> list[int]:
        """Return what each of the first so many takes."""
        context, grows, ns_per_token = self._context_sum, self._num_decodes, self._ns_per_token
        read_ns = ns_per_token * context
        at_rate_ns, ramp_ns, least_ns = self._at_rate_ns, self._ramp_ns, self._least_ns
        durations: list[int] = []
        if read_ns <= ramp_ns or at_rate_ns + read_ns < least_ns:
            base_ns = self._base_ns
            for _ in range(num_steps):  # as `_at`, written out: most steps of few requests are here
                read_ns = ns_per_token * context
                cost_ns = at_rate_ns + read_ns if read_ns > ramp_ns else base_ns + 2.0 * read_ns
                durations.append(int((cost_ns if cost_ns > least_ns else least_ns) + 0.5) or 1)
                context += grows
            return durations
        # And so it stays: contexts do not shrink.
        if num_steps >= _NUMPY_FROM:
            return segment_ns(at_rate_ns, ns_per_token, context, grows, 0.0, 0, num_steps)
        for _ in range(num_steps):
            durations.append(int(at_rate_ns + ns_per_token * context + 0.5) or 1)
            context += grows
        return durations

    def step_ns(self, step: int) -> int:
        """Return what one of them takes, the first being 0."""
        return self._at(self._context_sum + self._num_decodes * step)

    def total_ns(self, num_steps: int) -> int:
        """Return what the first so many take together."""
        context, grows, added_ns = self._context_sum, self._num_decodes, 0
        for _ in range(num_steps):
            added_ns += self._at(context)
            context += grows
        return added_ns

    def begun_before(self, num_steps: int, time_ns: int) -> tuple[int, int]:
        """Return how many of so many begin sooner than that, at least 1, and when they have ended.

        Both times are counted from the beginning of the first.
        """
        context, grows, elapsed_ns = self._context_sum, self._num_decodes, 0
        for begun in range(num_steps):
            if begun and elapsed_ns >= time_ns:
                return begun, elapsed_ns
            elapsed_ns += self._at(context)
            context += grows
        return num_steps, elapsed_ns

    def write(self, num_steps: int, rows: BytesWriter) -> None:
        """Append what each of the first so many takes to a table."""
        context, grows = self._context_sum, self._num_decodes
        for _ in range(num_steps):
            write_i64_le(rows, self._at(context))
            context += grows
