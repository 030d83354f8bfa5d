"""A run on several engines that take every step together."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.spec.experiment import ExperimentSpec
from policies import registry
from sim.config import EngineConfig
from sim.cost.overhead import SchedulingOverhead
from sim.cost.shape import CostModel
from sim.engine import Engine
from sim.errors import SpecError
from sim.lockstep import LockstepExecutor, simulate_lockstep
from sim.log import RunLog
from sim.request import Arrival


def run_engines(
    spec: ExperimentSpec,
    config: EngineConfig,
    cost_model: CostModel,
    overhead: SchedulingOverhead,
    arrivals: Iterable[Arrival],
) -> tuple[RunLog, int]:
    """Run a workload on `engine.data_parallel_size` engines.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    config, cost_model, overhead
        Of each engine.
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
    executors = [LockstepExecutor(cost_model, overhead) for _ in range(size)]
    engines = [
        Engine(config, registry.make(spec.policy.name, **spec.policy.knobs), executor)
        for executor in executors
    ]
    log = simulate_lockstep(engines, executors, arrivals)
    return log, sum(engine.num_plans for engine in engines)
