"""CUDA graphs of decode steps: one launch instead of hundreds."""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from schedlab.gpu_backend.model import Decoder, StepTensors
from schedlab.gpu_backend.step_batch import StepBatch

_WARM_UPS = 2


def graph_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: closer ones where padding costs more.

    One a doubling to 16, where a step is all weights; two to 128; then four; and the largest
    batch. A batch is padded by a third at most beyond 16, by a quarter beyond 128.

    Examples
    --------
    >>> graph_buckets(48)
    (1, 2, 4, 8, 16, 24, 32, 48)
    >>> graph_buckets(256)[10:]
    (128, 160, 192, 224, 256)
    """
    sizes = {max_num_seqs}
    for power in (1 << i for i in range(max_num_seqs.bit_length())):
        parts = 1 if power < 16 else 2 if power < 128 else 4
        sizes |= {power + power * i // parts for i in range(parts)}
    return tuple(sorted(n for n in sizes if n <= max_num_seqs))


class DecodeGraphs:
    """Decode steps of fixed batch sizes, captured once and replayed on the buffer they read.

    Parameters
    ----------
    decoder : Decoder
        On a CUDA device.
    kv_pools : list of (Tensor, Tensor)
        The cache; the graphs keep its addresses.
    views : dict of str to Tensor
        Parts of the device buffer that every step's batch is copied to.
    batch : StepBatch
        Host buffer to describe empty batches with; free again afterwards.
    device_buffer : Tensor
        The buffer of `views`.
    buckets : tuple of int
        Batch sizes, increasing.

    Notes
    -----
    Every size runs eagerly before it is captured, because a kernel that is compiled or tuned
    during a capture breaks it. The largest comes first, so that the smaller ones fit into the
    memory pool they share. The rows of the empty batch read block 0 and write nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_pools: list[tuple[Tensor, Tensor]],
        views: dict[str, Tensor],
        batch: StepBatch,
        device_buffer: Tensor,
        buckets: tuple[int, ...],
    ) -> None:
        self.buckets = buckets
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        batch.num_seqs = 0
        batch.pad_sequences(buckets[-1])
        device_buffer.copy_(batch.buffer)
        memory = torch.cuda.graph_pool_handle()
        for bucket in reversed(buckets):
            batch.num_seqs = 0
            batch.max_query_tokens = 1
            batch.pad_sequences(bucket)
            step = batch.tensors(views)
            self._graphs[bucket] = _capture(decoder, step, kv_pools, memory)

    def bucket(self, num_seqs: int) -> int | None:
        """Return the smallest captured batch size that holds `num_seqs`, or None."""
        i = bisect_left(self.buckets, num_seqs)
        return self.buckets[i] if i < len(self.buckets) else None

    def replay(self, bucket: int) -> Tensor:
        """Run a captured step on what the device buffer holds now.

        Returns
        -------
        Tensor, shape (bucket, vocab_size)
            Logits; overwritten by the next replay.
        """
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits


def _capture(
    decoder: Decoder,
    step: StepTensors,
    kv_pools: list[tuple[Tensor, Tensor]],
    memory: tuple[int, int],
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    # Not on the default stream, which a capture must not touch.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                decoder.forward(step, kv_pools)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=memory):
            logits = decoder.forward(step, kv_pools)
    return graph, logits
