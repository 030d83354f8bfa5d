"""HyGen, traced by hand.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context. Blocks hold four tokens. Requests
of priority 1 are offline.
"""

import pytest

from tests.laws import arrival
from tests.traced import batches, limits
from tests.unit.test_policies_ordering import served

OFF = {"priority": 1}


def test_hygen_serves_online_requests_first():
    work = [arrival(0, **OFF), arrival(1), arrival(2, **OFF), arrival(3)]
    assert served("hygen", work) == [1, 3, 0, 2]
    assert served("hygen", work, offline_priority=2) == [0, 1, 2, 3]


def test_hygen_fills_a_step_with_offline_prompts_up_to_the_budget():
    # 1000 + 10 (4 + 16) <= 1200.
    work = [arrival(0, prompt=4, output=3), arrival(1, prompt=40, output=1, **OFF)]
    got, _ = batches("hygen", work, limits(budget=100), latency_budget_s=1.2e-6)
    # Beside the decode, and behind 16 tokens: 1000 + 10 (1 + 17) + 4 + 16 <= 1200.
    assert got[:2] == [{0: 4, 1: 16}, {0: 1, 1: 17}]


def test_hygen_leaves_offline_decodes_out_that_exceed_the_budget():
    # The online prompt comes beside three rows: 1000 + 10 (20 + 2) + 2 <= 1222.
    work = [arrival(i, 0, prompt=1, output=5, **OFF) for i in range(3)]
    work.append(arrival(3, 500, prompt=20, output=2))
    got, _ = batches("hygen", work, limits(budget=100), latency_budget_s=1.222e-6)
    assert got[:3] == [{0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 3: 20}, {0: 1, 1: 1, 2: 1, 3: 1}]


def test_hygen_takes_memory_for_a_decode_from_one_that_the_budget_pauses():
    # Both are offline, fill the memory, and a step of two decodes takes longer than the budget.
    work = [
        arrival(0, prompt=8, output=16, max_tokens=16, priority=1),
        arrival(1, prompt=7, output=9, max_tokens=9, priority=1),
    ]
    few = limits(num_blocks=8, max_model_len=24)
    _, log = batches("hygen", work, few, latency_budget_s=1.045e-6)
    preemptions = log.requests()["num_preemptions"].tolist()
    assert preemptions[0] == 0
    assert preemptions[1] > 0


def test_hygen_online_requests_run_whatever_the_budget():
    work = [arrival(i, prompt=10, output=2) for i in range(3)]
    got, _ = batches("hygen", work, limits(budget=100), latency_budget_s=1e-9)
    assert got == [{0: 10, 1: 10, 2: 10}, {0: 1, 1: 1, 2: 1}]


def test_hygen_without_online_requests_runs_an_offline_one_whatever_the_budget():
    work = [arrival(i, prompt=2, output=2, **OFF) for i in range(2)]
    got, _ = batches("hygen", work, limits(budget=100), latency_budget_s=1e-9)
    assert got == [{0: 1}, {0: 1}, {0: 1}, {1: 1}, {1: 1}, {1: 1}]


def test_hygen_takes_the_seat_of_the_latest_offline_request_for_an_online_one():
    work = [
        arrival(0, 0, prompt=4, output=9, **OFF),
        arrival(1, 0, prompt=4, output=9, **OFF),
        arrival(2, 500, prompt=4, output=1),
    ]
    got, log = batches("hygen", work, limits(seats=2, budget=100))
    assert got[1] == ({0: 1, 2: 4}, [1])
    assert log.requests()["num_preemptions"].tolist() == [0, 1, 0]


def test_hygen_takes_memory_of_offline_requests_for_an_online_decode():
    # 6 blocks; online request 0 needs a third at 9 tokens. Nobody of the online ones gives way.
    work = [
        arrival(0, 0, prompt=8, output=4),
        arrival(1, 0, prompt=7, output=4, **OFF),
        arrival(2, 0, prompt=7, output=4),
    ]
    got, _ = batches("hygen", work, limits(num_blocks=6, budget=100))
    assert got[:2] == [{0: 8, 1: 7, 2: 7}, ({0: 1, 2: 1}, [1])]


def test_hygen_evicts_nobody_for_an_online_prompt_that_would_not_fit_even_then():
    # 6 blocks: the online request 0 holds 3 and goes on, offline request 1 holds 1.
    work = [
        arrival(0, 0, prompt=9, output=4),
        arrival(1, 0, prompt=3, output=2, **OFF),
        arrival(2, 500, prompt=16, output=1),
    ]
    config = limits(num_blocks=6, budget=100, scheduler_reserve_full_isl=True)
    _, log = batches("hygen", work, config)
    assert log.requests()["num_preemptions"].tolist() == [0, 0, 0]


def test_hygen_admits_no_offline_request_past_an_online_one_that_waits():
    work = [
        arrival(0, 0, prompt=9, output=4),
        arrival(1, 500, prompt=16, output=1),
        arrival(2, 500, prompt=1, output=1, **OFF),
    ]
    config = limits(num_blocks=6, budget=100, scheduler_reserve_full_isl=True)
    assert batches("hygen", work, config)[0][1] == {0: 1}


def test_hygen_shares_a_chunk_between_both_phases():
    work = [arrival(i, 0, prompt=1, output=3) for i in range(3)]
    work += [arrival(3, 0, prompt=9, output=1), arrival(4, 0, prompt=9, output=1, **OFF)]
    got, _ = batches("hygen", work, limits(budget=100), chunk_size=8)
    assert got[:2] == [{0: 1, 1: 1, 2: 1, 3: 5}, {0: 1, 1: 1, 2: 1, 3: 4, 4: 1}]


def test_hygen_orders_offline_requests_by_common_prefix():
    prefixes = [(7, 8), (3, 4), (7, 9), (3,)]
    work = [arrival(i, prompt=9, prefix_hash_ids=ids, **OFF) for i, ids in enumerate(prefixes)]
    assert served("hygen", work) == [0, 1, 2, 3]
    assert served("hygen", work, offline_order="prefix") == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"latency_budget_s": 0.0}, "latency_budget_s"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"offline_order": "trie"}, "fcfs, prefix"),
    ],
)
def test_hygen_with_an_impossible_knob_is_refused(knobs, message):
    with pytest.raises(Exception, match=message):
        batches("hygen", [arrival(0)], limits(), **knobs)
