from dataclasses import replace

import numpy as np

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.lockstep import LockstepExecutor, simulate_lockstep
from tests import laws
from tests.laws import LinearCost, arrival

CONFIG = EngineConfig(num_blocks=200, max_model_len=100, block_size=4, max_num_seqs=4)


class SharedCost(LinearCost):
    """Adds a nanosecond a token of all engines."""

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        return [
            d + (shape.gathered_tokens or shape.num_new_tokens) for d in super().step_ns(shape, k)
        ]


def simulate(workload, config=CONFIG, size=2, cost=None):
    pricing = Pricing(cost or SharedCost(100, 10, 0))
    executors = [LockstepExecutor(pricing) for _ in range(size)]
    engines = [Engine(config, registry.make("fcfs"), x, check_conservation) for x in executors]
    return simulate_lockstep(engines, executors, workload)


def test_engines_share_requests_and_wait_for_the_slowest():
    log = simulate([arrival(0, 0, 20, 2), arrival(1, 0, 4, 3)])
    requests = log.requests()
    # One request each. Step 1: 20 tokens here, 4 there, 24 at the experts: 100 + 200 + 24 ns.
    assert requests["first_token_ns"].tolist() == [324, 324]
    # Step 2: one decode each, 112 ns. Step 3: one engine is done, 111 ns.
    assert requests["last_token_ns"].tolist() == [436, 547]
    assert log.steps()["num_decodes"].sum() == 3


def test_next_request_goes_to_the_engine_with_less_to_do():
    workload = [arrival(0, 0, 4, 40), arrival(1, 0, 4, 1), arrival(2, 500, 4, 1)]
    requests = simulate(workload, replace(CONFIG, max_num_seqs=1)).requests()
    assert requests["first_scheduled_ns"][:2].tolist() == [0, 0]
    assert requests["first_scheduled_ns"][2] < 1000, "not behind the long request 0"


def test_one_engine_in_lockstep_equals_the_ordinary_simulation():
    workload = [arrival(i, 150 * i, 1 + 3 * i, 2 + i % 5) for i in range(12)]
    for config in (CONFIG, replace(CONFIG, async_scheduling=True, arrivals_between_steps=True)):
        alone = laws.run(registry.make("fcfs"), workload, config, cost=LinearCost())
        together = simulate(workload, config, size=1, cost=LinearCost())
        assert laws.signature(alone) == laws.signature(together)


def test_merged_log_has_every_token_and_gap():
    rng = np.random.default_rng(3)
    workload = [
        arrival(i, 40 * i, int(rng.integers(1, 30)), int(rng.integers(1, 30))) for i in range(30)
    ]
    config = replace(CONFIG, num_blocks=30)
    log = simulate(workload, config, size=3)
    requests = log.requests()
    assert requests["num_preemptions"].sum() > 0
    times = {a.request.id: log.token_times(a.request.id) for a in workload}
    assert all(len(times[a.request.id]) == a.output_tokens for a in workload)
    gaps, counts = log.token_gaps()
    expected = np.sort(np.concatenate([np.diff(t) for t in times.values()]))
    assert np.array_equal(np.sort(np.repeat(gaps, counts)), expected)
    assert len(log.preemptions()["id"]) == requests["num_preemptions"].sum()


def test_experiment_on_two_engines_finishes_everything_sooner():
    data = {"workload": {"trace": "azure-conv", "num_requests": 60, "request_rate": "inf"}}
    one, two = (
        run(make_spec(data | {"engine": {"data_parallel_size": size, "max_num_seqs": 8}}))
        for size in (1, 2)
    )
    assert two.metrics()["completed"] == 60
    assert two.metrics()["duration_s"] < 0.7 * one.metrics()["duration_s"]
