"""The wall clock: what must hold however long things take."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend import clock as clock_module  # noqa: E402
from schedlab.gpu_backend.clock import WallClock  # noqa: E402
from schedlab.gpu_backend.executor import TorchExecutor  # noqa: E402
from schedlab.gpu_backend.replay import replay  # noqa: E402
from schedlab.policies import registry  # noqa: E402
from schedlab.sim.core.engine import Engine  # noqa: E402
from schedlab.sim.cost.shape import BatchShape  # noqa: E402
from schedlab.sim.errors import Stalled  # noqa: E402
from tests import laws  # noqa: E402
from tests.gpu.backend import CONFIG, tiny_runner  # noqa: E402

MS = 1_000_000


def make(policy="fcfs", **params):
    clock = WallClock()
    executor = TorchExecutor(tiny_runner(), CONFIG, clock)
    return Engine(CONFIG, registry.make(policy, **params), executor), executor, clock


def test_replay_by_the_wall_clock_obeys_the_laws():
    work = [laws.arrival(i, i * 3 * MS, 3 + 5 * i, 2 + 3 * i) for i in range(6)]
    engine, executor, clock = make()
    log = replay(engine, work, clock)
    laws.check(log, work, CONFIG, may_wait=True)  # a sleeper wakes a little late
    assert engine.kv.free_blocks == CONFIG.num_blocks
    assert len(executor.steps) == log.num_steps
    steps = log.steps()
    assert steps["end_ns"][-1] <= clock.now_ns()
    assert (steps["overhead_ns"] >= 0).all()


def test_replay_releases_no_request_before_its_time():
    work = [laws.arrival(0, 0, 5, 2), laws.arrival(1, 60 * MS, 5, 2)]
    engine, _, clock = make()
    requests = replay(engine, work, clock).requests()
    assert requests["finish_ns"][0] < 60 * MS <= requests["first_scheduled_ns"][1]


def test_replay_wakes_a_policy_that_waits_by_the_clock():
    engine, _, clock = make("dynamic", max_batch_size=4, max_queue_delay_s=0.02)
    log = replay(engine, [laws.arrival(0, 0, 5, 2)], clock)
    assert log.requests()["first_scheduled_ns"][0] >= 20 * MS


def test_replay_of_a_policy_that_never_wakes_stalls_with_a_message():
    class Sleeper(type(registry.make("fcfs"))):
        def plan(self, view, builder):
            return builder.build()

    clock = WallClock()
    engine = Engine(CONFIG, Sleeper(), TorchExecutor(tiny_runner(), CONFIG, clock))
    with pytest.raises(Stalled, match="nothing is left to happen"):
        replay(engine, [laws.arrival(0, 0, 5, 2)], clock)


def test_replay_of_arrivals_that_go_back_in_time_is_refused():
    engine, _, clock = make()
    work = [laws.arrival(0, 5, 5, 2), laws.arrival(1, 3, 5, 2)]
    with pytest.raises(ValueError, match="request 1 is ready at 3 ns, before"):
        replay(engine, work, clock)


def test_replay_of_a_closed_loop_sends_when_an_answer_is_there():
    work = [laws.arrival(i, 0, 5, 2 + i) for i in range(5)]
    engine, _, clock = make()
    requests = replay(engine, work, clock, max_concurrency=2).requests()
    assert requests["arrival_ns"][:2].tolist() == [0, 0]
    answers = requests["finish_ns"].tolist()
    assert requests["arrival_ns"][2:].tolist() == sorted(answers)[:3]


def test_wall_clock_counts_a_step_from_when_it_was_planned_and_sleeps_no_longer_than_told(
    monkeypatch,
):
    at_ns, slept_s = [1_000], []

    def sleep(seconds):
        slept_s.append(seconds)
        at_ns[0] += round(seconds * 1e9) - 2 * (len(slept_s) == 1)  # wakes up too soon once

    monkeypatch.setattr(
        clock_module, "time", SimpleNamespace(perf_counter_ns=lambda: at_ns[0], sleep=sleep)
    )
    clock = WallClock()
    at_ns[0] = 5_000
    clock.start()
    assert clock.now_ns() == 0
    at_ns[0] = 5_300
    clock.step_begins(200)
    at_ns[0] = 5_900
    assert clock.step_ends(BatchShape(1, 5, 5)) == (900 - 200, 300 - 200)
    clock.sleep_until(1_000)
    assert slept_s == [100e-9, 2e-9]
    assert clock.now_ns() == 1_000
    clock.sleep_until(1_000)
    clock.sleep_until(10)
    assert len(slept_s) == 2
