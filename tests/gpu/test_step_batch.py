from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend.batch_builder import BatchBuilder, Rows  # noqa: E402
from schedlab.gpu_backend.block_pool import BlockPool  # noqa: E402
from schedlab.gpu_backend.step_batch import StepBatch, StepLayout, launch_order  # noqa: E402

TABLES = np.array([[4, 9, 0], [7, 0, 0], [2**31 - 1, 3, 1]], dtype=np.int32)
HISTORY = np.arange(3 * 12, dtype=np.int32).reshape(3, 12)


def make():
    return StepBatch(StepLayout(max_tokens=20, max_num_seqs=4, max_blocks=3), pinned=False)


def test_mixed_batch_lays_sequences_one_after_the_other_and_padding_last():
    batch = make()
    seats, contexts, new = np.array([1, 0]), np.array([2, 3]), np.array([1, 4])
    batch.fill(HISTORY, TABLES, 4, seats, contexts, new, padding_tokens=2)
    batch.sample(np.array([0, 4]), np.array([11, 12]))
    step = batch.tensors(batch.views)
    assert step.tokens.tolist() == [14, 3, 4, 5, 6, 0, 0]
    assert step.positions.tolist() == [2, 3, 4, 5, 6, 0, 0]
    assert step.slots.tolist() == [30, 19, 36, 37, 38, -1, -1]
    assert step.query_start.tolist() == [0, 1, 5]
    assert step.context_lens.tolist() == [3, 7]
    assert step.block_tables.tolist() == [[7, 0, 0], [4, 9, 0]]
    assert step.sample_rows.tolist() == [0, 4]
    assert (step.num_sequence_tokens, step.max_query_tokens) == (5, 4)
    assert not batch.decode_only


def test_slot_of_the_highest_block_id_does_not_overflow():
    batch = make()
    batch.fill(HISTORY, TABLES, 16, np.array([2]), np.array([5]))
    assert batch.slots[0] == (2**31 - 1) * 16 + 5


def test_decode_batch_padded_to_a_bucket_reads_the_dummy_block_and_writes_nothing():
    batch = make()
    batch.fill(HISTORY, TABLES, 4, np.array([0, 2, 1]), np.array([3, 0, 1]))
    batch.sample(np.arange(3), np.array([1, 2, 3]))
    assert batch.decode_only
    batch.pad_sequences(4)
    step = batch.tensors(batch.views)
    assert step.tokens.tolist() == [3, 24, 13, 0]
    assert step.slots.tolist()[3] == -1
    assert step.context_lens.tolist() == [4, 1, 2, 1]
    assert step.block_tables[3].tolist() == [0, 0, 0]
    assert step.query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.sample_rows.tolist() == [0, 1, 2, 3]


def test_layout_of_one_step_is_copied_by_its_used_bytes_alone():
    batch = make()
    batch.fill(HISTORY, TABLES, 4, np.array([0, 2]), np.array([3, 0]))
    batch.sample(np.arange(2), np.array([1, 2]))
    used = batch.layout.used_bytes(2)
    copy = torch.full((batch.layout.num_bytes,), 255, dtype=torch.uint8)
    copy[:used] = batch.buffer[:used]
    there, here = batch.tensors(batch.layout.views(copy)), batch.tensors(batch.views)
    for name, part in here._asdict().items():
        assert torch.equal(torch.as_tensor(there._asdict()[name]), torch.as_tensor(part)), name


def test_launch_order_puts_chunks_first_and_the_longest_decode_last():
    contexts = np.array([90, 7, 4000, 0, 500])
    new = np.array([1, 300, 1, 40, 1])
    assert launch_order(contexts, new).tolist() == [1, 3, 0, 4, 2]


def test_longest_chunk_of_a_batch_is_found_wherever_it_lies():
    batch = make()
    for new in ([5, 2], [2, 5], [1, 5, 3]):
        seats = np.arange(len(new))
        batch.fill(HISTORY, TABLES, 4, seats, np.zeros_like(seats), np.array(new))
        assert batch.max_query_tokens == 5


def test_batch_laid_out_ahead_opens_a_block_for_whom_the_last_one_is_full():
    """Contexts of 3, 4 and 5 tokens in blocks of 4: only the second needs one more."""
    pool, tokens = BlockPool(8, 4, 3, 12), np.arange(36, dtype=np.int32).reshape(3, 12)
    contexts = np.array([3, 4, 5])
    seats = np.array([pool.grow(i, int(context)) for i, context in enumerate(contexts)])
    builder = BatchBuilder(
        SimpleNamespace(new_batch=lambda: None), pool, SimpleNamespace(tokens=tokens), seed=0
    )
    batch = SimpleNamespace(
        block_tables=np.full((4, 3), -7), slots=np.full(4, -7), tokens=np.full(4, -7)
    )
    states = [SimpleNamespace(id=i) for i in range(3)]
    rows = Rows(batch, states, seats, contexts + 1, np.arange(3), True, True)
    builder._complete(rows)
    opened = int(pool.tables[seats[1], 1])
    assert opened > 0
    assert batch.slots.tolist() == [-7, 4 * opened, -7, -7]
    assert batch.block_tables[1].tolist() == [-7, opened, -7]
    assert (batch.block_tables[[0, 2, 3]] == -7).all()
    assert batch.tokens.tolist() == [3, 12 + 4, 24 + 5, -7]


def test_batch_that_follows_is_laid_out_ahead_for_those_who_have_tokens_left():
    def machine():
        pool = BlockPool(12, 4, 3, 12)
        for i, context in enumerate((3, 4, 5)):
            pool.grow(i, context)
        seats = np.array([pool.seat(i) for i in range(3)])
        last_index = np.full(3, 11)
        last_index[seats[0]] = 4  # the token that is under way
        tokens = np.arange(36, dtype=np.int32).reshape(3, 12)
        sequences = SimpleNamespace(tokens=tokens, last_index=last_index, ids=np.arange(3))
        return BatchBuilder(SimpleNamespace(new_batch=make), pool, sequences, seed=0)

    def decodes_of(*contexts):
        members = {
            i: SimpleNamespace(id=i, num_computed_tokens=context)
            for i, context in enumerate(contexts)
            if context
        }
        shape = SimpleNamespace(
            num_decodes=len(members), padding_tokens=0, draft_tokens=0,
            decode_context_sum_tokens=sum(contexts),
        )  # fmt: skip
        return SimpleNamespace(
            plan=SimpleNamespace(chunks=()), shape=shape, decodes=SimpleNamespace(members=members)
        )

    def states(work):
        return list(work.decodes.members.values())

    ahead, later = machine(), machine()
    first, second = decodes_of(3, 4, 5), decodes_of(0, 5, 6)
    # The same objects, as the engine's: they are compared.
    for i in (1, 2):
        second.decodes.members[i] = first.decodes.members[i]
    rows = ahead.build(first, ())
    assert not rows.was_ahead
    later.build(first, ())
    ahead.prepare_next(rows)
    for state in states(second):
        state.num_computed_tokens += 1
    got, expected = ahead.build(second, ()), later.build(second, ())
    assert (got.was_ahead, expected.was_ahead) == (True, False)
    assert got.states == expected.states == states(second)
    for name in ("seats", "indices", "picks"):
        assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name
    for name, part in got.batch.tensors(got.batch.views)._asdict().items():
        other = expected.batch.tensors(expected.batch.views)._asdict()[name]
        assert torch.equal(torch.as_tensor(part), torch.as_tensor(other)), name
    assert not ahead.build(second, ()).was_ahead, "it is used once"
    # Nor is it used for others, or where one of its requests lost its blocks.
    for lost in (False, True):
        ahead.prepare_next(rows)
        if lost:
            ahead.drop(states(second)[1])
        alone = second if lost else decodes_of(0, 5, 0)
        assert not ahead.build(alone, ()).was_ahead


def test_row_that_is_held_reads_what_is_computed_of_it_and_writes_nothing():
    pool = BlockPool(12, 4, 3, 12)
    for i, context in enumerate((3, 4)):
        pool.grow(i, context)
    seats = [pool.seat(i) for i in range(2)]
    tokens = np.arange(36, dtype=np.int32).reshape(3, 12)
    sequences = SimpleNamespace(tokens=tokens, ids=np.arange(3))
    builder = BatchBuilder(SimpleNamespace(new_batch=make), pool, sequences, seed=0)
    decoding = SimpleNamespace(id=0, num_computed_tokens=3, decode_tokens=1)
    finished = SimpleNamespace(id=1, num_computed_tokens=4)
    work = SimpleNamespace(
        plan=SimpleNamespace(chunks=(), pad_finished=True, padding_tokens=1),
        shape=SimpleNamespace(num_decodes=1, padding_tokens=1, draft_tokens=0),
        decodes=SimpleNamespace(members={0: decoding}),
    )
    rows = builder.build(work, [finished])
    step = rows.batch.tensors(rows.batch.views)
    assert sorted(step.context_lens.tolist()) == [4, 4]  # with the token that is computed
    assert sorted(step.tokens.tolist()[:2]) == sorted(tokens[seats, 3].tolist())
    assert sorted(step.slots.tolist()) == [-1, -1, 4 * int(pool.tables[seats[0], 0]) + 3]
    assert rows.states == [decoding]
    assert rows.indices.tolist() == [4]


def test_batch_that_is_filled_again_tells_of_its_own_rows_alone():
    batch = make()
    batch.fill(HISTORY, TABLES, 4, np.array([1, 0]), np.array([2, 3]), np.array([1, 9]), 3)
    assert (batch.max_query_tokens, batch.num_sequence_tokens, batch.num_tokens) == (9, 10, 13)
    batch.fill(HISTORY, TABLES, 4, np.array([0, 2]), np.array([1, 4]), np.array([2, 3]))
    assert (batch.max_query_tokens, batch.num_sequence_tokens, batch.num_tokens) == (3, 5, 5)
    assert batch.query_start[:3].tolist() == [0, 2, 5]
    assert batch.context_lens[:2].tolist() == [3, 7]
    batch.query_start[:] = 7  # as another batch may leave it
    batch.fill(HISTORY, TABLES, 4, np.array([2]), np.array([4]), np.array([3]))
    assert batch.query_start[:2].tolist() == [0, 3]
    batch.fill(HISTORY, TABLES, 4, np.array([0]), np.array([1]))
    assert (batch.max_query_tokens, batch.num_seqs, batch.decode_only) == (1, 1, True)
    none = np.array([], dtype=np.int64)
    batch.fill(HISTORY, TABLES, 4, none, none, none, 2)
    assert (batch.max_query_tokens, batch.num_sequence_tokens, batch.num_tokens) == (1, 0, 2)
    assert not batch.decode_only
