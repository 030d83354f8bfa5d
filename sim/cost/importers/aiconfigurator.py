"""AIConfigurator: operator measurements of many GPUs, through that package's own interpolation.

Source: ai-dynamo/aiconfigurator, PyPI package aiconfigurator-core (optional), class
`aiconfigurator_core.sdk.engine.EngineHandle`. The package prices whole steps of a model; here it is
asked for a grid of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from schedlab.sim.cost.importers.imported import Imported
from schedlab.sim.cost.table_profile import TableProfile
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.hardware.gpus import canonical_gpu
from schedlab.sim.hardware.models import ModelShape, canonical_model, model_names
from schedlab.sim.hardware.models import model as find_model

SYSTEMS = {
    "a100-80gb": "a100_sxm", "a100-80gb-pcie": "a100_pcie", "h100-80gb": "h100_sxm",
    "h100-80gb-pcie": "h100_pcie", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s",
    "l4": "l4", "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
"""Our names of GPUs and theirs."""

_CHUNKS = tuple(1 << i for i in range(4, 14))
_PREFIXES = (0, 1024, 4096, 16384)
_BATCHES = tuple(1 << i for i in range(9))
_CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)


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
    engine = _open(model, SYSTEMS[name], backend, backend_version, sizes)
    version = metadata.version("aiconfigurator-core")
    return Imported(
        profile=step_grid(engine),
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
        ),
    )


def step_grid(engine: StepPrices) -> TableProfile:
    """Ask for steps of every kind and return them as one table of whole steps.

    Parameters
    ----------
    engine : StepPrices
        Whom to ask.
    """
    points: list[tuple[int, int, int, int, float]] = []
    for n in _BATCHES:
        points += [(0, 0, n, c, engine.predict_decode_latency(n, c, 2)) for c in _CONTEXTS]
    attention = {
        (n, c): engine.mixed_step_breakdown(_CHUNKS[0], n, c, 2)[3]
        for n in _BATCHES
        for c in _CONTEXTS
    }
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


def _known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model that is known here too; raises for a folder that is unusable."""
    if canonical_model(name) in model_names() or Path(name).is_dir():
        return find_model(name)
    return None


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
    # It warns of tables of other kinds of models, which are not used here.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        engine: StepPrices = EngineHandle.compile(
            model, system, backend, backend_version=version, **sizes
        )
    except Exception as error:
        raise SpecError(
            f"aiconfigurator: {type(error).__name__}: {error} (MODEL: a name that package knows, "
            "or a folder with its config.json)"
        ) from error
    return engine
