"""What the CPU spends on scheduling a step: its own term, never part of kernel time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from schedlab.sim.errors import SpecError

_LARGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class SchedulingOverhead:
    """CPU time per step, linear in the running and waiting requests.

    Parameters
    ----------
    base_s : float
        Seconds per step whatever the load.
    per_running_s : float
        Seconds per request in the running list.
    per_waiting_s : float
        Seconds per request in the waiting queue; 0 where the scheduler only looks at its head.
    per_prefill_step_s : float
        Seconds more of a step that computes prompt tokens: building its metadata, and launching
        kernels one by one where decodes replay a CUDA graph.
    first_step_s : float
        Seconds more of the first step of a run, of an engine that was not warmed up.
    per_queued_step_s : float
        Seconds more of a step while anybody waits: whoever is first is tried, each time.

    Raises
    ------
    SpecError
        If a term is negative or not finite.

    Notes
    -----
    ``overhead = base_s + per_running_s * num_running + per_waiting_s * num_waiting
    + per_prefill_step_s (if the step computes prompt tokens) + per_queued_step_s (if num_waiting)``

    The default is zero: no overhead is assumed unless a profile or the user states one. Published
    sizes, to choose from: vLLM V1 0.1-0.3 ms per step and 4-10 us per running request (the
    inference-sim project fits 4 us a request and 126 us a step); vLLM V0 2-10 ms per step (the vLLM
    0.6.0 blog post gives 29 % of the time of Llama-3-8B on one H100 to scheduling and input
    preparation). V1 only looks at the head of the queue, so per_waiting_s is about 0; a policy that
    scores every waiting request pays for each.

    Examples
    --------
    >>> SchedulingOverhead(base_s=126e-6, per_running_s=4e-6).ns(num_running=10, num_waiting=500)
    166000
    """

    base_s: float = 0.0
    per_running_s: float = 0.0
    per_waiting_s: float = 0.0
    per_prefill_step_s: float = 0.0
    first_step_s: float = 0.0
    per_queued_step_s: float = 0.0

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if not (math.isfinite(value) and 0 <= value <= _LARGEST_S):
                raise SpecError(
                    f"overhead: {key} must be finite and >= 0 (and at most {_LARGEST_S:g}), "
                    f"got {value!r}"
                )

    def ns(self, num_running: int, num_waiting: int, has_prefills: bool = False) -> int:
        """Return the overhead of one step in nanoseconds, rounded to the nearest."""
        seconds = self.base_s + self.per_running_s * num_running + self.per_waiting_s * num_waiting
        if has_prefills:
            seconds += self.per_prefill_step_s
        if num_waiting:
            seconds += self.per_queued_step_s
        return int(seconds * 1e9 + 0.5)
