"""Measure a front end by comparison: what load tests took longer than the engine alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from schedlab.experiments.comparing.load_tests import (
    LoadTestValidation,
    Progress,
    StageErrors,
    validate_load_tests,
)
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.frontend import FrontendKeys
from schedlab.sim.drive.frontend import Frontend
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.latencies import Latencies
from schedlab.sim.record.columns import pairs, whole_numbers
from schedlab.traces.load_tests import LoadTest, load_test

_MEDIAN = 0.5


@dataclass(frozen=True)
class Gap:
    """How much longer the median first token of a stage took than without a front end.

    Attributes
    ----------
    gap_s, measured_s : float
        Measured median TTFT less that of the engine, and the measured one.
    tokens : float
        Median number of tokens that came out of the engine together with a first one.
    """

    gap_s: float
    measured_s: float
    tokens: float


@dataclass(frozen=True)
class FrontendMeasurement:
    """A front end, and how well it predicts load tests that it was not measured on.

    Attributes
    ----------
    frontend : Frontend
        Measured on all load tests.
    held_out : LoadTestValidation
        Each load test predicted with a front end measured on those of the other models.
    without : dict of str to Frontend
        By model: the front end measured on the other models.
    """

    frontend: Frontend
    held_out: LoadTestValidation
    without: dict[str, Frontend]

    def lines(self) -> list[str]:
        """Return what is printed of it."""
        shown = {"all": self.frontend}
        shown |= {f"all but {name}": one for name, one in self.without.items()}
        return [
            f"measured on {name}: {one.latency_s * 1e3:.2f} ms a request and "
            f"{one.output_token_s * 1e6:.1f} us a generated token"
            for name, one in shown.items()
        ]

    def to_data(self) -> dict[str, object]:
        """Return how it was measured, for the file of the front end."""
        return {
            "by": "median TTFT of load tests, less that of the simulated engine alone",
            "on": sorted({stage.run for stage in self.held_out.stages}),
            "held_out": "each model predicted with the figures of the others",
            "mean_absolute_error": self.held_out.mean_absolute_errors(),
            "without": {
                name: {"latency_s": one.latency_s, "output_token_s": one.output_token_s}
                for name, one in self.without.items()
            },
        }


def measure_frontend(
    specs: Sequence[ExperimentSpec], source: str, progress: Progress | None = None
) -> FrontendMeasurement:
    """Measure the front end of the server that some load tests are of.

    Parameters
    ----------
    specs : sequence of ExperimentSpec
        One point each, with `workload.load_test`, of two models at least.
    source : str
        What to say of where the figures come from.
    progress : callable, optional
        Told before each of the runs.

    Raises
    ------
    SpecError
        If there is one model only, so that nothing is left to hold the figures against.

    Notes
    -----
    Least squares, both figures >= 0, over all stages: ``measured TTFT - engine's TTFT = latency_s
    + output_token_s * tokens of the step`` (medians), each stage weighed by the inverse of its
    measured TTFT, since it is relative errors that count. The engine's TTFT is the predicted one
    times how much longer than predicted the rest of an answer took: nearly all of that is steps,
    so an error of the cost model is not taken for a front end.
    """
    tests = [_test_of(spec) for spec in specs]
    models = list(dict.fromkeys(test.model for test in tests))
    if len(models) < 2:
        raise SpecError(
            "measuring a front end needs load tests of two models: what is measured on one is "
            "held against the other"
        )
    gaps: dict[str, list[Gap]] = {name: [] for name in models}
    told = _counted(progress, 2 * len(specs))
    for spec, test in zip(specs, tests, strict=True):
        told(f"{spec.name} without a front end")
        gaps[test.model] += _gaps(spec, test)
    without = {
        name: _fit([gap for other in models if other != name for gap in gaps[other]], source)
        for name in models
    }
    stages: list[StageErrors] = []
    notes: list[str] = []
    cpu_s = 0.0
    for spec, test in zip(specs, tests, strict=True):
        told(f"{spec.name} with the front end of the others")
        found = validate_load_tests([_with(spec, without[test.model])])
        stages += found.stages
        notes += found.notes
        cpu_s += found.cpu_s
    held_out = LoadTestValidation(tuple(stages), tuple(dict.fromkeys(notes)), cpu_s)
    everything = _fit([gap for name in models for gap in gaps[name]], source)
    return FrontendMeasurement(everything, held_out, without)


def _counted(progress: Progress | None, total: int) -> Callable[[str], None]:
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, total, what)
        done += 1

    return tell


def _test_of(spec: ExperimentSpec) -> LoadTest:
    source = spec.workload.load_test
    if source is None:
        raise SpecError(f"{spec.name}: workload.load_test is required here")
    return load_test(source.file, source.run)


def _with(spec: ExperimentSpec, frontend: Frontend | None) -> ExperimentSpec:
    keys = None
    if frontend is not None:
        keys = FrontendKeys(latency_s=frontend.latency_s, output_token_s=frontend.output_token_s)
    return spec.model_copy(update={"frontend": keys})


def _gaps(spec: ExperimentSpec, test: LoadTest) -> list[Gap]:
    result = run(_with(spec, None))
    requests = result.requests
    seen = Latencies(requests)
    ends_ns, tokens = pairs(result.log.token_counts())
    step = np.searchsorted(ends_ns, whole_numbers(requests, "first_token_ns"))
    found = []
    for i, stage in enumerate(test.stages):
        rows = requests["application"] == f"stage {i}"
        measured_s = float(stage.ttft_s.at([_MEDIAN])[0])
        answer_s = float(stage.e2e_s.at([_MEDIAN])[0]) - measured_s
        ttft_s, e2e_s = (float(np.median(ms[rows])) / 1e3 for ms in (seen.ttft, seen.e2el))
        engine_s = ttft_s * answer_s / (e2e_s - ttft_s)
        found.append(
            Gap(
                gap_s=measured_s - engine_s,
                measured_s=measured_s,
                tokens=float(np.median(tokens[step[rows]])),
            )
        )
    return found


def _fit(gaps: Sequence[Gap], source: str) -> Frontend:
    from scipy.optimize import nnls

    weights = np.array([1 / gap.measured_s for gap in gaps])
    terms = np.array([[1.0, gap.tokens] for gap in gaps]) * weights[:, None]
    wanted = np.array([gap.gap_s for gap in gaps]) * weights
    (latency_s, output_token_s), _ = nnls(terms, wanted)
    return Frontend(
        latency_s=float(f"{latency_s:.3g}"),
        output_token_s=float(f"{output_token_s:.3g}"),
        source=source,
    )
