"""For how long steps count: those of a pipeline overlap."""

from __future__ import annotations

import numpy as np

from schedlab.sim.record.columns import Columns, Ints, whole_numbers
from schedlab.sim.record.steps import by_engine, stages_of


class StepLengths:
    """From when on each step counts, of tables that come some at a time.

    Notes
    -----
    Several batches are in flight in a pipeline, so a step there counts from the end of the one
    before it on its engine: then steps add up to the time in which there is any.
    """

    def __init__(self) -> None:
        self._last_ends_ns: dict[int, int] = {}

    def starts_ns(self, steps: Columns) -> Ints:
        """Return from when on each of the next steps counts."""
        start_ns = whole_numbers(steps, "start_ns")
        if not stages_of(steps):
            return start_ns
        start_ns, end_ns = start_ns.copy(), whole_numbers(steps, "end_ns")
        for engine, here in by_engine(steps):
            ends_ns = end_ns[here]
            before_ns = np.append(self._last_ends_ns.get(engine, 0), ends_ns[:-1])
            start_ns[here] = np.maximum(start_ns[here], before_ns)
            self._last_ends_ns[engine] = int(ends_ns[-1])
        return start_ns

    def of(self, steps: Columns) -> Ints:
        """Return for how long each of the next steps counts, in ns."""
        return whole_numbers(steps, "end_ns") - self.starts_ns(steps)
