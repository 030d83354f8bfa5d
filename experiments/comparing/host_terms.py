"""Host-side terms of a step, fitted on one recorded run to predict another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from schedlab.experiments.comparing.validate import Validation, validate
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec, set_key
from schedlab.sim.errors import SpecError

PER_RUNNING_S = 4e-6
"""Not fitted: what the inference-sim project (BLIS) publishes for a running request and step."""

PREFILL_STEP_GRID_S = tuple(halves * 5e-4 for halves in range(13))
PROFILING_GRID_S = tuple(tenths * 1e-4 for tenths in range(9))

Progress = Callable[[int, int, str], None]
"""Called with the runs done, the runs in all, and what comes next."""


@dataclass(frozen=True)
class HostTerms:
    """What kernel timings leave out, and what timing them added.

    Attributes
    ----------
    per_prefill_step_s : float
        Seconds more of a step that computes prompt tokens.
    profiling_overhead_s : float
        Seconds that a step takes less than the sum of its kernels timed one by one.
    per_running_s : float
        Seconds per running request and step.
    """

    per_prefill_step_s: float
    profiling_overhead_s: float
    per_running_s: float = PER_RUNNING_S

    def apply(self, spec: ExperimentSpec) -> ExperimentSpec:
        """Return the experiment with these terms in place of its own."""
        data = spec.to_data()
        set_key(data, "cost_model.profiling_overhead_s", self.profiling_overhead_s)
        overhead = {
            "per_running_s": self.per_running_s,
            "per_prefill_step_s": self.per_prefill_step_s,
        }
        set_key(data, "engine.scheduling_overhead", overhead)
        return make_spec(data)

    def __str__(self) -> str:
        return (
            f"{self.per_prefill_step_s * 1e3:g} ms more a step with prefills, "
            f"{self.profiling_overhead_s * 1e3:g} ms less a step than its kernels one by one, "
            f"{self.per_running_s * 1e6:g} us a running request"
        )


def fit(spec: ExperimentSpec, progress: Progress | None = None) -> HostTerms:
    """Choose the terms with which a recorded run is predicted best.

    Parameters
    ----------
    spec : ExperimentSpec
        One point with a recording.
    progress : callable, optional
        Told before each of the runs.

    Returns
    -------
    HostTerms
        The grid point with the least root mean square error over the fifteen latencies; of equals
        the first, so the smallest terms.

    Raises
    ------
    SpecError
        As for `validate`.
    """
    candidates = list(_candidates())
    best, least = candidates[0], float("inf")
    for i, terms in enumerate(candidates):
        if progress is not None:
            progress(i, len(candidates), f"fitting on {spec.name}")
        error = validate(terms.apply(spec)).root_mean_square_error
        if error < least:
            best, least = terms, error
    return best


def validate_elsewhere(
    spec: ExperimentSpec, fitted_on: ExperimentSpec, progress: Progress | None = None
) -> tuple[HostTerms, Validation]:
    """Fit the terms on one recorded run and predict another with them.

    Raises
    ------
    SpecError
        If both are the same recording: a fit is no prediction of what it was fitted to.
    """
    recordings = [s.validation.measured for s in (spec, fitted_on) if s.validation is not None]
    if len(recordings) == 2 and Path(recordings[0]).resolve() == Path(recordings[1]).resolve():
        raise SpecError("validation: fitted on the very run to be predicted; choose another one")
    terms = fit(fitted_on, progress)
    return terms, validate(terms.apply(spec))


def _candidates() -> Iterator[HostTerms]:
    for prefill_s, profiling_s in product(PREFILL_STEP_GRID_S, PROFILING_GRID_S):
        yield HostTerms(prefill_s, profiling_s)
