"""What the steps of a run take, and how many of them nobody has measured the like of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.own_prices import is_own, looked_at, uneven_looked_at
from schedlab.sim.cost.shape import BatchShape


class ExtrapolationWarning(UserWarning):
    """A run took steps outside the range that was measured."""


class Pricing:
    """The cost model and the CPU overhead of a run, and the count of its steps.

    Executors and clocks of one run share it. What a policy asks about is priced, but only a step
    that was carried out counts.

    Parameters
    ----------
    cost_model : CostModel
        Prices the kernels of a step.
    overhead : SchedulingOverhead, optional
        Time the CPU adds to each step, a term of its own; none by default.

    Attributes
    ----------
    step_ns, uneven_ns, stations_ns : callable
        Those of `CostModel`, or what gives the same without a detour.
    step_times : callable or None
        What `CostModel.step_times_pricer` returns.
    never_falls : bool
        As the cost model says.
    can_be_outside : bool
        Whether any step can lie outside the measured range: where none can, none is looked at.
    extrapolated_steps : int
        Steps carried out that lie outside the measured range in any feature.
    extrapolated_by_feature : dict of str to int
        The same by the feature that is out of range.
    """

    def __init__(self, cost_model: CostModel, overhead: SchedulingOverhead | None = None) -> None:
        self.cost_model = cost_model
        self.step_ns = cost_model.pricer()
        self.step_times = cost_model.step_times_pricer()
        self.never_falls = cost_model.never_falls
        self.uneven_ns = cost_model.uneven_pricer()
        self._is_own = is_own(cost_model)
        if self._is_own:
            self.step_ns = looked_at(cost_model)
            self.uneven_ns = uneven_looked_at(cost_model)
        self.stations_ns = cost_model.stations_pricer()
        self.overhead = overhead or SchedulingOverhead()
        self._has_overhead = self.overhead != SchedulingOverhead()
        self._has_warned = False
        self.can_be_outside = type(cost_model).outside is not CostModel.outside
        self.extrapolated_steps = 0
        self.extrapolated_by_feature: dict[str, int] = {}

    def overhead_ns(self, shape: BatchShape) -> int:
        """Return the scheduling overhead of a step."""
        if not self._has_overhead:
            return 0
        return self.overhead.ns(shape.num_running, shape.num_waiting, bool(shape.chunks))

    def estimate_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Return what a step would take, or the longest of so many like it; it does not count.

        Scheduling overhead is included. Only a step without chunks is followed by others like it.
        """
        if num_steps == 1:
            return self.step_ns(shape, 1)[0] + self.overhead_ns(shape)
        if not self.never_falls:
            return max(self.step_ns(shape, num_steps)) + self.overhead_ns(shape)
        grown = num_steps - 1 if shape.num_decodes else 0
        last = shape.with_contexts(
            shape.decode_context_sum_tokens + shape.num_decodes * grown,
            shape.decode_context_max_tokens + grown,
            shape.decode_context_min_tokens + grown,
        )
        return self.step_ns(last, 1)[0] + self.overhead_ns(shape)

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Return what `estimate_ns` says of a step with one more prefill, by its new tokens."""
        price_ns = self.cost_model.chunk_pricer(shape, context_tokens)
        if self._is_own and type(self.cost_model).chunk_pricer is CostModel.chunk_pricer:
            price_ns = self._chunk_looked_at(shape, context_tokens)
        if not self._has_overhead:
            return price_ns
        overhead_ns = self.overhead_ns(shape.with_chunk(1, context_tokens))
        return lambda num_tokens: price_ns(num_tokens) + overhead_ns

    def _chunk_looked_at(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        return lambda num_tokens: self.step_ns(shape.with_chunk(num_tokens, context_tokens), 1)[0]

    def carried_out(self, shape: BatchShape, num_steps: int = 1) -> None:
        """Count `num_steps` successive steps of the same batch; warn of the first outside."""
        if not self.can_be_outside:
            return
        outside = self.cost_model.outside(shape, num_steps)
        if not outside:
            return
        self._count(outside, 1)
        if not self._has_warned:
            self._has_warned = True
            described = self.cost_model.describe()
            warnings.warn(
                f"cost model {described.get('profile', self.cost_model.name)}: steps outside the "
                f"measured range ({', '.join(self.extrapolated_by_feature)}); their times are "
                "extrapolated and counted as extrapolated_steps",
                ExtrapolationWarning,
                stacklevel=3,
            )

    def meet(self, shape: BatchShape, among: BatchShape) -> None:
        """Count anew a step that was counted, now that it is known who else shares its experts.

        Parameters
        ----------
        shape : BatchShape
            As it was counted, of one engine on its own.
        among : BatchShape
            As it is among the others.
        """
        self._count(self.cost_model.outside(shape), -1)
        self.carried_out(among)

    def cut(self, shape: BatchShape, num_steps: int, kept: int) -> None:
        """Count only the first `kept` of `num_steps` steps that were counted before."""
        if not self.can_be_outside:
            return
        self._count(self.cost_model.outside(shape, num_steps), -1)
        if kept:
            self._count(self.cost_model.outside(shape, kept), 1)

    def take_back(self, shape: BatchShape) -> None:
        """Count a step as not carried out that was counted before."""
        if self.can_be_outside:
            self._count(self.cost_model.outside(shape), -1)

    def _count(self, outside: Mapping[str, Sequence[int]], sign: int) -> None:
        self.extrapolated_steps += sign * len(set().union(*outside.values()))
        for feature, steps in outside.items():
            counts = self.extrapolated_by_feature
            counts[feature] = counts.get(feature, 0) + sign * len(steps)
