from random import Random

from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.request import RequestState
from tests.laws import arrival


def decoding(request_id, computed, generated=1):
    state = RequestState(arrival(request_id, prompt=max(1, computed)).request)
    state._computed, state._generated, state._seat = computed, generated, request_id
    return state


def test_decode_batch_steps_advance_every_member():
    batch = DecodeBatch(4)
    first, second = decoding(0, 10), decoding(1, 3, generated=2)
    batch.join(first)
    batch.steps += 5
    batch.join(second)
    batch.steps += 2
    assert (first.num_computed_tokens, first.num_output_tokens) == (17, 8)
    assert (second.num_computed_tokens, second.num_output_tokens) == (5, 4)
    batch.leave(first)
    batch.steps += 9
    assert first.num_computed_tokens == 17


def test_decode_batch_aggregates_equal_those_counted_member_by_member():
    random = Random(1)
    batch, members = DecodeBatch(8), []
    for i in range(600):
        if members and random.random() < 0.45:
            batch.leave(members.pop(random.randrange(len(members))))
        else:
            members.append(decoding(i, random.randrange(100)))
            batch.join(members[-1])
        batch.steps += random.choice([0, 1, 1, 5])
        contexts = [s.num_computed_tokens for s in members]
        assert batch.size == len(members)
        assert batch.context_sum_tokens == sum(contexts)
        assert batch.context_max_tokens == max(contexts, default=0)
        assert batch.blocks_next_step() == sum(c % 8 == 0 for c in contexts)
        k = random.randrange(1, 30)
        by_hand = [sum((c + j) % 8 == 0 for c in contexts) for j in range(k)]
        assert batch.blocks_per_step(k) == by_hand


def test_decode_batch_steps_within_memory_is_the_largest_that_fits():
    random = Random(2)
    for _ in range(300):
        batch = DecodeBatch(random.choice([1, 4, 16]))
        for i in range(random.randrange(1, 6)):
            batch.join(decoding(i, random.randrange(50)))
        free, at_most = random.randrange(40), random.randrange(1, 60)
        needs = batch.blocks_per_step(at_most)
        fitting = max(j for j in range(at_most + 1) if sum(needs[:j]) <= free)
        assert batch.steps_within(free, at_most) == fitting


def test_decode_batch_of_many_at_once_is_that_of_one_after_the_other():
    random = Random(3)
    at_once, one_by_one = DecodeBatch(8), DecodeBatch(8)
    contexts = [random.randrange(100) for _ in range(200)]
    pairs = [(decoding(i, n), decoding(i, n)) for i, n in enumerate(contexts)]
    for _ in range(60):
        joining = [p for p in pairs if p[0]._batch is None and random.random() < 0.3]
        at_once.join_all([first for first, _ in joining])
        for _, second in joining:
            one_by_one.join(second)
        for batch in (at_once, one_by_one):
            batch.steps += 3
        leaving = [p for p in pairs if p[0]._batch is not None and random.random() < 0.4]
        at_once.leave_all([first for first, _ in leaving])
        for _, second in leaving:
            one_by_one.leave(second)
        assert list(at_once.members) == list(one_by_one.members)
        assert at_once.size == one_by_one.size
        assert at_once.context_sum_tokens == one_by_one.context_sum_tokens
        assert at_once.context_max_tokens == one_by_one.context_max_tokens
        assert at_once.context_min_tokens == one_by_one.context_min_tokens
        assert at_once.blocks_per_step(8) == one_by_one.blocks_per_step(8)
        states = [first for first, _ in pairs]
        assert at_once.blocks_of_all(states) == sum(map(at_once.blocks_of, states))
        for first, second in pairs:
            assert first.num_computed_tokens == second.num_computed_tokens
            assert first.num_output_tokens == second.num_output_tokens
