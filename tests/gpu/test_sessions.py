"""Sessions on the real engine: the same clients, whatever the clock."""

import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend.clock import WallClock  # noqa: E402
from schedlab.gpu_backend.executor import TorchExecutor  # noqa: E402
from schedlab.gpu_backend.replay import replay  # noqa: E402
from schedlab.policies import registry  # noqa: E402
from schedlab.sim.core.engine import Engine  # noqa: E402
from tests import laws, sessions  # noqa: E402
from tests.gpu.backend import CONFIG, TIGHT, generated, run_real, tiny_runner  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["program_fcfs", "plas"])
def test_sessions_run_on_the_real_engine_as_in_the_simulation(policy):
    work = sessions.drawn(2)
    log, executor = run_real(policy, work, TIGHT)
    simulated = laws.run(registry.make(policy), work, TIGHT)
    assert laws.difference(simulated, log, ("simulated", "real")) is None
    assert laws.signature(simulated) == laws.signature(log)
    lengths = {a.request.id: a.output_tokens for a in work}
    assert {i: len(tokens) for i, tokens in generated(executor, work).items()} == lengths


def test_sessions_by_the_wall_clock_wait_for_answers_and_delays():
    work = sessions.drawn(4, num_sessions=4)
    clock = WallClock()
    executor = TorchExecutor(tiny_runner(), CONFIG, clock)
    engine = Engine(CONFIG, registry.make("fcfs"), executor)
    log = replay(engine, work, clock)
    sessions.check_order(log, work)
    laws.check(log, work, CONFIG, may_wait=True)
