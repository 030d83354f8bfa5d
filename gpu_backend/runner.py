"""The device side of a step: weights, KV cache, kernels and sampling on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import torch

from schedlab.gpu_backend.copy_lane import Lane, ThreadLane, open_lane
from schedlab.gpu_backend.decoder_config import DecoderConfig, decoder_config
from schedlab.gpu_backend.device import open_device, require_memory, torch_dtype
from schedlab.gpu_backend.file_blocks import FileBlocks, open_block_file
from schedlab.gpu_backend.graphs import DecodeGraphs, graph_buckets
from schedlab.gpu_backend.host_blocks import HostBlocks
from schedlab.gpu_backend.model import Decoder, Ops
from schedlab.gpu_backend.sampling import sample
from schedlab.gpu_backend.step_batch import StepBatch, StepLayout
from schedlab.gpu_backend.swap import SwapSpace
from schedlab.gpu_backend.weights import (
    Weights,
    assemble_weights,
    random_source,
    safetensors_source,
)
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.errors import SpecError

Int64 = npt.NDArray[np.int64]


class ModelRunner:
    """Runs batches on one device; one at a time, asynchronously where the device is a GPU.

    Parameters
    ----------
    decoder : Decoder
        The model.
    config : EngineConfig
        Limits; the KV pool has ``num_blocks`` blocks and the dummy.
    temperature : float
        0 samples greedily.
    use_graphs : bool
        Capture CUDA graphs of decode steps (on a CUDA device only).
    tier_files : sequence of BinaryIO
        Where tiers below the host's memory lie, one each (`file_blocks.open_block_file`).
    max_rows : int, optional
        Most sequences of a step, with those of finished requests of a sealed batch, which are
        computed beside `max_num_seqs` others where more may be resident; `max_num_seqs` by default.

    Attributes
    ----------
    kv_pools : list of (Tensor, Tensor)
        Keys and values of each layer, (num_blocks + 1, num_kv_heads, block_size, head_dim).
    host : HostBlocks
        Host memory: the tier below the device's, or that of preempted requests alone.
    files : list of FileBlocks
        The tiers below that one.
    lanes : list of (Lane, Lane)
        Of each tier: what copies there beside the batches, and to the device.
    swap : SwapSpace
        Preempted requests in `host` where it is no tier; copies run with the next batch.
    device_ns : int
        How long the last batch took, from swapping and its copy to the device to its sampled
        tokens: between CUDA events, or by the host's clock on a CPU.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        temperature: float = 0.0,
        use_graphs: bool = True,
        tier_files: Sequence[BinaryIO] = (),
        max_rows: int | None = None,
    ) -> None:
        shape = decoder.config.shape
        weight = decoder.weights.embedding
        self.decoder = decoder
        self.device = weight.device
        self.is_cuda = self.device.type == "cuda"
        self.temperature = temperature
        size = (config.num_blocks + 1, shape.num_kv_heads, config.block_size, shape.head_dim)
        self.kv_pools = [
            (weight.new_zeros(size), weight.new_zeros(size)) for _ in range(shape.num_layers)
        ]
        self.host = HostBlocks(self.kv_pools, config.swap_space_blocks)
        if config.kv_tiers:
            self.host.what = _named(config.kv_tiers[0])
        self.files = [
            FileBlocks(self.kv_pools, file, tier.num_blocks, _named(tier))
            for tier, file in zip(config.kv_tiers[1:], tier_files, strict=True)
        ]
        lane: Callable[[torch.device], Lane] = ThreadLane if self.files else open_lane
        self.lanes = [(lane(self.device), lane(self.device)) for _ in config.kv_tiers]
        if config.kv_tiers or config.preemption_mode == "swap":
            self.host.allocate()
        self.swap = SwapSpace(self.host)
        # Static batching may pad prompts, and rows of held requests, beyond the token budget.
        rows = max(config.max_num_seqs, max_rows or 0)
        max_tokens = config.max_num_batched_tokens + config.max_model_len + rows
        max_blocks = -(-config.max_model_len // config.block_size)
        # A decode samples its own successor and that of each drafted token.
        max_samples = rows + config.max_num_seqs * config.num_speculative_tokens
        self.layout = StepLayout(max_tokens, rows, max_blocks, max_samples)
        self.device_ns = 0
        self._num_samples = 0
        self._graphs: DecodeGraphs | None = None
        if self.is_cuda:
            torch.cuda.set_device(self.device)
            self._buffer = torch.zeros(
                self.layout.num_bytes, dtype=torch.uint8, device=self.device
            )  # fmt: skip
            self._views = self.layout.views(self._buffer)
            self._start = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)
            if use_graphs:
                self._graphs = DecodeGraphs(
                    decoder, self.kv_pools, self._views, self.new_batch(), self._buffer,
                    graph_buckets(config.max_num_seqs),
                )  # fmt: skip
        self._ids = torch.zeros(max_samples, dtype=torch.int64, pin_memory=self.is_cuda)

    @property
    def graph_buckets(self) -> tuple[int, ...]:
        """Batch sizes of captured decode steps; empty without graphs."""
        return self._graphs.buckets if self._graphs is not None else ()

    def new_batch(self) -> StepBatch:
        """Return a host buffer that batches can be built in."""
        return StepBatch(self.layout, pinned=self.is_cuda)

    def launch(self, batch: StepBatch) -> None:
        """Start a batch; `batch` must stay untouched until `wait` has returned."""
        self._num_samples = batch.num_samples
        with torch.inference_mode():
            if self.is_cuda:
                self._launch_on_gpu(batch)
            else:
                self._run_on_cpu(batch)

    def _run_on_cpu(self, batch: StepBatch) -> None:
        begun_ns = time.perf_counter_ns()
        self.swap.run()
        logits = self.decoder.forward(batch.tensors(batch.views), self.kv_pools)
        keys = batch.views["sample_keys"][: batch.num_samples]
        self._ids[: batch.num_samples] = sample(logits, keys, self.temperature)
        self.device_ns = time.perf_counter_ns() - begun_ns

    def _launch_on_gpu(self, batch: StepBatch) -> None:
        bucket = None
        if self._graphs is not None and batch.decode_only:
            bucket = self._graphs.bucket(batch.num_seqs)
        if bucket is not None:
            batch.pad_sequences(bucket)
        used = self.layout.used_bytes(batch.num_seqs)
        self._start.record()
        self.swap.run()
        self._buffer[:used].copy_(batch.buffer[:used], non_blocking=True)
        if self._graphs is not None and bucket is not None:
            logits = self._graphs.replay(bucket)
        else:
            logits = self.decoder.forward(batch.tensors(self._views), self.kv_pools)
        ids = sample(logits, self._views["sample_keys"][: batch.num_samples], self.temperature)
        self._ids[: batch.num_samples].copy_(ids, non_blocking=True)
        self._end.record()

    def wait(self) -> Int64:
        """Wait for the batch under way and return its sampled tokens, in the order asked for.

        Returns
        -------
        ndarray of int64
            Valid until the next `launch`.
        """
        if self.is_cuda:
            self._end.synchronize()
            self.device_ns = int(self._start.elapsed_time(self._end) * 1e6)
        ids: Int64 = self._ids[: self._num_samples].numpy()
        return ids


def open_runner(
    model: str,
    config: EngineConfig,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    weights: Path | None = None,
    seed: int = 0,
    temperature: float = 0.0,
    use_graphs: bool = True,
    tier_folders: Sequence[Path | None] = (),
    max_rows: int | None = None,
) -> ModelRunner:
    """Put a model and its KV cache on a device.

    Parameters
    ----------
    model : str
        A name of the model table, or a Hugging Face folder or config.json.
    config : EngineConfig
        Limits, among them the size of the KV cache.
    device : str
        ``cpu``, ``cuda`` or ``cuda:INDEX``.
    dtype : str, optional
        ``fp32`` on a CPU; ``bf16`` (default) or ``fp16`` on a GPU.
    weights : Path, optional
        Folder with safetensors; seeded random weights without it.
    seed : int
        Of random weights.
    temperature : float
        0 samples greedily.
    use_graphs : bool
        Whether decode steps on a GPU replay CUDA graphs.
    tier_folders : sequence of Path or None
        Where files lie that hold the tiers of `config` below the first one, in order; whatever is
        missing, or None, stands for the system's temporary directory.
    max_rows : int, optional
        See `ModelRunner`.

    Raises
    ------
    SpecError
        If the device, the format, the model or its files do not do, or memory or room on a disk
        does not suffice.
    """
    where = open_device(device)
    number_format = dtype or ("bf16" if where.type == "cuda" else "fp32")
    element = torch_dtype(number_format, where)
    decoder = decoder_config(model)
    shape = decoder.shape
    if config.max_model_len > shape.max_model_len:
        raise SpecError(
            f"max_model_len {config.max_model_len} exceeds the {shape.max_model_len} tokens that "
            f"{shape.name} was built for"
        )
    block_bytes = shape.kv_bytes_per_token(number_format) * config.block_size
    require_memory(
        shape.weight_bytes(number_format) + (config.num_blocks + 1) * block_bytes,
        where,
        f"{shape.name} in {number_format} with {config.num_blocks} KV blocks",
    )
    folders = [*tier_folders, *[None] * len(config.kv_tiers)]
    files = [
        open_block_file(tier.num_blocks * block_bytes, folder, f"engine.kv_offload.tiers[{place}]")
        for place, (tier, folder) in enumerate(zip(config.kv_tiers[1:], folders, strict=False), 1)
    ]
    loaded = _weights(decoder, weights, seed, where, element)
    ops = cast(
        Ops,
        import_module(f"schedlab.gpu_backend.{'triton' if where.type == 'cuda' else 'cpu'}_ops"),
    )
    return ModelRunner(
        Decoder(decoder, loaded, ops, config.max_model_len), config, temperature, use_graphs,
        files, max_rows,
    )  # fmt: skip


def _named(tier: KVTier) -> str:
    return f"tier {tier.name} of engine.kv_offload"


def _weights(
    config: DecoderConfig,
    folder: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Weights:
    if folder is None:
        return assemble_weights(config, random_source(config, seed, device, dtype))
    return assemble_weights(config, safetensors_source(folder, device, dtype))
