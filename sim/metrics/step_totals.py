"""Sums over the steps of a run, in one pass: what the metrics of an engine are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from schedlab.sim.metrics.step_lengths import StepLengths
from schedlab.sim.record.columns import Columns, Floats, Ints, whole_numbers
from schedlab.sim.record.steps import by_engine, num_stages_by_engine, stages_of

_MEANS = (
    "num_running", "num_waiting", "kv_tokens", "kv_allocated_tokens", "kv_reserved_unused_tokens",
    "kv_fragmentation_tokens",
)  # fmt: skip
_SUMS = (
    "overhead_ns", "num_decodes", "prefill_tokens", "padding_tokens", "swapped_bytes",
    "draft_tokens", "accepted_tokens", "num_drafts",
)  # fmt: skip


@dataclass
class StepTotals:
    """Sums and extremes over steps.

    Attributes
    ----------
    num_steps : int
        How many there are.
    first_start_ns, last_end_ns : int
        When the first one starts and the last one ends; 0 if there is none.
    busy_ns : float
        Sum of their lengths; of those that overlap in a pipeline, the time in which there is any.
    sums : dict of str to int
        Column of `sim.record.steps.StepTable` to its sum.
    weighted, most : dict of str to float, dict of str to int
        Column, or ``batch`` (decodes + prefill chunks), to the sum of value times length in ns, and
        to the largest value. In a pipeline a step counts for the time from the end of the one
        before.
    stages_ns : list of float
        What each stage of a pipeline spent on them, of all engines that have it; empty where there
        is none.
    staged_ns : float
        Sum of the lengths of steps of pipelines, each times its number of stages.
    num_stages : dict of int to int
        Engine to its stages, of those that are pipelines; one engine is 0.
    """

    num_steps: int = 0
    first_start_ns: int = 0
    last_end_ns: int = 0
    busy_ns: float = 0.0
    sums: dict[str, int] = field(default_factory=dict)
    weighted: dict[str, float] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    stages_ns: list[float] = field(default_factory=list)
    staged_ns: float = 0.0
    num_stages: dict[int, int] = field(default_factory=dict)
    _lengths: StepLengths = field(default_factory=StepLengths)

    def mean(self, name: str) -> float:
        """Return the mean of a column, each step weighed with its length; NaN if there is none."""
        return self.weighted[name] / self.busy_ns if self.busy_ns else float("nan")

    def add(self, steps: Columns) -> None:
        """Count further steps in, of any number."""
        start_ns, end_ns = self._lengths.starts_ns(steps), whole_numbers(steps, "end_ns")
        if stages_of(steps):
            self._add_stages(steps, end_ns - start_ns)
        if len(start_ns):
            if not self.num_steps:
                self.first_start_ns = int(start_ns[0])
            self.last_end_ns = max(self.last_end_ns, int(end_ns.max()))
        self.num_steps += len(start_ns)
        length_ns: Floats = (end_ns - start_ns).astype(np.float64)
        self.busy_ns += float(length_ns.sum())
        for name in _SUMS:
            if name in steps:
                total = int(whole_numbers(steps, name).sum())
                self.sums[name] = self.sums.get(name, 0) + total
        for name in _MEANS:
            if name in steps:
                self._weigh(name, whole_numbers(steps, name), length_ns)
        if "num_prefills" in steps:
            batch = whole_numbers(steps, "num_decodes") + whole_numbers(steps, "num_prefills")
            self._weigh("batch", batch, length_ns)

    def _add_stages(self, steps: Columns, length_ns: Ints) -> None:
        names = stages_of(steps)
        spent = [float(whole_numbers(steps, name).sum()) for name in names]
        before = self.stages_ns or [0.0] * len(names)
        self.stages_ns = [one + more for one, more in zip(before, spent, strict=True)]
        num_stages = num_stages_by_engine(steps)
        self.num_stages |= num_stages
        for engine, here in by_engine(steps):
            self.staged_ns += num_stages.get(engine, 0) * float(length_ns[here].sum())

    def _weigh(self, name: str, values: Ints, length_ns: Floats) -> None:
        self.weighted[name] = self.weighted.get(name, 0.0) + float((values * length_ns).sum())
        self.most[name] = max(self.most.get(name, 0), int(values.max()) if len(values) else 0)


def step_totals(batches: Iterable[Columns]) -> StepTotals:
    """Return the totals of steps that come some at a time.

    Notes
    -----
    Sums of integers are exact; those of lengths are rounded once a batch, so that batches must be
    cut alike for the last bit to be the same (`sim.record.columns.batches` does).
    """
    totals = StepTotals()
    for steps in batches:
        totals.add(steps)
    return totals
