"""Cost models to which every number of a step counts: a wrong one is a wrong time."""

from collections.abc import Mapping, Sequence

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.step_spread import StepSpread

_PER = {
    "num_decodes": 97, "decode_context_sum_tokens": 1, "decode_context_max_tokens": 5,
    "decode_context_min_tokens": 3, "padding_tokens": 41, "padding_context_tokens": 2,
    "rows_sampled": 61, "num_running": 29, "num_waiting": 17,
    "gathered_tokens": 11, "padding_rows": 13, "draft_tokens": 19,
}  # fmt: skip
"""What one more of each adds to a step, in units of the model."""
_MEASURED_CONTEXT_TOKENS = 150
_MEASURED_CHUNK_TOKENS = 60


class EveryField(CostModel):
    """Adds up every field of a shape, each by a weight of its own.

    Parameters
    ----------
    deployment : Deployment, optional
        Of an experiment; its stages share a step evenly.
    unit_ns : int
        A step takes a thousand of these and more.
    spread : bool
        Whether steps scatter about that.
    """

    name = "every_field"

    def __init__(
        self, deployment: object = None, unit_ns: int = 10_000, spread: bool = False
    ) -> None:
        self.unit_ns = unit_ns
        if spread:
            self.step_spread = StepSpread((0.8, 1.2), (0.9, 1.0, 1.1), num_alike=3)
        self.num_stages = getattr(deployment, "pipeline_parallel_size", 1)

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` steps."""
        first = 1000 + sum([weight * getattr(shape, name) for name, weight in _PER.items()])
        first += sum([23 * new + 2 * context for new, context in shape.chunks])
        first += shape.swapped_bytes % 1009
        n = shape.num_decodes
        each = n * _PER["decode_context_sum_tokens"]
        if n:
            each += _PER["decode_context_max_tokens"] + _PER["decode_context_min_tokens"]
        return [self.unit_ns * (first + each * j) for j in range(k)]

    def stations_ns(self, shape: BatchShape) -> list[int]:
        """Return a step divided evenly, the rest on the last stage, and links by their tokens."""
        took_ns, stages = self.step_ns(shape)[0], self.num_stages
        link_ns = 3 * shape.num_new_tokens
        stations = [link_ns] * (2 * stages - 1)
        stations[::2] = [(took_ns - (stages - 1) * link_ns) // stages] * stages
        stations[-1] += took_ns - sum(stations)
        return stations

    def describe(self) -> dict[str, object]:
        """Return its name, and that nobody measured anything."""
        return {"name": self.name, "calibration": "UNCALIBRATED"}


class Measured(EveryField):
    """The same, of which some steps lie outside of what was measured."""

    def outside(self, shape: BatchShape, k: int = 1) -> Mapping[str, Sequence[int]]:
        """Return who reads more than was measured, and who computes more at once."""
        found: dict[str, Sequence[int]] = {}
        over = _MEASURED_CONTEXT_TOKENS - shape.decode_context_sum_tokens
        if shape.num_decodes and (first := max(over // shape.num_decodes + 1, 0)) < k:
            found["decode_context_tokens"] = range(first, k)
        if any(new > _MEASURED_CHUNK_TOKENS for new, _ in shape.chunks):
            found["prefill_chunk_tokens"] = range(k)
        return found
