"""Batching policies of published engines, traced by hand: the exact batches of a few steps.

A step takes 1000 ns and 10 ns a token and 1 ns a token of context, so requests that come at
500 ns are there when the second step is planned. Blocks hold four tokens.
"""

from types import SimpleNamespace

import pytest

from schedlab import core
from schedlab.policies import queued_batches, registry
from schedlab.policies.queued_batches import QueuedBatch, QueuedBatches
from schedlab.sim.errors import SpecError
from schedlab.sim.request import RequestState, Status
from schedlab.sim.rng import stream
from tests.laws import arrival
from tests.traced import batches, limits, wasted_tokens


def test_orca_computes_whole_prompts_among_decodes_and_stops_at_the_first_that_does_not_fit():
    work = [
        arrival(0, prompt=6, output=3),
        arrival(1, prompt=12, output=2),
        arrival(2, prompt=3, output=1),
    ]
    got, _ = batches("orca", work, limits())
    assert got == [
        {0: 6},  # 6 + 12 > 16, and request 2 may not overtake
        {0: 1, 1: 12, 2: 3},  # whole prompts join the decode
        {0: 1, 1: 1},
    ]


def test_orca_computes_a_prompt_beyond_the_budget_when_it_has_the_step_for_itself():
    work = [arrival(0, prompt=2, output=2), arrival(1, prompt=20, output=1)]
    got, _ = batches("orca", work, limits())
    assert got == [{0: 2}, {0: 1}, {1: 16}, {1: 4}]


@pytest.mark.parametrize(
    "name", ["fcfs", "static", "prompt_buckets", "qoserve", "hygen", "slai", "fair_batching"]
)
def test_policy_whose_prompts_must_not_be_cut_computes_each_in_one_step(name):
    work = [arrival(i, prompt=20, output=2, max_tokens=2) for i in range(3)]
    got, _ = batches(name, work, limits(budget=32, max_model_len=32, enable_chunked_prefill=False))
    chunks = [n for step in got for n in step.values() if n > 1]
    assert chunks == [20, 20, 20]
    got, _ = batches(name, work, limits(budget=32, max_model_len=32))
    assert got[0] == {0: 20, 1: 12}


def test_orca_with_reserved_memory_admits_by_the_longest_answer_and_never_preempts():
    # max_model_len is 16 tokens, so 2 requests of a reserved 16 fit 40 tokens; 3 paged ones do.
    work = [arrival(i, prompt=4, output=4) for i in range(3)]
    reserved = limits(num_blocks=10, max_model_len=16, kv_allocator="contiguous_max")
    got, log = batches("orca", work, reserved)
    assert got == [{0: 4, 1: 4}] + 3 * [{0: 1, 1: 1}] + [{2: 4}] + 3 * [{2: 1}]
    got, _ = batches("orca", work, limits(num_blocks=10, max_model_len=16))
    assert got == [{0: 4, 1: 4, 2: 4}] + 3 * [{0: 1, 1: 1, 2: 1}]
    assert log.requests()["num_preemptions"].sum() == 0


def test_orca_with_declared_lengths_reserves_prompt_and_longest_answer():
    # Of 10 blocks, two a request: 8 tokens declared of the model's 40.
    work = [arrival(i, prompt=4, output=4, max_tokens=4) for i in range(3)]
    config = limits(num_blocks=10, max_model_len=40, kv_allocator="contiguous_declared")
    got, _ = batches("orca", work, config)
    assert got == [{0: 4, 1: 4, 2: 4}] + 3 * [{0: 1, 1: 1, 2: 1}]


def test_sarathi_decodes_first_then_prefills_under_way_then_new_within_the_chunk():
    work = [
        arrival(0, prompt=3, output=4),
        arrival(1, prompt=10, output=2),
        arrival(2, prompt=4, output=2),
    ]
    got, _ = batches("sarathi", work, limits(), chunk_size=6)
    assert got == [
        {0: 3, 1: 3},  # chunk of 6
        {0: 1, 1: 5},  # the decode is never left out; request 1 takes the rest
        {0: 1, 1: 2, 2: 3},  # its last 2 tokens, then the new request
        {0: 1, 1: 1, 2: 1},  # all of request 0's 4 tokens are out
        {2: 1},
    ]


def test_sarathi_decodes_though_an_older_prompt_is_still_computed():
    # vLLM V1 would give request 0, admitted first, all 4 tokens of each step.
    work = [arrival(0, prompt=12, output=1), arrival(1, prompt=1, output=4)]
    config = limits(budget=4, long_prefill_token_threshold=3)
    got, _ = batches("sarathi", work, config, chunk_size=4)
    assert got == [{0: 3, 1: 1}, {0: 3, 1: 1}, {0: 3, 1: 1}, {0: 3, 1: 1}]


def test_sarathi_with_more_decodes_than_the_chunk_leaves_none_out_and_admits_nobody():
    work = [arrival(i, prompt=1, output=3) for i in range(3)] + [arrival(3, 500, prompt=1)]
    got, _ = batches("sarathi", work, limits(), chunk_size=3)
    assert got == [{0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {3: 1}]


def test_sarathi_without_memory_preempts_the_latest_arrival():
    work = [arrival(0, prompt=8, output=5), arrival(1, prompt=8, output=3)]
    got, _ = batches("sarathi", work, limits(num_blocks=5), chunk_size=16)
    assert got == [
        {0: 8, 1: 8},
        ({0: 1}, [1]),
        {0: 1},  # 9 tokens need three blocks; two are free
        {0: 1},
        {0: 1},
        {1: 9},
        {1: 1},
    ]


def test_sarathi_prompts_that_block_each_other_give_way_to_the_earlier():
    # 6 blocks. Both prompts get 8 tokens a step at most: after one step they hold two blocks
    # each, and the third pair does not fit beside.
    work = [arrival(0, prompt=16, output=1), arrival(1, prompt=16, output=1)]
    got, log = batches("sarathi", work, limits(num_blocks=6, long_prefill_token_threshold=8))
    assert got[:2] == [{0: 8, 1: 8}, {0: 8}]
    assert (log.requests()["output_tokens"] == 1).all()


def test_tensorrt_llm_guaranteed_no_evict_admits_by_declared_ends():
    # 8 blocks. Each request declares 12 tokens in all, 3 blocks, but generates fewer: two fit.
    work = [arrival(i, prompt=4, output=3, max_tokens=8) for i in range(3)]
    got, log = batches("tensorrt_llm", work, limits(num_blocks=8))
    assert got == [{0: 4, 1: 4}, {0: 1, 1: 1}, {0: 1, 1: 1}, {2: 4}, {2: 1}, {2: 1}]
    assert log.requests()["num_preemptions"].sum() == 0


def test_tensorrt_llm_max_utilization_admits_what_fits_now_and_pauses_the_latest():
    work = [arrival(i, prompt=4, output=3, max_tokens=8) for i in range(3)]
    got, _ = batches("tensorrt_llm", work, limits(num_blocks=4), capacity_policy="max_utilization")
    assert got == [
        {0: 4, 1: 4, 2: 4},  # one block each
        ({0: 1, 1: 1}, [2]),  # each needs a second block; one is free, and pausing 2 frees one
        {0: 1, 1: 1},
        {2: 5},  # its prompt and the token it had
        {2: 1},
    ]


@pytest.mark.parametrize(
    ("capacity_policy", "third"), [("guaranteed_no_evict", 2), ("static_batch", 4)]
)
def test_tensorrt_llm_with_static_batches_lets_nobody_join(capacity_policy, third):
    # Two requests of two blocks; the first ends after its second token, the other after four.
    work = [arrival(i, prompt=4, output=n, max_tokens=4) for i, n in enumerate([2, 4, 1])]
    config = limits(num_blocks=4)
    got, _ = batches("tensorrt_llm", work, config, capacity_policy=capacity_policy)
    assert got[0] == {0: 4, 1: 4}
    assert [i for i, batch in enumerate(got) if 2 in batch] == [third]


@pytest.mark.parametrize("value", ["no_evict", "", "MAX_UTILIZATION"])
def test_tensorrt_llm_with_an_unknown_capacity_policy_lists_the_known(value):
    with pytest.raises(Exception, match="guaranteed_no_evict, max_utilization, static_batch"):
        batches("tensorrt_llm", [arrival(0)], limits(), capacity_policy=value)


def test_tgi_lets_new_requests_in_when_enough_wait():
    # Four run; floor(4 * 0.5) = 2 must wait.
    work = [arrival(i, prompt=2, output=6, max_tokens=6) for i in range(4)]
    work += [arrival(4, 500, prompt=2, max_tokens=2), arrival(5, 1_500, prompt=2, max_tokens=2)]
    got, _ = batches("tgi", work, limits(), waiting_served_ratio=0.5)
    decode = {0: 1, 1: 1, 2: 1, 3: 1}
    assert got == [
        {0: 2, 1: 2, 2: 2, 3: 2},
        decode,  # only request 4 waits
        {4: 2, 5: 2},  # decodes are paused for the prefill batch
        *4 * [decode],
    ]


def test_tgi_lets_a_single_request_in_after_enough_decode_steps():
    work = [arrival(i, prompt=2, output=6, max_tokens=6) for i in range(4)]
    work += [arrival(4, 500, prompt=2, max_tokens=2)]
    got, _ = batches("tgi", work, limits(), waiting_served_ratio=0.5, max_waiting_tokens=3)
    decode = {0: 1, 1: 1, 2: 1, 3: 1}
    # The count starts at 1 with the prefill: after two decode steps it is 3.
    assert got == [{0: 2, 1: 2, 2: 2, 3: 2}, decode, decode, {4: 2}, *3 * [decode]]


def test_tgi_decodes_once_between_two_prefill_batches():
    work = [
        arrival(0, prompt=4, output=4, max_tokens=4),
        arrival(1, 500, prompt=4, max_tokens=4),
        arrival(2, 500, prompt=4, max_tokens=4),
    ]
    got, _ = batches("tgi", work, limits(), max_batch_prefill_tokens=4)
    assert got == [{0: 4}, {1: 4}, {0: 1}, {2: 4}, {0: 1}, {0: 1}]


def test_tgi_computes_a_prefill_batch_beyond_the_budget_to_its_end_before_it_decodes():
    work = [arrival(i, prompt=6, output=3, max_tokens=3) for i in range(3)]
    got, _ = batches("tgi", work, limits(budget=8))
    decode = {0: 1, 1: 1, 2: 1}
    assert got == [{0: 6, 1: 2}, {1: 4, 2: 4}, {2: 2}, decode, decode]


def test_tgi_looks_at_the_queue_after_a_first_prefill_of_any_number_of_steps():
    work = [arrival(0, prompt=12, output=3), arrival(1, 500, prompt=4, output=1)]
    got, _ = batches("tgi", work, limits(budget=8))
    assert got == [{0: 8}, {0: 4}, {1: 4}, {0: 1}, {0: 1}]  # nobody was held up by the first


@pytest.mark.parametrize(("max_tokens", "first"), [(5, {0: 4, 1: 4}), (6, {0: 4})])
def test_tgi_reserves_no_place_for_the_last_token(max_tokens, first):
    work = [arrival(i, prompt=4, output=2, max_tokens=max_tokens) for i in range(2)]
    got, _ = batches("tgi", work, limits(num_blocks=4))
    assert got[0] == first


def test_tgi_reserves_declared_tokens_and_computes_an_oversized_prompt_alone():
    work = [
        arrival(0, prompt=4, output=2, max_tokens=4),
        arrival(1, prompt=9, output=1, max_tokens=3),
        arrival(2, prompt=4, output=1, max_tokens=4),
    ]
    got, _ = batches("tgi", work, limits(), max_batch_prefill_tokens=8)
    assert got == [{0: 4}, {0: 1}, {1: 9}, {2: 4}]  # nobody overtakes request 1
    got, _ = batches("tgi", work, limits(), max_batch_total_tokens=12)
    assert got == [{0: 4}, {0: 1}, {1: 9}, {2: 4}]  # 8 + 12 declared tokens exceed 12


@pytest.mark.parametrize("name", ["tgi", "tgi3"])
def test_tgi_without_room_for_a_token_is_refused(name):
    with pytest.raises(SpecError, match="max_batch_total_tokens must be at least 1"):
        registry.make(name, max_batch_total_tokens=0)


def test_tgi3_lets_prompts_join_decodes_and_cuts_the_last_to_its_budget():
    work = [
        arrival(0, prompt=4, output=4, max_tokens=4),
        arrival(1, 500, prompt=6, output=2, max_tokens=2),
        arrival(2, 500, prompt=6, output=1, max_tokens=2),
    ]
    got, _ = batches("tgi3", work, limits(), max_batch_prefill_tokens=8)
    assert got == [
        {0: 4},
        {0: 1, 1: 6, 2: 2},  # 8 less one decode, in whole blocks: 8 tokens of prompts
        {0: 1, 1: 1, 2: 4},
        {0: 1},
    ]


def test_tgi3_looks_at_no_queue_in_the_step_after_somebody_joined():
    work = [
        arrival(0, prompt=4, output=5, max_tokens=5),
        arrival(1, 500, prompt=4, output=1, max_tokens=1),
        arrival(2, 1_500, prompt=4, output=1, max_tokens=1),
    ]
    got, _ = batches("tgi3", work, limits(), max_batch_prefill_tokens=8)
    assert got == [{0: 4}, {0: 1, 1: 4}, {0: 1}, {0: 1, 2: 4}, {0: 1}]


def test_tgi3_owes_no_decode_where_all_who_joined_have_ended():
    # 0 takes 3 of its 4 tokens; then 1 joins its last one, and with one token each both end.
    work = [arrival(i, prompt=prompt, output=1, max_tokens=1) for i, prompt in enumerate((4, 1, 1))]
    got, _ = batches(
        "tgi3", work, limits(seats=2, budget=3, block_size=1), max_batch_prefill_tokens=3
    )
    assert got == [{0: 3}, {0: 1, 1: 1}, {2: 1}]


def test_tgi3_gives_a_prompt_under_way_the_whole_budget_and_the_rest_to_new_ones():
    work = [
        arrival(0, prompt=4, output=9, max_tokens=9),
        arrival(1, 500, prompt=20, output=1, max_tokens=1),
        arrival(2, 500, prompt=9, output=1, max_tokens=1),
    ]
    got, _ = batches("tgi3", work, limits(), max_batch_prefill_tokens=8)
    assert got[:5] == [
        {0: 4},
        {0: 1, 1: 8},
        {0: 1, 1: 7},  # 8 less the decode: only new prompts are counted in whole blocks
        {0: 1, 1: 5, 2: 4},  # two are left, so a block of four
        {0: 1, 2: 5},
    ]


def test_tgi3_gives_a_prompt_under_way_one_token_where_decodes_use_up_the_budget():
    work = [arrival(0, prompt=1, output=4, max_tokens=4)]
    work += [arrival(i, 500, prompt=1, output=4, max_tokens=4) for i in (1, 2)]
    work += [arrival(3, 500, prompt=6, max_tokens=1), arrival(4, 500, prompt=1, max_tokens=1)]
    got, _ = batches("tgi3", work, limits(), max_batch_prefill_tokens=3)
    assert got == [
        {0: 1},
        {0: 1, 1: 1, 2: 1, 3: 2},  # a block of four
        {0: 1, 1: 1, 2: 1, 3: 1},
        {0: 1, 1: 1, 2: 1, 3: 1},  # nothing is left for request 4
        {1: 1, 2: 1, 3: 1},
        {3: 1, 4: 1},
    ]


def test_tgi3_reserves_declared_tokens_and_cuts_an_oversized_prompt():
    work = [
        arrival(0, prompt=4, output=2, max_tokens=4),
        arrival(1, prompt=9, output=1, max_tokens=3),
        arrival(2, prompt=4, output=1, max_tokens=4),
    ]
    got, _ = batches("tgi3", work, limits(), max_batch_prefill_tokens=8)
    assert got == [{0: 4, 1: 4}, {0: 1, 1: 5, 2: 4}]
    got, _ = batches("tgi3", work, limits(), max_batch_total_tokens=12)
    assert got == [{0: 4}, {0: 1}, {1: 9}, {2: 4}]  # 8 + 12 declared tokens exceed 12


def test_prefill_first_with_a_delay_lets_prompts_gather_for_as_long_as_the_last_prefill_took():
    work = [
        arrival(0, prompt=6, output=5),
        arrival(1, 500, prompt=4),
        arrival(2, 1_500, prompt=4),
    ]
    # The first prefill takes 1060 ns, so twice that after 500 ns is 2620 ns. Steps start at
    # 1060, 2076 and 3093 ns.
    got, _ = batches("prefill_first", work, limits(), delay_factor=2.0)
    assert got == [{0: 6}, {0: 1}, {0: 1}, {1: 4, 2: 4}, {0: 1}, {0: 1}]
    got, _ = batches("prefill_first", work, limits())
    assert got == [{0: 6}, {1: 4}, {2: 4}, *4 * [{0: 1}]]


@pytest.mark.parametrize(("delay_ns", "third"), [(1_576, {0: 1}), (1_575, {1: 4, 2: 4})])
def test_prefill_first_computes_prompts_once_the_delay_has_passed_and_not_at_its_end(
    delay_ns, third
):
    work = [arrival(0, prompt=6, output=5), arrival(1, 500, prompt=4), arrival(2, 600, prompt=4)]
    # The second step ends at 2076 ns.
    got, _ = batches("prefill_first", work, limits(), delay_factor=delay_ns / 1060)
    assert got[:3] == [{0: 6}, {0: 1}, third]


def test_prefill_first_delay_is_over_when_nobody_runs():
    work = [arrival(0, prompt=6, output=1), arrival(1, 500, prompt=4)]
    got, log = batches("prefill_first", work, limits(), delay_factor=1e6)
    assert got == [{0: 6}, {1: 4}]
    assert log.steps()["start_ns"].tolist() == [0, 1060]


@pytest.mark.parametrize(("num_blocks", "first"), [(8, {0: 8, 1: 8}), (7, {0: 8})])
def test_tgi_fills_memory_to_its_last_block(num_blocks, first):
    work = [arrival(i, prompt=8, output=8, max_tokens=8) for i in range(2)]
    got, _ = batches("tgi", work, limits(num_blocks=num_blocks))
    assert got[0] == first


def test_tgi_lets_new_requests_in_when_they_are_the_ratio_of_those_running_rounded_down():
    work = [arrival(i, prompt=4, output=6) for i in range(3)]
    work.append(arrival(3, 10, prompt=4, output=2))
    got, _ = batches("tgi", work, limits(), waiting_served_ratio=0.5, max_waiting_tokens=99)
    assert {3: 4} in got[:3], "one waits for three that run, and half of three is one"


def test_magnus_prices_a_batch_at_the_mean_context_of_its_answers():
    policy = registry.make("magnus")
    policy._estimator = None
    policy._view = SimpleNamespace(
        estimate_step_ns=lambda shape: shape.decode_context_sum_tokens or 1000
    )
    # Prompts in 1,000 ns, and ten steps of two contexts of 100 tokens and half the answer.
    assert policy._serving_time_ns(2, 100, 10.0) == 1000 + 10 * 2 * 105


def test_magnus_ratio_is_of_the_mean_wait_and_the_longest_of_those_who_wait(monkeypatch):
    policy, asked = registry.make("magnus"), []
    policy._view = SimpleNamespace(now_ns=1_000)

    def takes_ns(size, longest, last):
        asked.append((size, longest, last))
        return 260.0

    monkeypatch.setattr(policy, "_serving_time_ns", takes_ns)
    waiting = [
        RequestState(arrival(i, at_ns, prompt, 9, predicted_tokens=predicted).request)
        for i, (at_ns, prompt, predicted) in enumerate(
            ((200, 4, 7.0), (600, 9, 3.0), (880, 5, 2.5))
        )
    ]
    # They have waited for 800, 400 and 120 ns: 440 in the mean.
    assert policy._response_ratio(waiting) == 1 + 440 / 260
    assert asked == [(3, 9, 7.0)]


def wasted(batch, state):
    """Return what a batch reads for nothing, member by member, with one more request."""
    members = [*batch.members.values(), state]
    prompts = [s.request.prompt_tokens for s in members]
    outputs = [s.request.predicted_tokens for s in members]
    longest, last = max(prompts), max(outputs)
    read = len(members) * (last * longest + last * (last - 1) / 2)
    return read - sum(g * p + g * (g - 1) / 2 for p, g in zip(prompts, outputs, strict=True))


def response_ratio(batch, now_ns):
    members = list(batch.members.values())
    waited_ns = sum(now_ns - s.request.arrival_ns for s in members) / len(members)
    return 1 + waited_ns / batch_time_ns(len(members), batch.longest, batch.last)


def batch_time_ns(size, longest, last):
    return 100.0 * size + 3.0 * longest + 50.0 * last


@pytest.mark.parametrize("seed", range(4))
def test_queued_batches_say_what_going_through_their_members_says(seed, monkeypatch):
    monkeypatch.setattr(queued_batches, "_ROWS", 2)  # they have to find more
    rng = stream(seed, "queued batches")
    queued, opened, seats = QueuedBatches(), [], 0
    chosen = {"none": 0, "full": 0, "least": 0}
    for i in range(60):
        at_ns, prompt = 40 * i, int(rng.integers(1, 40))
        predicted = float(rng.integers(1, 20))
        state = RequestState(arrival(i, at_ns, prompt, 5, predicted_tokens=predicted).request)
        is_open = [batch for batch in opened if batch.is_queued]
        waste = [wasted(batch, state) for batch in is_open]
        assert wasted_tokens(queued, state) == waste
        most, capacity, limit = 4, int(rng.integers(100, 200)), float(rng.integers(60, 600))
        fitting = [
            batch for batch, tokens in zip(is_open, waste, strict=True)
            if tokens < limit and len(batch.members) < most
            and (len(batch.members) + 1) * (
                max(batch.longest, prompt) + max(batch.last, predicted)
            ) <= capacity
        ]  # fmt: skip
        wanted = min(fitting, key=lambda batch: waste[is_open.index(batch)], default=None)
        found = queued.least_waste(state, most, capacity, limit)
        assert found is wanted
        kind = (
            "none"
            if found is None
            else "least"
            if waste.index(min(waste)) == is_open.index(found)
            else "full"
        )
        chosen[kind] += 1
        if found is None:
            found = QueuedBatch(state)
            found.add(state)
            opened.append(found)
            queued.open(found)
        else:
            queued.add(found, state)
        if i % 4 == 3:
            now_ns = 40 * i + 7
            whole = [batch for batch in opened if batch.is_whole]
            best = queued.highest_response_ratio(now_ns, batch_time_ns)
            ratios = [response_ratio(batch, now_ns) for batch in whole]
            assert best is not None
            assert best[0] == pytest.approx(max(ratios), rel=1e-12)
            assert best[1] is whole[ratios.index(max(ratios))]
            # Somebody in it gets a seat: at every other time its first.
            members = list(best[1].members.values())
            member = members[0] if i % 8 == 3 else members[-1]
            member.first_scheduled_ns, member._seat = now_ns, seats
            member.status = Status.RUNNING
            seats += 1
            queued.note_started(best[1])
            assert best[1].is_open == best[1].is_queued
            queued.note_started(best[1])  # once is enough
    assert min(chosen.values()) > 0
    assert len(opened) > 8


@pytest.mark.parametrize(
    ("number", "ratio", "runs"), [(7, 3.0, 7), (7, 2.0, 5), (3, 2.0, 3), (3, 1.9, 5)]
)
def test_magnus_runs_a_batch_that_waits_before_one_that_has_begun_if_its_ratio_is_higher(
    number, ratio, runs
):
    policy = registry.make("magnus")
    begun, waits = (RequestState(arrival(i, prompt=4).request) for i in (5, number))
    batches_of = []
    for state in (begun, waits):
        batch = QueuedBatch(state)
        batch.members[state.id], batch.size = state, 1
        batches_of.append(batch)
    policy._started.append(batches_of[0])
    policy._queued = SimpleNamespace(
        note_started=lambda batch: None,
        highest_response_ratio=lambda now_ns, takes_ns: (ratio, batches_of[1]),
    )
    policy._response_ratio = lambda waiting: 2.0
    policy._admit = lambda waiting, builder: [state.id for state in waiting]
    assert policy._form(SimpleNamespace(now_ns=0), None) == [runs]
    assert policy._chosen is batches_of[1], "it is looked at again, should it be the next"


def test_queued_batches_equally_due_run_by_who_came_first():
    queued = QueuedBatches()
    for number in (5, 3, 4):
        state = RequestState(arrival(number, 10, 7, 5, predicted_tokens=4.0).request)
        batch = QueuedBatch(state)
        batch.add(state)
        queued.open(batch)
    ratio, batch = queued.highest_response_ratio(110, lambda *_: 50.0)
    assert (ratio, [*batch.members]) == (1 + 100 / 50, [3])
    assert QueuedBatches().highest_response_ratio(110, lambda *_: 50.0) is None
    assert QueuedBatches().least_waste(batch.members[3], 9, 10**6, 10**6) is None


@pytest.mark.skipif(core.running() != "python", reason="compiled code refuses stand-ins")
@pytest.mark.parametrize("started", [(3, 5), (5, 3)])
def test_magnus_runs_the_batch_of_the_lowest_number_of_those_equally_due(started):
    policy = registry.make("magnus")
    for number in started:
        state = RequestState(arrival(number, prompt=4).request)
        batch = QueuedBatch(state)
        batch.members[number], batch.size = state, 1
        policy._started.append(batch)
    policy._response_ratio = lambda waiting: 2.0
    policy._admit = lambda waiting, builder: [state.id for state in waiting]
    assert policy._form(SimpleNamespace(now_ns=0), None) == [3]


@pytest.mark.skipif(core.running() != "python", reason="compiled code refuses stand-ins")
@pytest.mark.parametrize(
    ("members", "ratios", "runs"),
    [
        (((5, 6), (3, 9)), (2.0, 2.0), [3, 9]),  # of who came first
        (((3, 9), (5, 6)), (2.0, 2.0), [3, 9]),
        (((3, 9), (5, 6)), (1.9, 2.0), [5, 6]),
        (((4, 5, 6), (7,)), (3.0, 2.0), [4, 5, 6]),
    ],
)
def test_magnus_runs_the_batch_with_the_highest_ratio_and_of_equals_the_first(
    members, ratios, runs
):
    policy = registry.make("magnus")
    ratio_of = {}
    for numbers, ratio in zip(members, ratios, strict=True):
        states = [RequestState(arrival(number, number, prompt=4).request) for number in numbers]
        batch = QueuedBatch(states[0])
        batch.members, batch.size = {state.id: state for state in reversed(states)}, len(states)
        policy._started.append(batch)
        ratio_of[numbers] = ratio
    policy._response_ratio = lambda waiting: ratio_of[tuple(state.id for state in waiting)]
    policy._admit = lambda waiting, builder: [state.id for state in waiting]
    assert policy._form(SimpleNamespace(now_ns=0), None) == runs


@pytest.mark.parametrize(("seats", "ratio", "at_once"), [(4, 1.0, 2), (3, 0.5, 1), (3, 1.0, 0)])
def test_tgi_counts_as_a_batch_only_those_who_get_a_seat(seats, ratio, at_once):
    # Two run and two wait; a batch is due if it is `ratio` of those who run.
    work = [arrival(i, prompt=2, output=6) for i in range(2)]
    work += [arrival(i, 500, prompt=2, output=1) for i in (2, 3)]
    knobs = {"waiting_served_ratio": ratio, "max_waiting_tokens": 99}
    got, _ = batches("tgi", work, limits(seats=seats), **knobs)
    assert got[0] == {0: 2, 1: 2}
    come = dict.fromkeys(range(2, 2 + at_once), 2)
    assert got[1] == (come or {0: 1, 1: 1})
    if not come:
        assert got == [{0: 2, 1: 2}, *5 * [{0: 1, 1: 1}], {2: 2, 3: 2}]


def test_static_batch_pads_a_prompt_under_way_to_what_is_computed_of_those_who_have_ended():
    # Prompts of 10 are padded to 10; the first, which has ended, is held with 10 tokens computed.
    work = [arrival(0, prompt=10, output=1), arrival(1, prompt=4, output=1)]
    got, _ = batches("static", work, limits(budget=12), pad_prompts=True)
    assert got == [{0: 10}, ({1: 4}, 6)]
