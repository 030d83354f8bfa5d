"""A step-by-step record of what was decided and how long it took, on either backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.executor import Executor, Steps, Work
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import Request, RequestState

Int64 = npt.NDArray[np.int64]


class RecordedStep(NamedTuple):
    """One step: the decision, what it costs by, and what it took."""

    start_ns: int
    tokens: dict[int, int]
    """Request id to tokens computed."""
    preempted: tuple[int, ...]
    shape: BatchShape
    duration_ns: int
    overhead_ns: int


class Difference(NamedTuple):
    """The first step at which two runs decided differently."""

    step: int
    first: RecordedStep | None
    second: RecordedStep | None

    def explain(self, arrivals_ns: Mapping[int, int] | None = None) -> str:
        """Say what differs in one line, and why where the times of the steps tell.

        Parameters
        ----------
        arrivals_ns : mapping of int to int, optional
            Request id to when it came.
        """
        if self.first is None or self.second is None:
            return f"step {self.step}: one run has ended"
        one, other = self.first.tokens, self.second.tokens
        changed = sorted(i for i in one.keys() | other.keys() if one.get(i) != other.get(i))
        parts = [
            f"request {i} gets {one.get(i, 0)} against {other.get(i, 0)} tokens"
            for i in changed[:3]
        ]
        if len(changed) > 3:
            parts.append(f"and {len(changed) - 3} more")
        if self.first.preempted != self.second.preempted:
            parts.append(f"preempted {self.first.preempted} against {self.second.preempted}")
        starts_ns = sorted((self.first.start_ns, self.second.start_ns))
        came = [i for i in changed if starts_ns[0] < (arrivals_ns or {}).get(i, -1) <= starts_ns[1]]
        starts = f"{self.first.start_ns / 1e9:.4f} s against {self.second.start_ns / 1e9:.4f} s"
        why = f"; request {came[0]} came in between" if came else ""
        return f"step {self.step}: {'; '.join(parts)} (the step starts at {starts}{why})"


class RecordingExecutor(Executor):
    """Writes down every step that another executor runs, one by one.

    Parameters
    ----------
    inner : Executor
        Who does the work.

    Attributes
    ----------
    steps : list of RecordedStep
        The record; it grows with every step, so it is for runs that are looked at closely.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.kv_bytes = inner.kv_bytes
        self.prices_never_fall = inner.prices_never_fall
        self.steps: list[RecordedStep] = []

    def add(self, request: Request, output_tokens: int) -> None:
        """Pass on; see `Executor`."""
        self.inner.add(request, output_tokens)

    def joined(self, states: Collection[RequestState], decodes: DecodeBatch) -> None:
        """Pass on; see `Executor`."""
        self.inner.joined(states, decodes)

    def look_ahead(self, state: RequestState) -> None:
        """Pass on; see `Executor`."""
        self.inner.look_ahead(state)

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        """Run a single step, whatever the plan promises, and record it."""
        tokens = work.plan.num_scheduled_tokens()
        preempted = tuple(state.id for state in work.plan.preempted)
        done = self.inner.execute(work, 1, horizon_ns)
        self.steps.append(
            RecordedStep(
                work.now_ns, tokens, preempted, work.shape, done.durations_ns[0], done.overhead_ns
            )
        )
        return done

    def cut(self, num_steps: int) -> None:
        """Pass on; see `Executor`."""
        self.inner.cut(num_steps)

    def released(self, state: RequestState) -> None:
        """Pass on; see `Executor`."""
        self.inner.released(state)

    def swapped_out(self, state: RequestState) -> None:
        """Pass on; see `Executor`."""
        self.inner.swapped_out(state)

    def swapped_in(self, state: RequestState) -> None:
        """Pass on; see `Executor`."""
        self.inner.swapped_in(state)

    def remove(self, state: RequestState) -> None:
        """Pass on; see `Executor`."""
        self.inner.remove(state)

    def output_tokens(self, request: Request) -> int:
        """Pass on; see `Executor`."""
        return self.inner.output_tokens(request)

    def estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Pass on; see `Executor`."""
        return self.inner.estimate_step_ns(shape, num_steps)

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Pass on; see `Executor`."""
        return self.inner.chunk_pricer(shape, context_tokens)


def first_difference(
    first: Sequence[RecordedStep], second: Sequence[RecordedStep]
) -> Difference | None:
    """Return where two runs first decide differently; None if they never do.

    Only decisions are compared (who computes how many tokens, who is preempted), not times.
    """
    for i in range(max(len(first), len(second))):
        one = first[i] if i < len(first) else None
        other = second[i] if i < len(second) else None
        if one is None or other is None:
            return Difference(i, one, other)
        if (one.tokens, one.preempted) != (other.tokens, other.preempted):
            return Difference(i, one, other)
    return None


def teacher_forced(steps: Sequence[RecordedStep], cost_model: CostModel) -> tuple[Int64, Int64]:
    """Price recorded steps: the error of the cost model alone, whatever was decided.

    Parameters
    ----------
    steps : sequence of RecordedStep
        A measured run.
    cost_model : CostModel
        What prices them.

    Returns
    -------
    predicted_ns, measured_ns : ndarray of int64, shape (n,)
        Durations without scheduling overhead.
    """
    predicted = [cost_model.step_ns(step.shape)[0] for step in steps]
    measured = [step.duration_ns - step.overhead_ns for step in steps]
    return np.array(predicted, dtype=np.int64), np.array(measured, dtype=np.int64)
