"""A Llama-style decoder over a paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from schedlab.gpu_backend.decoder_config import DecoderConfig, RopeScaling
from schedlab.gpu_backend.weights import Weights


class StepTensors(NamedTuple):
    """One step's batch on the device: T tokens of S sequences, R rows to sample.

    Sequences lie one after the other in the token axis. Tokens behind the last sequence are
    padding: they go through the linear layers and attend to nothing.
    """

    tokens: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64, from 0 in each sequence."""
    slots: Tensor
    """(T,) int64: ``block * block_size + offset`` to write keys and values to; -1 = nowhere."""
    query_start: Tensor
    """(S + 1,) int32: where each sequence's tokens start."""
    context_lens: Tensor
    """(S,) int32: tokens to attend to, those of this step included."""
    block_tables: Tensor
    """(S, max_blocks) int32."""
    sample_rows: Tensor
    """(R,) int64: indices of tokens whose successor is wanted."""
    num_sequence_tokens: int
    """Tokens before the padding."""
    max_query_tokens: int
    """Most tokens of a sequence in this step; 1 selects the decode kernel."""


class Ops(Protocol):
    """The kernels a decoder needs; `schedlab.gpu_backend.cpu_ops` documents each."""

    paged_decode: Callable[..., None]
    paged_prefill: Callable[..., None]
    rope_and_cache: Callable[..., None]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]


class Decoder:
    """A Llama-style decoder: RMSNorm, rotary positions, grouped queries, SwiGLU.

    Parameters
    ----------
    config : DecoderConfig
        Dimensions and constants.
    weights : Weights
        On the device the decoder runs on.
    ops : Ops
        The kernels: `schedlab.gpu_backend.cpu_ops` or `schedlab.gpu_backend.triton_ops`.
    max_model_len : int
        Longest sequence, for the table of rotations.
    """

    def __init__(
        self, config: DecoderConfig, weights: Weights, ops: Ops, max_model_len: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self._scale = config.shape.head_dim**-0.5
        self._cos_sin = rotations(config, max_model_len, weights.embedding.device)

    def forward(self, step: StepTensors, kv_pools: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute a step, writing its keys and values to the cache.

        Parameters
        ----------
        step : StepTensors
            The batch.
        kv_pools : list of (Tensor, Tensor)
            Keys and values of each layer, (num_blocks, num_kv_heads, block_size, head_dim).

        Returns
        -------
        Tensor, shape (R, vocab_size)
            Logits of `step.sample_rows`.
        """
        ops, eps, weights = self.ops, self.config.rms_norm_eps, self.weights
        x = F.embedding(step.tokens, weights.embedding)
        residual: Tensor | None = None
        for layer, (k_pool, v_pool) in zip(weights.layers, kv_pools, strict=True):
            x, residual = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            q, k, v = self._heads(F.linear(x, layer.qkv))
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._norm_heads(q, layer.q_norm), self._norm_heads(k, layer.k_norm)
            ops.rope_and_cache(
                q, k, v, self._cos_sin, step.positions, step.slots, k_pool, v_pool
            )  # fmt: skip
            x = F.linear(self._attend(q, k_pool, v_pool, step), layer.o)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = F.linear(ops.silu_and_mul(F.linear(x, layer.gate_up)), layer.down)
        rows = step.sample_rows
        assert residual is not None
        if not rows.shape[0]:
            return x.new_empty((0, self.config.shape.vocab_size))
        x, _ = ops.add_rms_norm(x[rows], residual[rows], weights.norm, eps)
        return F.linear(x, weights.head)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut (T, rows) into views (T, heads, head_dim) of queries, keys and values."""
        shape = self.config.shape
        qkv = qkv.view(qkv.shape[0], -1, shape.head_dim)
        q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        return q, k, v

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.ops.add_rms_norm(rows, None, weight, self.config.rms_norm_eps)[0].view(x.shape)

    def _attend(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, step: StepTensors) -> Tensor:
        num_tokens, attending = q.shape[0], step.num_sequence_tokens
        out = q.new_empty(q.shape)
        # Padding rows are nobody's, but denormal numbers in fresh memory would slow a CPU down.
        if attending < num_tokens:
            out[attending:].zero_()
        if step.max_query_tokens > 1:
            self.ops.paged_prefill(
                q[:attending], k_pool, v_pool, step.block_tables, step.query_start,
                step.context_lens, step.max_query_tokens, self._scale, out[:attending],
            )  # fmt: skip
        elif attending:
            self.ops.paged_decode(
                q[:attending], k_pool, v_pool, step.block_tables, step.context_lens,
                self._scale, out[:attending],
            )  # fmt: skip
        return out.view(num_tokens, -1)


def rotations(config: DecoderConfig, max_model_len: int, device: torch.device) -> Tensor:
    """Return the rotation of every position.

    Returns
    -------
    Tensor of float32, shape (max_model_len, head_dim)
        Cosines in the first half of a row, sines in the second.

    Notes
    -----
    Computed in float64. `RopeScaling` follows Hugging Face's ``_compute_llama3_parameters``:
    wavelengths above ``original / low_freq_factor`` are stretched by `factor`, those below
    ``original / high_freq_factor`` are kept, and the ones between are interpolated.
    """
    head_dim = config.shape.head_dim
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = config.rope_theta**-exponent
    if config.rope_scaling is not None:
        frequency = _stretched(frequency, config.rope_scaling)
    angle = torch.arange(max_model_len, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(device, torch.float32)


def _stretched(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (keep + (1.0 - keep) / scaling.factor)
