from random import Random

import pytest

from schedlab.sim.kv.contiguous import ContiguousKVCache
from schedlab.sim.kv.paged import PagedKVCache
from schedlab.sim.request import RequestState
from tests.laws import arrival


def state(request_id, prompt=10, computed=0):
    s = RequestState(arrival(request_id, prompt=prompt, max_tokens=100).request)
    s._computed = computed
    return s


def contiguous(reserve, num_blocks=100, output=25, max_model_len=200):
    return ContiguousKVCache(num_blocks, 1, reserve, max_model_len, lambda request: output)


def test_paged_cache_takes_only_the_blocks_that_new_tokens_open():
    kv = PagedKVCache(num_blocks=10, block_size=16)
    assert kv.allocate(state(0), 16)
    assert kv.free_blocks == 9
    assert kv.allocate(state(0, computed=10), 6)  # fills the block it has
    assert kv.free_blocks == 9
    assert kv.allocate(state(0, computed=16), 1)
    assert kv.free_blocks == 8
    kv.release(state(0, computed=17))
    assert kv.free_blocks == 10


def test_paged_cache_when_full_allocates_nothing():
    kv = PagedKVCache(num_blocks=2, block_size=16)
    assert not kv.allocate(state(0), 33)
    assert not kv.allocate(state(0), 17, keep_free_blocks=1)
    assert kv.free_blocks == 2


def test_paged_cache_fragmentation_is_the_tail_of_the_last_block():
    kv = PagedKVCache(num_blocks=10, block_size=16)
    kv.allocate(state(0), 50)  # 50 tokens take 4 blocks of 16
    assert kv.fragmentation(resident_tokens=50) == (0, 14)


@pytest.mark.parametrize(
    ("reserve", "blocks"),
    [("max", 200), ("declared", 10 + 100), ("pow2", 10 + 32), ("exact", 10 + 25)],
)
def test_contiguous_cache_reserves_prompt_and_room_for_the_answer(reserve, blocks):
    # Prompt 10, answer 25: up to max_model_len 200; the declared 100; next power of two 32; 25.
    kv = contiguous(reserve, num_blocks=300)
    assert kv.allocate(state(0), 10)
    assert kv.num_blocks - kv.free_blocks == blocks
    assert kv.allocate(state(0, computed=10), 1), "later tokens are paid for"
    assert kv.num_blocks - kv.free_blocks == blocks


def test_contiguous_cache_reserves_no_more_of_what_is_declared_than_the_model_holds():
    kv = contiguous("declared", max_model_len=60)
    assert kv.allocate(state(0), 10)
    assert kv.free_blocks == 40


def test_contiguous_range_is_used_up_to_its_end_by_an_answer_that_is_cut_off():
    # Prompt 4 of at most 8 tokens, and an answer of 20 that the limit cuts off: two blocks of 4.
    kv = ContiguousKVCache(10, 4, "exact", 8, lambda request: 20)
    assert kv.allocate(state(0, prompt=4), 4)
    assert kv.free_blocks == 8
    assert kv.fragmentation(resident_tokens=4) == (4, 0)


def test_contiguous_cache_splits_unused_memory_into_reserved_and_lost():
    kv = contiguous("pow2", num_blocks=300)
    kv.allocate(state(0), 10)
    # 42 held, 10 resident; 34 will be used in the end (the last token is never cached).
    assert kv.fragmentation(resident_tokens=10) == (24, 8)


def test_contiguous_cache_with_scattered_holes_refuses_what_would_fit_in_all():
    kv = contiguous("exact", num_blocks=105)  # 3 x 35
    states = [state(i) for i in range(3)]
    assert all(kv.allocate(s, 10) for s in states)
    kv.release(states[0])
    kv.release(states[2])
    wide = state(9, prompt=40)  # needs 65 of the 70 free blocks, in one piece
    assert kv.free_blocks == 70
    assert not kv.allocate(wide, 40)
    kv.release(states[1])
    assert kv.allocate(wide, 40)


def test_contiguous_cache_marks_how_much_is_free_and_takes_nothing_back_by_it():
    kv = ContiguousKVCache(10, 4, "exact", 40, lambda request: 4)
    one = state(0, prompt=9)
    assert kv.mark().free_blocks == 10
    kv.begin()
    assert kv.allocate(one, 9)  # four blocks, for prompt and answer
    mark = kv.mark()
    assert mark.free_blocks == kv.free_blocks == 6
    kv.restore(mark)
    assert kv.free_blocks == 6
    kv.rollback()
    assert kv.free_blocks == kv.mark().free_blocks == 10


def test_contiguous_cache_takes_the_first_hole_that_is_large_enough():
    kv = contiguous("exact", num_blocks=55 + 35 + 35)
    large, kept, small = (state(i, prompt=n) for i, n in enumerate((30, 10, 10)))
    assert all(kv.allocate(s, 10) for s in (large, kept, small))
    kv.release(large)
    kv.release(small)
    # Holes of 55 and 35. First fit puts 35 blocks into the first one, not where they fit best,
    # so that nobody who needs 55 finds a place any more.
    assert kv.allocate(state(3, prompt=10), 10)
    assert kv.free_blocks == 55
    assert not kv.allocate(state(4, prompt=30), 10)
    assert kv.allocate(state(5, prompt=10), 10)


def test_cache_rollback_restores_every_hole_and_count():
    random = Random(3)
    for make in (lambda: PagedKVCache(60, 1), lambda: contiguous("exact", 300)):
        kv, resident = make(), []
        for i in range(200):
            kv.begin()
            before = (kv.free_blocks, kv.fragmentation(0))
            trial = list(resident)
            for step in range(random.randrange(4)):
                if trial and random.random() < 0.5:
                    kv.release(trial.pop())
                else:
                    s = state(1000 * i + step)
                    if kv.allocate(s, 10):
                        s._computed = 10
                        trial.append(s)
            if random.random() < 0.5:
                kv.rollback()
                assert (kv.free_blocks, kv.fragmentation(0)) == before
            else:
                resident = trial
            kv.check(resident)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 1)])
def test_cache_of_no_size_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="at least one block"):
        PagedKVCache(num_blocks, block_size)


def test_cache_check_when_blocks_leak_fails():
    kv = PagedKVCache(10, 16)
    kv.allocate(state(0), 16)
    with pytest.raises(AssertionError, match="9 free"):
        kv.check([])
