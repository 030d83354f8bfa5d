"""What the kernels of a step take on a device, from shares of its datasheet's peaks."""

from __future__ import annotations

import math
from collections.abc import Callable

from mypy_extensions import i64

from schedlab.sim.cost.efficiency import Efficiency
from schedlab.sim.cost.product import TILE, Product
from schedlab.sim.cost.segment import StepTimes
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.dtypes import dtype_bytes, dtype_name, stored_bytes
from schedlab.sim.hardware.memory import default_kv_dtype
from schedlab.sim.hardware.stage import Stage, stages

PCIE_SHARE = 0.75
"""Share of the host link that swapping reaches: 25 of 32 GB/s on PCIe 4.0."""

KERNELS_PER_LAYER = 5
"""Element-wise ones: two norms, rotary positions, cache write, activation."""

LAUNCHES_PER_LAYER = 3
"""Of a step with prompts, in which vLLM's graphs leave attention out: the piece before it, the
cache write and the attention."""


class KernelTimes:
    """Adds up the kernels of a step; `RooflineCostModel` has the formulas.

    What does not change from step to step is worked out once: constants here, and what goes by a
    number of tokens or rows in tables that are filled on demand, because a run meets few of them.

    Parameters
    ----------
    deployment : Deployment
        What runs where, and in which formats.
    kernels : Efficiency
        What kernels reach.
    stage : Stage, optional
        The layers that are priced, with what stands before and behind them; all if not given.
    """

    def __init__(
        self, deployment: Deployment, kernels: Efficiency, stage: Stage | None = None
    ) -> None:
        self._deployment = deployment
        self._kernels = kernels
        model, gpu = deployment.model, deployment.gpu
        self._stage: Stage = stages(model, 1)[0] if stage is None else stage
        self._gathers: bool = deployment.data_parallel_size > 1 and model.num_experts > 0
        # Attention and the head multiply 16-bit numbers even where the weights are narrower.
        self._wide_dtype: str = default_kv_dtype(deployment.dtype)
        self._activation_bytes: float = dtype_bytes(self._wide_dtype)
        self._memory_bytes_per_s: float = gpu.memory_bytes_per_s
        self._ns_per_swapped_byte: float = 1e9 / (gpu.pcie_bytes_per_s * PCIE_SHARE)
        elementwise = kernels.elementwise
        self._ns_per_elementwise_byte: float = 1e9 / (
            gpu.memory_bytes_per_s * elementwise.bandwidth_share
        )
        calls = self._stage.num_layers * LAUNCHES_PER_LAYER
        self._launch_ns: float = calls * kernels.host.call_s * 1e9
        self._set_attention()
        self._set_products()
        self._token_ns: dict[int, float] = {0: 0.0}
        self._head_ns: dict[int, float] = {0: 0.0}
        self._expert_ns: dict[int, float] = {0: 0.0}

    def _set_attention(self) -> None:
        """Work out what attention costs by row, by KV token and by pair, over all layers."""
        deployment, kernel = self._deployment, self._kernels.attention
        m, gpu, workers = deployment.model, deployment.gpu, deployment.tensor_parallel_size
        heads, kv_heads = m.num_heads / workers, math.ceil(m.num_kv_heads / workers)
        num_layers = self._stage.num_layers
        per_sm = 1e9 * num_layers / gpu.num_sms
        bandwidth = gpu.memory_bytes_per_s * kernel.bandwidth_share
        kv_dtype = dtype_name(deployment.kv_dtype)
        wide_peak = gpu.peak_flops_per_s(self._wide_dtype)
        self._call_ns: float = 1e9 * num_layers * kernel.latency_s
        self._row_ns: float = per_sm * kv_heads * kernel.row_s
        self._row_share: float = kernel.row_share
        self._ramp_ns: float = 1e9 * num_layers * kernel.ramp_s
        kv_bytes = m.kv_bytes_per_token(kv_dtype, workers, num_layers)
        self._kv_ns: float = 1e9 * kv_bytes / bandwidth
        self._query_ns: float = per_sm * heads * kernel.block_s / TILE
        pair_flops = 4.0 * num_layers * heads * m.head_dim
        self._pair_ns: float = 1e9 * pair_flops / (wide_peak * kernel.flops_share)
        self._key_ns: float = 1e9 * num_layers * kernel.key_s
        self._query_block: int = kernel.query_block
        # A decode row beside prompts is computed as so many queries of each head.
        self._mixed_row_ns: float = kernel.mixed_rows * self._query_ns
        self._mixed_kv_ns: float = kernel.mixed_rows * self._pair_ns

    def _set_products(self) -> None:
        """Work out the products of a layer, and the bytes that its other kernels move a token."""
        deployment, size = self._deployment, self._activation_bytes
        m, workers = deployment.model, deployment.tensor_parallel_size
        hidden = m.hidden_size
        q_width = m.num_heads * m.head_dim / workers
        kv_width = math.ceil(m.num_kv_heads / workers) * m.head_dim
        self._first_products: list[Product] = [
            self._product(hidden, q_width + 2 * kv_width),
            self._product(q_width, hidden),
        ]
        self._router: Product | None = None
        if m.num_experts:
            self._router = self._product(hidden, m.num_experts, is_wide=True)
        self._mlp_width: float = m.intermediate_size / workers
        self._shared_width: float = m.shared_intermediate_size / workers
        self._mlp_products: list[Product] = self._mlp(self._mlp_width)
        self._shared_products: list[Product] = self._mlp(self._shared_width)
        norms = 8 * hidden + (2 * (q_width + kv_width) if m.qk_norm else 0)
        rope = 0 if m.num_position_embeddings else 2 * (q_width + kv_width)
        kv_bytes = dtype_bytes(dtype_name(deployment.kv_dtype))
        cache_write = kv_width * (2 * size + 2 * kv_bytes)
        self._elementwise_bytes: float = (norms + rope) * size + cache_write
        self._elementwise_start_ns: float = (
            KERNELS_PER_LAYER * self._kernels.elementwise.latency_s * 1e9
        )
        self._head = self._product(hidden, m.vocab_size / workers, is_wide=True)

    def _mlp(self, width: float) -> list[Product]:
        """Return the products of an MLP; gate and up are one."""
        hidden, fan = (
            self._deployment.model.hidden_size,
            self._deployment.model.num_mlp_matrices - 1,
        )
        if not width:
            return []
        return [self._product(hidden, fan * width), self._product(width, hidden)]

    def _product(self, inputs: float, outputs: float, *, is_wide: bool = False) -> Product:
        """Return one projection; wide ones keep their weights in 16 bits."""
        deployment, size = self._deployment, self._activation_bytes
        gpu, dtype = deployment.gpu, dtype_name(deployment.dtype)
        if is_wide:
            gemm = self._kernels.gemm_of(self._wide_dtype, self._wide_dtype)
            peak, read, stored = gpu.peak_flops_per_s(self._wide_dtype), size, size
        else:
            gemm = self._kernels.gemm_of(dtype, deployment.stored_dtype)
            peak, read = gpu.peak_flops_per_s(deployment.dtype), min(size, dtype_bytes(dtype))
            stored = stored_bytes(deployment.stored_dtype)
        row_bytes = inputs * read + outputs * size
        return Product(gemm, inputs, outputs, inputs * outputs * stored, row_bytes, peak, gpu)

    def step_ns(self, shape: BatchShape, k: int) -> list[int]:
        """Return the durations of `k` successive steps; see `CostModel.step_ns`.

        Raises
        ------
        ValueError
            If `k` < 1, or `k` > 1 for a step that cannot repeat (chunks or swapped bytes).
        """
        num_decodes, chunks = shape.num_decodes, shape.chunks
        tokens = num_decodes + shape.padding_tokens
        for chunk in chunks:
            tokens += chunk[0]
        rows = shape.rows_sampled
        token_ns, head_ns = self._token_ns.get(tokens), self._head_ns.get(rows)
        if self._gathers or token_ns is None or head_ns is None:
            beside = self._beside(shape, tokens, rows)
        else:  # the same, written out
            beside = shape.swapped_bytes * self._ns_per_swapped_byte + token_ns + head_ns
        # A decode row also attends to its own token.
        context = shape.decode_context_sum_tokens + num_decodes + shape.padding_context_tokens
        attending = num_decodes + shape.padding_rows
        if chunks:
            if k != 1:
                raise ValueError(f"k = {k}: a step with chunks cannot be repeated")
            longest = shape.decode_context_max_tokens + 1
            work, keys = self._mixed_work(chunks, attending, context, longest)
            pole = keys * self._key_ns
            base = beside + (self._call_ns + (pole if pole > work else work))
            return [int((base if base > self._launch_ns else self._launch_ns) + 0.5)]
        if k < 1 or (k > 1 and shape.swapped_bytes):
            raise ValueError(f"k = {k}: only a step without chunks and swapping can be repeated")
        return self._decode_times(shape, beside, context).durations_ns(k)

    def step_times(self, shape: BatchShape) -> StepTimes | None:
        """Return the times of a step and of those behind it; see `CostModel.step_times_pricer`."""
        if shape.chunks or shape.swapped_bytes:
            return None
        num_decodes = shape.num_decodes
        context = shape.decode_context_sum_tokens + num_decodes + shape.padding_context_tokens
        return self._decode_times(shape, self._beside_attention(shape), context)

    def _decode_times(self, shape: BatchShape, beside: float, context: int) -> StepTimes:
        """Return the times of steps of decodes alone, of which the first reads `context` tokens."""
        base, least = self._before_reading_ns(beside, shape.num_decodes + shape.padding_rows)
        return StepTimes(base, self._ramp_ns, self._kv_ns, least, context, shape.num_decodes)

    def _before_reading_ns(self, beside: float, attending: int) -> tuple[float, float]:
        """Return what a step of decodes takes before it reads contexts, and what at least."""
        if not attending:
            return beside, beside
        rows_ns = self._row_ns * attending
        base = beside + (self._call_ns + self._row_share * rows_ns)
        return base, beside + (self._call_ns + rows_ns)

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Return what gives the duration of a step with one more chunk, by its new tokens.

        See `CostModel.chunk_pricer`. The sums are those of `step_ns`, in the same order.
        """
        num_decodes, chunks = shape.num_decodes, shape.chunks
        others = num_decodes + shape.padding_tokens
        for chunk in chunks:
            others += chunk[0]
        context = shape.decode_context_sum_tokens + num_decodes + shape.padding_context_tokens
        attending, longest = num_decodes + shape.padding_rows, shape.decode_context_max_tokens + 1
        rows_work, rows_keys = self._mixed_work(chunks, attending, context, longest)
        call_ns, launch_ns, key_ns = self._call_ns, self._launch_ns, self._key_ns
        swapped_ns, token_ns = shape.swapped_bytes * self._ns_per_swapped_byte, self._token_ns
        rows = shape.rows_sampled + 1
        head_ns = self._head_ns.get(rows)
        head_ns = self._price_head(rows) if head_ns is None else head_ns

        def step_ns(num_tokens: int) -> int:
            found = None if self._gathers else token_ns.get(others + num_tokens)
            if found is None:
                beside = self._beside(shape, others + num_tokens, rows)
            else:
                beside = swapped_ns + found + head_ns
            work = rows_work + self._chunk_work(num_tokens, context_tokens)
            keys = context_tokens + num_tokens
            pole = (keys if keys > rows_keys else rows_keys) * key_ns
            cost = beside + (call_ns + (pole if pole > work else work))
            return int((cost if cost > launch_ns else launch_ns) + 0.5)

        return step_ns

    def uneven_ns(self, steps: UnevenSteps) -> list[int]:
        """Return the durations of steps with contexts of their own; see `CostModel.uneven_ns`."""
        shape, grown_tokens = steps.first, steps.grown_tokens
        attending = shape.num_decodes + shape.padding_rows
        context = shape.decode_context_sum_tokens + shape.num_decodes + shape.padding_context_tokens
        base, least = self._before_reading_ns(self._beside_attention(shape), attending)
        ramp_ns, kv_ns = self._ramp_ns, self._kv_ns
        at_rate = base + ramp_ns
        costs: list[int] = []
        last: i64 = len(grown_tokens)
        i: i64
        for i in range(last + 1):
            read = kv_ns * context
            cost = at_rate + read if read > ramp_ns else base + 2.0 * read
            costs.append(int((cost if cost > least else least) + 0.5) or 1)
            if i < last:
                context += grown_tokens[i]
        return costs

    def _beside_attention(self, shape: BatchShape) -> float:
        """Return what a step takes but for its attention."""
        tokens = shape.num_decodes + shape.padding_tokens
        for chunk in shape.chunks:
            tokens += chunk[0]
        return self._beside(shape, tokens, shape.rows_sampled)

    def _beside(self, shape: BatchShape, tokens: int, rows: int) -> float:
        """Return that of a step with other tokens and rows sampled than its shape says."""
        cost = shape.swapped_bytes * self._ns_per_swapped_byte
        found = self._token_ns.get(tokens)
        cost += self._price_tokens(tokens) if found is None else found
        if self._gathers:
            met = shape.gathered_tokens or tokens
            found = self._expert_ns.get(met)
            cost += self._price_experts(met) if found is None else found
        found = self._head_ns.get(rows)
        cost += self._price_head(rows) if found is None else found
        return cost

    def _mixed_work(
        self, chunks: tuple[tuple[int, int], ...], num_rows: int, context: int, longest: int
    ) -> tuple[float, int]:
        """Return the work of all rows and chunks, and the most keys that one of them looks at."""
        work, keys = 0.0, longest if num_rows else 0
        if num_rows or context:
            rows_ns = self._row_ns * num_rows
            read = self._kv_ns * context
            read += self._row_share * rows_ns + (read if read < self._ramp_ns else self._ramp_ns)
            alone = rows_ns if rows_ns > read else read
            padded = self._mixed_row_ns * num_rows + self._mixed_kv_ns * context
            work = padded if padded > alone else alone
        block, query_ns, pair_ns = self._query_block, self._query_ns, self._pair_ns
        for q, c in chunks:  # with `_chunk_work`, written out: most requests are one chunk
            queries = -(-q // block) * block
            compute = queries * (query_ns + pair_ns * (c + (q + 1) * 0.5))
            read = (c + q) * self._kv_ns
            work += compute if compute > read else read
            if c + q > keys:
                keys = c + q
        return work, keys

    def _chunk_work(self, tokens: int, context: int) -> float:
        """Return what the attention of a chunk takes beside others."""
        block = self._query_block
        queries = -(-tokens // block) * block
        compute = queries * (self._query_ns + self._pair_ns * (context + (tokens + 1) * 0.5))
        read = (context + tokens) * self._kv_ns
        return compute if compute > read else read

    def _price_tokens(self, tokens: int) -> float:
        """Price all that depends on the number of new tokens only, and remember it."""
        deployment, size = self._deployment, self._activation_bytes
        workers, model = deployment.tensor_parallel_size, deployment.model
        stage, hidden, dense = self._stage, model.hidden_size, 0.0
        layer = 0.0
        for product in self._first_products:
            layer += 1e9 * product.seconds(tokens)
        if self._router is not None:
            router = 1e9 * self._router.seconds(tokens)
            mixture = router if self._gathers else router + self._moe(tokens)
            if self._shared_products:
                mixture += self._price_mlp(self._shared_products, self._shared_width, tokens)
            layer += mixture
            if model.num_dense_layers:
                dense = self._price_mlp(self._mlp_products, self._mlp_width, tokens) - mixture
        else:
            layer += self._price_mlp(self._mlp_products, self._mlp_width, tokens)
        layer += self._traffic_ns(tokens * self._elementwise_bytes)
        layer += self._elementwise_start_ns
        if workers > 1:
            share = 2 * (workers - 1) / workers
            layer += 2 * self._link_ns(workers, share * tokens * hidden * size)
        # Embedding and last norm.
        num_ends = int(stage.is_first) + int(stage.is_last)
        ends = self._traffic_ns(tokens * hidden * 2 * num_ends * size)
        cost: float = stage.num_layers * layer + stage.num_dense_layers * dense + ends
        self._token_ns[tokens] = cost
        return cost

    def _price_mlp(self, products: list[Product], width: float, tokens: int) -> float:
        """Return what the products and the activation of one layer's MLP take."""
        cost = 0.0
        for product in products:
            cost += 1e9 * product.seconds(tokens)
        activated = self._deployment.model.num_mlp_matrices * width * self._activation_bytes
        return cost + self._traffic_ns(tokens * activated)

    def _price_head(self, rows: int) -> float:
        """Price the language-model head and the sampler, and remember it."""
        if not self._stage.is_last:
            return 0.0
        deployment, sampler = self._deployment, self._kernels.sampler
        vocab = deployment.model.vocab_size / deployment.tensor_parallel_size
        cost: float = 1e9 * self._head.seconds(rows)
        moved = rows * vocab * sampler.bytes_per_logit
        cost += 1e9 * (sampler.latency_s + moved / self._memory_bytes_per_s)
        self._head_ns[rows] = cost
        return cost

    def _traffic_ns(self, num_bytes: float) -> float:
        return num_bytes * self._ns_per_elementwise_byte

    def _link_ns(self, devices: int, moved_bytes: float) -> float:
        """Return what devices take to move so many bytes each over the link between them."""
        link = self._deployment.gpu.interconnect_bytes_per_s
        return 1e9 * self._kernels.all_reduce.seconds(devices, moved_bytes, link)

    def _moe(self, tokens: int) -> float:
        """Return what a layer's experts take for these tokens, of all engines that share them."""
        deployment, size, kernel = self._deployment, self._activation_bytes, self._kernels.experts
        m, gpu, engines = deployment.model, deployment.gpu, deployment.data_parallel_size
        missed = (1 - m.experts_per_token / m.num_experts) ** tokens
        touched = m.num_experts * (1 - missed) / engines
        pairs = tokens * m.experts_per_token / engines
        share = m.expert_parameters / deployment.tensor_parallel_size
        width = m.moe_intermediate_size / deployment.tensor_parallel_size
        between = m.num_mlp_matrices * width
        traffic = touched * share * stored_bytes(deployment.stored_dtype)
        traffic += pairs * (2 * m.hidden_size + between) * size
        traffic_s = traffic / (self._memory_bytes_per_s * kernel.bandwidth_share)
        peak = gpu.peak_flops_per_s(deployment.dtype)
        arithmetic_s = 2 * pairs * share / (peak * kernel.flops_share)
        cost = 1e9 * (kernel.latency_s + traffic_s + arithmetic_s)
        if engines > 1:
            moved = (engines - 1) / engines * tokens * m.hidden_size * size
            cost += 2 * self._link_ns(engines, moved)
        return cost

    def _price_experts(self, tokens: int) -> float:
        """Price the experts of all layers, and remember it."""
        num_moe_layers = self._stage.num_layers - self._stage.num_dense_layers
        cost: float = num_moe_layers * self._moe(tokens)
        self._expert_ns[tokens] = cost
        return cost
