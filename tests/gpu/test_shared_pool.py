"""Blocks that several requests share, against a ledger that a test writes down."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from schedlab.gpu_backend.shared_pool import SharedBlockPool
from schedlab.sim.errors import SchedlabError


def make(num_blocks=6, busy=()):
    """Return a pool of blocks of four tokens, and what its ledger knows and has left behind."""
    pool = SharedBlockPool(num_blocks, 4, 4, 64, busy=busy)
    known, left = set(), {}
    pool.ledger = SimpleNamespace(
        knows=known.__contains__,
        num_left_behind=lambda request_id: left.get(request_id, 0),
        blocks_before_eviction=lambda: 0,
    )
    return pool, known, left


def test_request_begins_with_the_blocks_of_another_one_whether_that_is_there_or_gone():
    pool, known, _ = make()
    known |= {10, 11}
    pool.name(1, [10, 11])
    pool.grow(1, 10)
    blocks = pool.blocks(1).tolist()
    pool.begin_with(2, [10, 11])
    pool.release(1)
    assert pool.blocks(2).tolist() == blocks[:2]
    assert pool.num_used == 2
    pool.release(2)
    assert pool.num_used == 0
    pool.begin_with(3, [10])
    assert pool.blocks(3).tolist() == blocks[:1]


def test_content_is_given_up_only_when_blocks_are_needed_and_the_ledger_knows_it_no_more():
    pool, known, _ = make(num_blocks=3)
    known |= {10, 11}
    pool.name(1, [10, 11])
    pool.release(1)
    known.remove(10)
    assert pool.blocks_of([10, 11]).tolist() == [1, 2]
    pool.grow(2, 5)
    assert sorted(pool.blocks(2).tolist()) == [1, 3]
    with pytest.raises(SchedlabError, match="do not count alike"):
        pool.grow(2, 9)


def test_content_that_two_compute_is_kept_once():
    pool, known, _ = make()
    known |= {10}
    pool.grow(1, 2)
    pool.grow(2, 2)
    pool.name(1, [10])
    pool.name(2, [10])
    assert pool.blocks(1).tolist() != pool.blocks(2).tolist()
    pool.merge_doubles()
    assert pool.blocks(1).tolist() == pool.blocks(2).tolist()
    assert pool.num_used == 1
    # The block that was merged away is handed out again, and the one in use is not.
    pool.grow(3, 20)
    assert sorted([*pool.blocks(1).tolist(), *pool.blocks(3).tolist()]) == [1, 2, 3, 4, 5, 6]
    pool.release(1)
    assert pool.blocks_of([10]).tolist() == pool.blocks(2).tolist()
    with pytest.raises(SchedlabError, match="do not count alike"):
        pool.grow(4, 1)


def test_names_that_are_told_again_in_part_are_taken_once():
    pool, known, _ = make()
    known |= {10, 11}
    pool.name(1, [10, 11])
    blocks = pool.blocks(1).tolist()
    pool.name(1, [10])
    pool.name(1, [10, 11])
    pool.merge_doubles()
    assert pool.blocks(1).tolist() == blocks
    assert pool.num_used == 2


def test_content_that_somebody_holds_is_computed_by_another_in_a_block_of_its_own():
    pool, known, _ = make()
    known |= {10}
    pool.name(1, [10])
    pool.name(2, [10])
    assert (pool.blocks(1).tolist(), pool.blocks(2).tolist()) == ([1], [2])
    assert pool.blocks_of([10]).tolist() == [1]
    pool.merge_doubles()
    assert pool.blocks(2).tolist() == [1]
    assert pool.num_used == 1


def test_content_that_is_computed_anew_takes_the_block_that_has_it():
    pool, known, _ = make(num_blocks=2)
    known |= {10}
    pool.name(1, [10])
    pool.release(1)
    pool.grow(2, 3)
    pool.name(3, [10])
    assert pool.blocks(3).tolist() == [1]
    # Who has its block already keeps that, and the other one is free.
    pool.release(3)
    pool.name(2, [10])
    assert pool.blocks(2).tolist() == [2]
    assert pool.blocks_of([10]).tolist() == [2]


def test_preempted_request_finds_full_blocks_of_its_own_as_long_as_the_ledger_has_them():
    pool, known, left = make()
    known |= {10}
    pool.name(1, [10])
    pool.grow(1, 14)
    blocks = pool.blocks(1).tolist()
    left[1] = 2
    pool.release(1, num_computed=13)
    assert pool.num_used == 0
    pool.hold_own(1, 2)
    left[1] = 0  # the ledger counts them as held
    pool.grow(2, 12)
    pool.release(2)
    pool.begin_with(1, [10])
    assert pool.blocks(1).tolist() == blocks[:3]
    left[1] = 2
    pool.release(1, num_computed=13)
    left[1] = 1
    pool.grow(2, 16)
    assert blocks[2] in pool.blocks(2)
    assert blocks[1] not in pool.blocks(2)


def test_block_that_was_granted_and_never_computed_is_not_taken_for_computed():
    pool, known, left = make()
    known |= {10, 11}
    pool.name(1, [10])
    pool.grow(1, 8)
    left[1] = 1
    pool.release(1, num_computed=7)
    with pytest.raises(SchedlabError, match="request 1 begins with a block that was never"):
        pool.hold_own(1, 1)
    with pytest.raises(SchedlabError, match="request 2 begins with a block that was never"):
        pool.begin_with(2, [10, 11])


def test_blocks_that_are_being_copied_away_are_handed_out_last():
    busy = {1: None, 3: None}
    pool, _, _ = make(num_blocks=4, busy=busy)
    pool.grow(1, 16)
    assert set(pool.blocks(1).tolist()[:2]) == {2, 4}


def test_loaded_blocks_lie_behind_those_that_a_request_begins_with():
    pool, known, _ = make()
    known |= {10}
    pool.name(1, [10])
    behind = pool.set_aside(2, 2).tolist()
    pool.begin_with(2, [10])
    assert pool.blocks(2).tolist() == [1, *behind]
    pool.grow(2, 15)
    assert len(pool.blocks(2)) == 4


def test_request_whose_blocks_are_kept_needs_no_seat_until_it_is_released():
    pool, known, _ = make()
    known |= {10}
    pool.name(0, [10])
    pool.grow(0, 8)
    pool.keep(0)
    assert not pool.holds(0)
    assert pool.num_used == 2
    for other in (1, 2, 3):
        pool.grow(other, 1)
    pool.begin_with(9, [10])
    assert pool.blocks(9).tolist() == pool.blocks_of([10]).tolist()
    pool.ledger.num_named = {0: 1, 1: 0, 2: 0, 3: 0, 9: 1}.get
    pool.check(engine_with(6, 1))
    for one in (9, 1, 2, 3):
        pool.release(one)
    assert pool.num_used == 2
    pool.release(0)
    assert pool.num_used == 0
    assert pool.blocks_of([10]).tolist() == [1]
    pool.check(engine_with(6, 6))


def engine_with(num_blocks, free_blocks):
    return SimpleNamespace(kv=SimpleNamespace(num_blocks=num_blocks, free_blocks=free_blocks))


def test_check_counts_every_block_once_wherever_it_is():
    """Held, set aside, taken over, left behind, kept for its content, free."""
    pool, known, _ = make(num_blocks=8)
    pool.ledger.num_named = {1: 1, 2: 0}.get
    known |= {10, 11}
    pool.name(1, [10])
    pool.grow(1, 6)
    pool.set_aside(3, 2)
    pool.grow(2, 3)
    pool.name(9, [11])
    pool.release(9)
    pool.check(engine_with(8, 3))
    with pytest.raises(AssertionError, match="5 blocks held, the engine counts 4"):
        pool.check(engine_with(8, 4))
    lost = pool._set_aside[3].pop()
    with pytest.raises(AssertionError, match="a KV block is lost or held twice"):
        pool.check(engine_with(8, 3))
    pool._set_aside[3].append(lost)
    pool.ledger.num_named = {1: 2, 2: 0}.get
    with pytest.raises(AssertionError, match="a name is missing"):
        pool.check(engine_with(8, 3))
