import math
import random
import re
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab import core
from schedlab.experiments.running import fleet
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.cluster import Link
from schedlab.experiments.specification.failures import StartUp
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies.autoscalers import dynamo_planner, registry
from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.migrators.migrator import Migrator
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.router import Router
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive import scaling
from schedlab.sim.drive.clock import Clock
from schedlab.sim.drive.fleet import Fleet
from schedlab.sim.drive.members import Member
from schedlab.sim.drive.pool_state import Answer, PoolState
from schedlab.sim.errors import PolicyError, SpecError
from schedlab.sim.record.fleet import Span
from schedlab.sim.request import Request, Slo

FLEETS = Path(__file__).resolve().parents[2] / "docs" / "fleets.md"


def engine(waiting=0, running=1, used_blocks=0, step_ns=lambda shape: 10_000_000):
    return SimpleNamespace(
        num_waiting=waiting, num_in_flight=waiting + running, num_running=running,
        used_blocks=used_blocks, num_blocks=100, block_size=16, estimate_step_ns=step_ns,
    )  # fmt: skip


def pool(*engines, now_s=15.0, num_engines=None, role="mixed", came=(), answers=()):
    size = len(engines) if num_engines is None else num_engines
    return PoolState(now_s, 15.0, role, size, engines, came, answers)


def test_hpa_scales_by_the_ratio_and_remembers_the_larger_number():
    hpa = registry.make("hpa", metric="num_waiting", target=5, stabilization_s=60)
    assert hpa.num_engines(pool(engine(10), engine(9))) == 4  # ceil(2 * 9.5 / 5)
    assert hpa.num_engines(pool(engine(5), engine(5.4), now_s=30)) == 2  # within the tolerance
    assert hpa.num_engines(pool(*[engine(0)] * 4, now_s=60)) == 4  # it asked for 4 at 15 s
    assert hpa.num_engines(pool(*[engine(0)] * 4, now_s=75)) == 4  # that was 60 s ago: still
    assert hpa.num_engines(pool(*[engine(0)] * 4, now_s=95)) == 0


@pytest.mark.parametrize(
    ("waiting", "num_engines", "from_pods", "external"),
    [
        ((10, 10), 4, 4, 4),  # 20 over the 20 that four may have: on its way already
        ((8, 8), 3, 3, 3),  # 16 over 15, within the tolerance
        ((30,), 2, 6, 6),  # 30 over 5, whoever has them
        ((8,), 4, 4, 2),  # above the target where they are, below it with all: no change
        ((5, 5), 3, 3, 2),
        ((1, 1), 4, 3, 1),  # two that start count as 5 each, or as nothing
        ((1, 1), 2, 1, 1),
    ],
)
def test_hpa_asks_no_second_time_for_engines_that_are_starting(
    waiting, num_engines, from_pods, external
):
    seen = pool(*map(engine, waiting), num_engines=num_engines)
    for is_external, expected in ((False, from_pods), (True, external)):
        hpa = registry.make("hpa", target=5, stabilization_s=0, external=is_external)
        assert hpa.num_engines(seen) == expected


@pytest.mark.parametrize(
    ("max_added", "asked"),
    [(4, [5, 5, 5, 10, 10, 10, 20]), (1, [2, 2, 2, 4, 4, 4, 8]), (None, [20] * 7)],
)
def test_hpa_grows_within_15_s_by_some_or_to_twice_as_many(max_added, asked):
    hpa = registry.make("hpa", target=5, max_added=max_added)
    found = [1]
    for now_s in range(10, 45, 5):
        seen = pool(engine(100), now_s=float(now_s), num_engines=found[-1])
        found.append(hpa.num_engines(seen))
    assert found[1:] == asked


def test_scalers_by_steps_wait_for_an_engine_that_is_starting():
    full = (engine(used_blocks=95, waiting=3), engine(used_blocks=99))
    idle = (engine(), engine())
    missed, held = ([Answer(10, 10, 1.0, 1.0, holds)] for holds in (False, True))
    for engines, answers, change in ((full, missed, 1), (idle, held, -1)):
        kv = registry.make("kv_thresholds")
        slo = registry.make("slo_attainment", patience=1)
        for scaler in (kv, slo):
            assert scaler.num_engines(pool(*engines, num_engines=3, answers=answers)) == 3
            assert scaler.num_engines(pool(*engines, answers=answers)) == 2 + change


def test_kv_thresholds_move_one_engine_at_a_time():
    scaler = registry.make("kv_thresholds")
    assert scaler.num_engines(pool(engine(used_blocks=95), engine(used_blocks=20))) == 2
    assert scaler.num_engines(pool(engine(used_blocks=50), engine(used_blocks=20))) == 1
    assert scaler.num_engines(pool(engine(used_blocks=95), engine(used_blocks=90))) == 3


def test_kv_thresholds_take_none_away_twice_after_one_was_added():
    scaler = registry.make("kv_thresholds")
    full, idle = pool(engine(used_blocks=95)), pool(engine(used_blocks=1), engine(used_blocks=1))
    starting = pool(engine(used_blocks=1), num_engines=2)
    seen = [full, starting, starting, idle, idle, idle, idle]  # what starts takes no time off
    assert [scaler.num_engines(one) for one in seen] == [2, 2, 2, 2, 2, 1, 1]


def test_kv_thresholds_count_who_waits_as_two_percent_of_the_memory():
    # 80 % and five who wait are 90 %, and six are more; where nobody runs they do not count.
    for waiting, running, asked in ((5, 1, 1), (6, 1, 2), (9, 0, 1)):
        one = engine(waiting=waiting, running=running, used_blocks=80)
        assert registry.make("kv_thresholds").num_engines(pool(one)) == asked
    idle = engine(waiting=2, used_blocks=47)
    assert registry.make("kv_thresholds").num_engines(pool(idle, idle)) == 2


def test_attainment_adds_at_once_and_takes_away_with_patience():
    scaler = registry.make("slo_attainment", target=0.9, patience=2)
    good, bad = (Answer(10, 10, 1.0, 1.0, holds) for holds in (True, False))
    assert scaler.num_engines(pool(engine(), answers=[good] * 8 + [bad] * 2)) == 2
    assert scaler.num_engines(pool(engine(), engine(), answers=[good])) == 2
    assert scaler.num_engines(pool(engine(), engine(), answers=[good])) == 1
    # What was held before a miss does not count behind it.
    asked = [scaler.num_engines(pool(engine(), engine(), answers=[a])) for a in (good, bad, good)]
    assert asked == [2, 3, 2]


def test_schedule_follows_its_timetable_and_repeats_it():
    scaler = registry.make("schedule", times=[[10, 2], [60, 5]], period_s=100)
    asked = [scaler.num_engines(pool(num_engines=1, now_s=t)) for t in (5, 15, 60, 105, 110)]
    assert asked == [1, 2, 5, 1, 2]


def test_planner_divides_the_load_by_what_an_engine_does_within_its_targets():
    def step_ns(shape):  # a millisecond, and one for each token of a prompt and each decode
        return 1_000_000 * (1 + shape.num_new_tokens)

    planner = registry.make("dynamo_planner", ttft_ms=500, itl_ms=21)
    came = [SimpleNamespace(prompt_tokens=99)] * 150  # 10 a second
    # As expected: 10 a second that take 694 ms are 7 at a time, of which a step takes 8 ms, and
    # prompts of 99 tokens take 100. How many decode at that very moment does not matter.
    answers = [Answer(99, 100, 100.0, 6.0, True)]
    one = engine(running=0, step_ns=step_ns)
    asked = {
        role: planner.num_engines(pool(one, role=role, came=came, answers=answers))
        for role in ("prefill", "decode", "mixed")
    }
    # 990 tokens a second over 990; 1000 over 16 (memory: 1600 / 149 = 10) in 11 ms = 909.
    assert asked == {"prefill": 1, "decode": 2, "mixed": 3}
    # Half an answer is in memory in the mean; with all of it 8 would fit, and 900 need two.
    nine = pool(one, role="decode", came=came[:135], answers=answers)
    assert planner.num_engines(nine) == 1


def test_planner_goes_by_prompts_that_came_and_answers_that_went():
    # 20 prompts of 99 tokens a second, of which an engine does half; others were answered.
    planner = registry.make("dynamo_planner")
    one = engine(step_ns=lambda shape: 1_000_000 * (1 + shape.num_new_tokens))
    came = [SimpleNamespace(prompt_tokens=99)] * 300
    for prompt_tokens in (1, 99, 5_000):
        answers = [Answer(prompt_tokens, 1, 100.0, 0.0, True)]
        assert planner.num_engines(pool(one, role="prefill", came=came, answers=answers)) == 2


class PoolsOfTwo(Autoscaler):
    """Takes one more than it is called with."""

    def num_engines(self, pool, other):
        return 1


class PairsOfNothing(Migrator):
    """Takes nothing."""

    def pairs(self):
        return []


class VictimOfTwo(Migrator):
    """Takes one more than it is called with."""

    def pairs(self, engines):
        return []

    def victim(self, states, other):
        return 0


class RoutesBlindly(Router):
    """Takes no engines."""

    def route(self, request):
        return 0


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (registry.make, "PoolsOfTwo", r"num_engines\(\) is called with the pool, and takes"),
        (migrators.make, "PairsOfNothing", r"pairs\(\) is called with one list, and takes"),
        (migrators.make, "VictimOfTwo", r"victim\(\) is called with one list, and takes"),
        (routers.make, "RoutesBlindly", r"route\(\) is called with a request and the engines"),
    ],
)
def test_class_of_a_fleet_that_cannot_be_called_is_refused_when_it_is_made(make, name, message):
    with pytest.raises(SpecError, match=message):
        make(f"{__name__}:{name}")


@pytest.mark.parametrize(
    ("ttft_ms", "asked"),
    [(100.0, 2), (50.0, 1), (25.0, 1), (400.0, 2)],  # queueing does not raise the load
)
def test_planner_lowers_the_load_of_prompts_that_are_sooner_than_expected(ttft_ms, asked):
    planner = registry.make("dynamo_planner")
    one = engine(step_ns=lambda shape: 1_000_000 * (1 + shape.num_new_tokens))
    came = [SimpleNamespace(prompt_tokens=99)] * 300  # 20 a second, of which one does 10
    answers = [Answer(99, 1, ttft_ms, 0.0, True)]
    found = planner.num_engines(pool(one, role="prefill", came=came, answers=answers))
    assert found == asked


def test_planner_asks_what_a_lone_prompt_takes_and_a_batch_of_equal_contexts():
    asked = []

    def step_ns(shape):
        asked.append(shape)
        return 3_000_000

    one = engine(step_ns=step_ns)
    assert dynamo_planner._prompt_ms(one, 99.6) == 3.0
    assert dynamo_planner._prompt_ms(one, 0.2) == 3.0
    assert dynamo_planner._step_ms(one, 7, 120.4) == 3.0
    assert asked == [
        BatchShape(0, 0, 0, ((100, 0),), rows_sampled=1, num_running=1),
        BatchShape(0, 0, 0, ((1, 0),), rows_sampled=1, num_running=1),
        BatchShape(
            7, 840, 120, rows_sampled=7, num_running=7, decode_context_min_tokens=120
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("itl_ms", [2.0, 3.0, 9.5, 17.0, 18.5, 400.0])
@pytest.mark.parametrize("took_ms", [0.0, 6.0, 9.0])
def test_planner_takes_the_largest_batch_within_its_target(itl_ms, took_ms):
    # A step takes a millisecond and one for each decode: 6 ms with five, who are there in the mean
    # if so many come in 15 s and take a millisecond and half the time of 39 gaps.
    one = engine(step_ns=lambda shape: 1_000_000 * (1 + shape.num_new_tokens))
    planner = registry.make("dynamo_planner", itl_ms=itl_ms)
    answers = [Answer(9, 40, 1.0, took_ms, True), Answer(9, 1, 1.0, 99.0, True)]
    came = [SimpleNamespace(prompt_tokens=9)] * round(5 * 15_000 / (1 + 19.5 * took_ms))
    target_ms = itl_ms / (took_ms / 6.0) if took_ms else itl_ms
    fitting = [n for n in range(1, 17) if 1 + n <= target_ms]  # 1,600 tokens of memory, 100 each
    best = max(fitting, default=1)
    seen = pool(one, came=came, answers=answers)
    found = planner._output_tokens_per_s(seen, one, 100.0)
    assert found == pytest.approx(best / (1 + best) * 1e3)


@pytest.mark.parametrize(
    ("num_engines", "duration_ms", "batch"),
    [
        (1, 500.0, 13),  # 12 a second for half a second: 6, 7 ms a step; 10 / (5 / 7) = 14 ms
        (2, 500.0, 7),  # 3 each, 4 ms; 8 ms
        (1, 9500.0, 16),  # 114, of which 16 have room: 17 ms; 34 ms, but 16 have room
    ],
)
@pytest.mark.parametrize("running", [0, 40])
def test_planner_expects_the_step_of_who_was_there_in_the_mean_and_not_of_who_is(
    num_engines, duration_ms, batch, running
):
    def step_ns(shape):
        return 1_000_000 * (1 + shape.num_new_tokens)

    engines = [engine(running=running, step_ns=step_ns) for _ in range(num_engines)]
    answers = [Answer(59, 82, duration_ms - 81 * 5.0, 5.0, True)]
    came = [SimpleNamespace(prompt_tokens=59)] * 180
    planner = registry.make("dynamo_planner", itl_ms=10.0)
    found = planner._output_tokens_per_s(
        pool(*engines, came=came, answers=answers), engines[0], 100.0
    )
    assert found == pytest.approx(batch / (1 + batch) * 1e3)


def test_planner_measures_the_mean_over_all_gaps_and_not_over_answers():
    # 90 gaps of 4 ms and 10 of 14: 5 ms. Half of the answers have 14.
    answers = [Answer(9, 91, 1.0, 4.0, True), Answer(9, 11, 1.0, 14.0, True)]
    assert dynamo_planner._mean_gap_ms(answers) == 5.0
    assert dynamo_planner._mean_gap_ms([Answer(9, 1, 1.0, 0.0, True)]) == 0.0


def member(index, in_flight=0, is_up=True, is_draining=True):
    live = SimpleNamespace(num_in_flight=in_flight)
    return SimpleNamespace(index=index, pool=0, is_up=is_up, is_draining=is_draining, live=live)


@pytest.mark.parametrize(
    ("count", "kept", "added"), [(1, [2], 0), (2, [2, 0], 0), (3, [2, 0], 1), (5, [2, 0], 3)]
)
def test_pool_that_grows_keeps_who_was_to_leave_before_it_adds_engines(count, kept, added):
    told = []
    fleet = SimpleNamespace(
        members=[member(0), member(1, is_draining=False), member(2), member(3, is_up=False)],
        keep=lambda one: told.append(one.index),
        add=lambda pool: told.append("new"),
    )
    scaling._grow(fleet, 0, count)
    assert told == [*kept, *["new"] * added]


def test_pool_that_shrinks_drains_who_starts_then_who_has_least_to_do_then_the_youngest():
    members = [member(0, 2), member(1, 5), member(2, 2), member(3, is_up=False), member(4, 1)]
    assert [one.index for one in scaling._to_spare(members, 4)] == [3, 4, 2, 0]
    assert scaling._to_spare(members, -1) == []


@pytest.mark.parametrize(
    ("slo", "holds"),
    [
        (None, True),
        (Slo(ttft_ms=2.0, tpot_ms=3.0, e2el_ms=14.0), True),
        (Slo(ttft_ms=1.9), False),
        (Slo(tpot_ms=2.9), False),
        (Slo(e2el_ms=13.9), False),
    ],
)
def test_answer_holds_its_targets_if_it_meets_each_of_them(slo, holds):
    request = SimpleNamespace(arrival_ns=1_000_000, prompt_tokens=7, slo=slo)
    state = SimpleNamespace(
        request=request, num_output_tokens=5, first_token_ns=3_000_000, last_token_ns=15_000_000
    )
    assert scaling._answer(state) == Answer(7, 5, 2.0, 3.0, holds)


def experiment(workload=None, **cluster):
    workload = {"trace": "azure-conv", "num_requests": 60, "request_rate": 20.0, **(workload or {})}
    sizes = {"num_gpu_blocks_override": 400, "max_model_len": 4000, "max_num_seqs": 6}
    return make_spec({"workload": workload, "engine": sizes, "cluster": cluster})


TIMETABLE = {"name": "schedule", "times": [[1, 3], [2, 1]], "every_s": 0.5, "max": 3}
START_UP = {"load_gb_per_s": 100, "warm_up_s": 0.2}


def test_engines_are_paid_for_from_their_start_and_until_they_have_drained():
    result = run(experiment(count=1, autoscaler=TIMETABLE, start_up=START_UP))
    first, *added = result.engines
    assert len(added) == 2
    assert result.num_engines == 3
    start_up_ns = round((16.06 / 100 + 0.2) * 1e9)
    for facts in added:
        (paid,), (served,) = facts.paid, facts.served
        assert paid.from_ns == 1_000_000_000
        assert served.from_ns == pytest.approx(paid.from_ns + start_up_ns, rel=1e-3)
        assert paid.until_ns == served.until_ns > 2_000_000_000 or paid.until_ns == -1
    metrics, requests = result.metrics(), result.requests
    drained = next(i for i, facts in enumerate(result.engines) if facts.paid[0].until_ns > 0)
    last_ns = requests["finish_ns"][requests["engine"] == drained].max()
    assert last_ns == result.engines[drained].paid[0].until_ns
    assert requests["queued_ns"][requests["engine"] == drained].max() <= 2_000_000_000
    assert metrics["duration_s"] < metrics["gpu_seconds"] < 3 * metrics["duration_s"]
    assert metrics["completed"] == run(experiment(count=1)).metrics()["completed"]
    assert first.paid == (Span(0, first.paid[0].until_ns),)


def test_engine_that_is_let_go_while_it_starts_never_serves():
    # Wanted at 1 s and not from 1.1 s on, while it takes 0.36 s to start; wanted again at 2 s.
    times = [[0, 1], [1, 2], [1.1, 1], [2, 2]]
    scaler = {"name": "schedule", "times": times, "every_s": 0.1, "max": 3}
    result = run(experiment(count=1, autoscaler=scaler, start_up=START_UP))
    _, gone, new = result.engines
    assert [(facts.paid[0].from_ns, facts.served != ()) for facts in (gone, new)] == [
        (1_000_000_000, False),
        (2_000_000_000, True),
    ]
    assert gone.paid[0].until_ns == 1_100_000_000
    assert 1 not in result.requests["engine"]
    assert result.metrics()["availability_share"] <= 1.0


@pytest.mark.slow
def test_fleet_grows_under_load_and_shrinks_after_it():
    scaler = {
        "name": "hpa", "metric": "num_in_flight", "target": 6, "max": 6, "every_s": 1,
        "stabilization_s": 3,
    }  # fmt: skip
    burst = {"num_requests": 120, "request_rate": 30.0}
    result = run(experiment(burst, count=1, autoscaler=scaler, start_up=START_UP))
    assert result.num_engines > 2
    alone = run(experiment(burst, count=1)).metrics()
    metrics = result.metrics()
    assert metrics["mean_ttft_ms"] < alone["mean_ttft_ms"] / 2
    assert metrics["completed"] == alone["completed"]


class Silent(Autoscaler):
    def num_engines(self, pool):
        return "two"


def test_autoscaler_of_ones_own_is_asked_and_blamed():
    with pytest.raises(PolicyError, match=r"Silent.*num_engines\(\) returned 'two'"):
        run(experiment(count=1, autoscaler=f"{__name__}:Silent"))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"count": 1, "autoscaler": "hpaa"}, "unknown autoscaler 'hpaa'.*hpa"),
        ({"count": 1, "autoscaler": {"name": "hpa", "aim": 3}}, "autoscaler.aim"),
        ({"count": 1, "autoscaler": {"name": "hpa", "target": 0}}, "target must be > 0"),
        (
            {"count": 1, "autoscaler": {"name": "hpa", "every_s": 1e-12}},
            "every_s: must be >= 0.001",
        ),
        (
            {"count": 1, "autoscaler": "slo_attainment"},
            r"cluster\.autoscaler: .*add slo\.ttft_ms or slo\.tpot_ms or slo\.e2el_ms",
        ),
        (
            {"count": 1, "router": "slo_aware"},
            r"cluster\.router: .*add slo\.ttft_ms or slo\.tpot_ms$",
        ),
        ({"count": 1, "autoscaler": "schedule"}, "needs a parameter 'times'"),
        (
            {"count": 1, "autoscaler": {"name": "schedule", "times": [[0, 2], "noon"]}},
            "in order of time, got",
        ),
        (
            {"count": 1, "autoscaler": {"name": "schedule", "times": [[0, 1.5]]}},
            "whole numbers >= 1, got",
        ),
        (
            {"count": 1, "autoscaler": {"name": "schedule", "times": [[0, 1], [5, 0]]}},
            r"cluster\.autoscaler: .*whole numbers >= 1, got \[\[0, 1\], \[5, 0\]\]",
        ),
        (
            {"count": 2, "autoscaler": {"name": "schedule", "times": [[0, 1]], "min": 2}},
            r"cluster\.autoscaler: schedule asks for 1 engines: must be between min .2. and max",
        ),
        ({"count": 9, "autoscaler": {"name": "hpa", "max": 8}}, "count: must be between min .1."),
        ({"count": 2, "autoscaler": {"name": "hpa", "min": 5, "max": 4}}, "min must be at most"),
    ],
)
def test_scaling_that_cannot_be_is_told(cluster, message):
    with pytest.raises(SpecError, match=message):
        experiment(**cluster)


def test_document_lists_every_autoscaler_and_knob():
    text = FLEETS.read_text(encoding="utf-8")
    table = re.search(r"^\| `dynamo_planner` \|.*\n(?:\|.*\n)+", text, re.M)
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", table[0], re.M))
    assert sorted(rows) == registry.names()
    for name in registry.names():
        cls = registry.autoscaler_class(name)
        assert cls.source, f"{name} says no source"
        for knob in cls.knobs():
            assert f"`{knob}`" in rows[name], f"docs/fleets.md does not name {knob} of {name}"


def test_schedule_may_ask_for_just_the_fewest_and_the_most_engines():
    timetable = {"name": "schedule", "times": [[1, 3], [2, 2]], "min": 2}
    experiment(count=2, autoscaler={**timetable, "max": 3})
    for num_engines, bounds in ((2, {"max": 2}), (3, {"min": 3, "max": 4})):
        with pytest.raises(SpecError, match=r"asks for \d engines: must be between"):
            experiment(count=num_engines, autoscaler={**timetable, **bounds})


def test_engines_of_each_pool_load_the_weights_of_their_own_model(monkeypatch):
    monkeypatch.setattr(fleet, "scaling", lambda cluster, kinds: ["grows"])
    monkeypatch.setattr(fleet, "migration", lambda cluster, kinds: None)
    kinds = [
        fleet.Kind(role, 1, SimpleNamespace(memory=SimpleNamespace(weight_bytes=size)), None, role)
        for role, size in (("prefill", 16 * 10**9), ("decode", 4 * 10**9))
    ]
    start_up = StartUp(load_gb_per_s=2.0, warm_up_s=1.0)
    spec = SimpleNamespace(cluster=SimpleNamespace(failures=None, start_up=start_up))
    supply = fleet.changes(spec, kinds, lambda kind: None).supply
    assert supply.start_up_ns == [9 * 10**9, 3 * 10**9]
    assert supply.roles == ["prefill", "decode"]


def test_link_of_ones_own_is_in_gigabytes_a_second_and_microseconds():
    model = SimpleNamespace(kv_bytes_per_token=lambda dtype, parts: 64, num_layers=5)
    deployment = SimpleNamespace(model=model, kv_dtype="bf16", num_devices=2)
    kind = fleet.Kind("a", 1, SimpleNamespace(deployment=deployment, speculation=None), None)
    own = Link(gb_per_s=25.0, latency_us=3.0, by_layer=True)
    found = fleet.interconnect(SimpleNamespace(link=own), [kind])
    assert (found.link.bytes_per_s, found.link.latency_s) == pytest.approx((25e9, 3e-6))
    assert (found.kv_bytes_per_token, found.num_layers, found.num_devices) == (64, 5, [2])


@pytest.mark.skipif(core.running() != "python", reason="compiled code refuses stand-ins")
def test_fleet_serves_with_engines_that_are_up_and_expects_those_that_are_there():
    members = [
        SimpleNamespace(is_up=up, is_there=there, is_draining=draining, role=role)
        for up, there in ((True, True), (False, True), (False, False))
        for draining in (False, True)
        for role in ("prefill", "mixed")
    ]

    def expects(some, *roles, grows=False):
        return Fleet.expects(SimpleNamespace(may_grow=lambda _: grows, members=some), *roles)

    fleet = SimpleNamespace(members=members)
    assert Fleet.serving(fleet, "mixed") == [members[1]]
    assert Fleet.serving(fleet, "prefill", "mixed") == members[:2]
    alone = [expects([member], "mixed") for member in members]
    assert alone == [i in (1, 5) for i in range(12)]
    assert expects([], "mixed", grows=True)
    assert not expects(members, "decode")


@pytest.mark.parametrize("for_good", [False, True])
def test_engine_that_leaves_for_good_is_paid_no_more_and_never_there_again(for_good):
    clock = Clock()
    member = Member(clock, 3, "mixed", 0)
    assert member.is_there, "it starts"
    member.leave(700, for_good=for_good)
    assert (member.is_there, member.is_moving) == (not for_good, not for_good)
    assert member.paid == [Span(0, 700) if for_good else Span(0)]


def test_pool_is_told_of_each_interval_once_and_grows_and_shrinks_within_its_bounds():
    told, asked = [], []
    wanted = iter([9, 0, 3, 2])

    def member(index, pool=1, *, is_up=True, is_there=True, is_draining=False, in_flight=0):
        return SimpleNamespace(
            index=index, pool=pool, role="decode", is_up=is_up, is_there=is_there,
            is_draining=is_draining, live=SimpleNamespace(num_in_flight=in_flight, index=index),
        )  # fmt: skip

    def answered(number, last_token_ns):
        request = Request(number, 1_000_000, 10 + number, 9)
        return SimpleNamespace(
            request=request, num_output_tokens=5, first_token_ns=3_000_000,
            last_token_ns=last_token_ns,
        )  # fmt: skip

    class Asked:
        def num_engines(self, state):
            asked.append(state)
            return next(wanted)

    members = [
        member(0, pool=0), member(1, in_flight=4), member(2, in_flight=2), member(3, is_up=False),
        member(4, is_draining=True), member(5, is_there=False),
    ]  # fmt: skip
    fleet = SimpleNamespace(
        members=members, has_work=True, now_ns=0, heard_of_came=[], heard_of_gone=[],
        processes=SimpleNamespace(wait=lambda ns, rank: told.append(("wait", ns)), process=list),
        drain=lambda one: told.append(("drain", one.index)),
        keep=lambda one: told.append(("keep", one.index)),
        add=lambda pool: told.append(("add", pool)),
    )  # fmt: skip
    plan = scaling.PoolScaling(1, Asked(), 2_000_000_000, 2, 5)
    steps = scaling._scale(fleet, plan, "decode")
    next(steps)
    assert told == [("wait", 2_000_000_000)]
    (came,), (gone,) = fleet.heard_of_came, fleet.heard_of_gone
    came += ["one", "two"]
    gone += [(answered(1, 11_000_000), 0), (answered(2, -1), 0)]  # the second got no answer
    fleet.now_ns = 2_000_000_000
    # Three there; at most five: who was to leave stays, and one more comes.
    next(steps)
    assert told[1:] == [("keep", 4), ("add", 1), ("wait", 2_000_000_000)]
    first = asked[0]
    assert first[:4] == (2.0, 2.0, "decode", 3)
    assert [one.index for one in first[4]] == [1, 2]
    assert first[5] == ["one", "two"]
    assert [tuple(one) for one in first[6]] == [(11, 5, 2.0, 2.0, True)]
    # At least two: who is not up yet goes first. Nothing came meanwhile.
    told.clear()
    next(steps)
    assert told == [("drain", 3), ("wait", 2_000_000_000)]
    assert asked[1][5:7] == ([], [])
    told.clear()
    next(steps)
    assert told == [("wait", 2_000_000_000)], "as many as there are"
    members[3].is_up = True
    members[3].live.num_in_flight = 2
    told.clear()
    next(steps)
    assert told == [("drain", 3), ("wait", 2_000_000_000)], "of equal ones the youngest"
    fleet.has_work = False
    assert list(steps) == []
    scaling.start_scaling(fleet, [plan, scaling.PoolScaling(0, Asked(), 1, 1, 1)])
    assert [fleet.may_grow(roles) for roles in (("decode",), ("prefill", "mixed"))] == [True, False]


def test_fleet_may_grow_where_any_role_asked_for_is_that_of_any_pool_that_scales():
    roles = ("prefill", "decode", "mixed")
    members = [SimpleNamespace(pool=pool, role=role) for pool, role in enumerate(roles)]
    for scaled in chain.from_iterable(combinations(range(3), n) for n in range(4)):
        fleet = SimpleNamespace(members=members, processes=SimpleNamespace(process=lambda _: None))
        plans = [scaling.PoolScaling(pool, None, 1, 1, 1) for pool in scaled]
        scaling.start_scaling(fleet, plans)
        for asked in chain.from_iterable(combinations(range(3), n) for n in range(4)):
            may_grow = fleet.may_grow([roles[pool] for pool in asked])
            assert may_grow == bool({*asked} & {*scaled}), (scaled, asked)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (True, r"returned True, which is no whole number >= 0"), (-1, "returned -1, which"),
        (2.0, r"returned 2\.0, which"), (None, "returned None, which"),
        (KeyError("x"), r"num_engines\(\) raised KeyError: 'x' \(test_fleet_scaling\.py:\d+\)"),
        (SystemExit(3), r"num_engines\(\) raised SystemExit: 3 \("),
    ],
)  # fmt: skip
def test_autoscaler_that_names_no_number_is_blamed_with_the_time(answer, message):
    class Odd:
        def num_engines(self, state):
            if isinstance(answer, BaseException):
                raise answer
            return answer

    state = SimpleNamespace(now_s=1.25)
    with pytest.raises(PolicyError, match=rf"autoscaler Odd at t = 1\.250000 s: .*{message}"):
        scaling._asked(Odd(), state)
    for number in (0, np.int64(0)):
        assert scaling._asked(SimpleNamespace(num_engines=lambda _, n=number: n), state) == 0


@pytest.mark.parametrize(
    ("times", "period_s", "said"),
    [
        ([], None, "in order of time"), ([[10, 2], [5, 3]], None, "in order of time"),
        ([[-5, 2], [5, 3]], None, "in order of time"), ([[5, 2], [10, 0]], None, ">= 1"),
        ([[5, 2], [10, 1.5]], None, ">= 1"), ([[5, 2]], 0, "period_s must be > 0"),
        ([["x", 2]], None, "in order of time"), ([[0, 2]], 1, None), ([[0, 2], [9, 1]], None, None),
    ],
)  # fmt: skip
def test_schedule_is_of_whole_engines_from_zero_on_in_order_of_time(times, period_s, said):
    if said is None:
        registry.make("schedule", times=times, period_s=period_s)
        return
    with pytest.raises((SpecError, ValueError), match=said):
        registry.make("schedule", times=times, period_s=period_s)


def test_engine_that_leaves_ends_its_last_spans_and_for_good_also_what_is_paid():
    one = Member(Clock(), 0, "mixed", 0)
    one.paid = [Span(0, 10), Span(20)]
    one.served = [Span(2, 9), Span(25)]
    one.is_up = True
    one.leave(30, for_good=False)
    assert (one.paid, one.served) == ([Span(0, 10), Span(20)], [Span(2, 9), Span(25, 30)])
    assert (one.is_up, one.comes_back) == (False, True)
    one.leave(40, for_good=True)
    assert (one.paid, one.served) == ([Span(0, 10), Span(20, 40)], [Span(2, 9), Span(25, 30)])
    assert not one.comes_back


def naive_planner(seen, ttft_ms, itl_ms, step_ms):
    """Count engines as the planner's page has it, each batch tried in turn."""
    if not (seen.came and seen.answers and seen.engines):
        return seen.num_engines
    rate = len(seen.came) / seen.interval_s
    prompt = np.mean([one.prompt_tokens for one in seen.came])
    output = np.mean([one.output_tokens for one in seen.answers])
    needed = 0.0
    if seen.role in ("mixed", "prefill"):
        alone_ms = step_ms(round(prompt), 0, 0)
        took = np.mean([one.ttft_ms for one in seen.answers]) / alone_ms
        needed += rate * prompt / (prompt / alone_ms * 1e3 / min(1.0, took))
    if seen.role in ("mixed", "decode"):
        context = prompt + output / 2
        gaps_ms = [gap for one in seen.answers for gap in [one.tpot_ms] * (one.output_tokens - 1)]
        lasted_s = np.mean([
            one.ttft_ms + one.tpot_ms * (one.output_tokens - 1) for one in seen.answers
        ]) / 1e3  # fmt: skip
        most = max(int(seen.engines[0].num_blocks * seen.engines[0].block_size / context), 1)
        target_ms = itl_ms
        if gaps_ms and np.mean(gaps_ms):
            beside = round(rate / len(seen.engines) * lasted_s)
            expected_ms = step_ms(0, min(max(beside, 1), most), round(context))
            target_ms /= np.mean(gaps_ms) / expected_ms
        batch = 1
        while batch < most and step_ms(0, batch + 1, round(context)) <= target_ms:
            batch += 1
        needed += rate * output / (batch / step_ms(0, batch, round(context)) * 1e3)
    return max(math.ceil(needed), 1)


def test_planner_asks_for_as_many_engines_as_a_naive_count():
    def step_ms(prompt, batch, context):
        return 40.0 + 2 * prompt + 10 * batch + batch * context / 100

    def step_ns(shape):
        prompts = sum(n for n, _ in shape.chunks)
        mean = shape.decode_context_max_tokens
        return round(1e6 * step_ms(prompts, shape.num_decodes, mean))

    draw, found = random.Random(4), set()
    for i in range(150):
        engines = [engine(running=draw.randrange(9), step_ns=step_ns) for _ in range(i % 3 + 1)]
        came = [SimpleNamespace(prompt_tokens=draw.randint(1, 90)) for _ in range(i % 7 * 40)]
        answers = [
            Answer(50, draw.choice((1, 2, 40, 90)), draw.choice((40.0, 400.0)),
                   draw.choice((0.0, 60.0, 200.0)), True)
            for _ in range(draw.randrange(4))
        ]  # fmt: skip
        role = draw.choice(("mixed", "decode", "prefill"))
        targets = {"ttft_ms": 100.0, "itl_ms": draw.choice((20.0, 90.0, 400.0))}
        seen = pool(*engines, num_engines=7, role=role, came=came, answers=answers)
        expected = naive_planner(seen, **targets, step_ms=step_ms)
        assert registry.make("dynamo_planner", **targets).num_engines(seen) == expected
        found.add(expected)
    assert len(found) > 8


def test_autoscalers_of_loads_ask_for_as_many_engines_as_naive_counts():
    draw = random.Random(5)
    for metric in ("num_waiting", "num_in_flight", "kv_use"):
        target = 0.5 if metric == "kv_use" else 4.0
        hpa = registry.make(
            "hpa", metric=metric, target=target, tolerance=0.25, stabilization_s=30.0
        )
        kv = registry.make("kv_thresholds", up=0.75, down=0.25)
        slo = registry.make("slo_attainment", target=0.75, patience=3)
        past, held, since_added = [], 0, 3
        for now_s in range(0, 900, 10):
            base = draw.choice((0, 25, 50, 75, 100))
            engines = [
                SimpleNamespace(
                    num_waiting=base * draw.choice((0, 4)) // 50,
                    num_in_flight=base // 5, num_running=base // 5,
                    used_blocks=base, num_blocks=draw.choice((100, 100, 200)),
                )
                for _ in range(draw.choice((0, 1, 1, 2, 3)))
            ]  # fmt: skip
            answers = [
                Answer(9, 9, 1.0, 1.0, draw.random() < 0.8)
                for _ in range(draw.choice((0, 0, 1, 4)))
            ]
            count = draw.randint(0, 5)
            seen = pool(*engines, num_engines=count, now_s=float(now_s), answers=answers)
            uses = [one.used_blocks / one.num_blocks for one in engines]
            values = uses if metric == "kv_use" else [getattr(one, metric) for one in engines]
            wanted, late = count, max(count - len(engines), 0)
            if values:
                above = np.mean(values) >= target
                counted = [*values, *[0 if above else target] * late]
                share = np.mean(counted) / target
                if not 0.75 <= share <= 1.25 and above == (share >= 1):
                    wanted = math.ceil(sum(counted) / target)
            past.append((now_s, wanted, count))
            lately = max(n for at, n, _ in past if at >= now_s - 30)
            had = next(n for at, _, n in past if at > now_s - 15)
            expected = min(lately, count)
            if wanted >= count:
                expected = max(min(wanted, max(had + 4, 2 * had)), count)
            assert hpa.num_engines(seen) == expected
            change = 0
            if uses and not late:
                since_added += 1
                waiting = [one.num_waiting if one.num_running else 0 for one in engines]
                load = np.mean(uses) + 0.02 * np.mean(waiting)
                if load > 0.75 + 1e-9:
                    change, since_added = 1, 0
                elif load < 0.25 - 1e-9 and since_added > 2:
                    change = -1
            assert kv.num_engines(seen) == max(count + change, 0)
            if answers:
                holds = sum(one.holds_targets for one in answers) / len(answers) >= 0.75
            else:
                holds = all(one.num_waiting == 0 for one in engines)
            held = held + 1 if holds else 0
            expected = count if holds or late else count + 1
            if held >= 3 and not late:
                held, expected = 0, max(count - 1, 0)
            assert slo.num_engines(seen) == expected
