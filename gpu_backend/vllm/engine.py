"""vLLM's engine core in this process, opened once for many runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from schedlab.gpu_backend.device import open_device, require_memory
from schedlab.gpu_backend.vllm.model_folder import model_folder
from schedlab.gpu_backend.vllm.step_estimates import DTYPES
from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.dtypes import dtype_name
from schedlab.sim.hardware.models import model

if TYPE_CHECKING:
    from schedlab.gpu_backend.vllm.scheduler import PolicyScheduler

_OURS = (
    "num_blocks", "null_blocks", "max_model_len", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold",
    "threshold_spares_lone_request", "watermark", "scheduler_reserve_full_isl",
    "enable_prefix_caching", "free_uncached_first", "async_scheduling", "preempt_in_order",
    "serve_behind_preempted",
)  # fmt: skip
"""Limits and switches that decide what is scheduled."""


@dataclass(frozen=True)
class VllmSetup:
    """What an engine is opened with.

    Attributes
    ----------
    model : str
        A name of the model table, or a Hugging Face folder or config.json.
    config : EngineConfig
        Limits, among them the size of the KV cache.
    device, dtype : str
        ``cpu`` or ``cuda``; ``fp32``, ``bf16`` or ``fp16``.
    weights : str or None
        Folder of a checkpoint; random weights without it.
    seed : int
        Of random weights and of sampling.
    threads : int
        Of the kernels, on a CPU.
    cuda_graphs : bool
        Whether steps on a GPU replay CUDA graphs.
    attention_backend : str or None
        vLLM's name of it, e.g. ``TRITON_ATTN``; vLLM's choice if None.
    gpu_memory_utilization : float
        Share of the device's memory, where the size of the cache follows from it.
    """

    model: str
    config: EngineConfig
    device: str = "cpu"
    dtype: str = "fp32"
    weights: str | None = None
    seed: int = 0
    threads: int = 1
    cuda_graphs: bool = True
    attention_backend: str | None = None
    gpu_memory_utilization: float = 0.9


class Core:
    """vLLM's `EngineCore`, without processes of its own.

    Parameters
    ----------
    setup : VllmSetup
        What to open.

    Attributes
    ----------
    engine : vllm EngineCore
        The loop; its scheduler is replaced for each run.
    vocab_size : int
        Token ids of prompts are below it.

    Raises
    ------
    SpecError
        If vLLM refuses, the device is missing or the model does not fit; with vLLM's words.
    """

    def __init__(self, setup: VllmSetup) -> None:
        self.setup = setup
        self._scratch = TemporaryDirectory(prefix="schedlab-vllm-")
        folder = Path(setup.weights) if setup.weights else None
        self.vocab_size = model(setup.model).vocab_size
        require_room(setup)
        self._folder = folder or model_folder(setup.model, Path(self._scratch.name))
        try:
            self.engine = self._open()
        except (SystemExit, KeyboardInterrupt):
            raise
        except Exception as error:
            self._scratch.cleanup()
            told = str(error).strip() or type(error).__name__
            raise SpecError(f"vLLM does not open {setup.model}: {told}") from error
        self._kv_cache_config = self.engine.scheduler.kv_cache_config

    def _open(self) -> Any:  # noqa: ANN401 - vLLM's
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        setup, config = self.setup, self.setup.config
        on_cpu = setup.device == "cpu"
        if on_cpu:
            torch.set_num_threads(setup.threads)
        num_blocks = config.num_blocks + config.null_blocks
        block_bytes = config.block_size * model(setup.model).kv_bytes_per_token(setup.dtype)
        attention = {}
        if setup.attention_backend is not None:
            attention = {"attention_config": {"backend": setup.attention_backend}}
        options = EngineArgs(
            model=str(self._folder),
            skip_tokenizer_init=True,
            load_format="auto" if setup.weights else "dummy",
            dtype=DTYPES[dtype_name(setup.dtype)],
            seed=setup.seed,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_gpu_blocks_override=num_blocks,
            # A CPU's cache is as large as asked for, whatever memory there is beside.
            kv_cache_memory_bytes=num_blocks * block_bytes if on_cpu else None,
            gpu_memory_utilization=setup.gpu_memory_utilization,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_prefix_caching=config.enable_prefix_caching,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            watermark=config.watermark,
            scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
            async_scheduling=config.async_scheduling,
            enforce_eager=on_cpu or not setup.cuda_graphs,
            distributed_executor_backend="uni",
            disable_log_stats=True,
            **attention,
        )
        vllm_config = options.create_engine_config()
        return EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)

    def new_scheduler(
        self,
        cls: type[PolicyScheduler],
        policy: dict[str, object],
        *arguments: Any,  # noqa: ANN401 - those of the class
    ) -> Any:  # noqa: ANN401 - of that class
        """Give the loop a scheduler that knows no request; the model and its memory stay.

        Parameters
        ----------
        cls : type of PolicyScheduler
            Its class.
        policy : dict
            Name and knobs.
        *arguments
            What the class is constructed with before vLLM's own arguments.

        Raises
        ------
        SpecError
            If the policy cannot run in vLLM, or vLLM's limits differ from those of the setup; names
            the key.
        """
        self.engine.vllm_config.additional_config = {"schedlab": {"policy": policy}}
        scheduler = self.new_plain_scheduler(cls, *arguments)
        require_same(self.setup.config, scheduler.engine_config)
        return scheduler

    def new_plain_scheduler(
        self,
        cls: type[Any],
        *arguments: Any,  # noqa: ANN401 - those of the class
    ) -> Any:  # noqa: ANN401 - of that class
        """Give the loop a scheduler of any class; see `new_scheduler`."""
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        engine = self.engine
        block_size, hash_block_size = resolve_kv_cache_block_sizes(
            self._kv_cache_config, engine.vllm_config
        )
        engine.scheduler = cls(
            *arguments,
            vllm_config=engine.vllm_config,
            kv_cache_config=self._kv_cache_config,
            structured_output_manager=engine.structured_output_manager,
            include_finished_set=False,
            log_stats=False,
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        return engine.scheduler

    @property
    def graph_buckets(self) -> tuple[int, ...]:
        """Batch sizes of captured steps; empty without graphs."""
        config = self.engine.vllm_config
        if config.model_config.enforce_eager:
            return ()
        return tuple(sorted(config.compilation_config.cudagraph_capture_sizes or ()))

    def describe(self) -> dict[str, object]:
        """Return version, model runner and attention backend."""
        import vllm

        config = self.engine.vllm_config
        backend = config.attention_config.backend
        return {
            "vllm": vllm.__version__,
            "model_runner": "v2" if config.use_v2_model_runner else "v1",
            "attention_backend": "vLLM's choice" if backend is None else backend.name,
            "eager": bool(config.model_config.enforce_eager),
        }

    def close(self) -> None:
        """Give the device back."""
        self.engine.shutdown()
        self._scratch.cleanup()


def require_room(setup: VllmSetup) -> None:
    """Make sure that there is the device, and room on it for weights and cache.

    Raises
    ------
    SpecError
        If there is not; says how much is needed and how much is free.
    """
    where = open_device(setup.device)
    config, shape = setup.config, model(setup.model)
    num_tokens = (config.num_blocks + config.null_blocks) * config.block_size
    require_memory(
        shape.weight_bytes(setup.dtype) + num_tokens * shape.kv_bytes_per_token(setup.dtype),
        where,
        f"{shape.name} in {setup.dtype} with {num_tokens} tokens of KV cache",
    )


def require_same(ours: EngineConfig, theirs: EngineConfig) -> None:
    """Make sure that what an experiment says of the engine is what vLLM does.

    Raises
    ------
    SpecError
        Naming the keys, and both values.
    """
    differing = [
        f"{name} is {getattr(theirs, name)} in vLLM, {getattr(ours, name)} in the experiment"
        for name in _OURS
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if ours.most_resident != theirs.most_resident:
        differing.append(
            f"max_num_resident is {theirs.most_resident} in vLLM, {ours.most_resident} in the "
            "experiment"
        )
    if ours.kv_allocator != "paged" or ours.preemption_mode != "recompute":
        differing.append("vLLM's memory is paged, and it recomputes who is preempted")
    if differing:
        raise SpecError(
            f"engine: {'; '.join(differing)} (engine.profile sets what is vLLM's own: vllm-0.32)"
        )
