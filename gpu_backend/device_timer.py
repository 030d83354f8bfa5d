"""Time on the GPU: CUDA events around replays of a captured graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

_WARM_UPS = 3
_MIN_TOTAL_S = 0.1
_MIN_REPETITIONS = 10
_MAX_REPETITIONS = 200


class Timing(NamedTuple):
    """Repeated measurements of the same work."""

    median_s: float
    iqr_s: float
    """Interquartile range."""
    min_s: float
    repetitions: int
    mode: str
    """``graph``; ``eager`` where work cannot be captured (launches count, too); ``host``."""

    @classmethod
    def of(cls, samples_s: list[float], mode: str) -> Timing:
        """Summarise samples."""
        low, median, high = np.percentile(samples_s, [25, 50, 75])
        return cls(float(median), float(high - low), min(samples_s), len(samples_s), mode)


class Timer(Protocol):
    """Measures work on a device."""

    def __call__(
        self, work: Callable[[], object], calls: int = 1, *, captured: bool = True
    ) -> Timing:
        """Time one of the `calls` like things that `work` does, from a captured graph if asked."""


def cuda_timer(work: Callable[[], object], calls: int = 1, *, captured: bool = True) -> Timing:
    """Time work on the current CUDA device.

    Parameters
    ----------
    work : callable
        Enqueues the same kernels on the current stream each time, and reads nothing back. To
        keep the L2 cache out of the measurement it should rotate over more data than that holds.
    calls : int
        How many like things it does; times are divided by it.
    captured : bool
        Whether to capture the work into a CUDA graph, so that the time of Python and of launching
        is no part of the result.

    Returns
    -------
    Timing
        Of at least 10 repetitions and 100 ms, after 3 warm-ups.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    run, mode = work, "eager"
    if captured:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                work()
            run, mode = graph.replay, "graph"
        except RuntimeError:
            # Some library paths cannot be captured. The mode is recorded with the result.
            torch.cuda.synchronize()
    run()
    (first_s,) = _elapsed_s(run, 1)
    repetitions = int(np.clip(_MIN_TOTAL_S / first_s, _MIN_REPETITIONS, _MAX_REPETITIONS))
    return Timing.of([s / calls for s in _elapsed_s(run, repetitions)], mode)


def host_timer(work: Callable[[], object], calls: int = 1, *, captured: bool = True) -> Timing:
    """Run work once on the CPU, to rehearse what is measured on a GPU."""
    begun_s = time.perf_counter()
    work()
    return Timing.of([(time.perf_counter() - begun_s) / calls], "host")


def _elapsed_s(run: Callable[[], object], repetitions: int) -> list[float]:
    """Time repetitions that follow each other on the device without a pause.

    Waiting for each would leave the device idle while the next one is launched, and the launch of
    a graph takes as long as a short kernel.
    """
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repetitions)
    ]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) * 1e-3 for start, end in pairs]
