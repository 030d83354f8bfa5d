"""Replay a recorded run of a real engine, and say how far the prediction is from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from schedlab.experiments.comparing.latency_errors import LatencyErrors
from schedlab.experiments.comparing.vllm_recording import Timeline, read_recording
from schedlab.experiments.results.tables import notes, warnings
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.errors import SpecError
from schedlab.sim.record.columns import FINISHED
from schedlab.sim.result import RunResult


@dataclass(frozen=True)
class Validation(LatencyErrors):
    """Measured and predicted latencies of the same requests.

    Attributes
    ----------
    measured_ms, predicted_ms : dict of str to float
        The fifteen latencies of `Timeline.latencies_ms`, or those of them that took any time.
    counts : dict of str to int
        What else the replay did: preemptions, tokens it had to recompute after them, tokens of new
        requests found in the prefix cache, steps.
    notes : list of str
        The cost model and what qualifies the numbers.
    cpu_s : float
        Processor time of the run, files read included.
    """

    counts: dict[str, int]
    notes: list[str]
    cpu_s: float

    @property
    def mean_absolute_error(self) -> float:
        """Mean of the absolute relative errors, as a fraction."""
        return float(np.mean(np.abs(list(self.errors.values()))))

    @property
    def root_mean_square_error(self) -> float:
        """Root of the mean squared relative error, as a fraction: large errors weigh more."""
        return float(np.sqrt(np.mean(np.square(list(self.errors.values())))))

    @property
    def worst(self) -> tuple[str, float]:
        """Name and error of the latency that is farthest off."""
        return max(self.errors.items(), key=lambda item: abs(item[1]))

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table a validation prints: metric, measured, predicted, error."""
        return [
            (name, f"{measured:,.1f}", f"{self.predicted_ms[name]:,.1f}", f"{error:+.2%}")
            for (name, measured), error in zip(
                self.measured_ms.items(), self.errors.values(), strict=True
            )
        ]

    def lines(self) -> list[str]:
        """Return what is printed under it."""
        name, error = self.worst
        return [
            f"mean absolute error {self.mean_absolute_error:.2%}, worst {error:+.2%} ({name}); "
            f"{self.cpu_s:.2f} s of CPU",
            "; ".join(f"{key.replace('_', ' ')} {count:,}" for key, count in self.counts.items()),
            *self.notes,
        ]

    def to_data(self) -> dict[str, object]:
        """Return all of it as plain data."""
        return {
            "latencies_ms": self.latencies_ms(),
            "mean_absolute_error": self.mean_absolute_error,
            "worst": list(self.worst),
            "counts": self.counts,
            "notes": self.notes,
            "cpu_s": self.cpu_s,
        }


def validate(spec: ExperimentSpec) -> Validation:
    """Predict a recorded run and compare.

    Parameters
    ----------
    spec : ExperimentSpec
        One point whose workload is what was sent to the real engine; `validation.measured` is what
        it recorded.

    Raises
    ------
    SpecError
        If there is no recording, it is of other requests, or not all of them finish in the replay.
    """
    measured = recording_of(spec)
    begun_s = time.process_time()
    result = run(spec)
    cpu_s = time.process_time() - begun_s
    predicted = timeline(result)
    check_same(measured, predicted, spec)
    requests = result.requests
    preemptions = result.log.preemptions() if result.log is not None else {}
    cost_model = result.provenance["cost_model"]
    assert isinstance(cost_model, dict)
    recorded_ms = measured.latencies_ms()
    measured_ms = {name: ms for name, ms in recorded_ms.items() if ms}
    if not measured_ms:
        assert spec.validation is not None
        raise SpecError(f"{spec.validation.measured}: every recorded latency is 0")
    predicted_ms = predicted.latencies_ms()
    return Validation(
        measured_ms=measured_ms,
        predicted_ms={name: predicted_ms[name] for name in measured_ms},
        counts={
            "preemptions": int(requests["num_preemptions"].sum()),
            "recomputed_tokens": int(preemptions["resumed_tokens"].sum()),
            "prefix_hit_tokens": int(requests["prefix_hit_tokens"].sum()),
            "steps": int(str(result.provenance["num_steps"])),
        },
        notes=[
            *notes([cost_model], warnings(result)),
            *_inside(result.provenance),
            *_left_out(recorded_ms),
        ],
        cpu_s=cpu_s,
    )


def _inside(provenance: Mapping[str, object]) -> list[str]:
    """Say that no step was extrapolated, where there is a range to stay in."""
    cost_model = provenance["cost_model"]
    is_known = isinstance(cost_model, dict) and "validity" in cost_model
    if is_known and not provenance["extrapolated_steps"]:
        return ["every step inside the measured range"]
    return []


def _left_out(recorded_ms: Mapping[str, float]) -> list[str]:
    """Say which latencies a recording cannot tell."""
    left = [name for name, ms in recorded_ms.items() if not ms]
    lines = []
    if "TPOT Mean" in left:
        lines.append("answers were not streamed: no time between tokens was recorded, so no TPOT")
        left = [name for name in left if not name.startswith("TPOT ")]
    return [*lines, f"recorded as 0 and left out: {', '.join(left)}"] if left else lines


def recording_of(spec: ExperimentSpec) -> Timeline:
    """Return the recorded run that an experiment is to be held against.

    Raises
    ------
    SpecError
        If there is none, it cannot be read, or the experiment is not simulated.
    """
    if spec.validation is None:
        raise SpecError("validation: is required here, e.g. validation: {measured: requests.jsonl}")
    if spec.backend != "sim":
        raise SpecError("backend: validation predicts with the simulation")
    return read_recording(Path(spec.validation.measured))


def timeline(result: RunResult) -> Timeline:
    """Return when the tokens of a simulated run came.

    Raises
    ------
    SpecError
        If a request was rejected or did not finish.
    """
    requests = result.requests
    lost = int(np.count_nonzero(requests["status"] != FINISHED))
    if lost:
        raise SpecError(f"{lost} requests were rejected, cut off or not finished in the replay")

    def seconds(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.asarray(requests[name], dtype=np.float64) / 1e9

    return Timeline(
        prompt_tokens=np.asarray(requests["prompt_tokens"], dtype=np.int64),
        output_tokens=np.asarray(requests["output_tokens"], dtype=np.int64),
        queued_s=seconds("queued_ns"),
        first_token_s=seconds("first_token_ns"),
        last_token_s=seconds("last_token_ns"),
    )


def check_same(measured: Timeline, predicted: Timeline, spec: ExperimentSpec) -> None:
    """Make sure that a recording is of the workload that was replayed.

    Raises
    ------
    SpecError
        If the requests differ in number or lengths.
    """
    assert spec.validation is not None
    path = spec.validation.measured
    if len(measured.queued_s) != len(predicted.queued_s):
        raise SpecError(
            f"{path}: {len(measured.queued_s)} requests, but the workload has "
            f"{len(predicted.queued_s)}"
        )
    for name in ("prompt_tokens", "output_tokens"):
        differs = np.flatnonzero(getattr(measured, name) != getattr(predicted, name))
        if len(differs):
            i = int(differs[0])
            raise SpecError(
                f"{path}: request {i} has {getattr(measured, name)[i]} {name}, the workload says "
                f"{getattr(predicted, name)[i]}: is it a recording of this workload?"
            )
