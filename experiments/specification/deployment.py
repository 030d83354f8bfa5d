"""The deployment that a specification describes: its names looked up."""

from __future__ import annotations

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model


def deployment(spec: ExperimentSpec) -> Deployment:
    """Return what runs where, without the limits of an engine.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.

    Raises
    ------
    SpecError
        If model or hardware are unknown, or a model without experts is to share them.

    Notes
    -----
    Engines that run every step together share the experts of their model: that is why they do.
    """
    engine, shape = spec.engine, model(spec.model)
    if engine.enable_expert_parallel and not shape.num_experts:
        raise SpecError(f"engine.enable_expert_parallel: {shape.name} has no experts")
    shares_experts = shape.num_experts > 0 and runs_in_lockstep(spec)
    return Deployment(
        model=shape,
        gpu=gpu(spec.hardware),
        tensor_parallel_size=engine.tensor_parallel_size,
        dtype=engine.dtype,
        weight_dtype=engine.weight_dtype,
        kv_cache_dtype=engine.kv_cache_dtype,
        data_parallel_size=engine.data_parallel_size if shares_experts else 1,
        enable_expert_parallel=engine.enable_expert_parallel,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        pipeline_link=None if engine.pipeline_link is None else engine.pipeline_link.link(),
    )


def runs_in_lockstep(spec: ExperimentSpec) -> bool:
    """Return whether data-parallel engines of an experiment run every step together.

    Of a model without experts vLLM's do not, as they have nothing in common (0.32,
    ``v1/engine/core.py``, ``run_engine_core``).
    """
    chosen = spec.engine.data_parallel_lockstep
    return model(spec.model).num_experts > 0 if chosen is None else chosen
