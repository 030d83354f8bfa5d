"""What a step would take, by the cost model that a server was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedlab.sim.config import EngineConfig
from schedlab.sim.cost import registry
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of the formats of arithmetic."""


def pricing(given: Mapping[str, Any], vllm_config: Any, config: EngineConfig) -> Pricing | None:  # noqa: ANN401 - vLLM's
    """Return the prices of steps; None if the server was given no cost model.

    Parameters
    ----------
    given : mapping
        ``cost_model`` (a name, a profile's folder, or a mapping with ``name`` or ``profile`` and
        knobs), ``hardware`` and, where the server's model has a path that says nothing, ``model``:
        the keys of an experiment.
    vllm_config : vllm VllmConfig
        Tells model, number format and devices.
    config : EngineConfig
        The server's limits.

    Raises
    ------
    SpecError
        If a name is unknown, ``hardware`` is missing, or the profile is unreadable or of something
        else.
    """
    chosen = given.get("cost_model")
    if chosen is None:
        return None
    knobs: dict[str, Any] = dict(chosen) if isinstance(chosen, Mapping) else {}
    if isinstance(chosen, str):
        knobs = {"name" if registry.is_name(chosen) else "profile": chosen}
    if not ({"name", "profile"} & set(knobs)):
        raise SpecError(
            f"schedlab.cost_model must be a name, a profile's folder or a mapping with name or "
            f"profile, got {chosen!r:.80}"
        )
    if not isinstance(given.get("hardware"), str):
        raise SpecError("schedlab.cost_model needs schedlab.hardware, e.g. h100-80gb")
    served = vllm_config.model_config
    formats = {torch: ours for ours, torch in DTYPES.items()}
    where = Deployment(
        model=model(str(given.get("model", served.model))),
        gpu=gpu(given["hardware"]),
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        dtype=formats.get(str(served.dtype).removeprefix("torch."), "bf16"),
        config=config,
    )
    name = knobs.pop("name", None) or registry.kind_of(str(knobs["profile"]))
    cost_model = registry.make(name, where, **knobs)
    return Pricing(cost_model, cost_model.scheduling_overhead)
