"""Times single steps of a model: batches of a given shape that nobody asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedlab.gpu_backend.block_pool import BlockPool
from schedlab.gpu_backend.calibration_design import BatchPoint
from schedlab.gpu_backend.runner import ModelRunner
from schedlab.gpu_backend.step_batch import launch_order
from schedlab.gpu_backend.stopwatch import ElapsedTime, Stopwatch
from schedlab.sim.config import EngineConfig

WARM_UPS = 3


class StepTimer:
    """Runs batches on scattered blocks of a cache whose content means nothing.

    Parameters
    ----------
    runner : ModelRunner
        Model and KV pool on the device.
    config : EngineConfig
        The limits that `runner` was opened with.
    seed : int
        Of the order in which blocks are handed out.
    stopwatch : Stopwatch, optional
        Reads the host's time; time as it passes by default.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        seed: int,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._runner = runner
        self._stopwatch = stopwatch or ElapsedTime()
        self._pool = BlockPool(
            config.num_blocks, config.block_size, config.max_num_seqs, config.max_model_len, seed
        )
        self._batch = runner.new_batch()
        # A device multiplies rows that are all alike with less power, and so faster.
        self._tokens = np.random.default_rng(seed).integers(
            runner.decoder.config.shape.vocab_size,
            size=(config.max_num_seqs, config.max_model_len),
            dtype=np.int32,
        )
        self._warm: set[BatchPoint] = set()

    def time(
        self, point: BatchPoint, repetitions: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return host and device seconds of each repetition, after warm-ups of a new point.

        The host's time includes laying the batch out, except for decode batches on a GPU: the
        executor does that while the step before runs.
        """
        self._stopwatch.between_steps()
        warm_ups = 0 if point in self._warm else WARM_UPS
        self._warm.add(point)
        lengths = [(1, c) for c in point.decodes] + list(point.chunks)
        host, device = [], []
        seats = [self._pool.grow(i, n + c) for i, (n, c) in enumerate(lengths)]
        try:
            for repetition in range(warm_ups + repetitions):
                elapsed = self._run(seats, lengths, decode_only=not point.chunks)
                if repetition >= warm_ups:
                    host.append(elapsed / 1e9)
                    device.append(self._runner.device_ns / 1e9)
        finally:
            for i in range(len(lengths)):
                self._pool.release(i)
        return tuple(host), tuple(device)

    def launch_times(
        self, batches: Sequence[Sequence[tuple[int, int]]], warm_ups: int = 0
    ) -> tuple[float, ...]:
        """Return host seconds to launch batches one after the other, each on an idle device.

        Parameters
        ----------
        batches : sequence of sequence of (int, int)
            New and cached tokens of each sequence of a batch.
        warm_ups : int
            How often the first is launched before.
        """
        self._stopwatch.between_steps()
        host = []
        for lengths in [*batches[:1]] * warm_ups + [*batches]:
            seats = [self._pool.grow(i, n + c) for i, (n, c) in enumerate(lengths)]
            try:
                self._lay_out(seats, list(lengths), decode_only=all(n == 1 for n, _ in lengths))
                begun = self._stopwatch()
                self._runner.launch(self._batch)
                host.append((self._stopwatch() - begun) / 1e9)
                self._runner.wait()
            finally:
                for i in range(len(lengths)):
                    self._pool.release(i)
        return tuple(host[warm_ups:])

    def _run(self, seats: list[int], lengths: list[tuple[int, int]], decode_only: bool) -> int:
        """Run the batch once; return nanoseconds."""
        begun = self._stopwatch()
        self._lay_out(seats, lengths, decode_only)
        if decode_only and self._runner.is_cuda:
            begun = self._stopwatch()
        self._runner.launch(self._batch)
        self._runner.wait()
        return self._stopwatch() - begun

    def _lay_out(self, seats: list[int], lengths: list[tuple[int, int]], decode_only: bool) -> None:
        """Fill the batch."""
        num_new = np.array([n for n, _ in lengths], dtype=np.int64)
        contexts = np.array([c for _, c in lengths], dtype=np.int64)
        rows = np.array(seats, dtype=np.int64)
        order = launch_order(contexts, num_new)
        rows, num_new, contexts = rows[order], num_new[order], contexts[order]
        tables, size = self._pool.tables, self._pool.block_size
        new = None if decode_only else num_new
        self._batch.fill(self._tokens, tables, size, rows, contexts, new)
        last = np.cumsum(num_new) - 1
        self._batch.sample(last, np.arange(len(last)))
