import numpy as np
import pytest

from schedlab.gpu_backend.block_pool import DUMMY_BLOCK, BlockPool
from schedlab.gpu_backend.sequences import Sequences
from schedlab.sim.errors import SchedlabError
from schedlab.sim.request import Request


def make(num_blocks=6, **options):
    return BlockPool(num_blocks, block_size=4, max_num_seqs=3, max_model_len=20, **options)


def test_block_pool_gives_blocks_only_as_tokens_need_them():
    pool = make()
    seat = pool.grow(7, 1)
    assert pool.tables[seat].tolist() == [1, 0, 0, 0, 0]
    assert pool.grow(7, 4) == seat
    assert pool.num_used == 1
    pool.grow(7, 13)
    assert pool.blocks(7).tolist() == [1, 2, 3, 4]
    assert pool.num_used == 4


def test_block_pool_never_gives_the_dummy_block_or_one_block_twice():
    pool = make(shuffle_seed=0)
    for request_id in range(3):
        pool.grow(request_id, 8)
    blocks = np.concatenate([pool.blocks(i) for i in range(3)]).tolist()
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6]
    assert blocks != sorted(blocks)
    assert DUMMY_BLOCK not in blocks


def test_block_pool_after_release_has_blocks_and_seat_for_others():
    pool = make(num_blocks=5)
    pool.grow(1, 20)
    with pytest.raises(SchedlabError, match="request 2 needs 1 more KV blocks and 0 of 5 are free"):
        pool.grow(2, 1)
    pool.release(1)
    assert not pool.holds(1)
    assert pool.num_used == 0
    for request_id in (2, 3, 4):
        pool.grow(request_id, 1)
    with pytest.raises(SchedlabError, match="all 3 seats"):
        pool.grow(5, 1)


def test_block_pool_after_release_leaves_no_block_in_the_table():
    pool = make()
    seat = pool.grow(1, 20)
    pool.release(1)
    assert (pool.tables[seat] == DUMMY_BLOCK).all()
    pool.release(1)
    assert pool.num_used == 0


@pytest.mark.parametrize(("output", "cut_at", "last"), [(3, 9, 6), (9, 3, 6), (1, 9, 4)])
def test_last_token_of_a_sequence_is_that_of_its_answer_or_where_it_is_cut_off(
    output, cut_at, last
):
    sequences = Sequences(2, 20, lambda request: np.arange(request.prompt_tokens))
    request = Request(7, 0, prompt_tokens=4, max_tokens=cut_at)
    sequences.add(request, output)
    sequences.sit(request, 1)
    assert sequences.last_index[1] == last
    assert sequences.tokens[1, :4].tolist() == [0, 1, 2, 3]
    assert sequences.ids[1] == 7
