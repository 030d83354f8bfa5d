"""VTC, traced by hand: an input token is charged 1, an output token 2."""

from types import SimpleNamespace

import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.request import RUNS, WAITS, RequestState
from tests import laws
from tests.laws import arrival
from tests.traced import batches, limits
from tests.unit.test_policies_ordering import served


def of(tenant, ids, at_ns=0):
    return [arrival(i, at_ns, prompt=4, tenant=tenant) for i in ids]


def test_vtc_serves_the_tenant_that_got_least():
    work = of("a", range(4)) + of("b", (4, 5))
    # Each request is charged 4 + 2; ties go to the earlier one.
    assert served("vtc", work) == [0, 4, 1, 5, 2, 3]


def test_vtc_charges_by_weight_of_the_tenant():
    work = of("a", range(4)) + of("b", (4, 5))
    # A request of tenant a is charged 6 / 3: 2, 4, 6 against b's 6.
    assert served("vtc", work, tenant_weights={"a": 3.0}) == [0, 4, 1, 2, 3, 5]


def test_vtc_charges_prompts_at_admission_within_a_step():
    # Two seats: request 0 charges tenant a 4, so the second seat goes to b.
    got, _ = batches("vtc", of("a", (0, 1)) + of("b", (2,)), limits(seats=2))
    assert got == [{0: 4, 2: 4}, {1: 4}]


def test_vtc_lets_nobody_save_up_idle_time():
    # b comes in the fifth step. a has been charged 30 by its end, and b is lifted to 30: they
    # take turns. With a counter of 0, b would be served three times in a row.
    work = of("a", range(10)) + of("b", range(10, 13), at_ns=4_500)
    assert served("vtc", work) == [0, 1, 2, 3, 4, 5, 10, 6, 11, 7, 12, 8, 9]


def test_vtc_charges_output_tokens_as_they_come_out():
    # One answer of 5 tokens costs tenant a 4 + 10, two of 1 token cost b 6 each.
    work = [arrival(0, prompt=4, output=5, tenant="a"), *of("a", (1,)), *of("b", (2, 3, 4))]
    assert served("vtc", work) == [0, 2, 3, 4, 1]


@pytest.mark.parametrize(
    ("knobs", "seats", "first"),
    [
        ({}, 2, {0, 2}),  # 4 against 0
        ({}, 3, {0, 1, 2}),  # then 4 against 4: who came first
        ({"input_weight": 0.0}, 2, {0, 1}),  # nothing is charged
        ({"tenant_weights": {"a": 3.0}}, 3, {0, 1, 2}),  # 4 / 3 against b's 4
        ({"tenant_weights": {"a": 0.5}}, 3, {0, 2, 3}),  # 8 against b's 4
    ],
)
def test_vtc_charges_within_a_step_by_both_weights(knobs, seats, first):
    work = of("a", (0, 1)) + of("b", (2, 3))
    got, _ = batches("vtc", work, limits(seats=seats), **knobs)
    assert set(got[0]) == first


def test_vtc_with_free_output_tokens_charges_prompts_alone():
    # One answer of 5 tokens costs tenant a 4, as each answer of b does.
    work = [arrival(0, prompt=4, output=5, tenant="a"), *of("a", (1,)), *of("b", (2, 3))]
    assert served("vtc", work, output_weight=0.0) == [0, 2, 1, 3]


def test_vtc_gives_requests_without_a_tenant_the_weight_of_one():
    work = of(None, range(4)) + of("a", (4, 5, 6))
    assert served("vtc", work, tenant_weights={"b": 5.0}) == [0, 4, 1, 5, 2, 6, 3]


@pytest.mark.parametrize("prompt", [12, 13, 14, 15, 16, 17])
def test_vtc_admits_at_the_very_step_in_which_a_counter_overtakes_another(prompt):
    # Tenant a runs for long and has a prompt waiting that does not fit. Tenant b, charged for a
    # long prompt before, has one that does; it is its turn once a has been charged more.
    work = [
        arrival(0, 0, 4, 40, tenant="a"),
        arrival(1, 0, prompt, 1, tenant="b"),
        arrival(2, 100, 99, 1, tenant="a"),
        arrival(3, 200, 4, 1, tenant="b"),
    ]
    config = limits(num_blocks=25, seats=4, budget=100)
    _, slow = batches("vtc", work, config)
    fast = laws.run(registry.make("vtc"), work, config)
    assert laws.signature(fast) == laws.signature(slow)
    first_ns = slow.requests()["first_scheduled_ns"]
    assert 2_000 < first_ns[3] < first_ns[2]


def test_vtc_without_tenants_is_first_come_first_served():
    work = [arrival(i, prompt=1 + i % 3) for i in range(5)]
    assert served("vtc", work) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "knobs",
    [
        {"input_weight": -1.0}, {"output_weight": float("nan")}, {"tenant_weights": {"a": 0}},
        {"max_waiting_tokens": -1},
    ],
)  # fmt: skip
def test_vtc_with_an_impossible_knob_is_refused(knobs):
    with pytest.raises(Exception, match=r"weight|max_waiting_tokens"):
        batches("vtc", [arrival(0)], limits(), **knobs)


def test_newcomer_held_back_to_the_end_of_a_step_is_lifted_alike_ahead_and_step_by_step():
    # b comes while a runs: it takes part from the end of a step on, not of all that is skipped.
    work = [
        arrival(0, 0, 8, 20, tenant="a"), arrival(1, 0, 8, 2, tenant="a"),
        arrival(2, 1500, 8, 2, tenant="b"),
    ]  # fmt: skip
    config = EngineConfig(
        num_blocks=40, max_model_len=100, block_size=4, max_num_seqs=1, arrivals_between_steps=True
    )
    ahead = laws.run(registry.make("vtc"), work, config)
    assert laws.signature(ahead) == laws.signature(
        laws.run(registry.make("vtc"), work, laws.slow(config))
    )
    assert ahead.requests()["finish_ns"].argsort().tolist() == [0, 2, 1]


def test_vtc_with_arrivals_between_steps_lets_newcomers_into_the_next_step():
    # Request 1 comes during the first step, at whose end the engine hears of it: it is in the
    # second, also where a prompt goes on there.
    work = [arrival(0, 0, prompt=6, tenant="a"), arrival(1, 500, prompt=2, tenant="b")]
    config = limits(budget=4, arrivals_between_steps=True)
    got, _ = batches("vtc", work, config)
    assert got[:2] == [{0: 4}, {0: 2, 1: 2}]


def test_vtc_with_decodes_to_wait_looks_at_the_queue_once_they_are_over_and_then_in_each_step():
    # Three decodes after the prompts the queue is looked at; the seat is there in the sixth.
    work = [
        arrival(0, prompt=4, output=12), arrival(1, prompt=4, output=6), arrival(2, prompt=4),
        arrival(3, 100, prompt=3),
    ]  # fmt: skip
    got, _ = batches("vtc", work, limits(seats=2), max_waiting_tokens=3)
    both = {0: 1, 1: 1}
    assert got[:7] == [{0: 4, 1: 4}, *5 * [both], {0: 1, 2: 4}]
    # Request 2, of one token, was let in: three decodes pass until request 3 is.
    assert got[7:11] == [*3 * [{0: 1}], {0: 1, 3: 3}]


def test_vtc_with_decodes_to_wait_looks_at_the_queue_at_once_where_nobody_runs():
    work = [arrival(0, prompt=4, output=2), arrival(1, 500, prompt=4, output=2)]
    got, _ = batches("vtc", work, limits(), max_waiting_tokens=10)
    assert got == [{0: 4}, {0: 1}, {1: 4}, {1: 1}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vtc", "past_future"])
@pytest.mark.parametrize("max_waiting_tokens", [1, 3, 10, 35])
@pytest.mark.parametrize("more", [{}, {"arrivals_between_steps": True}, {"num_blocks": 40}])
def test_decodes_to_wait_are_counted_alike_ahead_and_step_by_step(name, max_waiting_tokens, more):
    work = [
        arrival(i, 9_000 * i, (9, 40, 3)[i % 3], 30 + 7 * (i % 3), tenant="ab"[i % 2])
        for i in range(24)
    ]
    config = limits(**{"num_blocks": 120, "seats": 6, "budget": 64, **more})
    ahead, slow = (
        laws.run(registry.make(name, max_waiting_tokens=max_waiting_tokens), work, each)
        for each in (config, laws.slow(config))
    )
    assert laws.signature(ahead) == laws.signature(slow)
    at_once = laws.run(registry.make(name), work, config)
    if max_waiting_tokens == 35:
        assert laws.signature(ahead) != laws.signature(at_once)


@pytest.mark.parametrize(("status", "charged"), [(WAITS, 4.0), (RUNS, 0.0)])
def test_vtc_charges_no_prompt_again_that_decoded_elsewhere_before(status, charged):
    # Who comes here decoding and is preempted later is admitted here for the first time.
    policy = registry.make("vtc")
    policy.on_start(SimpleNamespace(running=(), in_pipeline=()))
    state = RequestState(arrival(0, prompt=4, tenant="a").request)
    state.status = status
    policy.on_arrival(state, 0)
    state.status = WAITS
    policy.on_tokens(SimpleNamespace(chunks=((state, 4),), admitted=(state,)), 1, 0)
    assert policy.counters == {"a": charged}


@pytest.mark.parametrize("status", [WAITS, RUNS])
def test_vtc_charges_no_token_again_that_another_engine_generated(status):
    # It lost its engine, or migrates, with three tokens, and gets two here.
    policy = registry.make("vtc")
    state = RequestState(arrival(0, prompt=4, output=9, tenant="a").request)
    view = SimpleNamespace(running=(), in_pipeline=())
    policy.on_start(view)
    state.status, state._generated = status, 3
    policy.on_arrival(state, 0)
    state.status, state._generated = RUNS, 5
    view.running = (state,)
    policy.on_tokens(SimpleNamespace(chunks=((state, 7),), admitted=(state,)), 1, 0)
    assert policy.counters == {"a": 2 * 2.0}
