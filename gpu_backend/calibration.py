"""Measure steps on a device: randomised, interleaved rounds, written down as they come."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol, TextIO

import numpy as np

from schedlab.gpu_backend.calibration_design import BatchPoint, design_hash, sentinels
from schedlab.gpu_backend.calibration_fit import MeasuredBatch
from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError
from schedlab.sim.files import alone, parse_json, read_text, write_text
from schedlab.sim.rng import stream

SENTINEL_EVERY = 25
DRIFT_BAR = 0.03

Progress = Callable[[int, int, str], None]
"""Called with: batches measured, batches in all, what comes next."""


class BatchTimer(Protocol):
    """Times batches on a device, whosever engine runs there."""

    def time(
        self, point: BatchPoint, repetitions: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return host and device seconds of each repetition, after warm-ups of a new point."""


class Visit(NamedTuple):
    """One visit to one point: host and device time of each repetition, seconds."""

    round: int
    point: int
    """Index into the points; sentinels count from -1 downwards."""
    host_s: tuple[float, ...]
    device_s: tuple[float, ...]


class Measurement(NamedTuple):
    """All readings of a calibration."""

    readings: list[Visit]
    drift: list[float]
    """By round: the largest deviation of a sentinel from its median over all rounds."""

    def median_s(self, point: int) -> float:
        """Return the median host time of a point over all rounds and repetitions."""
        return median(s for r in self.readings if r.point == point for s in r.host_s)

    def spread(self, point: int) -> float:
        """Return the interquartile range of a point's host times relative to the median."""
        values = [s for r in self.readings if r.point == point for s in r.host_s]
        low, high = np.quantile(values, [0.25, 0.75])
        return float((high - low) / median(values))


def measure(
    timer: BatchTimer,
    config: EngineConfig,
    points: Sequence[BatchPoint],
    log: Path,
    *,
    about: str,
    num_rounds: int = 5,
    repetitions: int = 2,
    seed: int = 0,
    max_s: float = math.inf,
    on_round: Callable[[Measurement], object] | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure every point in every round, in random order, with sentinels in between.

    Parameters
    ----------
    timer : BatchTimer
        Runs them.
    config : EngineConfig
        The limits that it was opened with.
    points : sequence of Point
        What to measure; held-out points among them.
    log : Path
        Raw readings, a JSON line each, appended as they come. Readings of the same calibration
        found there are not taken again, so an interrupted one goes on where it was.
    about : str
        What is measured (device, model, format); part of the calibration's identity.
    num_rounds, repetitions : int
        Every point is visited once a round and timed so many times a visit.
    seed : int
        Of the order.
    max_s : float
        No round but the first begins that would likely end later than this.
    on_round : callable, optional
        Called after each round with what has been measured.
    progress : callable, optional
        Told how far it is.

    Returns
    -------
    Measurement
        Of all rounds that are complete.

    Raises
    ------
    SpecError
        If `log` holds readings of another calibration, or another process appends to it.
    """
    identity = design_hash(points, config, about)
    watch = sentinels(config)
    begun_s, longest_s, complete = time.monotonic(), 0.0, 0
    with _resumed(log, identity) as (file, readings):
        done = {(r.round, r.point) for r in readings if r.point >= 0}
        total, finished = num_rounds * len(points), len(done)

        def record(reading: Visit) -> None:
            readings.append(reading)
            file.write(json.dumps(reading._asdict()) + "\n")
            file.flush()

        for number in range(num_rounds):
            round_begun_s = time.monotonic()
            if number and round_begun_s + longest_s > begun_s + max_s:
                break
            order = stream(seed, f"round/{number}").permutation(len(points)).tolist()
            todo = [i for i in order if (number, i) not in done]
            for position, i in enumerate(todo):
                if position % SENTINEL_EVERY == 0:
                    for k, sentinel in enumerate(watch):
                        record(Visit(number, -1 - k, *timer.time(sentinel, repetitions)))
                if progress is not None:
                    progress(finished, total, f"round {number + 1}/{num_rounds}, {points[i].kind}")
                record(Visit(number, i, *timer.time(points[i], repetitions)))
                finished += 1
            complete = number + 1
            if todo:
                longest_s = max(longest_s, time.monotonic() - round_begun_s)
                if on_round is not None:
                    on_round(Measurement(readings, _drift(readings, len(watch), complete)))
    if progress is not None:
        progress(total, total, "done")
    of_complete = [r for r in readings if r.round < complete]
    return Measurement(of_complete, _drift(of_complete, len(watch), complete))


def measured(measurement: Measurement, points: Sequence[BatchPoint]) -> list[MeasuredBatch]:
    """Return each point with its median time."""
    return [MeasuredBatch(p.shape, measurement.median_s(i)) for i, p in enumerate(points)]


@contextmanager
def _resumed(log: Path, identity: str) -> Iterator[tuple[TextIO, list[Visit]]]:
    """Give a log to append to, and what it holds, to one calibration at a time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with alone(log.parent, "calibration"):
        readings = _resume(log, identity)
        with log.open("a", encoding="utf-8") as file:
            yield file, readings


def _resume(log: Path, identity: str) -> list[Visit]:
    """Read what an interrupted calibration left, or begin a log."""
    lines = read_text(log).splitlines(keepends=True) if log.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if not whole:  # none was there, or a machine that stopped lost even its first line
        write_text(log, json.dumps({"calibration": identity}) + "\n")
        return []
    header = parse_json(whole[0], f"{log}:1")
    if not isinstance(header, dict) or header.get("calibration") != identity:
        raise SpecError(
            f"{log} holds readings of another calibration (other device, model, limits, "
            "kernels, threads or design); choose another folder, or delete that file to begin anew"
        )
    if len(whole) < len(lines):  # the interruption came in the middle of a line
        write_text(log, "".join(whole))
    return [_reading(line, f"{log}:{number}") for number, line in enumerate(whole[1:], start=2)]


def _reading(line: str, source: str) -> Visit:
    row = parse_json(line, source)
    try:
        return Visit(row["round"], row["point"], tuple(row["host_s"]), tuple(row["device_s"]))
    except (KeyError, TypeError):
        raise SpecError(
            f"{source}: no reading of a calibration; delete that line, and it is taken again"
        ) from None


def _drift(readings: Sequence[Visit], num_sentinels: int, num_rounds: int) -> list[float]:
    drift = []
    usual = {
        k: median(s for r in readings if r.point == -1 - k for s in r.host_s)
        for k in range(num_sentinels)
    }
    for number in range(num_rounds):
        worst = 0.0
        for k, typical in usual.items():
            here = [
                s for r in readings if r.point == -1 - k and r.round == number for s in r.host_s
            ]
            if here:
                worst = max(worst, abs(median(here) / typical - 1))
        drift.append(worst)
    return drift
