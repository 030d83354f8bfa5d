"""Step time from datasheets, and from what kernels of such devices reach of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.efficiency import Efficiency, efficiency_of
from schedlab.sim.cost.kernel_times import KernelTimes
from schedlab.sim.cost.registry import register
from schedlab.sim.cost.segment import StepTimes
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.cost.stages import Stages
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.dtypes import dtype_bytes, dtype_name
from schedlab.sim.hardware.gpus import Gpu
from schedlab.sim.hardware.link import LINKS, Link
from schedlab.sim.hardware.memory import check_tensor_parallel, default_kv_dtype
from schedlab.sim.hardware.stage import stages


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

    Attention of decodes costs ``latency + max(rows, share * rows + read + min(read, ramp))`` with
    ``read = KV bytes / bandwidth``: a row with context c reads c + 1 tokens, reading hides all but
    a share of what rows cost, and is at half its rate while the call fills and drains. A chunk of q
    tokens after c adds its blocks of queries and ``q*(c + (q+1)/2)`` pairs, or the cache it
    reads if that takes longer; decodes beside it are computed as `Attention.mixed_rows` queries,
    and the call takes at least as long as its longest sequence keeps one thread block.

    The language-model head and the sampler run over `rows_sampled` rows. Two all-reduces a layer
    under tensor parallelism, each ``latency + hop*(N-1) + 2*(N-1)/N * bytes / link``. Of N engines
    that share experts each computes 1/N of the experts, for the tokens of all, which come and leave
    in ``latency + hop*(N-1) + (N-1)/N * bytes / link`` each. Swapped bytes cross PCIe without
    overlap. A step with prompts takes at least as long as the host launches it.

    In a pipeline each stage costs what its layers do, the first with the embedding, the last with
    head and sampler. Between two, every device sends its share of one activation vector a token,
    ``latency + T * hidden / tp * bytes / link``.

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
        self.dtype = dtype_name(dtype)
        self.weight_dtype = deployment.stored_dtype
        self.kv_dtype = dtype_name(deployment.kv_dtype)
        divided = stages(model, deployment.pipeline_parallel_size)
        self.num_stages = len(divided)
        self.layers_per_stage = [stage.num_layers for stage in divided]
        self._times = [KernelTimes(deployment, self.kernels, stage) for stage in divided]
        # Who prices steps in a way of its own is asked for each, and may look at any context.
        is_plain = type(self).step_ns is _STEP_NS
        self.reads_extremes = not is_plain
        self.never_falls = is_plain  # a sum of terms of which none does
        self._all_times = self._times[0] if is_plain and self.num_stages == 1 else None
        self.pipeline_link = deployment.pipeline_link or _link_of_gpus(gpu)
        size = dtype_bytes(default_kv_dtype(dtype))
        sent_bytes = model.hidden_size * size / workers
        link = self.pipeline_link
        send_ns = link.latency_s * 1e9
        self._stages = Stages(self._times, send_ns, 1e9 * sent_bytes / link.bytes_per_s)

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` successive steps; see `CostModel.step_ns`.

        Raises
        ------
        ValueError
            If `k` < 1, or `k` > 1 for a step that cannot repeat (chunks or swapped bytes).
        """
        if self.num_stages == 1:
            return self._times[0].step_ns(shape, k)
        return self._stages.step_ns(shape, k)

    def pricer(self) -> Callable[[BatchShape, int], list[int]]:
        """Return `step_ns`, or of a single stage what it calls; see `CostModel.pricer`."""
        return self.step_ns if self._all_times is None else self._all_times.step_ns

    def step_times_pricer(self) -> Callable[[BatchShape], StepTimes | None] | None:
        """Return what has the times of a single stage; see `CostModel.step_times_pricer`."""
        return None if self._all_times is None else self._all_times.step_times

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Return what prices a step by a chunk of it; see `CostModel.chunk_pricer`."""
        if self._all_times is None:
            return super().chunk_pricer(shape, context_tokens)
        return self._all_times.chunk_pricer(shape, context_tokens)

    def uneven_ns(self, steps: UnevenSteps) -> list[int]:
        """Return the durations of steps whose contexts grow unevenly; see `CostModel.uneven_ns`."""
        if self._all_times is None:
            return super().uneven_ns(steps)
        return self._all_times.uneven_ns(steps)

    def uneven_pricer(self) -> Callable[[UnevenSteps], list[int]]:
        """Return `uneven_ns`, or of a single stage what it calls; see `CostModel`."""
        return self.uneven_ns if self._all_times is None else self._all_times.uneven_ns

    def stations_ns(self, shape: BatchShape) -> list[int]:
        """Return what stages and links take of a step; see `CostModel.stations_ns`."""
        return self._stages.stations_ns(shape)

    def stations_pricer(self) -> Callable[[BatchShape], list[int]]:
        """Return what `stations_ns` calls; see `CostModel.stations_pricer`."""
        is_plain = type(self).stations_ns is _STATIONS_NS
        return self._stages.stations_ns if is_plain else self.stations_ns

    def describe(self) -> dict[str, object]:
        """Return source, parameters and simplifications, for results."""
        gemm = self.kernels.gemm_of(self.dtype, self.weight_dtype)
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
        pipeline: dict[str, object] = {}
        if self.num_stages > 1:
            simplifications.append(
                "stages send one activation vector a token, beside what they compute"
            )
            pipeline = {
                "pipeline_parallel_size": self.num_stages,
                "layers_per_stage": self.layers_per_stage,
                "pipeline_link": asdict(self.pipeline_link),
            }
        return {
            "name": self.name,
            "calibration": "UNCALIBRATED",
            "model": self.model.name,
            "model_source": self.model.source,
            "hardware": self.gpu.name,
            "hardware_source": self.gpu.source,
            "tensor_parallel_size": self.tensor_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            **pipeline,
            "dtype": self.dtype,
            "weight_dtype": self.weight_dtype,
            "kv_dtype": self.kv_dtype,
            "compute_efficiency": self.compute_efficiency or gemm.flops_share,
            "memory_efficiency": self.memory_efficiency or gemm.bandwidth_share,
            "kernels_learnt_on": dict(self.kernels.origin),
            "simplifications": simplifications,
        }


_STATIONS_NS = RooflineCostModel.stations_ns

_STEP_NS = RooflineCostModel.step_ns


def _link_of_gpus(gpu: Gpu) -> Link:
    """Return the link between the GPUs of one machine."""
    return Link(gpu.interconnect_bytes_per_s, LINKS["nvlink"].latency_s, gpu.source)
