"""FairBatching, traced by hand.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context. Blocks hold four tokens.
"""

from random import Random

import pytest

from schedlab import core
from schedlab.policies import registry
from schedlab.policies.slack_loop import Deadlines, _by_slack
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.request import RequestState, Slo
from tests.laws import LinearCost, arrival, run, slow
from tests.traced import Recorder, batches, limits
from tests.unit.test_policies_ordering import served


def pace(ttft_ns, tbt_ns):
    return Slo(ttft_ns / 1e6, tbt_ns / 1e6)


def test_fair_batching_orders_prompts_by_deadline():
    work = [
        arrival(0, slo=pace(9000, 2000)),
        arrival(1, slo=pace(3000, 2000)),
        arrival(2),  # the default of 5000
    ]
    assert served("fair_batching", work, ttft_s=5e-6) == [1, 2, 0]


def test_fair_batching_gives_prompts_the_time_that_decodes_are_ahead():
    # Request 0 has its first token at 1040, due at 5000; the next is due at 7000, so prompts may
    # have all of 7000 - 1040 = 5960 ns: they get the whole token budget of 200, not the 2000 ns
    # between tokens. The decode is urgent (7000 < 1040 + 5960 + 2000) and in the step as well.
    work = [
        arrival(0, 0, prompt=4, output=3, slo=pace(5000, 2000)),
        arrival(1, 500, prompt=190, output=1, slo=pace(9000, 2000)),
    ]
    got, _ = batches("fair_batching", work, limits(budget=200, max_model_len=400))
    assert got[:2] == [{0: 4}, {0: 1, 1: 190}]


def test_fair_batching_never_takes_less_time_than_the_least_between_tokens():
    # Request 0 is late whatever one does; the time for prompts is 1500 ns all the same:
    # 1000 + 10 (1 + 48) + 5 <= 1500 < one token more.
    work = [
        arrival(0, 0, prompt=4, output=4, slo=pace(1, 1500)),
        arrival(1, 500, prompt=90, output=1, slo=pace(1, 3000)),
    ]
    got, log = batches("fair_batching", work, limits(budget=100))
    assert got[:2] == [{0: 4}, {0: 1, 1: 48}]
    assert log.steps()["end_ns"][1] - log.steps()["start_ns"][1] <= 1500


def test_fair_batching_takes_the_least_target_of_all_who_decode():
    work = [
        arrival(0, 0, prompt=4, output=4, slo=pace(1, 1500)),
        arrival(1, 0, prompt=4, output=4, slo=pace(1, 1200)),
        arrival(2, 500, prompt=90, output=1),
    ]
    got, _ = batches("fair_batching", work, limits(budget=100))
    # 1000 + 10 (2 + 17) + 8 <= 1200.
    assert got[:2] == [{0: 4, 1: 4}, {0: 1, 1: 1, 2: 17}]


def test_fair_batching_computes_prompts_before_decodes_far_ahead_of_their_deadline():
    # At 1080 the token of request 0 is due at 2200, so a step may take 1120 ns. Request 1's next is
    # due at 90000: later than 1080 + 1120 + 1000, so it comes behind the prompt, which takes all.
    ahead, near = pace(80_000, 10_000), pace(1200, 1000)
    work = [
        arrival(0, 0, prompt=4, output=4, slo=near),
        arrival(1, 0, prompt=4, output=4, slo=ahead),
        arrival(2, 500, prompt=90, output=1),
    ]
    got, _ = batches("fair_batching", work, limits(budget=100))
    assert got[:2] == [{0: 4, 1: 4}, {0: 1, 2: 10}]  # 1000 + 10 (1 + 10) + 4 <= 1120
    # Without the prompt there is room for both.
    got, _ = batches("fair_batching", work[:2], limits(budget=100))
    assert got[:2] == [{0: 4, 1: 4}, {0: 1, 1: 1}]


def test_fair_batching_decodes_that_are_due_soon_after_the_step_are_urgent():
    # As before, but request 1's next token is due at 3100 < 1080 + 1120 + 1000.
    work = [
        arrival(0, 0, prompt=4, output=4, slo=pace(1200, 1000)),
        arrival(1, 0, prompt=4, output=4, slo=pace(2100, 1000)),
        arrival(2, 500, prompt=90, output=1),
    ]
    got, _ = batches("fair_batching", work, limits(budget=100))
    assert got[1] == {0: 1, 1: 1, 2: 9}  # 1000 + 10 (2 + 9) + 8 <= 1120


def test_fair_batching_leaves_decodes_out_that_do_not_fit_the_time():
    # All are late; 1030 ns have room for two: 1000 + 10 * 2 + 2 * 4.
    work = [arrival(i, 0, prompt=4, output=3, slo=pace(1 + i, 1030)) for i in range(4)]
    got, _ = batches("fair_batching", work, limits(budget=100))
    assert got[:4] == [{0: 4, 1: 4, 2: 4, 3: 4}, {0: 1, 1: 1}, {2: 1, 3: 1}, {0: 1, 1: 1}]


def test_fair_batching_takes_one_request_whatever_its_time():
    work = [arrival(i, 0, prompt=4, output=2, slo=pace(1, 5)) for i in range(2)]
    got, _ = batches("fair_batching", work, limits(budget=100))
    assert got == [{0: 4, 1: 4}, {0: 1}, {1: 1}]


def test_fair_batching_without_memory_evicts_the_latest_arrival():
    # 4 blocks: both decodes need another one at 8 tokens.
    work = [arrival(i, 0, prompt=7, output=4) for i in range(2)]
    got, log = batches("fair_batching", work, limits(num_blocks=4))
    assert got[:3] == [{0: 7, 1: 7}, {0: 1, 1: 1}, ({0: 1}, [1])]
    assert log.requests()["num_preemptions"].tolist() == [0, 1]


def test_fair_batching_with_prompts_that_block_each_other_evicts_the_latest():
    # Both hold two of four blocks and need a third.
    work = [arrival(i, 0, prompt=12, output=2) for i in range(2)]
    config = limits(num_blocks=4, long_prefill_token_threshold=4)
    got, _ = batches("fair_batching", work, config)
    assert got[:4] == [{0: 4, 1: 4}, {0: 4, 1: 4}, ({}, [1]), {0: 4, 1: 4}]


def test_fair_batching_looks_again_once_a_prompt_decodes_that_is_later_than_all_who_did():
    # In the second step request 2 does not fit the token budget, so that all are looked at: request
    # 0 is far ahead, and 1 waits. Once that decodes it is late, and a step may take 2000 ns:
    # 1000 + 10 (1 + 79) + 10 + 189 <= 2000, which leaves out request 0.
    work = [
        arrival(0, 0, prompt=4, output=9, slo=pace(100_000, 2000)),
        arrival(1, 500, prompt=10, output=9, slo=pace(1, 2000)),
        arrival(2, 500, prompt=290, output=1, slo=pace(90_000, 2000)),
    ]
    config = limits(num_blocks=300, budget=200, max_model_len=400)
    for never_falls in (False, True):
        cost = LinearCost()
        cost.never_falls = never_falls
        recorder = Recorder(registry.make("fair_batching"))
        run(recorder, work, slow(config), cost)
        got = recorder.batches
        assert got[:3] == [{0: 4}, {0: 1, 1: 10, 2: 189}, {1: 1, 2: 79}]


@pytest.mark.skipif(core.running() != "python", reason="compiled code calls no stand-ins")
def test_fair_batching_while_one_is_late_looks_at_all_decodes_once(monkeypatch):
    # Prompts of 300 tokens are cut off by a time of 3000 ns. One in four requests is far ahead of
    # its dates, and waits while prompts are computed.
    paces = [Slo(0.0001)] * 3 + [Slo(2.0)]
    work = [arrival(i, 2000 * i, 300, 20, slo=paces[i % 4]) for i in range(20)]
    of_decodes, looks = Deadlines.of_decodes, []

    def look(deadlines, view, decodes):
        looks.append(len(decodes))
        return of_decodes(deadlines, view, decodes)

    monkeypatch.setattr(Deadlines, "of_decodes", look)
    recorder = Recorder(registry.make("fair_batching", tbt_s=3e-6))
    run(recorder, work, limits(num_blocks=3000, seats=20, budget=200, max_model_len=400))
    with_prompt = [got for got in recorder.batches if len(got) > 1 and max(got.values()) > 1]
    assert len(with_prompt) == 80
    turns = "".join("x" if 3 in got else " " for got in recorder.batches)
    assert " " in turns.strip()
    assert looks == [1]


@pytest.mark.parametrize("knobs", [{"ttft_s": 0.0}, {"tbt_s": float("inf")}])
def test_fair_batching_with_an_impossible_target_is_refused(knobs):
    with pytest.raises(Exception, match="ttft_s and tbt_s"):
        batches("fair_batching", [arrival(0)], limits(), **knobs)


@pytest.mark.parametrize(("seats", "num_plans"), [(1, 5), (2, 3)])
def test_fair_batching_plans_ahead_where_nobody_who_waits_has_a_seat(seats, num_plans):
    work = [arrival(i, prompt=4, output=20) for i in range(2)]
    engine = Engine(
        limits(seats=seats), registry.make("fair_batching"), SimExecutor(Pricing(LinearCost()))
    )
    simulate(engine, work)
    # A prompt, all of its steps, and when all is done: for both at once, or one after the other.
    assert engine.num_plans == num_plans


def test_prompts_under_way_and_in_the_queue_are_served_by_due_date_then_arrival_then_number():
    # Few dates and arrivals, so that most are equal in one or both; numbers follow neither.
    draw = Random(7)
    executor = SimExecutor(Pricing(LinearCost()))
    builder = Engine(limits(), registry.make("fair_batching"), executor).builder
    for _ in range(40):
        states, targets = [], {}
        for number in draw.sample(range(99), 8):
            arrival_ns, due_ns = draw.randrange(3), draw.randrange(3, 6)
            state = RequestState(arrival(number, arrival_ns).request)
            targets[state] = (arrival_ns, [due_ns - arrival_ns], 1.0, 1.0)
            states.append((due_ns, arrival_ns, number, state))
        cut = draw.randrange(9)
        waiting = [state for *_, state in sorted(states[cut:])]
        under_way = [state for *_, state in states[:cut]]
        for seats in (0, 1):
            builder.residents_left = seats
            merged = list(_by_slack(under_way, waiting, targets, builder))
            assert merged == [state for *_, state in sorted(states if seats else states[:cut])]
