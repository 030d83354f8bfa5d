"""What it costs to swap a request out and in: copies of KV blocks, timed."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np
import torch

from schedlab.gpu_backend.calibration_fit import SwapTime
from schedlab.gpu_backend.host_blocks import HostBlocks
from schedlab.gpu_backend.runner import ModelRunner
from schedlab.gpu_backend.stopwatch import ElapsedTime, Stopwatch
from schedlab.gpu_backend.swap import SwapSpace

_LARGEST_BLOCKS = 256
_WARM_UPS, _REPETITIONS = 1, 5


def swap_times(runner: ModelRunner, stopwatch: Stopwatch | None = None) -> list[SwapTime]:
    """Time swapping 1, 4, 16, ... blocks both ways, as a preemption does it.

    The blocks are scattered over the cache, which is overwritten; up to 256 blocks of host memory
    are taken for the time being. The time is that of `stopwatch`; as it passes by default.
    """
    stopwatch = stopwatch or ElapsedTime()
    num_blocks = min(_LARGEST_BLOCKS, runner.kv_pools[0][0].shape[0] - 1)
    host = HostBlocks(runner.kv_pools, num_blocks)
    host.allocate()
    space = SwapSpace(host)
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks + 1))
    block_bytes = sum(pool[0].nbytes for pair in runner.kv_pools for pool in pair)
    found = []
    for count in _counts(num_blocks):
        blocks = ids[:count]
        out, back = [], []
        for repetition in range(_WARM_UPS + _REPETITIONS):
            space.swap_out(0, blocks)
            out_s = _run(space, runner, stopwatch)
            space.swap_in(0, blocks)
            in_s = _run(space, runner, stopwatch)
            if repetition >= _WARM_UPS:
                out.append(out_s)
                back.append(in_s)
        found.append(SwapTime("out", count, count * block_bytes, median(out)))
        found.append(SwapTime("in", count, count * block_bytes, median(back)))
    return found


def _counts(num_blocks: int) -> Iterator[int]:
    count = 1
    while count < num_blocks:
        yield count
        count *= 4
    yield num_blocks


def _run(space: SwapSpace, runner: ModelRunner, stopwatch: Stopwatch) -> float:
    stopwatch.between_steps()
    begun_ns = stopwatch()
    space.run()
    if runner.is_cuda:
        torch.cuda.synchronize(runner.device)
    return (stopwatch() - begun_ns) / 1e9
