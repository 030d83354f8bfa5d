"""Admission by future memory, and sealed batches by wasted memory access, traced by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.policies.future_memory import FuturePeak
from schedlab.policies.queued_batches import QueuedBatch, QueuedBatches
from schedlab.sim.request import RequestState, Status
from tests.laws import arrival
from tests.traced import batches, limits, wasted_tokens
from tests.unit.test_policies_ordering import rival_stream, served


def peak(*requests):
    future = FuturePeak()
    for used, remaining in requests:
        future.add(used, remaining)
    return future


def test_future_peak_is_the_largest_sum_just_before_an_end():
    # In two steps 5 + 2 and 4 + 2 tokens; then one is gone, and in the third step 5 + 3.
    assert peak((5, 3), (4, 2)).tokens() == 13
    assert peak((5, 30), (4, 2)).tokens() == 35
    assert peak().tokens() == 0


def test_future_peak_with_one_more_leaves_the_set_as_it_is():
    future = peak((5, 3), (4, 2))
    assert future.tokens_with(1, 2) == 5 + 4 + 1 + 3 * 2
    assert future.tokens() == 13


def test_future_peak_agrees_with_counting_step_by_step():
    requests = [(7, 4), (1, 9), (3, 4), (10, 1), (2, 6)]
    counted = max(
        sum(used + t for used, remaining in requests if remaining >= t) for t in range(1, 10)
    )
    assert peak(*requests).tokens() == counted


def admitted_together(work, config, **knobs):
    """Return how many requests computed their prompts in each step that had any."""
    got, _ = batches("past_future", work, config, **knobs)
    tokens = [step[0] if isinstance(step, tuple) else step for step in got]
    return [n for n in (sum(t == 4 for t in step.values()) for step in tokens) if n]


def test_past_future_is_careful_at_first_and_learns_that_answers_are_short():
    # 20 tokens of memory. Declared: 4 + 8 tokens, so two requests would need 24. Seen: answers
    # of 2, so three requests that start together need 18.
    work = [arrival(i, prompt=4, output=2, max_tokens=8) for i in range(8)]
    config = limits(num_blocks=20, block_size=1)
    together = admitted_together(work, config, reserved=0.0, window=2)
    assert together[0] == 1
    assert max(together) == 3
    assert max(admitted_together(work, config, reserved=0.15, window=2)) == 2


def test_past_future_of_more_futures_admits_no_more():
    work = [arrival(i, prompt=4, output=1 + i % 9, max_tokens=20) for i in range(60)]
    config = limits(num_blocks=60, block_size=1, seats=16, budget=64)

    def mean_batch(samples):
        knobs = {"samples": samples, "window": 20, "initial_tokens": 5}
        got, _ = batches("past_future", work, config, **knobs)
        return sum(len(step) for step in got) / len(got)

    assert mean_batch(5) < mean_batch(1)


@pytest.mark.slow
def test_past_future_with_decodes_to_wait_counts_anew_after_a_look_that_let_nobody_in():
    # Three decodes after the prompts the queue is looked at, and again after three: the seat that
    # is there in the sixth is taken in the seventh.
    work = [arrival(0, prompt=4, output=12), arrival(1, prompt=4, output=6), arrival(2, prompt=4)]
    got, _ = batches("past_future", work, limits(seats=2), max_waiting_tokens=3)
    both = {0: 1, 1: 1}
    assert got[:8] == [{0: 4, 1: 4}, *5 * [both], {0: 1}, {0: 1, 2: 4}]
    at_once, _ = batches("past_future", work, limits(seats=2))
    assert at_once[6] == {0: 1, 2: 4}


def test_past_future_draws_from_a_seed_of_its_own():
    work = [arrival(i, prompt=4, output=1 + i % 9, max_tokens=20) for i in range(40)]
    config = limits(num_blocks=60, block_size=1, seats=16, budget=64)
    runs = [batches("past_future", work, config, seed=seed)[0] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_past_future_draws_between_the_lengths_above_what_is_generated():
    policy = registry.make("past_future")
    view = SimpleNamespace(config=limits(num_blocks=200, block_size=1))
    state = RequestState(arrival(0, prompt=4, output=1, max_tokens=30).request)
    state._generated = 10
    past = np.array([5.0, 12.0, 20.0])
    # [10, 12, 20, 30]: a draw of 1/2 lies half way between 12 and 20.
    for at, end in ((0.0, 11), (1 / 3, 12), (0.5, 16), (0.999, 30)):
        remaining = policy._draw_remaining([state], view, past, np.array([[at]]))
        assert remaining.tolist() == [[end - 10]]
    assert policy._draw_remaining([state], view, np.array([]), np.array([[0.5]])).tolist() == [[10]]


def test_mc_sf_admits_the_shortest_while_memory_suffices_at_every_end():
    # 17 tokens. Requests 1 and 2 peak at 4 * 2 + 2 * 2 = 12; with request 0 it would be
    # 4 * 3 + 3 * 2 = 18. After a step they have 5 tokens and 1 and 3 to come, and with request
    # 0 the ends are at 3 * 1 + 14 = 17, 6 + 9 and 10 tokens.
    work = [
        arrival(0, prompt=4, output=6, predicted_tokens=6.0),
        arrival(1, prompt=4, output=2, predicted_tokens=2.0),
        arrival(2, prompt=4, output=4, predicted_tokens=4.0),
    ]
    got, log = batches("mc_sf", work, limits(num_blocks=17, block_size=1), margin=0.0)
    assert got == [
        {1: 4, 2: 4},
        {0: 4, 1: 1, 2: 1},
        *2 * [{0: 1, 2: 1}],
        *3 * [{0: 1}],
    ]
    assert log.requests()["num_preemptions"].sum() == 0


def test_mc_sf_in_order_of_arrival_has_the_same_memory_rule():
    # Request 1 would end at 4 + 4 beside request 0 at 8 + 4: 20 tokens for 16.
    work = [
        arrival(0, prompt=8, output=8, predicted_tokens=8.0),
        arrival(1, prompt=8, output=4, predicted_tokens=4.0),
        arrival(2, prompt=1, output=1, predicted_tokens=1.0),
    ]
    config = limits(num_blocks=17, block_size=1)
    assert served("mc_sf", work, config, margin=0.0, shortest_first=False) == [0, 1, 2]
    got, log = batches("mc_sf", work, config, margin=0.0, shortest_first=False)
    assert got[0] == {0: 8}  # request 2 would fit, and waits behind request 1
    assert log.requests()["num_preemptions"].sum() == 0


def test_mc_sf_looks_for_the_peak_when_a_prompt_of_several_steps_ends():
    # Request 1 is computed in ten steps of two tokens, beside the decodes of request 0, and ends
    # after 12: then request 0, with 4 tokens now, has 16, and request 1 has 23. Three steps later
    # request 0 ends first, after 10, with 17 tokens, and then request 1 has 20 + 10 - 9.
    work = [
        arrival(0, prompt=1, output=16, predicted_tokens=16.0),
        arrival(1, 3_000, prompt=20, output=3, predicted_tokens=3.0),
    ]
    for num_blocks, joins in ((39, 3), (38, 6)):
        config = limits(num_blocks=num_blocks, block_size=1, budget=3)
        got, log = batches("mc_sf", work, config, margin=0.0)
        assert got[joins - 1 : joins + 1] == [{0: 1}, {0: 1, 1: 2}]
        assert log.requests()["num_preemptions"].sum() == 0


def test_mc_sf_with_a_margin_admits_fewer():
    work = [arrival(i, prompt=4, output=2, predicted_tokens=2.0) for i in range(3)]
    config = limits(num_blocks=18, block_size=1)
    assert batches("mc_sf", work, config, margin=0.0)[0][0] == {0: 4, 1: 4, 2: 4}
    assert batches("mc_sf", work, config, margin=0.1)[0][0] == {0: 4, 1: 4}


def test_mc_sf_lets_one_alone_have_the_memory_that_is_kept_free_of_several():
    # 40 tokens less a tenth are 36; either request comes to 38.
    work = [arrival(i, prompt=30, output=8, predicted_tokens=8.0) for i in range(2)]
    got, log = batches("mc_sf", work, limits(num_blocks=40, block_size=1, budget=64), margin=0.1)
    assert got == [{0: 30}, *7 * [{0: 1}], {1: 30}, *7 * [{1: 1}]]
    assert log.requests()["num_preemptions"].sum() == 0


def test_mc_sf_that_underestimates_preempts_the_longest_prediction():
    work = [
        arrival(0, prompt=4, output=8, predicted_tokens=1.0),
        arrival(1, prompt=4, output=8, predicted_tokens=2.0),
    ]
    _, log = batches("mc_sf", work, limits(num_blocks=12, block_size=1), margin=0.0)
    assert log.requests()["num_preemptions"].tolist() == [0, 1]


def test_mc_sf_starves_the_long():
    work = rival_stream({"predicted_tokens": 1.0}, {"predicted_tokens": 9.0})
    assert served("mc_sf", work)[-1] == 1


def test_wasted_memory_access_is_padding_read_and_reads_after_the_end():
    first = RequestState(arrival(0, prompt=2, predicted_tokens=3.0).request)
    second = RequestState(arrival(1, prompt=4, predicted_tokens=5.0).request)
    batches, batch = QueuedBatches(), QueuedBatch(first)
    batches.open(batch)
    assert wasted_tokens(batches, first) == [0]
    batches.add(batch, first)
    # The first reads 2 tokens of padding in 3 steps, then 3 + 4 and 4 + 4 tokens for nothing.
    assert wasted_tokens(batches, second) == [3 * 2 + 7 + 8]
    batches.add(batch, second)
    # A second one like the first wastes as much.
    assert wasted_tokens(batches, first) == [2 * (3 * 2 + 7 + 8)]


def test_queued_batches_keep_their_rows_when_one_starts():
    # Of a hundred batches, one a request, all but every third get a seat.
    work = [arrival(i, prompt=2 + i, predicted_tokens=3.0) for i in range(100)]
    waiting = [RequestState(each.request) for each in work]
    batches = QueuedBatches()
    for state in waiting:
        batch = QueuedBatch(state)
        batches.open(batch)
        batches.add(batch, state)
        if state.id % 3:
            state.status = Status.RUNNING
            batches.note_started(batch)
    # Alike in length are the 51st and whom it would join: nothing is wasted.
    assert batches.least_waste(waiting[51], 2, 1000, 1.0).members == {51: waiting[51]}
    assert batches.least_waste(waiting[51], 1, 1000, 1.0) is None
    assert len(wasted_tokens(batches, waiting[0])) == 34


def test_batch_of_which_somebody_had_a_seat_is_not_chosen_though_nobody_waited_longer():
    states = [RequestState(arrival(i, 0, predicted_tokens=3.0).request) for i in range(4)]
    batches = QueuedBatches()
    for pair in (states[:2], states[2:]):
        batch = QueuedBatch(pair[0])
        batches.open(batch)
        for state in pair:
            batches.add(batch, state)
    for number, left in ((1, batch), (3, None)):
        states[number].status = Status.RUNNING
        batches.note_started(next(b for b in batches._batches if number in b.members))
        best = batches.highest_response_ratio(0, lambda size, longest, last: 100.0)
        assert best == (None if left is None else (1.0, left))


def test_magnus_batches_similar_requests_and_runs_the_highest_response_ratio():
    work = [
        arrival(0, prompt=2, output=3, predicted_tokens=3.0),
        arrival(1, prompt=4, output=5, predicted_tokens=5.0),
        arrival(2, prompt=2, output=3, predicted_tokens=3.0),
    ]
    got, _ = batches("magnus", work, limits(), wma_threshold=20.0)
    apart = [{0: 2, 2: 2}, *2 * [{0: 1, 2: 1}], {1: 4}, *4 * [{1: 1}]]
    assert got == apart
    got, _ = batches("magnus", work, limits(), wma_threshold=50.0, pad_prompts=False)
    assert got[0] == {0: 2, 1: 4, 2: 2}  # 21 and 42 tokens wasted
    got, _ = batches("magnus", work, limits(), wma_threshold=50.0, max_batch_size=2)
    assert [sorted(b if isinstance(b, dict) else b[0]) for b in got[:1]] == [[0, 1]]


def test_magnus_does_not_join_a_batch_beyond_memory():
    # Two requests of 4 + 6 tokens need 20; 16 are there.
    work = [arrival(i, prompt=4, output=6, predicted_tokens=6.0) for i in range(2)]
    got, log = batches("magnus", work, limits(num_blocks=4))
    assert got[0] == {0: 4}
    assert log.requests()["num_preemptions"].sum() == 0


@pytest.mark.parametrize(
    ("prompts", "together"), [((3, 9), True), ((9, 3), True), ((3, 11), False)]
)
def test_magnus_batch_takes_memory_for_its_longest_prompt_and_answer(prompts, together):
    # Two rows of 9 + 3 tokens take 24, of 11 + 3 take 28; 24 are there.
    work = [
        arrival(i, prompt=p, output=3 - i, predicted_tokens=3.0 - i) for i, p in enumerate(prompts)
    ]
    got, _ = batches("magnus", work, limits(num_blocks=6), wma_threshold=1e9, pad_prompts=False)
    assert (set(got[0]) == {0, 1}) is together


@pytest.mark.parametrize(("asked", "most"), [(None, 4), (1, 1), (3, 3), (9, 4)])
def test_magnus_batch_is_no_larger_than_what_the_engine_seats(asked, most):
    policy = registry.make("magnus", max_batch_size=asked, wma_threshold=5.0)
    policy.on_start(SimpleNamespace(config=SimpleNamespace(max_num_seqs=4), capacity_tokens=77))
    told, opened, added = [], [], []
    policy._queued = SimpleNamespace(
        least_waste=lambda *given: told.append(given), open=opened.append,
        add=lambda *given: added.append(given), note_started=lambda batch: None,
    )  # fmt: skip
    states = [
        SimpleNamespace(id=i, status=status, first_scheduled_ns=at_ns)
        for i, (status, at_ns) in enumerate(
            [(Status.WAITING, -1), (Status.WAITING, 0), (Status.RUNNING, -1)]
        )
    ]
    for state in states:
        policy.on_arrival(state, 0)
    assert told == [(state, most, 77, 5.0) for state in states]
    assert added == list(zip(opened, states, strict=True))
    assert policy._started == opened[1:], "who was scheduled once, or runs, has started"


@pytest.mark.parametrize(("first_scheduled_ns", "queued"), [(-1, True), (0, False), (7, False)])
def test_magnus_batch_whose_first_had_a_seat_takes_nobody_in(first_scheduled_ns, queued):
    preempted = SimpleNamespace(status=Status.WAITING, first_scheduled_ns=first_scheduled_ns)
    assert QueuedBatch(preempted).is_queued is queued


def test_magnus_prefers_a_short_batch_to_a_long_one_that_waited_longer():
    # At 1010 ns the long one has waited 1010 ns for 11,170 ns of work, the short 510 for 2,022.
    work = [
        arrival(0, 0, predicted_tokens=1.0),
        arrival(1, 0, predicted_tokens=10.0),
        arrival(2, 500, predicted_tokens=1.0),
    ]
    assert served("magnus", work, wma_threshold=0.0) == [0, 2, 1]


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("past_future", {"window": 0}, "window"),
        ("past_future", {"reserved": 1.0}, "reserved"),
        ("past_future", {"samples": 0}, "samples"),
        ("past_future", {"seed": -1}, "seed"),
        ("past_future", {"max_waiting_tokens": -1}, "max_waiting_tokens"),
        ("mc_sf", {"margin": -0.1}, "margin"),
        ("magnus", {"wma_threshold": -1.0}, "wma_threshold"),
    ],
)
def test_memory_policy_with_an_impossible_knob_is_refused(name, knobs, message):
    with pytest.raises(Exception, match=message):
        batches(name, [arrival(0)], limits(), **knobs)


@pytest.mark.parametrize("name", ["mc_sf", "magnus"])
def test_memory_policy_without_predictions_says_so(name):
    with pytest.raises(Exception, match="needs a predictor"):
        batches(name, [arrival(0), arrival(1)], limits())
