import json
from dataclasses import replace

import numpy as np
import pytest

from schedlab.experiments.running import backend
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.engine import ENGINE_PROFILES
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.policies.routers.router import Router
from schedlab.policies.routers.vllm import Vllm
from schedlab.policies.routers.vllm_kv import VllmKV
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import ExtrapolationWarning, Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.clock import PLANS, Clock
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.engine_state import LiveState
from schedlab.sim.drive.lockstep import Lockstep, joint_steps_ns
from schedlab.sim.drive.members import Supply
from schedlab.sim.errors import PolicyError
from schedlab.sim.record.cluster_log import ClusterLog, Loss, Move, Transfer
from schedlab.sim.record.columns import REJECTED, pairs
from schedlab.sim.result import RunResult
from tests import laws
from tests.laws import LinearCost, arrival

CONFIG = EngineConfig(num_blocks=200, max_model_len=100, block_size=4, max_num_seqs=4)


class SharedCost(LinearCost):
    """Adds a nanosecond a token of all engines."""

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        return [
            d + (shape.gathered_tokens or shape.num_new_tokens) for d in super().step_ns(shape, k)
        ]


def joint_step(stepping, idle):
    return max(joint_steps_ns(stepping, idle))


def simulate(
    workload, config=CONFIG, size=2, cost=None, policy="fcfs", lockstep=True, max_concurrency=None,
    **knobs,
):  # fmt: skip
    pricing = Pricing(cost or SharedCost(100, 10, 0))
    engines = [
        Engine(config, registry.make(policy, **knobs), SimExecutor(pricing), check_conservation)
        for _ in range(size)
    ]
    together = joint_step if lockstep else None
    return simulate_cluster(engines, Vllm(), workload, max_concurrency, together)


def test_engines_share_requests_and_wait_for_the_slowest():
    log = simulate([arrival(0, 0, 20, 2), arrival(1, 0, 4, 3)])
    requests = log.requests()
    # One request each. Step 1: 20 tokens here, 4 there, 24 at the experts: 100 + 200 + 24 ns.
    assert requests["first_token_ns"].tolist() == [324, 324]
    # Step 2: one decode each, 112 ns. Step 3: one engine is done, and computes one for nobody.
    assert requests["last_token_ns"].tolist() == [436, 548]
    assert log.steps()["num_decodes"].sum() == 3


def test_engines_that_all_wait_go_on_when_the_first_of_them_does():
    log = simulate(
        [arrival(0, 0, 20, 2), arrival(1, 400, 4, 3)], policy="dynamic", max_queue_delay_s=1e-6
    )
    assert log.requests()["first_scheduled_ns"].tolist() == [1_000, 1_433]
    # 321 ns for 20 tokens and one for nobody, 112 for a decode; by then the other's delay is over.
    assert log.steps()["start_ns"].tolist()[:3] == [1_000, 1_321, 1_433]


@pytest.mark.parametrize(
    ("sizes", "first_ns", "padding"),
    [
        # 20 tokens become 24, and so do the 3 of the other: 48 at the experts.
        ((1, 4, 8, 24), 100 + 240 + 48, [4, 21]),
        # 20 are too many, so the 3 are padded for themselves alone: 24 at the experts.
        ((1, 4, 8), 100 + 200 + 24, [0, 1]),
        ((), 100 + 200 + 23, [0, 0]),
    ],
)
def test_engines_in_lockstep_pad_to_the_largest_batch_that_is_in_a_graph(sizes, first_ns, padding):
    config = replace(CONFIG, cudagraph_capture_sizes=sizes)
    log = simulate([arrival(0, 0, 20, 2), arrival(1, 0, 3, 3)], config)
    requests, steps = log.requests(), log.steps()
    assert requests["first_token_ns"].tolist() == [first_ns] * 2
    first = steps["start_ns"] == 0
    assert steps["padding_tokens"][first].tolist() == padding
    # A decode each; then one engine is idle, and computes one for nobody.
    assert requests["last_token_ns"].tolist() == [first_ns + 112, first_ns + 224]


def test_idle_engine_in_lockstep_is_padded_as_the_others_are():
    config = replace(CONFIG, cudagraph_capture_sizes=(1, 2, 4, 8))
    three = simulate([arrival(0, 0, 3, 1)], config, 3).requests()
    assert three["last_token_ns"].tolist() == [100 + 40 + 12]
    large = simulate([arrival(0, 0, 9, 1)], config, 3).requests()
    assert large["last_token_ns"].tolist() == [100 + 90 + 9 + 2], "one token each, of no graph"


class Fewest(Router):
    """Least in flight, whatever it says that it looks at."""

    def route(self, request, engines):
        return self.least([engine.num_in_flight for engine in engines])


def test_a_router_that_looks_at_engines_and_says_it_does_not_is_refused_by_name():
    def places(router):
        engines = [
            Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(SharedCost())))
            for _ in range(3)
        ]
        return simulate_cluster(engines, router, work).requests()["engine"].tolist()

    work = [arrival(i, 10 * i, 20, 4) for i in range(6)]
    router = Fewest()
    assert places(router) == [0, 1, 2, 0, 1, 2]
    router.looks_at_engines = False
    with pytest.raises(PolicyError, match=r"Fewest, request 0: .*num_in_flight.*looks_at_engines"):
        places(router)
    router.route = lambda request, engines: [e.index for e in engines].index(request.id % 3)
    assert places(router) == [0, 1, 2, 0, 1, 2]


class Measured(SharedCost):
    """Measured up to 20 tokens of one engine, and up to 25 of all."""

    def outside(self, shape, k=1):
        met = shape.gathered_tokens or shape.num_new_tokens
        found = {"new_tokens": shape.num_new_tokens > 20, "gathered_tokens": met > 25}
        return {feature: range(k) for feature, is_out in found.items() if is_out}


OUTSIDE = [
    ((20, 5), 0, {}),
    ((20, 6), 2, {"gathered_tokens": 2}),
    ((21, 4), 1, {"new_tokens": 1}),
    ((26, 4), 2, {"new_tokens": 1, "gathered_tokens": 2}),
]
"""Prompts of two engines that `Measured` prices together, steps outside, and of what."""


@pytest.mark.filterwarnings("ignore::schedlab.sim.cost.pricing.ExtrapolationWarning")
@pytest.mark.parametrize(("prompts", "steps", "by_feature"), OUTSIDE)
def test_step_is_extrapolated_by_the_tokens_that_meet_where_those_decide(
    prompts, steps, by_feature
):
    pricing = Pricing(Measured(100, 10, 0))
    engines = [Engine(CONFIG, registry.make("fcfs"), SimExecutor(pricing)) for _ in range(2)]
    workload = [arrival(i, 0, prompt, 1) for i, prompt in enumerate(prompts)]
    simulate_cluster(engines, Vllm(), workload, None, joint_step)
    assert pricing.extrapolated_steps == steps
    assert pricing.extrapolated_by_feature == by_feature


def test_joint_step_outside_what_was_measured_is_warned_of_once():
    pricing = Pricing(Measured(100, 10, 0))
    engines = [Engine(CONFIG, registry.make("fcfs"), SimExecutor(pricing)) for _ in range(2)]
    workload = [arrival(i, 0, 30, 1) for i in range(4)]
    with pytest.warns(ExtrapolationWarning) as told:
        simulate_cluster(engines, Vllm(), workload, None, joint_step)
    assert len(told) == 1


def test_first_step_of_equals_is_shared_in_turn():
    log = simulate([arrival(i, 0, 4, 1) for i in range(5)], size=3)
    assert log.requests()["engine"].tolist() == [0, 1, 2, 0, 1]


def test_waiting_requests_weigh_four_times_as_much_as_running_ones():
    request = arrival(0, 0, 4, 1).request
    three_run = [_Load(waiting=0, running=3), _Load(waiting=1, running=0)]
    assert Vllm().route(request, three_run) == 0
    five_run = [_Load(waiting=0, running=5), _Load(waiting=1, running=0)]
    assert Vllm().route(request, five_run) == 1


def test_equal_engines_take_turns_from_the_one_behind_the_last():
    router, request = Vllm(), arrival(0, 0, 4, 1).request
    equal = [_Load(waiting=0, running=1)] * 3
    assert [router.route(request, equal) for _ in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize(("busy", "order"), [(1, [0, 2, 0]), (0, [1, 2, 1]), (2, [0, 1, 0])])
def test_equal_engines_take_turns_past_a_busy_one(busy, order):
    router, request = Vllm(), arrival(0, 0, 4, 1).request
    engines = [_Load(waiting=0, running=2 if i == busy else 1) for i in range(3)]
    assert [router.route(request, engines) for _ in order] == order


class _Load:
    def __init__(self, waiting, running):
        self.num_waiting = waiting
        self.num_running = running


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
        assert laws.signature(alone) == laws.signature(together.of_engines[0])


@pytest.mark.slow
@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("max_concurrency", [None, 3])
def test_one_engine_of_a_cluster_equals_the_ordinary_simulation(lockstep, max_concurrency):
    rng = np.random.default_rng(5)
    workload = [
        arrival(i, 110 * (i // 3), int(rng.integers(1, 30)), int(rng.integers(1, 30)))
        for i in range(40)
    ]
    for policy in ("fcfs", "static", "fastserve"):
        for config in (CONFIG, replace(CONFIG, num_blocks=30, max_num_seqs=6)):
            alone = laws.run(
                registry.make(policy),
                workload,
                config,
                cost=LinearCost(),
                max_concurrency=max_concurrency,
            )
            among = simulate(workload, config, 1, LinearCost(), policy, lockstep, max_concurrency)
            assert laws.signature(alone) == laws.signature(among.of_engines[0])


def test_engines_on_their_own_do_not_wait_for_each_other():
    log = simulate([arrival(0, 0, 20, 2), arrival(1, 0, 4, 3)], lockstep=False)
    # 100 + 20 * 10 + 20 ns for one, 100 + 4 * 10 + 4 for the other.
    assert log.requests()["first_token_ns"].tolist() == [320, 144]


def test_engines_on_their_own_equal_one_engine_each_with_its_share():
    rng = np.random.default_rng(7)
    workload = [
        arrival(i, 70 * i, int(rng.integers(1, 30)), int(rng.integers(1, 30))) for i in range(60)
    ]
    config = replace(CONFIG, num_blocks=30)
    log = simulate(workload, config, 3, LinearCost(), lockstep=False)
    engine = log.requests()["engine"]
    for i in range(3):
        share = [a for a, e in zip(workload, engine, strict=True) if e == i]
        alone = laws.run(registry.make("fcfs"), share, config, cost=LinearCost())
        assert laws.signature(alone) == laws.signature(log.of_engines[i])


@pytest.mark.parametrize("lockstep", [True, False])
def test_closed_loop_over_engines_never_has_more_in_flight(lockstep):
    workload = [arrival(i, 0, 3, 2 + i % 7) for i in range(40)]
    requests = simulate(workload, lockstep=lockstep, max_concurrency=5).requests()
    assert (requests["finish_ns"] > 0).all()
    times = np.concatenate([requests["arrival_ns"], requests["finish_ns"]])
    change = np.repeat([1, -1], len(workload))
    order = np.lexsort((change, times))
    assert np.cumsum(change[order]).max() == 5


@pytest.mark.slow
@pytest.mark.parametrize("lockstep", [True, False])
def test_rejections_in_a_closed_loop_let_the_next_request_come(lockstep):
    workload = [arrival(i, 0, 3, 90 if i % 3 else 200) for i in range(30)]
    status = simulate(workload, lockstep=lockstep, max_concurrency=2).requests()["status"]
    assert (status == REJECTED).sum() == 10


def test_steps_of_a_cluster_are_in_order_and_say_whose_they_are():
    workload = [arrival(i, 40 * i, 9, 12) for i in range(20)]
    log = simulate(workload, lockstep=False)
    steps = log.steps()
    assert (np.diff(steps["start_ns"]) >= 0).all()
    for engine, own in enumerate(log.of_engines):
        mine = steps["engine"] == engine
        for name in own.steps():
            assert np.array_equal(steps[name][mine], own.steps()[name]), name
    assert log.num_steps == steps.num_rows == len(steps["engine"])


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
    gaps, counts = pairs(log.token_gaps())
    expected = np.sort(np.concatenate([np.diff(t) for t in times.values()]))
    assert np.array_equal(np.sort(np.repeat(gaps, counts)), expected)
    assert len(log.preemptions()["id"]) == requests["num_preemptions"].sum()


def test_log_of_a_fleet_tells_transfers_moves_and_losses_by_request():
    of_engines = simulate([arrival(i, i, 8, 4) for i in range(5)], size=2).of_engines
    log = ClusterLog(
        of_engines,
        transfers=[Transfer(1, 0, 10, 20, 33, 400), Transfer(4, 1, 11, 22, 37, 500),
                   Transfer(1, 1, 50, 60, 79, 600)],
        moves=[Move(2, 0, 1, 100, 130, 150, 700, 3), Move(3, 1, 0, 101, 140, 152, 800, 1),
               Move(2, 1, 0, 200, 231, 260, 900, 2)],
        losses=[Loss(0, 1, 5, 60), Loss(2, 0, 6, 70), Loss(0, 0, 7, 80)],
        engines=(4, 9),
    )  # fmt: skip
    found = {name: column.tolist() for name, column in log.requests().items()}
    assert found["id"] == [0, 1, 2, 3, 4]
    assert found["prefill_engine"] == [-1, 1, -1, -1, 1]
    assert found["transfer_start_ns"] == [-1, 60, -1, -1, 22]
    assert found["transfer_end_ns"] == [-1, 79, -1, -1, 37]
    assert found["transferred_bytes"] == [0, 600, 0, 0, 500]
    assert found["num_moves"] == [0, 0, 2, 1, 0]
    assert found["moved_bytes"] == [0, 0, 700 + 900, 800, 0]
    assert found["moved_stop_ns"] == [0, 0, 150 - 130 + 260 - 231, 152 - 140, 0]
    assert found["num_losses"] == [2, 0, 1, 0, 0]
    assert found["lost_tokens"] == [60 + 80, 0, 70, 0, 0]
    own = [{*log.requests()["id"].tolist()} for log in of_engines]
    assert found["engine"] == [4 if i in own[0] else 9 for i in range(5)]
    assert log.num_steps == sum(one.num_steps for one in of_engines) == log.steps().num_rows
    assert {*log.steps()["engine"].tolist()} == {4, 9}


def test_tokens_of_a_fleet_are_those_of_all_engines_in_order_of_time():
    log = simulate([arrival(i, 7 * i, 8, 3 + i) for i in range(5)], size=2, lockstep=False)
    by_engine = [one.token_counts() for one in log.of_engines]
    rows = sorted(
        (int(ns), engine, int(count))
        for engine, table in enumerate(by_engine)
        for ns, count in zip(table["time_ns"], table["count"], strict=True)
    )
    found = log.token_counts()
    assert found["time_ns"].tolist() == [ns for ns, _, _ in rows]
    assert found["count"].tolist() == [count for _, _, count in rows]
    assert found["count"].sum() == sum(3 + i for i in range(5))
    some = log.token_counts(np.array([1, 4]))
    assert some["count"].sum() == 4 + 7
    assert log.token_gaps(np.array([1, 4]))["count"].sum() == 3 + 6
    assert log.token_gaps()["count"].sum() == sum(2 + i for i in range(5))


def test_engines_in_lockstep_that_hand_over_or_change_are_refused():
    engines = [
        Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(SharedCost()))) for _ in range(2)
    ]
    for more in (
        {"disaggregation": Disaggregation(["prefill", "decode"], Vllm())},
        {"changes": Changes(Supply(lambda pool: engines[0], ["mixed"] * 2, [0] * 2), None)},
    ):
        with pytest.raises(ValueError, match="lockstep do not hand requests over, and do not"):
            simulate_cluster(engines, Vllm(), [arrival(0)], lockstep=joint_step, **more)


def two_engines(num_requests=60, **engine):
    data = {"workload": {"trace": "azure-conv", "num_requests": num_requests}}
    return make_spec(data | {"engine": {"data_parallel_size": 2, "max_num_seqs": 8} | engine})


def test_data_parallel_engines_are_chosen_by_the_rule_of_the_release(monkeypatch):
    made = []
    monkeypatch.setattr(
        backend, "simulate_cluster",
        lambda engines, router, *rest: made.append(type(router)) or simulate_cluster(
            engines, router, *rest
        ),
    )  # fmt: skip
    profiles = (None, "vllm-0.19", "vllm-0.24", "vllm-0.32", "vllm-0.33")
    for profile in profiles:
        run(two_engines(4, **({} if profile is None else {"profile": profile})))
    assert made == [Vllm, Vllm, Vllm, VllmKV, VllmKV]
    assert set(profiles[1:]) == set(ENGINE_PROFILES)


@pytest.mark.parametrize(
    ("model", "chosen", "together"),
    [
        ("qwen3-30b-a3b", None, True),
        ("qwen3-30b-a3b", False, False),
        ("llama-3-8b", None, False),
        ("llama-3-8b", True, True),
    ],
)
def test_engines_step_together_where_they_share_experts_unless_told_otherwise(
    model, chosen, together
):
    keys = {} if chosen is None else {"data_parallel_lockstep": chosen}
    spec = make_spec({
        "model": model, "hardware": "h200",
        "workload": {"num_requests": 4, "request_rate": 50, "prompt_tokens": 40,
                     "output_tokens": {"distribution": "uniform", "low": 5, "high": 9}},
        "engine": {"data_parallel_size": 2, **keys},
    })  # fmt: skip
    steps = run(spec).log.steps()
    ends = [set(steps["end_ns"][steps["engine"] == i].tolist()) for i in (0, 1)]
    assert bool(ends[0] & ends[1]) is together


@pytest.mark.parametrize("lockstep", [True, False])
def test_time_and_memory_of_two_engines_are_those_of_each(lockstep):
    result = run(two_engines(data_parallel_lockstep=lockstep))
    steps, metrics = result.log.steps(), result.metrics()
    assert metrics["idle_s"] >= 0
    assert 0 < metrics["busy_share"] <= 1
    busy_ns = (steps["end_ns"] - steps["start_ns"]).sum()
    span_ns = steps["end_ns"].max() - steps["start_ns"].min()
    assert metrics["busy_s"] + metrics["idle_s"] == pytest.approx(2 * span_ns / 1e9)
    assert metrics["busy_share"] == pytest.approx(busy_ns / (2 * span_ns))
    capacity_tokens = result.kv_capacity_tokens
    most = steps["kv_allocated_tokens"].max() / capacity_tokens
    assert metrics["max_kv_allocated_share"] == pytest.approx(most)
    assert metrics["max_batch_size"] <= 8


def test_policy_is_started_once_for_each_engine_and_progress_counts_both(monkeypatch, tmp_path):
    (tmp_path / "counted_policy.py").write_text(
        "from schedlab.policies import ContinuousBatching\n\n\n"
        "class Counted(ContinuousBatching):\n    started = 0\n\n"
        "    def on_start(self, view):\n        type(self).started += 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = two_engines(trial_requests=0)
    spec = make_spec(spec.to_data() | {"policy": "counted_policy:Counted"})
    told = []
    run(spec, progress=lambda done, of: told.append((done, of)))
    from counted_policy import Counted

    assert Counted.started == 2
    assert told[-1] == (60, 60)


def test_saved_run_of_two_engines_reads_back_the_same(tmp_path):
    result = run(two_engines(data_parallel_lockstep=False))
    result.save(tmp_path)
    again = RunResult.load(tmp_path)
    assert again.num_engines == 2
    assert set(again.requests["engine"]) == {0, 1}
    assert again.metrics() == pytest.approx(result.metrics(), nan_ok=True)
    for request_id in result.requests["id"][:10].tolist():
        times = result.log.token_times(request_id)
        assert np.array_equal(again.log.token_times(request_id), times)
    assert again.metric("largest", latency="itl") == result.metric("largest", latency="itl")


def test_perfetto_shows_each_engine_as_a_process(tmp_path):
    result = run(two_engines(num_requests=8))
    result.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert [event["pid"] for event in steps] == result.log.steps()["engine"].tolist()
    queued = {e["tid"]: e["pid"] for e in events if e["name"] == "queued"}
    order = result.requests["arrival_ns"].argsort(kind="stable")
    assert [queued[i + 1] for i in range(8)] == result.requests["engine"][order].tolist()


@pytest.mark.slow
def test_experiment_on_two_engines_finishes_everything_sooner():
    data = {"workload": {"trace": "azure-conv", "num_requests": 60, "request_rate": "inf"}}
    one, two = (
        run(make_spec(data | {"engine": {"data_parallel_size": size, "max_num_seqs": 8}}))
        for size in (1, 2)
    )
    assert two.metrics()["completed"] == 60
    assert two.metrics()["duration_s"] < 0.7 * one.metrics()["duration_s"]


def test_engines_in_lockstep_show_no_step_once_theirs_has_ended():
    clock = Clock()
    engines = [
        Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(SharedCost(100, 10, 0))))
        for _ in range(3)
    ]
    lives = [LiveState(i, engine, clock) for i, engine in enumerate(engines)]
    lockstep = Lockstep(clock, engines, lives, joint_step)
    for i, prompt in ((0, 20), (1, 4)):
        engines[i].submit(arrival(i, 0, prompt, 4), 0)
    seen = []

    def look(_):
        shown = [live.segment is not None for live in lives]
        blocks = [live.used_blocks for live in lives]
        held = [engine.kv.num_blocks - engine.kv.free_blocks for engine in engines]
        seen.append((clock.now_ns, shown, blocks == held))

    lockstep.wake()
    assert lockstep.is_moving
    # 100 + 200 + 24 ns, and 100 + 10 + 2, each with one for nobody; before all plans.
    for at_ns in (324, 325, 437, 438):
        clock.at(at_ns, PLANS, look)
    clock.run()
    assert seen == [
        (324, [True, True, False], True), (325, [False] * 3, True),
        (437, [True, True, False], True), (438, [False] * 3, True),
    ]  # fmt: skip
    assert not lockstep.is_moving
    assert [engine.log.num_steps for engine in engines] == [4, 4, 0]
