"""The deployment that a specification describes: its names looked up."""

from __future__ import annotations

from schedlab.experiments.specification.experiment import ExperimentSpec
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
        If model or hardware are unknown.
    """
    engine = spec.engine
    return Deployment(
        model=model(spec.model),
        gpu=gpu(spec.hardware),
        tensor_parallel_size=engine.tensor_parallel_size,
        dtype=engine.dtype,
        kv_cache_dtype=engine.kv_cache_dtype,
    )
