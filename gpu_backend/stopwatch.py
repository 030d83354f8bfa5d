"""What the time of a step is read from: time as it passes, or CPU time at a reference speed."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object, write_texts

SHARE = 0.2
"""CPU time that sentinels may take, relative to what is measured between them."""
_WINDOW = 5
_FIRST_TIMINGS = 25
_FILE = "reference_speed.json"
_READINGS = 10
_COARSE_NS = 500_000


class Stopwatch(Protocol):
    """Reads the time for a clock or a calibration."""

    def __call__(self) -> int:
        """Return nanoseconds since some instant."""

    def between_steps(self) -> None:
        """Learn that nothing is being measured: what passed since the last reading may be lost."""

    def describe(self) -> dict[str, object]:
        """Return what a result must say of it."""


def require_cpu(asked: str, device: str, others: Sequence[str]) -> None:
    """Refuse CPU time as the time of a step on a device that computes beside the CPU.

    Raises
    ------
    SpecError
        If `device` is not the CPU; says what was `asked`, and the `others` that do.
    """
    if device != "cpu":
        raise SpecError(
            f"{asked} is CPU time, and {device} computes beside the CPU; use {' or '.join(others)}"
        )


def require_fine_cpu_time(cpu_ns: Callable[[], int] = time.process_time_ns) -> None:
    """Refuse a CPU time that is told in pieces as long as a step.

    Some kernels do that where a process has a limit of its CPU time, or a timer of it.

    Raises
    ------
    SpecError
        If it mostly moves by half a millisecond or more; says by how much.
    """
    readings_ns = [cpu_ns()]
    while len(readings_ns) < _READINGS:
        if (now_ns := cpu_ns()) != readings_ns[-1]:
            readings_ns.append(now_ns)
    piece_ns = median(np.diff(readings_ns).tolist())
    if piece_ns >= _COARSE_NS:
        raise SpecError(
            f"this process can read its CPU time in pieces of {piece_ns / 1e6:.1f} ms only, too "
            "coarse for steps: run it without a limit of CPU time (ulimit -t), or use another clock"
        )


class ElapsedTime:
    """Time as it passes."""

    def __call__(self) -> int:
        """Read the machine's clock."""
        return time.perf_counter_ns()

    def between_steps(self) -> None:
        """Do nothing."""

    def describe(self) -> dict[str, object]:
        """Return nothing: this is what everybody expects."""
        return {}


class ReferenceTime:
    """CPU time of this process, in seconds of the machine at its reference speed.

    A batch of the same model, the sentinel, is timed again and again, between steps. CPU time is
    multiplied by the sentinel's time at reference speed over the median of its last five. So
    neither programs beside this one count, nor a processor that is slower for a while because it
    shares its caches, memory and clock with others.

    Parameters
    ----------
    time_sentinel : callable
        Runs the sentinel once and returns its CPU time in ns.
    reference_ns : float
        Its CPU time at reference speed; 0 takes what it is now.
    cpu_ns : callable
        Reads the CPU time.
    """

    def __init__(
        self,
        time_sentinel: Callable[[], int],
        reference_ns: float = 0,
        cpu_ns: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self._time_sentinel = time_sentinel
        self._cpu_ns = cpu_ns
        first = [time_sentinel() for _ in range(_WINDOW if reference_ns else _FIRST_TIMINGS)]
        self.reference_ns = reference_ns or median(first)
        self._recent = deque(first, _WINDOW)
        self._ratios = [ns / self.reference_ns for ns in first]
        self._measured_cpu_ns = 0
        self._since_sentinel_ns = 0
        self._now_ns = 0.0
        self._set_rate()
        self._read_ns = cpu_ns()

    def _set_rate(self) -> None:
        self._rate = self.reference_ns / median(self._recent)

    def __call__(self) -> int:
        """Read the time."""
        now_ns = self._cpu_ns()
        passed_ns = now_ns - self._read_ns
        self._read_ns = now_ns
        self._measured_cpu_ns += passed_ns
        self._since_sentinel_ns += passed_ns
        self._now_ns += passed_ns * self._rate
        return int(self._now_ns)

    def between_steps(self) -> None:
        """Time the sentinel if it is due; what passed since the last reading does not count."""
        if self._since_sentinel_ns * SHARE >= self._recent[-1]:
            taken_ns = self._time_sentinel()
            self._recent.append(taken_ns)
            self._ratios.append(taken_ns / self.reference_ns)
            self._since_sentinel_ns = 0
            self._set_rate()
        self._read_ns = self._cpu_ns()

    def describe(self) -> dict[str, object]:
        """Return the sentinel's time, raw and scaled seconds, and how the speed drifted."""
        low, middle, high = np.quantile(self._ratios, [0.05, 0.5, 0.95])
        return {
            "sentinel_reference_s": self.reference_ns / 1e9,
            "sentinel_timings": len(self._ratios),
            "sentinel_over_reference": {
                "p5": float(low), "median": float(middle), "p95": float(high),
            },
            "cpu_s": self._measured_cpu_ns / 1e9,
            "reference_s": self._now_ns / 1e9,
        }  # fmt: skip


class ReferenceSpeed(NamedTuple):
    """The speed to which `ReferenceTime` scales; in the folder of a profile.

    Attributes
    ----------
    sentinel_s : float
        CPU seconds of the sentinel at this speed.
    """

    sentinel_s: float

    @classmethod
    def read(cls, folder: Path) -> ReferenceSpeed | None:
        """Return the speed of a profile; None if it was measured in elapsed time.

        Raises
        ------
        SpecError
            If its file is not what `write` writes.
        """
        path = folder / _FILE
        if not path.exists():
            return None
        value: Any = read_json_object(path).get("sentinel_s")
        if not isinstance(value, int | float) or not value > 0:
            raise SpecError(f"{path}: sentinel_s must be a positive number; got {value!r}")
        return cls(float(value))

    def write(self, folder: Path) -> None:
        """Write it into the folder of a profile."""
        write_texts(folder, self.texts())

    def texts(self) -> dict[str, str]:
        """Return what its file holds, by the name of that file."""
        return {_FILE: json.dumps(self._asdict()) + "\n"}


def sentinel_of(model: str, threads: int, seed: int = 0) -> Callable[[], int]:
    """Return what runs a fixed mixed batch of a model and returns its CPU time in ns.

    It has weights and a cache of its own, so that it disturbs no run, and the kernels of
    `schedlab.gpu_backend.cpu_ops` whatever engine is measured: it tells of the machine.

    Raises
    ------
    SpecError
        If several threads are asked for: their CPU time is not the time of a step. If this process
        can read its CPU time in large pieces only.
    """
    require_fine_cpu_time()
    import torch

    from schedlab.gpu_backend.calibration_design import BatchPoint
    from schedlab.gpu_backend.runner import open_runner
    from schedlab.gpu_backend.step_timer import StepTimer

    if threads != 1:
        raise SpecError(
            f"real.threads: the CPU time of {threads} threads is not the time of a step; "
            "clock: reference measures one thread"
        )
    torch.set_num_threads(threads)
    config = EngineConfig(
        num_blocks=16, max_model_len=128, max_num_seqs=3, max_num_batched_tokens=32
    )
    batch = BatchPoint("sentinel", (64, 64), ((30, 0),))
    timer = StepTimer(open_runner(model, config, device="cpu", seed=seed), config, seed)
    timer.time(batch, 1)  # warms up

    def run() -> int:
        begun_ns = time.process_time_ns()
        timer.time(batch, 1)
        return time.process_time_ns() - begun_ns

    return run
