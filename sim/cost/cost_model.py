"""What prices a step: the interface of all cost models."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.segment import StepTimes
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.cost.step_spread import StepSpread


class CostModel(ABC):
    """Price a step, and the k steps that follow it with the same batch.

    A cost model answers questions and remembers nothing of them but what saves time: policies ask
    it about steps that never run. Who runs steps counts them, see `schedlab.sim.cost.pricing`.

    Attributes
    ----------
    name : str
        How results name it, e.g. ``"roofline"``.
    is_measured : bool
        Whether its times were measured on the device they are said to be of; such times must not
        beat the device's datasheet.
    scheduling_overhead : SchedulingOverhead or None
        What the CPU was measured to add to a step; None if nobody measured it.
    num_stages : int
        Into how many stages of a pipeline it divides a step; see `stations_ns`.
    step_spread : StepSpread or None
        By how much the steps of a run are to scatter about what it says; None for not at all.
    draw : int
        Which of the runs that may come of it.
    reads_extremes : bool
        Whether it looks at the smallest context, or in a step of decodes alone at the largest. Who
        says no is not told: those with such a context may have left, and others must be looked at.
    never_falls : bool
        Whether a step with more tokens in a chunk never takes less, nor one with more decodes or
        more tokens in their contexts, which no measured curve promises (ADR 7). Then who searches
        need not ask of all.
    """

    name: str
    is_measured: bool = False
    scheduling_overhead: SchedulingOverhead | None = None
    num_stages: int = 1
    step_spread: StepSpread | None = None
    draw: int = 0
    reads_extremes: bool = True
    never_falls: bool = False

    @abstractmethod
    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` successive steps of the same batch.

        Parameters
        ----------
        shape : BatchShape
            The first step. Step j (0-based) has ``num_decodes * j`` more tokens in
            `decode_context_sum_tokens` and j more in `decode_context_max_tokens` and `_min_`.
        k : int
            Number of steps, >= 1; only 1 is allowed when `shape.chunks` is not empty.

        Returns
        -------
        list of int
            `k` durations in nanoseconds, each >= 1. Element j equals
            ``step_ns(shape_of_step_j, 1)[0]`` exactly: asking at once or one by one must not
            change a bit.

        Notes
        -----
        Scheduling overhead is not part of it: see `SchedulingOverhead`.
        """

    def pricer(self) -> Callable[[BatchShape, int], list[int]]:
        """Return what gives the same as `step_ns`, and may do so without a detour."""
        return self.step_ns

    def step_times_pricer(self) -> Callable[[BatchShape], StepTimes | None] | None:
        """Return what gives the steps of `step_ns` unwritten, where they are of that form.

        None says that no step ever is.
        """
        return None

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Return what gives the duration of a step with one more prefill, by its new tokens.

        Who looks for the longest chunk that ends in time asks of one step many times.

        Parameters
        ----------
        shape : BatchShape
            The step without it.
        context_tokens : int
            Its tokens in the cache.

        Returns
        -------
        callable
            What ``step_ns`` says of `BatchShape.with_chunk`, to the bit. A model that adds up
            kernels may add up once what the other rows take.
        """
        return lambda num_tokens: self.step_ns(shape.with_chunk(num_tokens, context_tokens))[0]

    def uneven_pricer(self) -> Callable[[UnevenSteps], list[int]]:
        """Return what gives the same as `uneven_ns`, and may do so without a detour."""
        return self.uneven_ns

    def uneven_ns(self, steps: UnevenSteps) -> list[int]:
        """Return the durations of successive steps whose contexts grow unevenly.

        Parameters
        ----------
        steps : UnevenSteps
            The steps. A model that adds contexts up need not look at `UnevenSteps.shapes`.

        Returns
        -------
        list of int
            What ``step_ns`` says of each of them, to the bit.
        """
        return [self.step_ns(shape)[0] for shape in steps.shapes()]

    def stations_ns(self, shape: BatchShape) -> list[int]:
        """Return what a step takes of each stage of a pipeline, and of the links between them.

        Parameters
        ----------
        shape : BatchShape
            The step.

        Returns
        -------
        list of int
            ``2 * num_stages - 1`` durations in nanoseconds, in the order in which the batch
            passes: stages, each >= 1, and links in turn. They add up to ``step_ns(shape)[0]``,
            which a batch takes that meets no other.
        """
        return self.step_ns(shape)

    def stations_pricer(self) -> Callable[[BatchShape], list[int]]:
        """Return what gives the same as `stations_ns`, and may do so without a detour."""
        return self.stations_ns

    def describe(self) -> dict[str, object]:
        """Return what a result must say about this model: what JSON can hold.

        Tables and pages show ``name``, ``model`` and ``hardware`` (of what the times are), and
        ``calibration`` (by what; ``"UNCALIBRATED"`` if by nothing). By default the path of the
        class, and the parameters that its constructor stored under their names.
        """
        cls = type(self)
        stored = {
            name: value
            for name in inspect.signature(cls).parameters
            if isinstance(value := getattr(self, name, None), str | int | float)
        }
        return {**stored, "name": f"{cls.__module__}:{cls.__qualname__}"}

    def outside(self, shape: BatchShape, k: int = 1) -> Mapping[str, Sequence[int]]:
        """Return which of `k` successive steps lie outside of what was measured.

        Parameters
        ----------
        shape, k
            As for `step_ns`.

        Returns
        -------
        mapping of str to sequence of int
            By feature that is out of range: the steps (0-based). Empty where all are inside, and
            always for a model that goes by no measurements.
        """
        return {}
