"""A run on several engines that take every step together."""

from __future__ import annotations

from collections.abc import Iterable

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.lockstep import LockstepExecutor, simulate_lockstep
from schedlab.sim.errors import SpecError
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival


def run_engines(
    spec: ExperimentSpec,
    config: EngineConfig,
    pricing: Pricing,
    arrivals: Iterable[Arrival],
) -> tuple[RunLog, int]:
    """Run a workload on `engine.data_parallel_size` engines.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    config : EngineConfig
        Of each engine.
    pricing : Pricing
        Of all engines.
    arrivals : iterable of Arrival
        The workload of all of them.

    Returns
    -------
    log : RunLog
        All engines' logs in one.
    num_plans : int
        Calls of the policies.

    Raises
    ------
    SpecError
        If a closed loop is asked for.
    """
    if spec.workload.max_concurrency is not None:
        raise SpecError("workload.max_concurrency: a closed loop needs data_parallel_size 1")
    size = spec.engine.data_parallel_size
    executors = [LockstepExecutor(pricing) for _ in range(size)]
    engines = [
        Engine(config, registry.make(spec.policy.name, **spec.policy.knobs), executor)
        for executor in executors
    ]
    log = simulate_lockstep(engines, executors, arrivals)
    return log, sum(engine.num_plans for engine in engines)
