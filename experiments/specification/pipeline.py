"""What a pipeline of stages cannot go together with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.yaml_lines import KeyPath

_SIZE: KeyPath = ("engine", "pipeline_parallel_size")

_OTHERWISE_AHEAD = ("vllm-0.19", "vllm-0.24")
"""Profiles of releases that plan batches of a pipeline ahead in another way, or not at all."""


def check_pipeline(spec: ExperimentSpec, fail: Callable[[KeyPath, str], NoReturn]) -> None:
    """Check what an engine has beside its pipeline, if it has one.

    Parameters
    ----------
    spec : ExperimentSpec
        As that engine sees it.
    fail : callable
        Called with the key at fault and what is wrong with it; must raise.
    """
    from schedlab.policies import registry

    engine = spec.engine
    if engine.pipeline_parallel_size == 1:
        return
    if spec.backend != "sim":
        fail(_SIZE, f"must be 1 with backend: {spec.backend}; only the simulation has stages")
    if engine.data_parallel_size > 1:
        fail(
            _SIZE,
            "must be 1 with data_parallel_size > 1; set cluster.count for several engines that "
            "have stages",
        )
    if engine.speculation is not None:
        fail(("engine", "speculation"), "is not simulated with pipeline_parallel_size > 1")
    if engine.kv_offload is not None:
        fail(("engine", "kv_offload"), "is not simulated with pipeline_parallel_size > 1")
    if engine.check_horizon:
        fail(
            ("engine", "check_horizon"),
            "is not simulated with pipeline_parallel_size > 1; set it to false",
        )
    if engine.async_scheduling:
        if engine.profile in _OTHERWISE_AHEAD:
            fail(
                ("engine", "async_scheduling"),
                f"must be false with pipeline_parallel_size > 1 and profile {engine.profile}, "
                "which switches it on: with stages it is simulated as vLLM has it from 0.32 on",
            )
        if not engine.arrivals_between_steps:
            fail(
                ("engine", "arrivals_between_steps"),
                "must be true with async_scheduling and pipeline_parallel_size > 1, which is "
                "simulated as vLLM has it: requests are taken in when a batch is back",
            )
    if not registry.policy_class(spec.policy.name).can_pipeline:
        able = [name for name in registry.names() if registry.policy_class(name).can_pipeline]
        fail(
            ("policy",),
            f"{spec.policy.name} does not plan with several batches in flight "
            f"(engine.pipeline_parallel_size > 1); these do: {', '.join(able)}",
        )
