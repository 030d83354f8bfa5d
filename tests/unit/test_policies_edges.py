"""What random work rarely meets: edges, targets at odds, three tenants and a preemption.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from schedlab.policies import ContinuousBatching, registry
from schedlab.sim.request import RequestState, Slo
from tests import laws
from tests.laws import arrival
from tests.traced import batches, limits
from tests.unit.test_policies_ordering import served

# -- edf ---------------------------------------------------------------------------------------


def test_edf_goes_by_the_first_token_where_a_request_states_both_targets():
    work = [
        arrival(0),
        arrival(1, 100, slo=Slo(ttft_ms=3.0, e2el_ms=1.0)),
        arrival(2, 200, slo=Slo(ttft_ms=2.0, e2el_ms=9.0)),
        arrival(3, 300, slo=Slo(e2el_ms=2.5)),
    ]
    assert served("edf", work) == [0, 2, 3, 1]


def test_edf_breaks_ties_of_deadlines_by_arrival():
    # Deadlines 1,100,100 for both; and 1 ns later for request 3.
    work = [
        arrival(0),
        arrival(1, 100, slo=Slo(ttft_ms=1.1)),
        arrival(2, 100_100 - 99_900, slo=Slo(ttft_ms=1.0999)),
        arrival(3, 300, slo=Slo(ttft_ms=1.099799)),
    ]
    assert served("edf", work) == [0, 3, 1, 2]


# -- bins and buckets --------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "first"), [(9.5, {0, 2}), (10.0, {2, 3})])
def test_multi_bin_edge_belongs_to_the_upper_bin(length, first):
    work = [
        arrival(0, predicted_tokens=9.0),
        arrival(1, predicted_tokens=30.0),
        arrival(2, predicted_tokens=length),
        arrival(3, predicted_tokens=10.0),
    ]
    knobs = {"bin_edges": [10, 20], "max_batch_size": 2, "max_wait_s": 1e-5}
    got, _ = batches("multi_bin", work, limits(), **knobs)
    assert set(got[0]) == first


def test_multi_bin_serves_the_oldest_at_the_very_instant_of_its_limit():
    work = [arrival(0, 5_000, predicted_tokens=5.0), arrival(1, 15_000, predicted_tokens=50.0)]
    knobs = {"bin_edges": [10], "max_batch_size": 2, "max_wait_s": 10e-6}
    _, log = batches("multi_bin", work, limits(), **knobs)
    assert log.requests()["first_scheduled_ns"].tolist() == [15_000, 25_000]


@pytest.mark.parametrize(("prompt", "first"), [(4, {0, 1}), (5, {0})])
def test_prompt_buckets_edge_belongs_to_the_lower_bucket(prompt, first):
    work = [arrival(0, prompt=2), arrival(1, prompt=prompt), arrival(2, prompt=9)]
    got, _ = batches("prompt_buckets", work, limits(), bucket_edges=[4, 8], pad_prompts=False)
    assert set(got[0]) == first


def test_wait_edge_belongs_to_the_lower_type():
    # Types of up to 2 and up to 8 tokens; one place a step for each, so the second of a type waits.
    knobs = {"output_edges": [2, 8], "request_rates": [1, 1], "total_limit": 2, "only_cap": True}
    for length, together in ((2.0, False), (2.5, True)):
        work = [arrival(0, predicted_tokens=2.0), arrival(1, predicted_tokens=length)]
        got, _ = batches("wait", work, limits(), **knobs)
        assert (set(got[0]) == {0, 1}) is together


# -- hrrn --------------------------------------------------------------------------------------


def test_hrrn_counts_a_prediction_below_one_token_as_one():
    # By 1,010 ns request 1 has waited 910 ns and request 2 810; a service of 0.1 tokens would put
    # request 2 first with a ratio of 8,100.
    work = [
        arrival(0, predicted_tokens=1.0),
        arrival(1, 100, predicted_tokens=1.0),
        arrival(2, 200, predicted_tokens=0.1),
        arrival(3, 150, predicted_tokens=1.2),
    ]
    order = sorted(work, key=lambda a: a.ready_ns)
    assert served("hrrn", order) == [0, 1, 2, 3]


def test_hrrn_breaks_ties_of_ratios_by_arrival_then_id():
    work = [arrival(0, predicted_tokens=1.0)]
    work += [arrival(i, 10, predicted_tokens=2.0) for i in (1, 2, 3)]
    assert served("hrrn", work) == [0, 1, 2, 3]


def test_hrrn_keeps_track_of_more_requests_than_it_has_slots_for():
    work = [arrival(i, 3 * i, predicted_tokens=1.0 + i % 3) for i in range(150)]
    order = served("hrrn", work)
    assert sorted(order) == list(range(150))
    assert order == served("hrrn", work, config=limits(seats=1, fast_forward=False))


# -- vtc ---------------------------------------------------------------------------------------


def vtc_run(work, config, **knobs):
    """Run VTC; return the policy, the log and its counters after each step."""
    policy, history = registry.make("vtc", **knobs), []

    def watch(engine):
        history.append((engine.now_ns, dict(policy.counters)))

    return policy, laws.run(policy, work, config, observer=watch), history


def crowd(num=18):
    """Three tenants at once whose answers outgrow the memory."""
    return [arrival(i, 0, 5 + i % 4, 6 + i % 5, tenant="abc"[i % 3]) for i in range(num)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_vtc_charges_a_preempted_request_no_more_than_once(mode):
    # All are there from the start, so nobody is lifted: what is charged is what was served.
    config = limits(num_blocks=12, seats=5, preemption_mode=mode, swap_space_blocks=50)
    work = crowd()
    policy, log, _ = vtc_run(work, config, tenant_weights={"b": 2.0})
    assert log.requests()["num_preemptions"].sum() > 3
    for tenant in "abc":
        own = [a for a in work if a.request.tenant == tenant]
        charge = sum(a.request.prompt_tokens + 2 * a.output_tokens for a in own)
        weight = 2.0 if tenant == "b" else 1.0
        assert policy.counters[tenant] == pytest.approx(charge / weight)


def test_vtc_does_not_charge_a_returning_prompt_within_the_step_either():
    # Request 0 of tenant a and 1 of tenant b fill the memory; 1 is preempted and comes back in the
    # step in which 0 ends, with room for two. Its prompt was paid for, so its tenant b, at 8 + 2,
    # is still below tenant c, whose lift is to the least of those waiting, and is served again.
    work = [
        arrival(0, 0, 8, 3, tenant="a"),
        arrival(1, 0, 8, 3, tenant="b"),
        arrival(2, 0, 8, 1, tenant="b"),
        arrival(3, 0, 8, 1, tenant="c"),
    ]
    config = limits(num_blocks=4, seats=3, budget=32)
    got, log = batches("vtc", work, config)
    assert log.requests()["num_preemptions"].tolist() == [0, 1, 0, 0]
    order = [next(i for i, b in enumerate(got) if k in (b[0] if type(b) is tuple else b))
             for k in range(4)]  # fmt: skip
    assert order[3] <= order[2]


def test_vtc_lifts_who_comes_back_to_the_least_counter_of_those_who_wait():
    # Tenants a and b wait with different counters when c comes: prompts of b are twice as long.
    work = [arrival(i, 0, 4 if i % 2 else 9, 2, tenant="ba"[i % 2]) for i in range(12)]
    work.append(arrival(12, 7_500, 4, 2, tenant="c"))
    _, _, history = vtc_run(work, limits(seats=1))
    _, counters = next((at, c) for at, c in history if "c" in c)
    assert counters["a"] != counters["b"]
    assert counters["c"] == min(counters["a"], counters["b"])


def test_vtc_lifts_to_whoever_left_last_when_nobody_waits():
    # Tenant b is served alone from 0; a comes when nobody waits: it starts at b's counter.
    work = [arrival(0, 0, 4, 8, tenant="b"), arrival(1, 2_500, 4, 1, tenant="a")]
    _, _, history = vtc_run(work, limits(seats=1))
    at_ns, counters = next((at, c) for at, c in history if "a" in c)
    assert at_ns < 5_000
    assert counters["a"] == counters["b"] > 4


def test_vtc_never_lowers_a_counter():
    work = crowd(9) + [arrival(9 + i, 60_000 + 40_000 * i, 4, 3, tenant="abc"[i % 3])
                       for i in range(6)]  # fmt: skip
    _, _, history = vtc_run(work, limits(seats=2))
    for (_, before), (_, after) in pairwise(history):
        assert all(after[tenant] >= counter for tenant, counter in before.items())


# -- preemption in a ranked order --------------------------------------------------------------


def test_priority_evicts_the_latest_of_the_least_urgent():
    work = [arrival(i, 10 * i, 8, 3, priority=p) for i, p in enumerate([5, 5, 1])]
    _, log = batches("priority", work, limits(num_blocks=7, budget=64))
    assert log.requests()["num_preemptions"].tolist() == [0, 1, 0]


def test_sjf_evicts_the_longest_prediction_and_of_equals_the_latest():
    work = [arrival(i, 0, 8, 3, predicted_tokens=p) for i, p in enumerate([9.0, 9.0, 1.0])]
    _, log = batches("sjf", work, limits(num_blocks=7, budget=64))
    assert log.requests()["num_preemptions"].tolist() == [0, 1, 0]


def test_srtf_counts_what_is_left_and_not_what_there_was():
    # Request 0 has 9 - 6 = 3 left when request 1 with 4 comes: it stays; one with 1 takes over.
    for predicted, first in ((4.0, 0), (1.0, 1)):
        work = [
            arrival(0, 0, 4, 9, predicted_tokens=9.0),
            arrival(1, 6_200, 4, 2, predicted_tokens=predicted),
        ]
        _, log = batches("srtf", work, limits(seats=1))
        assert log.requests()["finish_ns"].argmin() == first


@pytest.mark.parametrize(("threshold_s", "order"), [(2.0e-6, [0, 1, 2]), (2.1e-6, [0, 2, 1])])
def test_boosted_threshold_is_reached_at_its_very_instant(threshold_s, order):
    # Steps of 1,010 ns: at 2,020 ns ... request 1 has waited 2,000 ns since 20.
    work = [
        arrival(0, 0, predicted_tokens=1.0, output=2),
        arrival(1, 21, predicted_tokens=50.0),
        arrival(2, 500, predicted_tokens=2.0),
    ]
    # Request 0: prefill ends at 1,010, its decode of 1,011 ns at 2,021.
    assert served("boosted", work, threshold_s=threshold_s) == order


def test_static_computes_one_token_of_a_step_whose_padding_exceeds_the_budget():
    # Each token of the prompt of 2 goes with 19 of padding, beyond the budget of 16.
    got, _ = batches("static", [arrival(0, prompt=2), arrival(1, prompt=40)], limits())
    assert got == [({0: 1}, 19), ({0: 1}, 19), {1: 16}, {1: 16}, {1: 8}]


def test_request_that_is_given_up_after_a_preemption_keeps_its_books():
    class GivesUp(ContinuousBatching):
        """Gives up whom it preempted."""

        def candidates(self, view, builder):
            for state in view.waiting:
                if state.num_preemptions:
                    builder.reject(state, "preempted once too often")
                else:
                    yield state

    work = [arrival(0, prompt=8, output=6), arrival(1, prompt=8, output=3)]
    log = laws.run(GivesUp(), work, limits(num_blocks=5))
    assert log.requests()["num_preemptions"].tolist() == [0, 1]
    assert log.requests()["recomputed_tokens"].tolist() == [0, 8]
    gone = {name: column.tolist() for name, column in log.preemptions().items()}
    assert (gone["id"], gone["resumed_tokens"]) == ([1], [0])
    assert gone["resumed_ns"] == [-1], "never"


# -- slai --------------------------------------------------------------------------------------


def test_slai_decode_due_at_this_very_instant_goes_before_prompts():
    # A target below half a nanosecond and no offset: due when the step that gave its token ended.
    knobs = {"order": "fcfs", "token_budget": 4, "tbt_s": 4e-10, "offset": 0}
    work = [arrival(0, 0, 2, 5), arrival(1, 0, 9, 1)]
    got, _ = batches("slai", work, limits(), dynamic_offset=False, **knobs)
    assert got[:2] == [{0: 2, 1: 2}, {0: 1, 1: 3}]


def test_boosted_serves_who_comes_back_from_another_engine_by_its_arrival():
    # Request 2 arrived first, and comes here last: its engine died. All but the last wait for
    # more than the threshold.
    policy = registry.make("boosted", inner="fcfs", threshold_s=1e-6)
    came = [RequestState(arrival(i, at).request) for i, at in enumerate((500, 9_000, 100))]
    for state in came:
        policy.on_arrival(state, 9_500)
    view = SimpleNamespace(now_ns=9_500, waiting=came, waits=came.__contains__)
    assert [state.id for state in policy.candidates(view, None)] == [2, 0, 1]


def test_boosted_serves_who_came_between_two_others_of_another_engine_between_them():
    # Request 2 comes last and arrived second; the first and it have waited for long enough.
    policy = registry.make("boosted", inner="fcfs", threshold_s=1e-6)
    came = [RequestState(arrival(i, at).request) for i, at in enumerate((500, 9_000, 700))]
    for state in came:
        policy.on_arrival(state, 9_500)
    view = SimpleNamespace(now_ns=9_500, waiting=came, waits=came.__contains__)
    assert [state.id for state in policy.candidates(view, None)] == [0, 2, 1]
