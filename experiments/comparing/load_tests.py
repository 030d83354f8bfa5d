"""Predict load tests that are known by rates and quantiles, and say how far off that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments.comparing.latency_errors import LatencyErrors
from schedlab.experiments.comparing.validate import timeline
from schedlab.experiments.results.tables import notes, warnings
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object
from schedlab.sim.hardware.gpus import canonical_gpu
from schedlab.sim.hardware.models import model
from schedlab.sim.metrics.latencies import Latencies
from schedlab.traces.load_tests import LoadTest, Quantiles, load_test, read_load_tests

Progress = Callable[[int, int, str], None]

_STATISTICS = ("mean", "median", "P90", "P99")
_PROBABILITIES = {"median": 0.5, "P90": 0.9, "P99": 0.99}
_ENGINE = "vllm-0.19"


@dataclass(frozen=True)
class StageErrors(LatencyErrors):
    """Measured and predicted latencies of one stage of a load test.

    Attributes
    ----------
    run : str
        Id of the load test.
    model : str
        Its model.
    stage : int
        Its number, from 0.
    rate : float
        Requests a second.
    measured_ms, predicted_ms : dict of str to float
        Mean, median, P90 and P99 of ``TTFT`` and ``E2E``, by ``"TTFT mean"`` and so on.
    """

    run: str
    model: str
    stage: int
    rate: float


@dataclass(frozen=True)
class LoadTestValidation:
    """How well some load tests are predicted.

    Attributes
    ----------
    stages : tuple of StageErrors
        All stages of all tests.
    notes : tuple of str
        Cost models, and what qualifies the numbers.
    cpu_s : float
        Processor time of the runs.
    """

    stages: tuple[StageErrors, ...]
    notes: tuple[str, ...]
    cpu_s: float

    def mean_absolute_errors(self) -> dict[str, float]:
        """Return the mean over stages of the absolute relative error of each latency."""
        return {
            key: float(np.mean([abs(stage.errors[key]) for stage in self.stages]))
            for key in self.stages[0].measured_ms
        }

    def header(self) -> tuple[str, ...]:
        """Return the names of the columns of `rows`."""
        return ("load test", "req/s", *self.stages[0].measured_ms)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table a validation prints: one line a stage, measured ms and error."""
        found = [
            (
                stage.run,
                f"{stage.rate:.3g}",
                *(
                    f"{ms:,.{1 if ms < 1000 else 0}f} {stage.errors[key]:+.1%}"
                    for key, ms in stage.measured_ms.items()
                ),
            )
            for stage in self.stages
        ]
        means = self.mean_absolute_errors()
        return [*found, ("mean absolute error", "", *(f"{error:.1%}" for error in means.values()))]

    def lines(self) -> list[str]:
        """Return what is printed under it."""
        return [f"{len(self.stages)} stages, {self.cpu_s:.1f} s of CPU", *self.notes]

    def to_data(self) -> dict[str, object]:
        """Return all of it as plain data."""
        return {
            "stages": [
                {
                    "run": stage.run,
                    "model": stage.model,
                    "stage": stage.stage,
                    "rate": stage.rate,
                    "latencies_ms": stage.latencies_ms(),
                }
                for stage in self.stages
            ],
            "mean_absolute_error": self.mean_absolute_errors(),
            "notes": list(self.notes),
            "cpu_s": self.cpu_s,
        }


def validate_load_tests(
    specs: Sequence[ExperimentSpec], progress: Progress | None = None
) -> LoadTestValidation:
    """Predict load tests and compare.

    Parameters
    ----------
    specs : sequence of ExperimentSpec
        One point each, with `workload.load_test`.
    progress : callable, optional
        Told before each of the runs.

    Raises
    ------
    SpecError
        If one has no load test, or not all of its requests finish in the simulation.
    """
    begun_s = time.process_time()
    stages: list[StageErrors] = []
    told: list[str] = []
    for i, spec in enumerate(specs):
        if progress is not None:
            progress(i, len(specs), spec.name)
        found, said = _predict(spec)
        stages += found
        told += said
    return LoadTestValidation(
        tuple(stages), tuple(dict.fromkeys(told)), time.process_time() - begun_s
    )


def _predict(spec: ExperimentSpec) -> tuple[list[StageErrors], list[str]]:
    """Run the requests of one load test, all of its stages one after another."""
    source = spec.workload.load_test
    if source is None:
        raise SpecError(f"{spec.name}: workload.load_test is required here")
    if spec.backend != "sim":
        raise SpecError("backend: validation predicts with the simulation")
    test = load_test(source.file, source.run)
    result = run(spec)
    timeline(result)  # refuses a run that not all requests finish in
    seen = Latencies(result.requests)
    stage_of = result.requests["application"]
    stages = []
    for i, stage in enumerate(test.stages):
        rows = stage_of == f"stage {i}"
        predicted = _statistics("TTFT", seen.ttft[rows]) | _statistics("E2E", seen.e2el[rows])
        measured = _measured("TTFT", stage.ttft_s) | _measured("E2E", stage.e2e_s)
        stages.append(StageErrors(measured, predicted, test.id, test.model, i, stage.rate))
    cost_model = result.provenance["cost_model"]
    assert isinstance(cost_model, dict)
    between = result.provenance.get("frontend")
    said = "none: the times are the engine's"
    if isinstance(between, dict):
        said = str(between["source"])
    return stages, [*notes([cost_model], warnings(result)), f"front end: {said}"]


def _statistics(name: str, ms: np.ndarray) -> dict[str, float]:
    quantiles = np.percentile(ms, [100 * p for p in _PROBABILITIES.values()])
    return dict(zip(_names(name), [float(ms.mean()), *map(float, quantiles)], strict=True))


def _measured(name: str, seconds: Quantiles) -> dict[str, float]:
    quantiles = seconds.at(list(_PROBABILITIES.values()))
    values = [seconds.mean, *map(float, quantiles)]
    return {key: 1e3 * value for key, value in zip(_names(name), values, strict=True)}


def _names(name: str) -> list[str]:
    return [f"{name} {statistic}" for statistic in _STATISTICS]


def experiments_of(
    path: Path,
    overrides: Sequence[str] = (),
    runs: Iterable[str] = (),
    profiles: Path | None = None,
) -> list[ExperimentSpec]:
    """Return an experiment for each load test of a file.

    Parameters
    ----------
    path : Path
        The file.
    overrides : sequence of str
        Changes of all of them, as ``dotted.key=value``.
    runs : iterable of str
        Ids of the tests to take; all if empty.
    profiles : Path, optional
        Folder that is searched for a profile of the model, GPU and parallelism of each test, for
        those that are not given a `cost_model`.

    Raises
    ------
    SpecError, TraceError
        If the file is wrong, there is no such test, no profile fits, or a change is wrong.
    """
    tests = read_load_tests(path)
    chosen = [load_test(path, run) for run in runs] or list(tests.values())
    given = {text.partition("=")[0].partition(".")[0] for text in overrides}
    found = []
    for test in chosen:
        data: dict[str, Any] = {
            "name": test.id,
            "model": test.model,
            "engine": {"profile": _ENGINE, **test.engine},
            "workload": {"load_test": {"file": str(path.resolve()), "run": test.id}},
        }
        if test.hardware is not None:
            data["hardware"] = test.hardware
        elif "hardware" not in given:
            raise SpecError(f"{path}: {test.id} does not say on which GPU; add hardware=h100")
        spec = make_spec(data, overrides)
        if "cost_model" not in given:
            spec = make_spec(
                {**data, "cost_model": {"profile": str(_profile(spec, test, profiles))}}, overrides
            )
        found.append(spec)
    return found


def _profile(spec: ExperimentSpec, test: LoadTest, folder: Path | None) -> Path:
    """Return the profile of what a load test ran on."""
    name, engine = model(spec.model).name, spec.engine
    wanted = {
        "model": name,
        "hardware": canonical_gpu(spec.hardware),
        "tensor_parallel_size": engine.tensor_parallel_size,
        "data_parallel_size": engine.data_parallel_size,
        "dtype": engine.dtype,
    }
    spread = bool(engine.enable_expert_parallel)  # off unless it is said, as in vLLM
    fitting = []
    for file in sorted(folder.rglob("meta.json")) if folder is not None else []:
        meta = {"data_parallel_size": 1, **read_json_object(file)}
        same = all(meta.get(key) == value for key, value in wanted.items())
        if same and bool(meta.get("expert_parallel")) == spread:
            fitting.append(file.parent)
    if len(fitting) > 1:
        names = ", ".join(str(one) for one in fitting)
        raise SpecError(f"{test.id}: several profiles fit ({names}); add cost_model=FOLDER")
    if not fitting:
        what = (
            f"{name} on {wanted['hardware']}, tensor parallel size {wanted['tensor_parallel_size']}"
        )
        tp = engine.tensor_parallel_size
        command = f"schedlab profile import aiconfigurator {test.model} --hardware {spec.hardware}"
        command += f" --tp {tp}" if tp > 1 else ""
        command += " --expert-parallel" if spread else ""
        raise SpecError(
            f"{test.id}: no profile of {what} in {folder}; make one, e.g. with {command} -o "
            f"{folder}/{name}-tp{tp}, or add cost_model=roofline"
        )
    return fitting[0]


def is_load_test(path: Path) -> bool:
    """Say whether a file holds load tests, and not an experiment.

    Parameters
    ----------
    path : Path
        The first argument of `schedlab validate`.
    """
    from schedlab.sim.yaml_lines import read_yaml

    if path.suffix != ".json" or not path.is_file():
        return False
    data = read_yaml(path).data
    return isinstance(data, list) or "workload" not in data
