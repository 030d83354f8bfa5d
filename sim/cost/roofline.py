"""Step time from datasheets alone: each operator bound by arithmetic or by memory traffic."""

from __future__ import annotations

import math

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.registry import register
from schedlab.sim.cost.segment import segment_ns
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.dtypes import dtype_bytes, dtype_name
from schedlab.sim.hardware.memory import check_tensor_parallel, default_kv_dtype

KERNELS_PER_LAYER = 10
"""Two norms, qkv, rope, cache write, attention, o, gate-up, activation, down."""

LINK_EFFICIENCY = 0.75
"""Share of a link's bandwidth that transfers reach: 25 of 32 GB/s on PCIe 4.0, and 61-75 % of
NVLink in the all-reduce profiles of the Vidur project (H100, 2 and 8 GPUs, 64 MB)."""

ALL_REDUCE_LATENCY_S = 10e-6
"""Start-up of one all-reduce; the same profiles show 7-30 us at 2-100 kB."""


@register("roofline")
class RooflineCostModel(CostModel):
    """Price a step by ``max(flops / peak, bytes / bandwidth)`` of each of its operators.

    Uncalibrated: every number comes from datasheets and from the dimensions of the model, but for
    one reachable share of each peak.

    Parameters
    ----------
    deployment : Deployment
        What runs where, and in which formats.
    compute_efficiency, memory_efficiency : float or None
        Reachable share of the datasheet's peaks, in (0, 1]; `None` means the GPU's own.
    kernel_latency_s : float
        Start-up time of one kernel; a layer has `KERNELS_PER_LAYER`.

    Raises
    ------
    SpecError
        If an efficiency is out of range, the GPU does not compute in `dtype`, or the heads cannot
        be split over the GPUs.

    Notes
    -----
    For T new tokens (decodes, chunks and padding), per layer: the qkv, o and MLP projections, each
    ``max(2*T*in*out / peak, (in*out + T*(in+out)) * bytes / bandwidth)``; norms, rope, activation
    and cache write as pure traffic; 10 kernel start-ups. A mixture of experts reads the expected
    number of distinct experts, ``E * (1 - (1 - k/E)**T)`` under uniform routing. Attention costs
    ``max(4*heads*head_dim*pairs / peak, KV bytes / bandwidth)``: a decode row with context c has
    c + 1 pairs and reads c + 1 tokens; a chunk of q tokens after c has ``q*(c + (q+1)/2)`` pairs
    and reads c + q tokens. The language-model head runs over `rows_sampled` rows. Two all-reduces a
    layer under tensor parallelism, each ``latency + 2*(N-1)/N * bytes / link``. Of N engines that
    share experts each computes 1/N of the experts, for the tokens of all, which come and leave in
    ``latency + (N-1)/N * bytes / link`` each. Swapped bytes cross
    PCIe without overlap.

    The efficiencies of a GPU are what large matrix products and weight reading reach in public
    profiles: 0.66-1.0 of the dense peak, 0.75-0.93 of the bandwidth (docs/cost-models.md). The
    smallest kernels there take 2 us.

    Examples
    --------
    >>> from schedlab.sim.hardware.gpus import gpu
    >>> from schedlab.sim.hardware.models import model
    >>> cost = RooflineCostModel(Deployment(model("llama-2-7b"), gpu("a100-80gb")))
    >>> ns = cost.step_ns(BatchShape(1, 1024, 1024, rows_sampled=1))[0]
    >>> 7e6 < ns < 11e6
    True
    """

    name = "roofline"

    def __init__(
        self,
        deployment: Deployment,
        compute_efficiency: float | None = None,
        memory_efficiency: float | None = None,
        kernel_latency_s: float = 2e-6,
    ) -> None:
        model, gpu, dtype = deployment.model, deployment.gpu, deployment.dtype
        tensor_parallel_size = deployment.tensor_parallel_size
        if compute_efficiency is None:
            compute_efficiency = gpu.compute_efficiency
        if memory_efficiency is None:
            memory_efficiency = gpu.memory_efficiency
        for key, value in (
            ("compute_efficiency", compute_efficiency),
            ("memory_efficiency", memory_efficiency),
        ):
            if not 0 < value <= 1:
                raise SpecError(f"roofline: {key} must be in (0, 1], got {value!r}")
        if not (math.isfinite(kernel_latency_s) and kernel_latency_s >= 0):
            raise SpecError(f"roofline: kernel_latency_s must be >= 0, got {kernel_latency_s!r}")
        check_tensor_parallel(model, tensor_parallel_size)
        self.model = model
        self.gpu = gpu
        self.tensor_parallel_size = tensor_parallel_size
        self.data_parallel_size = deployment.data_parallel_size
        self._gathers = deployment.data_parallel_size > 1 and model.num_experts > 0
        self._activation_bytes = max(dtype_bytes(dtype), 2.0)
        self.dtype = dtype_name(dtype)
        self.kv_dtype = dtype_name(deployment.kv_dtype)
        self.compute_efficiency = compute_efficiency
        self.memory_efficiency = memory_efficiency
        self.kernel_latency_s = kernel_latency_s

        self._ns_per_flop = 1e9 / (gpu.peak_flops_per_s(dtype) * compute_efficiency)
        # Attention multiplies 16-bit activations even where the weights are narrower.
        attention_dtype = default_kv_dtype(dtype)
        self._ns_per_attention_flop = 1e9 / (
            gpu.peak_flops_per_s(attention_dtype) * compute_efficiency
        )
        self._ns_per_byte = 1e9 / (gpu.memory_bytes_per_s * memory_efficiency)
        self._ns_per_swapped_byte = 1e9 / (gpu.pcie_bytes_per_s * LINK_EFFICIENCY)

        kv_bytes = model.kv_bytes_per_token(self.kv_dtype, tensor_parallel_size)
        heads = model.num_heads / tensor_parallel_size
        pair_flops = 4 * model.num_layers * heads * model.head_dim
        self._pair_ns = pair_flops * self._ns_per_attention_flop
        self._kv_ns = kv_bytes * self._ns_per_byte
        self._decode_ns = max(self._pair_ns, self._kv_ns)
        # Filled on demand: a run meets few distinct token counts, and the table of a step is a
        # single look-up.
        self._token_ns: dict[int, float] = {0: 0.0}
        self._head_ns: dict[int, float] = {0: 0.0}
        self._expert_ns: dict[int, float] = {0: 0.0}

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` successive steps; see `CostModel.step_ns`.

        Raises
        ------
        ValueError
            If `k` < 1, or `k` > 1 for a step that cannot repeat (chunks or swapped bytes).
        """
        num_decodes, context, _, chunks, padding, padding_context, rows, swapped = shape[:8]
        tokens = num_decodes + padding
        base = 0.0
        for q, c in chunks:
            tokens += q
            compute = q * (c + (q + 1) * 0.5) * self._pair_ns
            read = (c + q) * self._kv_ns
            base += compute if compute > read else read
        if swapped:
            base += swapped * self._ns_per_swapped_byte
        try:
            base += self._token_ns[tokens]
        except KeyError:
            base += self._price_tokens(tokens)
        if self._gathers:
            met = shape.gathered_tokens or tokens
            try:
                base += self._expert_ns[met]
            except KeyError:
                base += self._price_experts(met)
        try:
            base += self._head_ns[rows]
        except KeyError:
            base += self._price_head(rows)
        context += num_decodes + padding_context  # a decode row also attends to its own token
        if k == 1:
            return [int(base + self._decode_ns * context + 0.5) or 1]
        if k < 1 or chunks or swapped:
            raise ValueError(f"k = {k}: only a step without chunks and swapping can be repeated")
        return segment_ns(base, self._decode_ns, context, num_decodes, 0.0, 0, k)

    def describe(self) -> dict[str, object]:
        """Return source, parameters and simplifications, for results."""
        simplifications = [
            "no calibration: datasheet peaks times one efficiency each",
            "one launch latency per kernel; no wave quantisation, no kernel selection",
            "swapping does not overlap with computation",
        ]
        if self.model.num_experts:
            simplifications.append("experts are chosen uniformly and independently")
        if self.model.sliding_window:
            simplifications.append(
                f"the sliding window of {self.model.sliding_window} tokens is ignored: contexts "
                "beyond it are priced as full attention"
            )
        return {
            "name": self.name,
            "calibration": "UNCALIBRATED",
            "model": self.model.name,
            "model_source": self.model.source,
            "hardware": self.gpu.name,
            "hardware_source": self.gpu.source,
            "tensor_parallel_size": self.tensor_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "compute_efficiency": self.compute_efficiency,
            "memory_efficiency": self.memory_efficiency,
            "kernel_latency_s": self.kernel_latency_s,
            "simplifications": simplifications,
        }

    def _price_tokens(self, tokens: int) -> float:
        """Price all that depends on the number of new tokens only, and remember it."""
        m, tp = self.model, self.tensor_parallel_size
        act = max(dtype_bytes(self.dtype), 2.0)
        hidden = m.hidden_size
        q_width = m.num_heads * m.head_dim / tp
        kv_width = math.ceil(m.num_kv_heads / tp) * m.head_dim
        layer = self._linear(tokens, hidden, q_width + 2 * kv_width)
        layer += self._linear(tokens, q_width, hidden)
        if m.num_experts:
            router = self._linear(tokens, hidden, m.num_experts)
            layer += router if self._gathers else router + self._moe(tokens)
        else:
            layer += self._mlp(tokens)
        norms = 8 * hidden + (2 * (q_width + kv_width) if m.qk_norm else 0)
        rope = 0 if m.num_position_embeddings else 2 * (q_width + kv_width)
        attention = 2 * q_width + 2 * kv_width
        cache_write = 2 * kv_width * dtype_bytes(self.kv_dtype)
        traffic = tokens * ((norms + rope + attention) * act + cache_write)
        layer += traffic * self._ns_per_byte
        layer += KERNELS_PER_LAYER * self.kernel_latency_s * 1e9
        if tp > 1:
            share = 2 * (tp - 1) / tp
            link = self.gpu.interconnect_bytes_per_s * LINK_EFFICIENCY
            layer += 2e9 * (ALL_REDUCE_LATENCY_S + share * tokens * hidden * act / link)
        ends = tokens * hidden * 4 * act * self._ns_per_byte  # embedding, final norm
        cost = m.num_layers * layer + ends
        self._token_ns[tokens] = cost
        return cost

    def _price_head(self, rows: int) -> float:
        vocab = self.model.vocab_size / self.tensor_parallel_size
        # The sampler reads the logits in fp32.
        cost = self._linear(rows, self.model.hidden_size, vocab)
        cost += rows * vocab * 4 * self._ns_per_byte
        cost += 2 * self.kernel_latency_s * 1e9
        self._head_ns[rows] = cost
        return cost

    def _linear(self, tokens: float, inputs: float, outputs: float, copies: float = 1.0) -> float:
        """One projection; `copies` is the number of weight matrices read (experts)."""
        flops = 2 * tokens * inputs * outputs
        weights = copies * inputs * outputs * dtype_bytes(self.dtype)
        activations = tokens * (inputs + outputs) * max(dtype_bytes(self.dtype), 2.0)
        return max(flops * self._ns_per_flop, (weights + activations) * self._ns_per_byte)

    def _mlp(self, tokens: float) -> float:
        m = self.model
        width = m.intermediate_size / self.tensor_parallel_size
        return self._expert(tokens, width, 1.0)

    def _moe(self, tokens: int) -> float:
        """Return what a layer's experts take for these tokens, of all engines that share them."""
        m, engines = self.model, self.data_parallel_size
        missed = (1 - m.experts_per_token / m.num_experts) ** tokens
        touched = m.num_experts * (1 - missed)
        width = m.moe_intermediate_size / self.tensor_parallel_size
        pairs = tokens * m.experts_per_token
        cost = self._expert(pairs / engines, width, touched / engines)
        if engines > 1:
            link = self.gpu.interconnect_bytes_per_s * LINK_EFFICIENCY
            moved = (engines - 1) / engines * tokens * m.hidden_size * self._activation_bytes
            cost += 2e9 * (ALL_REDUCE_LATENCY_S + moved / link)
        return cost

    def _price_experts(self, tokens: int) -> float:
        """Price the experts of all layers, and remember it."""
        cost = self.model.num_layers * self._moe(tokens)
        self._expert_ns[tokens] = cost
        return cost

    def _expert(self, tokens: float, width: float, copies: float) -> float:
        fan = self.model.num_mlp_matrices - 1  # gate and up are one product
        up = self._linear(tokens, self.model.hidden_size, fan * width, copies)
        down = self._linear(tokens, width, self.model.hidden_size, copies)
        act = max(dtype_bytes(self.dtype), 2.0)
        return up + down + tokens * (fan + 1) * width * act * self._ns_per_byte
