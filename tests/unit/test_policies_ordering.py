"""Orderings, traced by hand, and who starves under them.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context. With one seat, requests are
served one after the other, in the order of the policy.
"""

from dataclasses import replace

import pytest

from schedlab.policies import registry
from schedlab.sim.request import RequestState, Slo
from schedlab.testing import check_policy, fleet_cases
from tests.laws import arrival
from tests.traced import batches, limits


def served(name, work, config=None, **params):
    """Return the ids in the order in which they were admitted, one seat unless told otherwise."""
    _, log = batches(name, work, config or limits(seats=1), **params)
    requests = log.requests()
    return [int(i) for i in requests["id"][requests["first_scheduled_ns"].argsort(kind="stable")]]


def rival_stream(short, long, gap_ns=900, num_short=30):
    """One long request, and short ones that come faster than one seat serves them (1010 ns)."""
    return [arrival(0, 0, **short), arrival(1, 0, **long)] + [
        arrival(i, gap_ns * (i - 1), **short) for i in range(2, num_short)
    ]


def test_shortest_prompt_admits_by_prompt_then_arrival():
    work = [arrival(0, prompt=9), arrival(1, prompt=3), arrival(2, prompt=5), arrival(3, prompt=3)]
    assert served("shortest_prompt", work) == [1, 3, 2, 0]


def test_shortest_prompt_starves_a_long_prompt_while_short_ones_keep_coming():
    work = rival_stream({"prompt": 2}, {"prompt": 12})
    assert served("shortest_prompt", work)[-1] == 1
    assert served("fcfs", work)[1] == 1


def lpm_limits(**more):
    return limits(**{"seats": 1, "budget": 64, "enable_prefix_caching": True, **more})


def begins(number, *names, at_ns=0):
    return arrival(number, at_ns, prompt=4 * len(names) + 1, prefix_hash_ids=names)


def test_lpm_admits_who_has_most_in_the_cache_then_by_arrival():
    # The first is served alone; the others come meanwhile, and have 0, 4, 8, 4 and 0 tokens of it.
    work = [begins(0, 1, 2)]
    others = ((7, 8), (1, 5), (1, 2), (1, 6), (9,))
    work += [begins(i, *names, at_ns=i) for i, names in enumerate(others, 1)]
    assert served("lpm", work, lpm_limits()) == [0, 3, 2, 4, 1, 5]
    assert served("lpm", work, lpm_limits(), max_queue=5) == [0, 3, 2, 4, 1, 5]
    # Of five who wait the first goes first, of four the one with most, and so on.
    assert served("lpm", work, lpm_limits(), max_queue=4) == [0, 1, 3, 2, 4, 5]
    assert served("lpm", work, lpm_limits(enable_prefix_caching=False)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("knobs", "order"),
    [
        ({"check_tokens": 0, "deprioritize_tokens": 8}, [0, 2, 1, 3]),
        ({"check_tokens": 0, "deprioritize_tokens": 5}, [0, 2, 1, 3]),  # whole blocks: 8 as well
        ({"check_tokens": 0, "deprioritize_tokens": 4}, [0, 3, 1, 2]),  # and 2 shares 4 with them
        ({"check_tokens": 0, "deprioritize_tokens": 9}, [0, 1, 2, 3]),
        ({"check_tokens": -1, "deprioritize_tokens": 8}, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_lpm_lets_one_compute_what_several_who_wait_begin_with(knobs, order):
    work = [begins(0, 1, 2), begins(1, 1, 2), begins(2, 1, 5), begins(3, 6)]
    # Two seats, and two steps: who comes last in the first step finds it cached in the next.
    assert served("lpm", work, lpm_limits(seats=2), **knobs) == order


def test_lpm_does_not_put_back_who_has_something_cached():
    # 1 and 2 find 4 tokens of 0, and share 8: with no more than 4 cached they are compared.
    work = [begins(0, 1), begins(1, 1, 2, at_ns=1), begins(2, 1, 2, at_ns=2)]
    work.append(begins(3, 8, 9, at_ns=3))
    knobs = {"deprioritize_tokens": 8}
    first = lpm_limits(seats=1, budget=9)
    assert served("lpm", work, first, check_tokens=3, **knobs) == [0, 1, 2, 3]
    _, log = batches("lpm", work, first, check_tokens=4, **knobs)
    assert log.requests()["prefix_hit_tokens"].tolist() == [0, 4, 8, 0]


def test_lpm_starves_who_shares_nothing_while_others_keep_coming():
    work = [begins(0, 1, 2), begins(1, 7, 8, at_ns=1)]
    work += [begins(i, 1, 2, at_ns=900 * (i - 1)) for i in range(2, 20)]
    assert served("lpm", work, lpm_limits())[-1] == 1
    assert served("fcfs", work, lpm_limits())[1] == 1


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_queue": -1}, "max_queue must be >= 0"),
        ({"check_tokens": -2}, "check_tokens must be >= -1"),
        ({"deprioritize_tokens": 0}, "deprioritize_tokens must be >= 1"),
    ],
)
def test_lpm_refuses_impossible_limits(knobs, message):
    with pytest.raises(Exception, match=message):
        registry.make("lpm", **knobs)


@pytest.mark.slow
def test_lpm_keeps_the_laws_where_prefixes_are_cached():
    cases = list(fleet_cases(num_cases=3))
    small = {"max_queue": 5, "check_tokens": 8, "deprioritize_tokens": 4}
    check_policy(lambda: registry.make("lpm", **small), cases=cases)


def test_dfs_weight_walks_the_tree_of_cached_prefixes_where_most_wait_first():
    # Two beginnings are cached, of two and of four requests; then all others wait for one seat.
    work = [begins(0, 1, 2), begins(1, 8, 9, at_ns=1)]
    others = ((1, 2), (8, 5), (8, 9), (7,), (8, 9, 3), (8, 6), (1,))
    work += [begins(i, *names, at_ns=i) for i, names in enumerate(others, 2)]
    config = lpm_limits(num_blocks=40)
    order = served("dfs_weight", work, config)
    # The first alone, then by arrival: nothing of 8 is cached, and two of 1 wait. Its leaf first.
    assert order[:3] == [0, 2, 8]
    # Then nothing is cached of anybody who waits, so 1 is next, and 8 has most: 9, then others.
    assert order[3:] == [1, 4, 6, 3, 7, 5]
    assert served("dfs_weight", work, replace(config, enable_prefix_caching=False)) == [*range(9)]


def test_dfs_weight_takes_the_branch_that_most_wait_for_before_an_older_request():
    work = [begins(0, 1), begins(1, 8, at_ns=1), begins(2, 5, at_ns=2)]
    # While the third is served two beginnings are cached, of one and of three who wait.
    work += [begins(i, name, at_ns=2_500) for i, name in ((3, 1), (4, 8), (5, 8), (6, 8))]
    # Of the last two one waits for each.
    assert served("dfs_weight", work, lpm_limits()) == [0, 1, 2, 4, 5, 3, 6]
    assert served("lpm", work, lpm_limits()) == [0, 1, 2, 3, 4, 5, 6]


def test_dfs_weight_takes_of_equal_branches_the_one_of_who_came_first():
    work = [begins(0, 1), begins(1, 8, at_ns=1), begins(2, 5, at_ns=2)]
    # Two wait for each; then two for the second.
    work += [begins(i, name, at_ns=2_500) for i, name in ((3, 1), (4, 8), (5, 8), (6, 1))]
    assert served("dfs_weight", work, lpm_limits()) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_dfs_weight_keeps_the_laws_where_prefixes_are_cached():
    check_policy(lambda: registry.make("dfs_weight"), cases=list(fleet_cases(num_cases=3)))


def test_sjf_starves_a_long_answer_and_hrrn_only_in_a_lasting_overload():
    short, long = {"predicted_tokens": 1.0}, {"predicted_tokens": 10.0}
    # After k answers it is 1010 k. The oldest short request has waited (1010 - gap) k, and the
    # long one, ten times as long, has a ratio of 1010 k / 10. So what counts is whether the gap
    # is above or below 909 ns: an overload of 1 / (1 - 1/10).
    for gap_ns, place in ((920, 1), (900, 29)):
        work = rival_stream(short, long, gap_ns)
        assert served("sjf", work)[-1] == 1
        assert served("hrrn", work).index(1) == place


def test_hrrn_serves_by_wait_over_predicted_length():
    # At 1010 ns request 1 has waited 1010 (ratio 101), request 2 510 (ratio 255), request 3 310
    # (ratio 77.5). At 2020: request 1 202, request 3 (2020 - 700) / 4 = 330.
    work = [
        arrival(0, 0, predicted_tokens=1.0),
        arrival(1, 0, predicted_tokens=10.0),
        arrival(2, 500, predicted_tokens=2.0),
        arrival(3, 700, predicted_tokens=4.0),
    ]
    assert served("hrrn", work) == [0, 2, 3, 1]


def test_hrrn_serves_who_came_first_of_equal_ratios_whatever_the_numbers():
    # At 1010 ns request 2 has waited 1000 for 4 tokens, request 1 500 for 2.
    work = [
        arrival(0, 0, predicted_tokens=1.0),
        arrival(2, 10, predicted_tokens=4.0),
        arrival(1, 510, predicted_tokens=2.0),
    ]
    assert served("hrrn", work) == [0, 2, 1]


def test_edf_serves_by_arrival_plus_target():
    work = [
        arrival(0, 0),
        arrival(1, 100, slo=Slo(ttft_ms=5.0)),
        arrival(2, 200, slo=Slo(ttft_ms=1.0)),
        arrival(3, 300, slo=Slo(e2el_ms=2.0)),
        arrival(4, 400),  # no target: the default of 3 ms
        arrival(5, 500, slo=Slo(tpot_ms=1.0)),  # none for the first token either
    ]
    assert served("edf", work, default_ttft_s=3e-3) == [0, 2, 3, 4, 5, 1]


def test_edf_serves_a_late_request_before_all_that_come_after_its_deadline():
    urgent = {"slo": Slo(ttft_ms=0.001)}
    work = rival_stream(urgent, {"slo": Slo(ttft_ms=0.01)})  # deadline at 10 us
    # Urgent request i is due at 900 (i - 1) + 1000 ns: those up to i = 10 come
    # before, and i = 11 ties and arrived later.
    assert served("edf", work).index(1) == 10


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_edf_with_an_impossible_default_is_refused(value):
    with pytest.raises(Exception, match="default_ttft_s"):
        batches("edf", [arrival(0)], limits(), default_ttft_s=value)


def test_prompt_buckets_fill_a_batch_from_the_bucket_of_the_oldest_request():
    work = [arrival(i, prompt=p) for i, p in enumerate([3, 10, 2, 9, 1, 4])]
    got, _ = batches("prompt_buckets", work, limits(seats=3), bucket_edges=[4, 8])
    assert got == [
        ({0: 3, 2: 2, 4: 1}, 3),  # up to 4 tokens, padded to 3: 1 + 2 for nobody
        {1: 10, 3: 5},  # beyond 8: request 3 is padded to 10 as well, and that takes budget
        ({3: 4}, 1),
        {5: 4},
    ]


def test_prompt_buckets_starve_nobody():
    work = rival_stream({"prompt": 2}, {"prompt": 12})
    assert served("prompt_buckets", work, bucket_edges=[4])[1] == 1


def test_multi_bin_serves_bins_in_the_order_they_became_full():
    lengths = [5, 50, 6, 51, 52, 7]
    work = [arrival(i, prompt=2, predicted_tokens=float(n)) for i, n in enumerate(lengths)]
    got, _ = batches("multi_bin", work, limits(), bin_edges=[10], max_batch_size=2, max_wait_s=1e-5)
    assert got == [
        {0: 2, 2: 2},  # full with request 2
        {1: 2, 3: 2},  # full with request 3
        {4: 2},  # two bins of one each: after 10 us the oldest request's is served
        {5: 2},
    ]


def test_multi_bin_waits_for_a_bin_to_fill_but_no_longer_than_its_limit():
    work = [
        arrival(0, 0, predicted_tokens=5.0),
        arrival(1, 3_000, predicted_tokens=50.0),
        arrival(2, 4_000, predicted_tokens=50.0),
    ]
    _, log = batches(
        "multi_bin", work, limits(), bin_edges=[10], max_batch_size=2, max_wait_s=10e-6
    )
    assert log.requests()["first_scheduled_ns"].tolist() == [10_000, 4_000, 4_000]


def test_multi_bin_never_lets_a_partial_bin_pass_a_full_one():
    work = [arrival(0, 0, predicted_tokens=50.0)]
    work += [arrival(i, 400 * i, predicted_tokens=5.0) for i in range(1, 29)]
    knobs = {"bin_edges": [10], "max_batch_size": 2}
    # Two answers take 1020 ns, so that a bin is full whenever a batch ends.
    for max_wait_s in (5e-6, 1e-3):
        assert served("multi_bin", work, limits(seats=2), max_wait_s=max_wait_s, **knobs)[-1] == 0


@pytest.mark.parametrize("edges", [[0, 4], [4, 4], [8, 2], [-1.0]])
@pytest.mark.parametrize("name", ["multi_bin", "prompt_buckets"])
def test_bins_with_edges_out_of_order_are_refused(name, edges):
    knob = {"multi_bin": "bin_edges", "prompt_buckets": "bucket_edges"}[name]
    with pytest.raises(Exception, match=f"{knob} must be positive and strictly ascending"):
        batches(name, [arrival(0)], limits(), **{knob: edges})


@pytest.mark.parametrize("name", ["hrrn", "multi_bin"])
def test_policy_that_needs_predictions_says_so_when_there_are_none(name):
    with pytest.raises(Exception, match="needs a predictor"):
        batches(name, [arrival(0), arrival(1)], limits())


def test_key_of_who_starts_over_is_that_of_a_new_request_unless_it_goes_by_the_answer_so_far():
    by_the_answer = {"fair_batching", "program_srpt", "qoserve", "slai", "srtf", "trail"}
    asks_the_engine = {"fastserve", "magnus", "vtc"}
    for name in sorted(set(registry.names()) - asks_the_engine):
        policy = registry.make(name)
        request = arrival(3, 70, prompt=7, output=9, predicted_tokens=6.0).request
        state = RequestState(request)
        if policy.on_arrival is not None:
            policy.on_arrival(state, 80)
        fresh = policy.key(state, 900)
        state._generated = 2
        assert (policy.key(state, 900) == fresh) == (name not in by_the_answer), name
