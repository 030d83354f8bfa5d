from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from schedlab import core
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.failures import FailureKeys
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.router import Router
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.departures import Departures
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.pipeline import BatchInFlight, Pipeline
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive import failures
from schedlab.sim.drive.clock import Clock
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.failures import Failures, Outage, Slowdown
from schedlab.sim.drive.links import Interconnect
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.offer import Column, Offer, column, loads
from schedlab.sim.drive.processes import Processes
from schedlab.sim.drive.retries import Retries, as_received
from schedlab.sim.drive.scaling import PoolScaling
from schedlab.sim.errors import PolicyError, SpecError
from schedlab.sim.hardware.link import Link
from schedlab.sim.record.columns import REJECTED
from schedlab.sim.record.fleet import Span
from schedlab.sim.request import RequestState, Session, Status
from schedlab.sim.result import RunResult
from schedlab.sim.rng import stream
from tests.laws import LinearCost, arrival

CONFIG = EngineConfig(num_blocks=200, max_model_len=100, block_size=4, max_num_seqs=4)


def simulate(
    workload,
    failures,
    roles=("mixed", "mixed"),
    start_up_ns=0,
    router="round_robin",
    staleness_ns=0,
    latency_s=50e-9,
    num_layers=1,
    bytes_per_s=1e12,
    start_ups_ns=None,
    first_token="prefill",
    **limits,
):  # fmt: skip
    config = replace(CONFIG, **limits)

    def new_engine(pool):
        return Engine(config, registry.make("fcfs"), SimExecutor(Pricing(LinearCost(1000, 10, 0))))

    size = len(roles)
    return simulate_cluster(
        [new_engine(i) for i in range(size)],
        routers.make(router) if isinstance(router, str) else router,
        workload,
        staleness_ns=staleness_ns,
        disaggregation=Disaggregation(roles, routers.make("jsq"), first_token=first_token)
        if "decode" in roles
        else None,
        interconnect=Interconnect(
            Link(bytes_per_s, latency_s, "a test"), 1000, [1] * size, num_layers
        ),
        changes=Changes(Supply(new_engine, roles, start_ups_ns or [start_up_ns] * size), failures),
    )


@pytest.mark.parametrize("staleness_ns", [0, 900])
def test_columns_of_an_offer_are_what_its_engines_say_whatever_becomes_of_them(staleness_ns):
    sizes = set()

    def in_flight(engine):
        told = engine.prompt_tokens_in_flight, engine.num_waiting, engine.num_running
        return *told, engine.used_blocks

    class Comparing(Router):
        def route(self, request, engines):
            assert isinstance(engines, Offer)
            sizes.add(len(engines))
            for name in get_args(Column):
                assert column(engines, name) == [getattr(e, name) for e in engines], name
            assert loads(engines, in_flight) == [in_flight(engine) for engine in engines]
            return self.least(column(engines, "num_running"))

    workload = [arrival(i, 400 * i, 20 + i, 30) for i in range(40)]
    failures = Failures([Outage(0, 2_500, 2_000), Outage(2, 4_000, 3_000)])
    log = simulate(workload, failures, ("mixed",) * 3, 500, Comparing(), staleness_ns)
    assert sizes == {1, 2, 3}
    assert {0, 1, 2} == set(log.requests()["engine"].tolist())


def test_loads_that_an_offer_keeps_are_those_of_engines_that_are_asked_each_time():
    # Steps of 1 us that open blocks; just before and after engines go and come it is asked twice,
    # and again while the first two have gone on by themselves.
    times_ns = [0, 10, 20, 2_400, 2_600, 7_000, 9_100, 22_900, 23_100, 23_500, 27_000, 31_000]

    def told(ask):
        said = []

        class Asking(Router):
            def route(self, request, engines):
                said.append(ask(engines))
                return request.id if request.id < 3 else len(engines) - 1

        workload = [arrival(i, at_ns, 18 + i, 40) for i, at_ns in enumerate(times_ns)]
        failures = Failures([Outage(0, 2_500, 20_000)])
        simulate(workload, failures, ("mixed",) * 3, 500, Asking())
        return said

    def used(engine):
        return engine.used_blocks

    kept = told(lambda engines: list(loads(engines, used)))
    assert kept == told(lambda engines: [used(engine) for engine in engines])
    # The request that was lost is sent once more.
    assert [len(one) for one in kept] == [3] * 4 + [2] * 5 + [3] * 4


def test_request_goes_on_elsewhere_with_the_tokens_that_came_out():
    # Prompt: 1000 + 20 * 10 ns; then a token every 1010 ns. Two are out when the engine dies.
    log = simulate([arrival(0, 0, 20, 4)], Failures([Outage(0, 2_500)]))
    assert log.token_times(0).tolist() == [
        1200,
        2210,
        2500 + 1000 + 22 * 10,
        2500 + 1000 + 22 * 10 + 1010,
    ]
    row = {name: column[0] for name, column in log.requests().items()}
    # In memory: the prompt and the first token; the second was to be computed next.
    assert (row["engine"], row["num_losses"], row["lost_tokens"]) == (1, 1, 21)
    assert (row["first_token_ns"], row["generated_tokens"]) == (1200, 4)
    assert log.steps()["end_ns"].tolist() == [1200, 2210, 3720, 4730]


@pytest.mark.parametrize("is_async", [False, True])
def test_request_that_lost_its_engine_was_queued_by_the_one_that_scheduled_it_first(is_async):
    limits = {"arrivals_between_steps": True, "async_scheduling": is_async}
    workload = [arrival(i, 700 * i, 20, 12) for i in range(6)]
    outages = [Outage(0, 9_000, 100), Outage(1, 14_000, 100)]

    def requests(failures):
        return simulate(workload, failures, **limits).requests()

    found, alone = requests(Failures(outages)), requests(Failures([Outage(0, 10**9)]))
    lost = found["num_losses"] > 0
    assert lost.sum() > 3
    assert found["num_losses"].max() == 2
    assert (found["queued_ns"] <= found["first_scheduled_ns"]).all()
    # All were scheduled before an engine died, so they were queued as if none did.
    assert found["first_scheduled_ns"].tolist() == alone["first_scheduled_ns"].tolist()
    assert found["queued_ns"].tolist() == alone["queued_ns"].tolist()


def test_request_that_is_sent_again_keeps_its_past_and_no_memory():
    sent = RequestState(arrival(0, 5, 20, 9).request)
    kept = (
        "queued_ns", "first_scheduled_ns", "first_token_ns", "num_preemptions",
        "recomputed_tokens", "cached_tokens", "prefix_hit_tokens", "critical_ns", "served_ns",
    )  # fmt: skip
    for number, name in enumerate(kept, 100):
        setattr(sent, name, number)
    sent.awaited_call = "search", 7
    sent._generated, sent._computed, sent.session = 3, 22, Session("its own", 5)
    fresh = as_received(sent, CONFIG)
    assert [getattr(fresh, name) for name in kept] == [*range(100, 109)]
    assert fresh.awaited_call == ("search", 7)
    assert (fresh.num_output_tokens, fresh.num_computed_tokens) == (3, 0)
    assert (fresh.request, fresh.session) == (sent.request, sent.session)
    assert fresh.status is Status.WAITING


def test_step_that_ends_when_the_engine_dies_counts():
    log = simulate([arrival(0, 0, 20, 4)], Failures([Outage(0, 2_210)]))
    assert log.token_times(0).tolist()[:3] == [1200, 2210, 2210 + 1000 + 22 * 10]


@pytest.mark.parametrize("start_ups_ns", [[1_000, 7_000], [7_000, 1_000]])
def test_engines_that_start_again_take_the_time_of_their_own_pool(start_ups_ns):
    log = simulate(
        [arrival(i, ns, 20, 2) for i, ns in enumerate([0, 100, 20_000, 20_100])],
        Failures([Outage(0, 500, 6_000), Outage(1, 800, 6_000)]),
        start_ups_ns=start_ups_ns,
    )
    for place, died_ns, start_up_ns in zip(log.places, (500, 800), start_ups_ns, strict=True):
        assert place.served == (Span(0, died_ns), Span(died_ns + 6_000 + start_up_ns, -1))


def test_time_to_the_next_random_failure_begins_when_the_engine_serves_again():
    plan = Failures(mtbf_ns=4_000.0, mttr_ns=900.0, seed=3)
    drawn = stream(3, "failures of engine 0")
    up_ns, down_ns, again_ns = (int(drawn.exponential() * mean) + 1 for mean in (4e3, 900.0, 4e3))
    start_up_ns = 50_000
    back_ns = up_ns + down_ns + start_up_ns
    log = simulate([arrival(0, 0, 20, 70)], plan, ("mixed",), start_up_ns)
    assert log.places[0].served[:2] == (Span(0, up_ns), Span(back_ns, back_ns + again_ns))


def test_request_waits_for_an_engine_that_starts_again():
    log = simulate(
        [arrival(0, 0, 20, 2), arrival(1, 5_000, 20, 1)],
        Failures([Outage(0, 500, 6_000)]),
        roles=("mixed",),
        start_up_ns=1_000,
    )
    assert log.places[0].served == (Span(0, 500), Span(7_500, -1))
    assert log.places[0].paid == (Span(0, -1),)
    requests = log.requests()
    assert requests["first_scheduled_ns"].tolist() == [0, 7_500]
    assert requests["num_losses"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        (Failures([Outage(0, 500)]), "no engine is left"),
        (Failures([Outage(0, 500, 9_000)], deadline_ns=3_000), "before its deadline"),
        (Failures([Outage(0, 500, 10)], max_retries=0), "it lost its engine 1 times"),
    ],
)
def test_request_that_cannot_be_sent_again_fails_with_a_reason(failures, reason):
    log = simulate([arrival(0, 0, 20, 2)], failures, roles=("mixed",))
    assert log.requests()["status"].tolist() == [REJECTED]
    assert reason in log.reject_reasons[0]


def test_request_that_loses_its_engine_after_its_deadline_is_not_sent_to_another():
    failures = Failures([Outage(0, 4_000)], deadline_ns=3_000)
    log = simulate([arrival(0, 0, 20, 9)], failures, roles=("mixed", "mixed"))
    assert log.requests()["status"].tolist() == [REJECTED]
    assert [*log.reject_reasons.values()] == ["it lost its engine after its deadline"]


def test_router_is_never_offered_a_dead_engine_and_cannot_name_one():
    class Second(Router):
        def route(self, request, engines):
            return 1

    workload = [arrival(0, 0, 20, 1), arrival(1, 5_000, 20, 1)]
    with pytest.raises(PolicyError, match="places of engines 1, the others are down"):
        simulate(workload, Failures([Outage(0, 1)]), router=Second())


@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("mixed", "decode", "decode")])
def test_router_that_fails_when_an_engine_dies_is_its_fault(roles, monkeypatch):
    class Fails(Router):
        def route(self, request, engines):
            return 0

        def engine_is_gone(self, index):
            raise ValueError("gone")

    monkeypatch.setattr(routers, "make", lambda name: Fails())
    said = r"router Fails: engine_is_gone\(\) of engine 0 raised ValueError: gone \(test_fleet_fail"
    with pytest.raises(PolicyError, match=said):
        simulate([arrival(0, 0, 20, 5)], Failures([Outage(0, 5_000)]), roles=roles)


def test_straggler_takes_longer_for_steps_that_begin_while_it_is_slow():
    log = simulate(
        [arrival(0, 0, 20, 5)], Failures(slowdowns=[Slowdown(0, 1_500, 4_000, 3.0)]), ("mixed",)
    )
    # The second step began before; the third is slow; the fourth begins after.
    assert np.diff(log.token_times(0)).tolist() == [1010, 3030, 1010, 1010]


def test_transfer_begins_anew_when_its_link_is_up_again():
    # The prompt is there at 1200; 20 tokens take 50 + 20 ns. The link fails when ten are sent.
    failures = Failures(link_outages=[Outage(1, 1_260, 500)])
    requests = simulate([arrival(0, 0, 20, 2)], failures, ("prefill", "decode")).requests()
    assert requests["transfer_end_ns"].tolist() == [1_760 + 20]


def test_kv_held_for_a_dead_engine_goes_to_another_one():
    failures = Failures([Outage(1, 1_260)])
    log = simulate([arrival(0, 0, 20, 2)], failures, ("prefill", "decode", "decode"))
    requests = log.requests()
    assert requests["engine"].tolist() == [2]
    assert requests["transfer_start_ns"].tolist() == [1_260]
    assert not log.losses


def test_kv_lost_with_its_sender_is_computed_again():
    failures = Failures([Outage(0, 1_260)])
    log = simulate([arrival(0, 0, 20, 3)], failures, ("prefill", "prefill", "decode"))
    row = {name: column[0] for name, column in log.requests().items()}
    # 21 tokens are computed again, with which the second token comes out.
    assert log.token_times(0).tolist()[:2] == [1200, 1_260 + 1000 + 210]
    assert (row["prefill_engine"], row["engine"], row["lost_tokens"]) == (1, 2, 20)


@pytest.mark.parametrize(
    ("first_token", "times_ns"),
    # The prompt is there at 1200 and its KV at 1270. The engine of the answer dies at 3000; then 20
    # tokens and those that came out are computed again, and 21 or 22 tokens sent.
    [
        # Out before: at 1200 and 2280. 22 tokens: the third comes out with the last of them.
        ("prefill", [1200, 2280, 3000 + 1220, 4220 + 50 + 22 + 1010]),
        ("transfer", [1270, 2280, 3000 + 1220 + 50 + 22, 4292 + 1010]),
        # Out before: at 2280. Of 21 tokens the last is computed again, as a decode.
        ("decode", [2280, 3000 + 1210 + 50 + 21 + 1010, 5291 + 1010, 6301 + 1010]),
    ],
)
def test_first_token_is_told_once_whoever_computes_the_prompt_again(first_token, times_ns):
    failures = Failures([Outage(1, 3_000)])
    roles = ("prefill", "decode", "decode")
    log = simulate([arrival(0, 0, 20, 4)], failures, roles, first_token=first_token)
    assert log.token_times(0).tolist() == times_ns
    row = {name: column[0] for name, column in log.requests().items()}
    assert (row["first_token_ns"], row["generated_tokens"], row["engine"]) == (times_ns[0], 4, 2)
    assert log.token_counts()["count"].sum() == 4


def test_token_of_a_decode_is_dropped_where_another_engine_goes_on():
    # One token of what is computed again is left for a step of its own: a decode, whose token is
    # for nobody. Steps of 21 tokens compute the others.
    failures = Failures([Outage(1, 3_000)])
    roles = ("prefill", "decode", "decode")
    log = simulate(
        [arrival(0, 0, 21, 4)], failures, roles, first_token="decode", max_num_batched_tokens=21
    )
    # 1000 + 210 ns for the prompt, 50 + 21 for its KV, and a step; then all of it again.
    again_ns = 3_000 + 1210 + 1010
    first_ns = again_ns + 50 + 22 + 1010
    assert log.token_times(0).tolist() == [2291, first_ns, first_ns + 1010, first_ns + 2020]
    steps = log.of_engines[0].steps()
    assert steps["num_decodes"].tolist() == [0, 0, 1]
    assert log.of_engines[0].token_counts()["count"].tolist() == []


@pytest.mark.parametrize(
    ("dies_ns", "losses", "first_ns"),
    [
        (100, [(0, 100, 0)], 100 + 1_200),  # nothing of it was computed
        (700, [(0, 700, 0)], 700 + 1_200),  # its first layer, which is on its way
        (1_199, [(0, 1_199, 0)], 1_199 + 1_200),
        (1_500, [(0, 1_500, 20)], 1_200),  # the prompt, and not all of it has come
        (20_349, [(0, 20_349, 20)], 1_200),
        (20_351, [], 1_200),
    ],
)
def test_kv_sent_layer_by_layer_is_lost_with_its_sender_until_all_of_it_has_come(
    dies_ns, losses, first_ns
):
    # The first of four layers is computed at 300 ns; then 20,000 bytes leave at one a nanosecond,
    # and 50 ns later the last is there.
    roles = ("prefill", "prefill", "decode")
    log = simulate(
        [arrival(0, 0, 20, 3)], Failures([Outage(0, dies_ns)]), roles, num_layers=4, bytes_per_s=1e9
    )
    assert [(loss.id, loss.at_ns, loss.lost_tokens) for loss in log.losses] == losses
    times_ns = log.token_times(0).tolist()
    assert (len(times_ns), times_ns[0]) == (3, first_ns)
    row = {name: column[0] for name, column in log.requests().items()}
    assert (row["status"], row["engine"]) == (0, 2)
    assert row["prefill_engine"] == (1 if losses else 0)


def test_seat_of_kv_that_is_lost_on_its_way_is_given_to_who_waits_for_it():
    failures = Failures([Outage(0, 1_260)])
    workload = [arrival(0, 0, 20, 3), arrival(1, 0, 20, 3)]
    log = simulate(workload, failures, ("prefill", "prefill", "decode"), max_num_seqs=1)
    requests = log.requests()
    # The other prompt is there since 1200 as well; that of the lost KV is computed behind it.
    assert requests["transfer_start_ns"].tolist()[1] == 1_260
    assert requests["prefill_engine"].tolist() == [1, 1]


def test_kv_that_waits_behind_lost_kv_is_sent_at_once():
    # Twelve blocks: the first request decodes in five or more, the second would need eleven, and
    # the third, for which three are free, does not pass it by.
    failures = Failures([Outage(1, 3_000)])
    workload = [arrival(0, 0, 20, 12), arrival(1, 0, 40, 3), arrival(2, 400, 8, 3)]
    roles = ("prefill", "prefill", "prefill", "decode")
    log = simulate(workload, failures, roles, num_blocks=12, max_model_len=48)
    requests = log.requests()
    assert requests["transfer_start_ns"].tolist()[::2] == [1_200, 3_000]
    assert requests["lost_tokens"].tolist() == [0, 40, 0]


def test_memory_of_kv_that_is_lost_on_its_way_lets_who_was_preempted_go_on():
    # Twelve blocks hold 20 tokens whose KV is on its way for 10 us, and 28 of the request that
    # decodes there: for its 29th it waits until the other engine dies.
    failures = Failures([Outage(1, 19_800)])
    workload = [arrival(0, 0, 20, 12), arrival(1, 9_000, 20, 3)]
    log = simulate(
        workload, failures, ("prefill", "prefill", "decode"), latency_s=10e-6, num_blocks=12,
        max_model_len=48,
    )  # fmt: skip
    assert log.requests()["num_preemptions"].tolist()[0] == 1
    times_ns = log.token_times(0).tolist()
    assert times_ns[9] - 19_800 == 1000 + 10 * 29


def experiment(**cluster):
    workload = {"trace": "azure-conv", "num_requests": 60, "request_rate": 20.0}
    engine = {"num_gpu_blocks_override": 400, "max_model_len": 4000, "max_num_seqs": 6}
    return make_spec({"workload": workload, "engine": engine, "cluster": cluster})


def test_experiment_tells_of_failures(tmp_path):
    failures = {"engines": [{"engine": 0, "at_s": 1.0, "down_s": 0.5}]}
    start_up = {"load_gb_per_s": 100, "warm_up_s": 0.25}
    result = run(experiment(count=2, failures=failures, start_up=start_up))
    metrics = result.metrics()
    assert result.num_engines == 2
    assert metrics["completed"] == run(experiment(count=2)).metrics()["completed"]
    assert metrics["requests_retried"] == np.count_nonzero(result.requests["num_losses"]) > 0
    assert metrics["lost_tokens"] == result.requests["lost_tokens"].sum() > 0
    # Llama 3 8B in bf16: 16.06 GB over 100 GB/s.
    first, second = result.engines[0].served
    down_s = (second.from_ns - first.until_ns) / 1e9
    assert down_s == pytest.approx(0.5 + 0.1606 + 0.25, abs=1e-3)
    duration_s = metrics["duration_s"]
    assert metrics["availability_share"] == pytest.approx(1 - down_s / (2 * duration_s))
    assert metrics["gpu_seconds"] == pytest.approx(2 * duration_s)
    result.save(tmp_path)
    again = RunResult.load(tmp_path)
    assert again.engines == result.engines
    assert again.metrics() == pytest.approx(metrics, nan_ok=True)


def test_engine_dies_at_the_same_times_whatever_is_asked_of_the_fleet():
    failures = {"mtbf_s": 1.5, "mttr_s": 0.2}

    def deaths(rate):
        data = experiment(count=3, failures=failures, start_up={"warm_up_s": 0}).to_data()
        data["workload"]["request_rate"] = rate
        engines = run(make_spec(data)).engines
        return [[span.until_ns for span in e.served if span.until_ns >= 0] for e in engines]

    slow, fast = deaths(5.0), deaths(20.0)
    assert any(fast)
    for many, few in zip(slow, fast, strict=True):
        assert many[: len(few)] == few[: len(many)]


@pytest.mark.parametrize(("is_up", "later_ns"), [(True, 0), (False, 5_000)])
def test_engine_that_still_starts_begins_to_age_when_it_serves(is_up, later_ns):
    clock, died_ns = Clock(), []
    processes = Processes(clock)
    fleet = SimpleNamespace(
        processes=processes, has_work=True, start_up_ns=lambda member: 5_000, repair=print
    )

    def fail(member, comes_back):
        died_ns.append(clock.now_ns)
        fleet.has_work = False  # so that it dies once

    fleet.fail = fail
    member = SimpleNamespace(index=3, is_up=is_up, is_there=True)
    plan = Failures(mtbf_ns=1e6, mttr_ns=1e18, seed=4)
    processes.process(failures._die_at_random(fleet, member, plan))
    clock.run()
    first_ns = int(stream(4, "failures of engine 3").exponential() * 1e6) + 1
    assert died_ns == [first_ns + later_ns]


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({"engines": [{"engine": 2, "at_s": 1}]}, r"engines\[0\].engine: there are engines 0 to 1"),
        ({"mtbf_s": 5}, "mtbf_s and mttr_s: give both"),
        ({"links": [{"engine": 0, "at_s": 1, "down_s": 1}]}, "nothing is sent"),
        (
            {"stragglers": [{"engine": 0, "from_s": 2, "to_s": 1, "slowdown": 2}]},
            "to_s must be after from_s",
        ),
        ({"engine": []}, "failures.engine: .*did you mean engines"),
    ],
)
def test_failures_that_cannot_be_are_told(failures, message):
    with pytest.raises(SpecError, match=message):
        experiment(count=2, failures=failures)


def test_engine_much_faster_than_its_clock_still_takes_time():
    fast = {"engine": 0, "from_s": 0, "to_s": 10, "slowdown": 1e-12}
    answered = [
        run(experiment(count=1, failures={"stragglers": slow})).metrics()["completed"]
        for slow in ([fast], [])
    ]
    assert answered[0] == answered[1] > 0


@pytest.mark.skipif(core.running() != "python", reason="compiled code refuses stand-ins")
def test_engine_that_dies_gives_up_everyone_wherever_they_are_in_order_of_arrival():
    def state(number):
        request = SimpleNamespace(arrival_ns=number // 2)
        return SimpleNamespace(id=number, request=request, served_ns=5, _seated_ns=number)

    states = [state(number) for number in range(10)]
    answered, left_decodes, in_flight = [], [], Pipeline()
    in_flight.enter(BatchInFlight({9: states[9]}, {9: 1}, None, {}, []))
    engine = SimpleNamespace(
        decodes=SimpleNamespace(members={6: states[6]}), unanswered=[states[8]],
        running={6: states[6], 1: states[1]}, waiting=[states[4], states[0]],
        intake=SimpleNamespace(requests=[states[5]]), arrived=[states[2]],
        loading={7: states[7], 3: states[3]}, holding={}, overrun={}, tiers=None,
        in_pipeline=in_flight, leave_pipeline=left_decodes.append,
        _leave_decodes=left_decodes.append,
        _answer=lambda one, now_ns: answered.append((one.id, now_ns)),
    )  # fmt: skip
    left = Departures.abandon(engine, 100)
    assert [one.id for one in left] == [*range(8), 9]
    assert [one.served_ns for one in left] == [5, 104, 5, 5, 5, 5, 99, 5, 96]
    assert [one.id for one in left_decodes] == [6, 9]
    assert not in_flight.batches
    assert answered == [(8, 100)]
    assert engine.unanswered == []


def test_policy_hears_of_who_ended_as_the_engine_died_though_the_next_step_was_planned_with_them():
    # The prompts of both take 1,400 ns, a step of both 1,020: the first ends at 2,420, when the
    # engine dies; without that its policy hears of it once the next step was planned with it.
    config = replace(CONFIG, async_scheduling=True, overrun_at_stop=True)
    heard = {0: [], 1: []}

    def new_engine(pool):
        policy = registry.make("fcfs")
        policy.on_finish = lambda state, now_ns: heard[pool].append((state.id, now_ns))
        return Engine(config, policy, SimExecutor(Pricing(LinearCost(1000, 10, 0))))

    log = simulate_cluster(
        [new_engine(i) for i in range(2)],
        routers.make("round_robin"),
        [arrival(i, 0, 20, 2 if i == 0 else 9) for i in (0, 1, 2, 3)],
        changes=Changes(Supply(new_engine, ("mixed",) * 2, [0, 0]), Failures([Outage(0, 2_420)])),
    )
    requests = log.requests()
    assert requests["num_losses"].tolist() == [0, 0, 1, 0]
    assert requests["finish_ns"][0] == 2_420
    assert heard[0] == [(0, 2_420)]
    assert [number for number, _ in heard[1]] == [1, 3, 2]


def test_requests_that_an_engine_loses_are_sent_on_in_order_of_their_arrival():
    """Whatever their ids: those of sessions are no order of time."""

    class Notes(Router):
        def __init__(self):
            self.sent = []

        def route(self, request, engines):
            self.sent.append(request.id)
            return 0  # of those that are up

    ids = [5, 1, 3]
    work = [arrival(i, 10 * n, 8, 60) for n, i in enumerate(ids)]
    router = Notes()
    simulate(work, Failures(outages=(Outage(0, 5_000, 900_000),)), router=router)
    assert router.sent == [*ids, *ids]


@pytest.mark.parametrize(
    ("outages", "up_again_ns"),
    [
        ([(500, 6_000)], 6_500),
        ([(500, 6_000), (2_000, 1_000)], 6_500),  # one within the other
        ([(500, 6_000), (2_000, 9_000)], 11_000),  # or beyond it
        ([(2_000, 9_000), (500, 6_000), (3_000, 10)], 11_000),
    ],
)
def test_engine_that_is_down_for_several_reasons_is_up_when_the_last_is_over(outages, up_again_ns):
    failures = Failures([Outage(0, at_ns, for_ns) for at_ns, for_ns in outages])
    log = simulate([arrival(i, 700 * i, 20, 4) for i in range(30)], failures)
    down_ns = min(at_ns for at_ns, _ in outages)
    assert log.places[0].served == (Span(0, down_ns), Span(up_again_ns, -1))


class Outside:
    """Stands in for a fleet: notes what is asked of its clock, and takes nobody unless it may."""

    def __init__(self, now_ns):
        self.now_ns, self.takes, self.expected = now_ns, False, True
        self.timed, self.resumed, self.gone, self.turned_away = [], [], [], []
        self.clock = SimpleNamespace(
            at=lambda wait_ns, kind, then: self.timed.append((wait_ns, then))
        )
        self.sessions = SimpleNamespace(rejected=lambda state: None)
        self.arrivals = {i: arrival(i, 20, 5, 30 + i) for i in range(9)}
        self.logs = [(index, self.log(index)) for index in range(3)]

    def log(self, index):
        return SimpleNamespace(reject=lambda *told: self.turned_away.append((index, *told)))

    def resume(self, state):
        if self.takes:
            self.resumed.append(state.id)
        return self.takes

    def expects(self, *roles):
        return {("mixed", "prefill"): self.expected}[roles]

    def request_is_gone(self, state, now_ns):
        self.gone.append((state.id, now_ns))

    def state(self, number):
        return RequestState(self.arrivals[number].request)


def test_request_without_an_engine_waits_until_its_deadline_and_no_longer():
    fleet = Outside(now_ns=70)
    retries = Retries(fleet)
    retries.deadline_ns = 100
    first, second = fleet.state(1), fleet.state(2)
    retries.lost(first, SimpleNamespace(index=2))
    retries.park(second)
    assert retries.num_parked == 2
    # They came at 20, and may wait until 120.
    assert [wait_ns for wait_ns, _ in fleet.timed] == [50, 50]
    fleet.now_ns, fleet.takes = 110, True
    retries.send_parked()
    assert (fleet.resumed, retries.num_parked) == ([1, 2], 0)
    fleet.timed[0][1](None)  # it is served by then
    assert fleet.turned_away == []
    fleet.takes = False
    retries.park(first)
    fleet.now_ns = 120
    fleet.timed[-1][1](None)
    late = "no engine took it before its deadline"
    assert fleet.turned_away == [(2, first, 31, late)], "with the engine that lost it"
    retries.park(second)  # just too late
    assert fleet.turned_away[1:] == [(0, second, 32, late)], "nobody had it"
    assert fleet.gone == [(1, 120), (2, 120)]
    assert retries.num_parked == 0


def test_requests_without_an_engine_are_given_up_when_none_is_to_come():
    fleet = Outside(now_ns=70)
    retries = Retries(fleet)
    retries.most = 2
    first, second = fleet.state(1), fleet.state(2)
    retries.lost(first, SimpleNamespace(index=1))
    retries.lost(second, SimpleNamespace(index=0))
    assert (fleet.timed, retries.num_parked) == ([], 2)
    fleet.expected = False
    retries.give_up_if_nobody_comes()
    assert fleet.turned_away == [
        (1, first, 31, "no engine is left"), (0, second, 32, "no engine is left")
    ]  # fmt: skip
    fleet.takes = True
    for times in (2, 3):
        retries.lost(first, SimpleNamespace(index=2))
        told = [(2, first, 31, "it lost its engine 3 times")] if times == 3 else []
        assert fleet.turned_away[2:] == told
    assert fleet.resumed == [1]
    assert [(loss.id, loss.engine, loss.at_ns) for loss in retries.losses] == [
        (1, 1, 70), (2, 0, 70), (1, 2, 70), (1, 2, 70)
    ]  # fmt: skip


def test_tokens_of_requests_that_fail_midway_count_for_no_rate_and_no_gap():
    keys = {
        "policy": "fcfs",
        "workload": {
            "prompt_tokens": 50, "output_tokens": 60, "request_rate": 12, "num_requests": 40,
            "classes": {"one": {"share": 0.5, "priority": 1}, "two": {"share": 0.5, "priority": 2}},
        },
        "cluster": {
            "count": 2, "failures": {"engines": [{"engine": 0, "at_s": 1.5}], "max_retries": 0},
        },
    }  # fmt: skip
    whole = run(make_spec(keys))
    windowed = run(make_spec({**keys, "measure": {"warm_up_s": 0}}))
    failed = whole.requests["status"] == REJECTED
    assert (whole.requests["generated_tokens"][failed] > 1).any()
    duration_s = whole.metric("duration_s")
    seconds = {}
    gaps = []
    for number in whole.requests["id"][~failed].tolist():
        times_ns = whole.log.token_times(number)
        gaps += np.diff(times_ns).tolist()
        for time_ns in times_ns.tolist():
            second = (time_ns - whole.requests["arrival_ns"].min()) // 1_000_000_000
            seconds[second] = seconds.get(second, 0) + 1
    num_tokens = sum(seconds.values())
    assert num_tokens == whole.metric("total_output_tokens")
    for one in (whole, windowed):
        assert one.metric("output_throughput") == pytest.approx(num_tokens / duration_s)
        assert one.metric("max_output_tokens_per_s") == max(seconds.values())
        usd = one.metric("cost_usd") / num_tokens * 1e6
        assert one.metric("usd_per_million_output_tokens") == pytest.approx(usd)
        assert one.metric("mean_itl_ms") == pytest.approx(np.mean(gaps) / 1e6)
        assert one.metric("largest", latency="itl") == max(gaps) / 1e6
        parts = [part["output_throughput"] for part in one.metrics_by("priority").values()]
        assert len(parts) == 2
        assert sum(parts) == pytest.approx(num_tokens / duration_s)


def test_keys_of_failures_are_handed_on_one_by_one_in_nanoseconds():
    keys = FailureKeys.model_validate({
        "engines": [{"engine": 1, "at_s": 2, "down_s": 3}, {"engine": 4, "at_s": 5}],
        "mtbf_s": 6, "mttr_s": 7,
        "stragglers": [{"engine": 8, "from_s": 9, "to_s": 11, "slowdown": 1.5}],
        "links": [{"engine": 12, "at_s": 13, "down_s": 14}],
        "max_retries": 15, "deadline_s": 16,
    })  # fmt: skip
    s = 1_000_000_000
    assert keys.failures(17) == Failures(
        outages=[Outage(1, 2 * s, 3 * s), Outage(4, 5 * s, FOREVER)],
        mtbf_ns=6e9, mttr_ns=7e9,
        slowdowns=[Slowdown(8, 9 * s, 11 * s, 1.5)],
        link_outages=[Outage(12, 13 * s, 14 * s)],
        max_retries=15, deadline_ns=16 * s, seed=17,
    )  # fmt: skip
    assert FailureKeys().failures(1) == Failures(
        [], slowdowns=[], link_outages=[], max_retries=10, seed=1
    )


@pytest.mark.parametrize(("to_s", "is_time"), [(4.0, False), (5.0, False), (5.001, True)])
def test_engine_is_slow_for_some_time_or_the_keys_are_refused(to_s, is_time):
    keys = {"stragglers": [{"engine": 0, "from_s": 5, "to_s": to_s, "slowdown": 2}]}
    if is_time:
        assert FailureKeys.model_validate(keys).stragglers[0].to_s == to_s
    else:
        with pytest.raises(ValueError, match="to_s must be after from_s"):
            FailureKeys.model_validate(keys)


class Asks(Autoscaler):
    """Asks for what a test says, one time after the other."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)
        self.told = []

    def num_engines(self, pool):
        self.told.append((pool.num_engines, len(pool.engines)))
        return self.numbers.pop(0) if self.numbers else pool.num_engines


def served_while_one_drains(work, *numbers, failures=None):
    def new_engine(_=0):
        return Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(LinearCost(1000, 10, 0))))

    asks = Asks(*numbers)
    scaling = [PoolScaling(0, asks, every_ns=10_000, least=1, most=3)]
    log = simulate_cluster(
        [new_engine(), new_engine()], routers.make("round_robin"), work, pools=[0, 0],
        changes=Changes(Supply(new_engine, ["mixed"], [500]), failures, scaling),
    )  # fmt: skip
    assert len(log.places) == 2, "nobody new was needed"
    return log.requests(), asks.told


def test_engine_kept_after_all_is_sent_requests_again_at_once():
    # Two requests keep both busy for 20 us and 30 us. The second drains from 10 us to 20 us.
    work = [arrival(0, 0, 3, 20), arrival(1, 0, 3, 30)]
    work += [
        arrival(2 + i, at_ns, 3, 2) for i, at_ns in enumerate((12_000, 15_000, 20_001, 20_002))
    ]
    rows, told = served_while_one_drains(work, 1, 2)
    assert told == [(2, 2), (1, 1), (2, 2)]
    assert rows["engine"][:4].tolist() == [0, 1, 0, 0]
    assert sorted(rows["engine"][4:].tolist()) == [0, 1]


def test_engine_kept_after_all_takes_who_had_none_at_once():
    # The first dies for good, and the second drains: its requests wait until that is kept.
    work = [arrival(0, 0, 3, 20), arrival(1, 0, 3, 30), arrival(2, 12_000, 3, 2)]
    failures = Failures(outages=[Outage(0, 11_500)])
    rows, told = served_while_one_drains(work, 1, 1, failures=failures)
    assert told == [(2, 2), (0, 0), (1, 1)]
    assert rows["engine"].tolist() == [1, 1, 1]
    assert 20_000 <= rows["first_scheduled_ns"][2] < 21_100, "in the next step of the second"
    assert rows["finish_ns"][0] < 30_000


def test_engine_that_comes_back_is_known_only_as_it_reports():
    told = {}

    class Noting(Router):
        def route(self, request, engines):
            period = request.arrival_ns // 10_000
            for engine in engines:
                told.setdefault((engine.index, period), []).append(engine.num_running)
            return request.id % len(engines)

    # The second is down from 2.5 us to 4.5 us, and reports next with the other at 10 us.
    work = [arrival(i, 400 * i, 5, 9) for i in range(60)]
    simulate(work, Failures([Outage(1, 2_500, 2_000)]), router=Noting(), staleness_ns=10_000)
    assert all(len(set(running)) == 1 for running in told.values())
    assert {told[1, 0][-1], told[0, 0][-1]} == {0}
    assert told[1, 1][0] > 0


def test_straggler_that_is_slow_for_several_reasons_is_slow_by_all_of_them():
    # 1,000 ns and ten a token; steps that begin within both times take two by three as long.
    slowdowns = [Slowdown(0, 1_500, 9_000, 3.0), Slowdown(0, 3_000, 15_500, 2.0)]
    log = simulate([arrival(0, 0, 20, 6)], Failures(slowdowns=slowdowns), ("mixed",))
    # They begin at 1,200, 2,210, 5,240, 11,300 and 13,320 ns.
    assert np.diff(log.token_times(0)).tolist() == [1010, 3030, 6060, 2020, 2020]
