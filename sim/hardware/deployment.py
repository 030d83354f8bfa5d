"""What runs where: a model on devices, in which number formats, under which limits."""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.dtypes import dtype_bytes, dtype_name
from schedlab.sim.hardware.gpus import Gpu
from schedlab.sim.hardware.link import Link
from schedlab.sim.hardware.memory import default_kv_dtype
from schedlab.sim.hardware.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine's model and devices: what the time of a step can depend on beside its batch.

    Attributes
    ----------
    model : ModelShape
        The model.
    gpu : Gpu
        The device, or each of several.
    tensor_parallel_size : int
        Devices that share every layer.
    dtype : str
        Format of arithmetic; activations keep at least 16 bits.
    kv_cache_dtype : str
        Format of the KV cache; ``auto`` is that of the activations.
    config : EngineConfig or None
        The engine's limits; None where a cost model is looked at without an engine.
    data_parallel_size : int
        Engines that share the experts of a mixture and run every step together; 1 where an engine
        has all of the model.
    enable_expert_parallel : bool or None
        Whether devices share experts by spreading whole ones, and not by slicing their width;
        None = as the cost model's profile says.
    weight_dtype : str
        Format in which the weights of the layers are stored; ``auto`` is `dtype`. A narrower one is
        widened as it is read (W4A16, W8A16).
    pipeline_parallel_size : int
        Stages that the layers are divided among, each of `tensor_parallel_size` devices.
    pipeline_link : Link or None
        What joins each device of a stage to one of the next; None = what joins the devices of the
        stage itself, `Gpu.interconnect_bytes_per_s`.

    Raises
    ------
    SpecError
        If weights are stored wider than they are computed in.
    """

    model: ModelShape
    gpu: Gpu
    tensor_parallel_size: int = 1
    dtype: str = "bf16"
    kv_cache_dtype: str = "auto"
    config: EngineConfig | None = None
    data_parallel_size: int = 1
    enable_expert_parallel: bool | None = None
    weight_dtype: str = "auto"
    pipeline_parallel_size: int = 1
    pipeline_link: Link | None = None

    def __post_init__(self) -> None:
        if dtype_bytes(self.stored_dtype) > dtype_bytes(self.dtype):
            raise SpecError(
                f"weight_dtype {self.weight_dtype} is wider than dtype {self.dtype}: weights are "
                "stored in the format of arithmetic or in a narrower one"
            )

    @property
    def num_devices(self) -> int:
        """GPUs of an engine, those of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def stored_dtype(self) -> str:
        """Format of the weights, never ``auto``."""
        return dtype_name(self.dtype if self.weight_dtype == "auto" else self.weight_dtype)

    @property
    def kv_dtype(self) -> str:
        """Format of the KV cache, never ``auto``."""
        return (
            default_kv_dtype(self.dtype) if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        )
