"""Step time from datasheets, and from what kernels of such devices reach of them."""

from __future__ import annotations

import math
from functools import cached_property

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.efficiency import TILE, Efficiency, efficiency_of
from schedlab.sim.cost.registry import register
from schedlab.sim.cost.segment import segment_ns
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.dtypes import dtype_bytes, dtype_name, stored_bytes
from schedlab.sim.hardware.memory import check_tensor_parallel, default_kv_dtype

PCIE_SHARE = 0.75
"""Share of the host link that swapping reaches: 25 of 32 GB/s on PCIe 4.0."""

KERNELS_PER_LAYER = 5
"""Element-wise ones: two norms, rotary positions, cache write, activation."""

LAUNCHES_PER_LAYER = 3
"""Of a step with prompts, in which vLLM's graphs leave attention out: the piece before it, the
cache write and the attention."""


@register("roofline")
class RooflineCostModel(CostModel):
    """Price a step by its kernels: datasheets, and learnt shares of their peaks.

    Uncalibrated: what kernels reach was learnt from public tables of kernels, not measured on the
    machine that is simulated (`schedlab.sim.cost.efficiency`).

    Parameters
    ----------
    deployment : Deployment
        What runs where, and in which formats.
    kernels : str, Efficiency or None
        What kernels reach, or a file of it as ``schedlab profile learn`` writes it; `None` means
        the file that comes with this package.
    compute_efficiency, memory_efficiency : float or None
        Reachable share of the datasheet's peaks for all kernels, in (0, 1]; `None` means what was
        learnt.

    Raises
    ------
    SpecError
        If an efficiency is out of range, the file is wrong, the GPU does not compute in `dtype`, or
        the heads cannot be split over the GPUs.

    Notes
    -----
    For T new tokens (decodes, chunks and padding), per layer: the qkv, o and MLP projections, each
    ``latency + (arithmetic**3 + traffic**3)**(1/3)`` with whole tiles and waves of tiles counted in
    part (`Gemm`); norms, rotary positions, activation and cache write as traffic. A mixture of
    experts reads the expected number of distinct experts, ``E * (1 - (1 - k/E)**T)`` under uniform
    routing, and takes ``latency + traffic + arithmetic``.

    Attention of decodes costs ``latency + max(rows, share * rows + KV bytes / bandwidth)``: a row
    with context c reads c + 1 tokens, and reading hides all but a share of what rows cost. A chunk
    of q tokens after c adds its blocks of queries and ``q*(c + (q+1)/2)`` pairs, or the cache it
    reads if that takes longer; decodes beside it are computed as `Attention.mixed_rows` queries,
    and the call takes at least as long as its longest sequence keeps one thread block.

    The language-model head and the sampler run over `rows_sampled` rows. Two all-reduces a layer
    under tensor parallelism, each ``latency + hop*(N-1) + 2*(N-1)/N * bytes / link``. Of N engines
    that share experts each computes 1/N of the experts, for the tokens of all, which come and leave
    in ``latency + hop*(N-1) + (N-1)/N * bytes / link`` each. Swapped bytes cross PCIe without
    overlap. A step with prompts takes at least as long as the host launches it.

    Weights narrower than the arithmetic (`Deployment.weight_dtype`) are read in their own format
    and multiplied in that of the activations; the head and the router keep 16 bits. What it takes
    to bring activations into 8 or 4 bits is part of the products, as it was when they were timed.

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
        kernels: str | Efficiency | None = None,
        compute_efficiency: float | None = None,
        memory_efficiency: float | None = None,
    ) -> None:
        model, gpu, dtype = deployment.model, deployment.gpu, deployment.dtype
        workers = deployment.tensor_parallel_size
        check_tensor_parallel(model, workers)
        if not isinstance(kernels, Efficiency):
            kernels = efficiency_of(gpu, kernels)
        self.kernels = kernels.with_shares(compute_efficiency, memory_efficiency)
        self.compute_efficiency = compute_efficiency
        self.memory_efficiency = memory_efficiency
        self.model = model
        self.gpu = gpu
        self.tensor_parallel_size = workers
        self.data_parallel_size = deployment.data_parallel_size
        self._gathers = deployment.data_parallel_size > 1 and model.num_experts > 0
        self.dtype = dtype_name(dtype)
        self.weight_dtype = deployment.stored_dtype
        self.kv_dtype = dtype_name(deployment.kv_dtype)
        self._wide_dtype = default_kv_dtype(dtype)
        self._activation_bytes = dtype_bytes(self._wide_dtype)
        self._peak = gpu.peak_flops_per_s(dtype)
        # Attention and the head multiply 16-bit numbers even where the weights are narrower.
        self._wide_peak = gpu.peak_flops_per_s(self._wide_dtype)
        self._gemm = self.kernels.gemm_of(self.dtype, self.weight_dtype)
        self._wide_gemm = self.kernels.gemm_of(self._wide_dtype, self._wide_dtype)
        self._weight_bytes = stored_bytes(self.weight_dtype)
        self._ns_per_swapped_byte = 1e9 / (gpu.pcie_bytes_per_s * PCIE_SHARE)
        self._set_attention()
        calls = model.num_layers * LAUNCHES_PER_LAYER
        self._launch_ns = calls * self.kernels.host.call_s * 1e9
        # Filled on demand: a run meets few distinct token counts, and the table of a step is a
        # single look-up.
        self._token_ns: dict[int, float] = {0: 0.0}
        self._head_ns: dict[int, float] = {0: 0.0}
        self._expert_ns: dict[int, float] = {0: 0.0}

    def _set_attention(self) -> None:
        """Work out what attention costs by row, by KV token and by pair, over all layers."""
        m, workers, kernel = self.model, self.tensor_parallel_size, self.kernels.attention
        heads, kv_heads = m.num_heads / workers, math.ceil(m.num_kv_heads / workers)
        per_sm = 1e9 * m.num_layers / self.gpu.num_sms
        bandwidth = self.gpu.memory_bytes_per_s * kernel.bandwidth_share
        self._call_ns = 1e9 * m.num_layers * kernel.latency_s
        self._row_ns = per_sm * kv_heads * kernel.row_s
        self._row_share = kernel.row_share
        self._kv_ns = 1e9 * m.kv_bytes_per_token(self.kv_dtype, workers) / bandwidth
        self._query_ns = per_sm * heads * kernel.block_s / TILE
        pair_flops = 4.0 * m.num_layers * heads * m.head_dim
        self._pair_ns = 1e9 * pair_flops / (self._wide_peak * kernel.flops_share)
        self._key_ns = 1e9 * m.num_layers * kernel.key_s
        self._query_block = kernel.query_block
        # A decode row beside prompts is computed as so many queries of each head.
        self._mixed_row_ns = kernel.mixed_rows * self._query_ns
        self._mixed_kv_ns = kernel.mixed_rows * self._pair_ns

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` successive steps; see `CostModel.step_ns`.

        Raises
        ------
        ValueError
            If `k` < 1, or `k` > 1 for a step that cannot repeat (chunks or swapped bytes).
        """
        num_decodes, context, longest, chunks, padding, padding_context, rows, swapped = shape[:8]
        tokens = num_decodes + padding
        for chunk in chunks:
            tokens += chunk[0]
        base = swapped * self._ns_per_swapped_byte
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
        # A decode row also attends to its own token.
        context += num_decodes + padding_context
        attending = num_decodes + shape.padding_rows
        if chunks:
            base += self._mixed_attention(chunks, attending, context, longest + 1)
            if k != 1:
                raise ValueError(f"k = {k}: a step with chunks cannot be repeated")
            return [int(max(base, self._launch_ns) + 0.5)]
        least = base
        if attending:
            rows_ns = self._row_ns * attending
            least += self._call_ns + rows_ns
            base += self._call_ns + self._row_share * rows_ns
        cost = base + self._kv_ns * context
        if k == 1:
            return [int((cost if cost > least else least) + 0.5) or 1]
        if k < 1 or swapped:
            raise ValueError(f"k = {k}: only a step without chunks and swapping can be repeated")
        if cost >= least:
            return segment_ns(base, self._kv_ns, context, num_decodes, 0.0, 0, k)
        return [  # contexts so short that they hide behind the rows, for a while
            int(max(base + self._kv_ns * (context + num_decodes * j), least) + 0.5) or 1
            for j in range(k)
        ]

    def _mixed_attention(
        self, chunks: tuple[tuple[int, int], ...], num_rows: int, context: int, longest: int
    ) -> float:
        """Return what attention takes in a step with prompts, nanoseconds over all layers."""
        block, pair_ns, kv_ns = self._query_block, self._pair_ns, self._kv_ns
        rows_ns = self._row_ns * num_rows
        alone = max(rows_ns, self._row_share * rows_ns + kv_ns * context)
        padded = self._mixed_row_ns * num_rows + self._mixed_kv_ns * context
        work = padded if padded > alone else alone
        keys = longest if num_rows else 0
        for q, c in chunks:
            queries = -(-q // block) * block
            compute = queries * (self._query_ns + pair_ns * (c + (q + 1) * 0.5))
            read = (c + q) * kv_ns
            work += compute if compute > read else read
            if c + q > keys:
                keys = c + q
        pole = keys * self._key_ns
        return self._call_ns + (pole if pole > work else work)

    def describe(self) -> dict[str, object]:
        """Return source, parameters and simplifications, for results."""
        simplifications = [
            "no calibration: datasheet peaks times shares learnt from tables of kernels",
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
            "weight_dtype": self.weight_dtype,
            "kv_dtype": self.kv_dtype,
            "compute_efficiency": self.compute_efficiency or self._gemm.flops_share,
            "memory_efficiency": self.memory_efficiency or self._gemm.bandwidth_share,
            "kernels_learnt_on": dict(self.kernels.origin),
            "simplifications": simplifications,
        }

    def _price_tokens(self, tokens: int) -> float:
        """Price all that depends on the number of new tokens only, and remember it."""
        m, workers = self.model, self.tensor_parallel_size
        hidden = m.hidden_size
        q_width = m.num_heads * m.head_dim / workers
        kv_width = math.ceil(m.num_kv_heads / workers) * m.head_dim
        layer = self._linear(tokens, hidden, q_width + 2 * kv_width)
        layer += self._linear(tokens, q_width, hidden)
        if m.num_experts:
            router = self._linear(tokens, hidden, m.num_experts, is_wide=True)
            layer += router if self._gathers else router + self._moe(tokens)
        else:
            fan = m.num_mlp_matrices - 1  # gate and up are one product
            width = m.intermediate_size / workers
            layer += self._linear(tokens, hidden, fan * width)
            layer += self._linear(tokens, width, hidden)
            layer += self._traffic_ns(tokens * (fan + 1) * width * self._activation_bytes)
        norms = 8 * hidden + (2 * (q_width + kv_width) if m.qk_norm else 0)
        rope = 0 if m.num_position_embeddings else 2 * (q_width + kv_width)
        cache_write = kv_width * (2 * self._activation_bytes + 2 * dtype_bytes(self.kv_dtype))
        layer += self._traffic_ns(tokens * ((norms + rope) * self._activation_bytes + cache_write))
        layer += KERNELS_PER_LAYER * self.kernels.elementwise.latency_s * 1e9
        if workers > 1:
            share = 2 * (workers - 1) / workers
            layer += 2 * self._link_ns(workers, share * tokens * hidden * self._activation_bytes)
        ends = self._traffic_ns(
            tokens * hidden * 4 * self._activation_bytes
        )  # embedding, last norm
        cost = m.num_layers * layer + ends
        self._token_ns[tokens] = cost
        return cost

    def _price_head(self, rows: int) -> float:
        """Price the language-model head and the sampler, and remember it."""
        vocab = self.model.vocab_size / self.tensor_parallel_size
        sampler = self.kernels.sampler
        cost = self._linear(rows, self.model.hidden_size, vocab, is_wide=True)
        moved = rows * vocab * sampler.bytes_per_logit
        cost += 1e9 * (sampler.latency_s + moved / self.gpu.memory_bytes_per_s)
        self._head_ns[rows] = cost
        return cost

    def _linear(
        self, tokens: float, inputs: float, outputs: float, *, is_wide: bool = False
    ) -> float:
        """Return the time of one projection; wide ones keep their weights in 16 bits."""
        gemm = self._wide_gemm if is_wide else self._gemm
        peak = self._wide_peak if is_wide else self._peak
        size = self._activation_bytes
        weights = inputs * outputs * (size if is_wide else self._weight_bytes)
        read = min(size, dtype_bytes(self.dtype)) if not is_wide else size
        traffic = weights + tokens * (inputs * read + outputs * size)
        arithmetic = gemm.arithmetic(tokens, inputs, outputs, self.gpu.num_sms)
        return 1e9 * gemm.seconds(arithmetic / peak, traffic / self.gpu.memory_bytes_per_s)

    def _traffic_ns(self, num_bytes: float) -> float:
        return num_bytes * self._ns_per_elementwise_byte

    @cached_property
    def _ns_per_elementwise_byte(self) -> float:
        share = self.kernels.elementwise.bandwidth_share
        return 1e9 / (self.gpu.memory_bytes_per_s * share)

    def _link_ns(self, devices: int, moved_bytes: float) -> float:
        """Return what devices take to move so many bytes each over the link between them."""
        link = self.gpu.interconnect_bytes_per_s
        return 1e9 * self.kernels.all_reduce.seconds(devices, moved_bytes, link)

    def _moe(self, tokens: int) -> float:
        """Return what a layer's experts take for these tokens, of all engines that share them."""
        m, engines, kernel = self.model, self.data_parallel_size, self.kernels.experts
        size = self._activation_bytes
        missed = (1 - m.experts_per_token / m.num_experts) ** tokens
        touched = m.num_experts * (1 - missed) / engines
        pairs = tokens * m.experts_per_token / engines
        share = m.expert_parameters / self.tensor_parallel_size
        width = m.moe_intermediate_size / self.tensor_parallel_size
        between = m.num_mlp_matrices * width
        traffic = touched * share * self._weight_bytes
        traffic += pairs * (2 * m.hidden_size + between) * size
        traffic_s = traffic / (self.gpu.memory_bytes_per_s * kernel.bandwidth_share)
        arithmetic_s = 2 * pairs * share / (self._peak * kernel.flops_share)
        cost = 1e9 * (kernel.latency_s + traffic_s + arithmetic_s)
        if engines > 1:
            moved = (engines - 1) / engines * tokens * m.hidden_size * size
            cost += 2 * self._link_ns(engines, moved)
        return cost

    def _price_experts(self, tokens: int) -> float:
        """Price the experts of all layers, and remember it."""
        cost = self.model.num_layers * self._moe(tokens)
        self._expert_ns[tokens] = cost
        return cost
