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
