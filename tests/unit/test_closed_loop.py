"""Clients that send their next request when they have an answer, or a refusal."""

from dataclasses import replace

import pytest

from schedlab.policies import ContinuousBatching, registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan import FOREVER
from tests import laws
from tests.laws import arrival
from tests.refusing import Refusing

CONFIG = EngineConfig(
    num_blocks=100, max_model_len=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=64
)
COST = laws.LinearCost(base_ns=100, token_ns=0, context_ns=0)  # every step takes 100 ns


def run(policy, workload, clients, config=CONFIG, **options):
    return laws.run(policy, workload, config, cost=COST, max_concurrency=clients, **options)


@pytest.mark.parametrize("clients", [1, 2])
def test_rejected_request_when_nothing_runs_makes_way_for_the_next(clients):
    workload = [arrival(i, 0, 4, 3, priority=i % 2) for i in range(7)]
    log = run(Refusing(), [arrival(9, 0, 4, 3, priority=1), *workload], clients)
    assert sorted(log.reject_reasons) == [1, 3, 5, 9]
    requests = log.requests()
    assert (requests["generated_tokens"] == [3, 0, 3, 0, 3, 0, 3, 0]).all()


@pytest.mark.parametrize(
    ("own_ns", "sent_ns"), [(100, 160), (159, 160), (160, 160), (161, 161), (500, 500)]
)
def test_client_sends_when_it_has_its_answer_however_long_the_next_is_predicted(own_ns, sent_ns):
    # Request 0 is ready at 60 and answered at 160; a prediction ends after that, its request may
    # have been sent before.
    workload = [
        replace(one, ready_ns=one.ready_ns + 60)
        for one in (arrival(0, 0, 4, 1), arrival(1, own_ns, 4, 1))
    ]
    requests = run(registry.make("fcfs"), workload, 1).requests()
    assert requests["finish_ns"][0] == 160
    assert requests["arrival_ns"][1] == sent_ns
    assert requests["first_scheduled_ns"][1] == sent_ns + 60


def test_rejecting_everybody_ends_the_run():
    log = run(Refusing(), [arrival(i, 0, 4, 3, priority=1) for i in range(5)], 2)
    assert len(log.reject_reasons) == 5
    assert log.num_steps == 0


def test_client_that_is_refused_sends_at_that_instant():
    # Request 1 is refused at 0, when request 0 is scheduled; its client sends request 2 at once,
    # which comes while that step runs and is in the next one.
    workload = [arrival(0, 0, 4, 9), arrival(1, 0, 4, 9, priority=1), arrival(2, 0, 4, 2)]
    requests = run(Refusing(), workload, 2).requests()
    assert requests["arrival_ns"].tolist() == [0, 0, 0]
    assert requests["first_scheduled_ns"].tolist() == [0, -1, 100]


def test_refusal_in_a_plan_without_tokens_does_not_hide_the_next_request():
    class Pausing(ContinuousBatching):
        """Pauses everybody for a plan to reject, then goes on; promises all it may."""

        def plan(self, view, builder):
            refused = [s for s in view.waiting if s.request.priority]
            for state in refused:
                builder.reject(state, "not today")
            if not refused:
                builder.grant_running()
                for state in view.waiting:
                    builder.grant(state)
            return builder.build(max_steps=1 if refused else FOREVER)

    workload = [arrival(0, 0, 4, 9), arrival(1, 250, 4, 9, priority=1), arrival(2, 250, 4, 2)]
    fast = run(Pausing(), workload, 2)
    assert fast.requests()["first_scheduled_ns"].tolist() == [0, -1, 400]
    slow = run(Pausing(), workload, 2, config=laws.slow(CONFIG))
    assert laws.signature(fast) == laws.signature(slow)


def test_request_that_can_never_run_makes_way_for_the_next():
    workload = [arrival(0, 0, 99, 9), arrival(1, 0, 4, 2), arrival(2, 0, 99, 9)]
    log = run(registry.make("fcfs"), workload, 1)
    assert sorted(log.reject_reasons) == [0, 2]
    assert log.requests()["finish_ns"].tolist() == [-1, 200, -1]


def test_client_of_a_sealed_batch_sends_when_it_has_its_answer():
    # Request 0 has its last token at 200, but is answered with its batch, at 900.
    workload = [arrival(0, 0, 4, 2), arrival(1, 0, 4, 9), arrival(2, 0, 4, 2)]
    requests = run(registry.make("static"), workload, 2).requests()
    assert requests["last_token_ns"].tolist() == [200, 900, 1100]
    assert requests["finish_ns"].tolist() == [900, 900, 1100]
    assert requests["arrival_ns"].tolist() == [0, 0, 900]


def test_client_of_a_sealed_batch_that_answers_early_sends_early():
    workload = [arrival(0, 0, 4, 2), arrival(1, 0, 4, 9), arrival(2, 0, 4, 2)]
    requests = run(registry.make("static", return_early=True), workload, 2).requests()
    assert requests["finish_ns"].tolist() == [200, 900, 1100]
    assert requests["arrival_ns"].tolist() == [0, 0, 200]


@pytest.mark.parametrize("policy", ["fcfs", "static", "scorpio"])
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_never_more_requests_lack_an_answer_than_there_are_clients(policy, clients):
    knobs = {"ttft_s": 1.5e-7, "tbt_s": 2e-7, "ttft_margin_s": 0.0} if policy == "scorpio" else {}
    workload = [arrival(i, 90 * i, 3 + i % 5, 1 + 7 * (i % 3)) for i in range(40)]
    # Prompts of 3 to 7 tokens: few share a step of 8, and a second step is too late.
    config = replace(CONFIG, max_num_batched_tokens=8)
    log = run(registry.make(policy, **knobs), workload, clients, config)
    requests = log.requests()
    answered = requests["finish_ns"] >= 0
    assert bool(answered.sum() < 40) is (policy == "scorpio" and clients > 2)
    sent, done = requests["arrival_ns"][answered], requests["finish_ns"][answered]
    for instant in sent:
        assert ((sent <= instant) & (instant < done)).sum() <= clients


def test_closed_loop_in_an_engine_that_plans_ahead_never_exceeds_its_clients():
    config = replace(CONFIG, async_scheduling=True, arrivals_between_steps=True)
    workload = [arrival(i, 0, 4, 1 + i % 4) for i in range(12)]
    requests = run(registry.make("fcfs"), workload, 3, config=config).requests()
    for instant in requests["arrival_ns"]:
        in_flight = (requests["arrival_ns"] <= instant) & (instant < requests["finish_ns"])
        assert in_flight.sum() <= 3
