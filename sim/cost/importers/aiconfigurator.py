"""AIConfigurator: operator measurements of many GPUs, through that package's own interpolation.

Source: ai-dynamo/aiconfigurator, PyPI package aiconfigurator-core (optional), class
`aiconfigurator_core.sdk.engine.EngineHandle`. The package prices whole steps of a model; here it is
asked for a grid of them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from logging.handlers import BufferingHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from schedlab.sim.cost.importers.imported import Imported
from schedlab.sim.cost.table_profile import TableProfile
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.files import write_text
from schedlab.sim.hardware.gpus import L2_BYTES, canonical_gpu
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import canonical_model, model_names
from schedlab.sim.hardware.models import model as find_model

SYSTEMS = {
    "a100-80gb": "a100_sxm", "a100-80gb-pcie": "a100_pcie", "h100-80gb": "h100_sxm",
    "h100-80gb-pcie": "h100_pcie", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s",
    "l4": "l4", "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
"""Our names of GPUs and theirs."""

_CACHE_BYTES = 2
"""Of a number in the KV cache: bf16, as the profile says."""
_CHUNKS = tuple(1 << i for i in range(4, 14))
_PREFIXES = (0, 64, 256, 1024, 4096, 16384)
_BATCHES = tuple(1 << i for i in range(9))
_CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_COLD = 1.2
"""Of the cache's size, as in what the roofline is learnt from (`learning.fit`)."""
_MOST_KV_HEADS = 8
"""Of decode attention the package's tables have no more KV heads on a device."""


class StepPrices(Protocol):
    """What is used of `EngineHandle`; milliseconds."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """Price `bs` prompts of `isl` tokens of which `prefix` are cached."""

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        """Price the decode steps that take `bs` answers from the first token to `osl`."""

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int
    ) -> tuple[float, float, float, float]:
        """Price a step of both kinds: total, all but attention, prefill and decode attention."""


class NarrowAttention(NamedTuple):
    """Decode attention of a model with many KV heads, as that of more requests with fewer heads.

    A decode kernel deals with every (request, KV head) on its own, so N requests of 32 heads are
    4 N requests of 8: the same bytes in as many pieces.
    """

    engine: StepPrices
    """Prices a model that differs from the one in question in the number of heads only."""
    requests: int
    """So many of its requests are one of the model's."""

    def ms(self, num_requests: int, context: int) -> float:
        """Return the attention of a step that decodes so many requests."""
        return _attention_ms(self.engine, num_requests * self.requests, context)


class ColdCache(NamedTuple):
    """Says which calls of decode attention were timed with their keys and values in the L2 cache.

    The package's tables are of one call repeated on one cache (its collector, collect_attn.py). In
    a step every layer reads its own, after its own weights, so nothing of them is left there.
    """

    bytes_per_token: int
    """Keys and values of a token in one layer on one device."""
    l2_bytes: int

    def context(self, num_requests: int) -> float:
        """Return the context from which on so many requests surely read from memory."""
        return _COLD * self.l2_bytes / (num_requests * self.bytes_per_token)


def import_aiconfigurator(
    model: str,
    hardware: str,
    tensor_parallel_size: int = 1,
    backend: str = "vllm",
    backend_version: str | None = None,
    *,
    expert_parallel: bool = False,
) -> Imported:
    """Return the profile of a model on a GPU.

    Parameters
    ----------
    model : str
        As that package names it, e.g. ``meta-llama/Meta-Llama-3.1-8B``, or a folder with the
        model's config.json.
    hardware : str
        A GPU of `SYSTEMS`.
    tensor_parallel_size : int
        GPUs.
    backend, backend_version : str
        The engine that was measured; the package's default version if absent.
    expert_parallel : bool
        Whether the GPUs share the experts of a mixture by spreading whole ones, and not by slicing
        each.

    Raises
    ------
    SpecError
        If the package is missing, or does not know the GPU, model or engine; or if there are no
        experts to spread.
    """
    name = canonical_gpu(hardware)
    if name not in SYSTEMS:
        raise SpecError(f"aiconfigurator has no {hardware!r}; {nearest(name, SYSTEMS)}")
    shape = _known_shape(model)
    if expert_parallel and shape is not None and not shape.num_experts:
        raise SpecError(f"{shape.name} has no experts: leave out --expert-parallel")
    experts = "moe_ep_size" if expert_parallel else "moe_tp_size"
    sizes = {"tp_size": tensor_parallel_size, "moe_tp_size": 1, "moe_ep_size": 1}
    sizes[experts] = tensor_parallel_size
    system, opened = SYSTEMS[name], (backend, backend_version)
    try:
        engine = _open(model, system, *opened, sizes)
    except SpecError:
        # The package finds configurations of few models; ours says the same.
        if shape is None or not _is_plain(shape) or Path(model).is_dir():
            raise
        engine = _open_config(_config(shape), system, *opened, sizes)
    narrow = None
    heads = 0 if shape is None else shape.num_kv_heads // tensor_parallel_size
    if shape is not None and heads > _MOST_KV_HEADS and heads % _MOST_KV_HEADS == 0:
        one = {"tp_size": 1, "moe_tp_size": 1, "moe_ep_size": 1}
        config = _config(_narrowed(shape))
        narrow = NarrowAttention(
            _open_config(config, system, *opened, one), heads // _MOST_KV_HEADS
        )
    cold = None
    if shape is not None:
        width = max(shape.num_kv_heads // tensor_parallel_size, 1) * shape.head_dim
        cold = ColdCache(2 * width * _CACHE_BYTES, L2_BYTES[name])
    version = metadata.version("aiconfigurator-core")
    return Imported(
        profile=step_grid(engine, narrow, cold),
        meta={
            "model": canonical_model(model) if shape is None else shape.name,
            "hardware": name,
            "dtype": "bf16",
            "tensor_parallel_size": tensor_parallel_size,
            "expert_parallel": expert_parallel,
            "source": f"aiconfigurator-core {version}, {backend} {backend_version or 'default'}",
        },
        assumptions=(
            "interpolation between measurements is the package's own; where an engine's table has "
            "no row, it takes another engine's",
            "a step of both kinds is its prefill, plus what its decodes add to the linear layers "
            "and their attention",
            "formats are what the package infers from the model; bf16 is assumed of its weights",
            *_narrow_assumption(narrow, heads),
            "decode attention that was timed in the L2 cache takes as much longer as its bytes "
            "need from memory, by the calls that do not fit"
            if cold is not None
            else "decode attention is as timed, in the L2 cache if it fits",
        ),
    )


def _narrow_assumption(narrow: NarrowAttention | None, heads: int) -> tuple[str, ...]:
    if narrow is None:
        return ()
    return (
        f"decode attention with {heads} KV heads on a device, which was not measured, is that of "
        f"{narrow.requests} times the requests with {_MOST_KV_HEADS}",
    )


def step_grid(
    engine: StepPrices, narrow: NarrowAttention | None = None, cold: ColdCache | None = None
) -> TableProfile:
    """Ask for steps of every kind and return them as one table of whole steps.

    Parameters
    ----------
    engine : StepPrices
        Whom to ask.
    narrow : NarrowAttention, optional
        Whom to ask for the attention of decodes instead.
    cold : ColdCache, optional
        Which calls of it were too fast.
    """
    points: list[tuple[int, int, int, int, float]] = []
    own = {(n, c): _attention_ms(engine, n, c) for n in _BATCHES for c in _CONTEXTS}

    def timed(num_requests: int, context: int) -> float:
        if narrow is not None:
            return narrow.ms(num_requests, context)
        return _attention_ms(engine, num_requests, context)

    attention = {(n, c): _cold_ms(timed, cold, n, c) for n, c in own}
    for n in _BATCHES:
        points += [
            (0, 0, n, c, engine.predict_decode_latency(n, c, 2) - own[n, c] + attention[n, c])
            for c in _CONTEXTS
        ]
    for chunk in _CHUNKS:
        alone = engine.mixed_step_breakdown(chunk, 0, chunk, 2)[1]
        more = {n: engine.mixed_step_breakdown(chunk, n, chunk, 2)[1] - alone for n in _BATCHES}
        for prefix in _PREFIXES:
            prefill = engine.predict_prefill_latency(1, chunk + prefix, prefix)
            points.append((chunk, prefix, 0, 0, prefill))
            points += [
                (chunk, prefix, n, c, prefill + more[n] + attention[n, c])
                for n in _BATCHES
                for c in _CONTEXTS
            ]
    names = ("prefill_chunk", "kv_prefill", "num_decodes", "kv_decode", "us")
    columns: dict[str, list[Any]] = dict(
        zip(names, map(list, zip(*points, strict=True)), strict=True)
    )
    columns["us"] = [1e3 * ms for ms in columns["us"]]
    return TableProfile((), (), columns, attention_calls=1)


def _cold_ms(
    timed: Callable[[int, int], float], cold: ColdCache | None, num_requests: int, context: int
) -> float:
    """Return a call of decode attention as it is outside the cache: start-up, and bytes in turn."""
    ms = timed(num_requests, context)
    if cold is None or context >= (enough := math.ceil(cold.context(num_requests))):
        return ms
    least = _CONTEXTS[0]
    start, end = timed(num_requests, least), timed(num_requests, enough)
    return max(ms, start + (end - start) * (context - least) / (enough - least))


def _attention_ms(engine: StepPrices, num_requests: int, context: int) -> float:
    """Return the attention of decodes, of all layers."""
    return engine.mixed_step_breakdown(_CHUNKS[0], num_requests, context, 2)[3]


def _narrowed(shape: ModelShape) -> ModelShape:
    """Return a model with as many query heads per KV head, and no more KV heads than measured."""
    heads = _MOST_KV_HEADS * (shape.num_heads // shape.num_kv_heads)
    return replace(
        shape,
        num_heads=heads,
        num_kv_heads=_MOST_KV_HEADS,
        hidden_size=heads * shape.head_dim,
    )


def _is_plain(shape: ModelShape) -> bool:
    """Say whether `_config` can describe a model."""
    layers = shape.num_moe_layers in (0, shape.num_layers)
    return shape.mlp == "gated" and layers and not shape.shared_intermediate_size


def _config(shape: ModelShape) -> dict[str, object]:
    """Return what a Hugging Face config.json says of a model with a gated MLP."""
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
    }
    if not shape.num_experts:
        return config
    config["num_experts_per_tok"] = shape.experts_per_token
    if shape.qk_norm:
        return config | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.num_experts,
            "moe_intermediate_size": shape.moe_intermediate_size,
        }
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": shape.num_experts,
        "intermediate_size": shape.moe_intermediate_size,
    }


def _known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model that is known here too; raises for a folder that is unusable."""
    if canonical_model(name) in model_names() or Path(name).is_dir():
        return find_model(name)
    return None


def _open_config(
    config: Mapping[str, object],
    system: str,
    backend: str,
    version: str | None,
    sizes: Mapping[str, int],
) -> StepPrices:
    with TemporaryDirectory() as folder:
        write_text(Path(folder) / "config.json", json.dumps(config))
        return _open(folder, system, backend, version, sizes)


def _open(
    model: str, system: str, backend: str, version: str | None, sizes: Mapping[str, int]
) -> StepPrices:
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as error:
        raise SpecError(
            "this importer needs the package aiconfigurator-core: "
            "pip install 'schedlab[aiconfigurator]'"
        ) from error
    with _collected() as logged:
        try:
            engine: StepPrices = EngineHandle.compile(
                model, system, backend, backend_version=version, **sizes
            )
        except Exception as error:
            why = "".join(f"{record.getMessage()}: " for record in logged[-1:])
            raise SpecError(
                f"aiconfigurator: {why}{type(error).__name__}: {error} (MODEL: a name that package "
                "knows, or a folder with its config.json)"
            ) from error
    return engine


@contextmanager
def _collected() -> Iterator[list[logging.LogRecord]]:
    """Keep the errors that the package logs until it succeeds: what fails says why in one line.

    It warns of tables of other kinds of models, too, which are not used here.
    """
    logger = logging.getLogger("aiconfigurator_core")
    logger.setLevel(logging.ERROR)
    handler = BufferingHandler(1000)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.buffer
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
    for record in handler.buffer:
        logger.handle(record)
