"""Tables of numbers in temporary files: rows, pieces and orders."""

from random import Random

import numpy as np
import pytest

from schedlab.sim.record import spool
from schedlab.sim.record.spool import Spool, SpoolFile


@pytest.mark.parametrize("most", [1000, 0])
def test_table_put_in_order_has_its_rows_and_ends_with_them(most, monkeypatch):
    monkeypatch.setattr(spool, "_MOST_ORDERED_NUMBERS", most)
    table = Spool(3)
    table.append(np.array([[1, 2, 3], [4, 5, 6]]))
    table.append(np.array([[7, 8, 9]]))
    ordered = table.in_order(np.array([2, 0, 1]))
    assert ordered.num_rows == 3
    assert ordered.rows(0, 3).tolist() == [[7, 8, 9], [1, 2, 3], [4, 5, 6]]
    assert ordered.column(1).tolist() == [8, 2, 5]
    assert [part.tolist() for part in ordered.batches(2)] == [
        [[7, 8, 9], [1, 2, 3]],
        [[4, 5, 6]],
    ]


@pytest.mark.parametrize("num_written", range(6))
def test_rows_of_a_table_in_file_and_memory_are_those_at_their_place(num_written):
    rows = np.arange(12).reshape(6, 2)
    table = Spool(2)
    for piece in np.array_split(rows[:num_written], 2):
        table.append(piece)
    whole = table.followed_by(rows[num_written:])
    assert whole.num_rows == 6
    for start in range(6):
        for stop in range(start + 1, 7):
            assert whole.rows(start, stop).tolist() == rows[start:stop].tolist(), (start, stop)
            assert whole.column(1, start, stop).tolist() == rows[start:stop, 1].tolist()
    order = np.array([5, 0, 3, 3, 1])
    assert whole.take(0, order).tolist() == (2 * order).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_tables_in_one_file_that_are_read_between_writes_keep_every_row(seed):
    draw, file = Random(seed), SpoolFile()
    tables = [Spool(width, dtype, file) for width, dtype in ((1, float), (2, int), (3, int))]
    kept = [np.zeros((0, one.num_columns), one.dtype) for one in tables]
    for _ in range(30):
        i = draw.randrange(3)
        table, rows = tables[i], kept[i]
        if draw.random() < 0.4:
            size = (draw.randrange(4), table.num_columns)
            new = np.array([draw.randrange(10**6) for _ in range(size[0] * size[1])], table.dtype)
            table.append(new.reshape(size))
            kept[i] = rows = np.concatenate([rows, new.reshape(size)])
        assert table.num_rows == len(rows)
        if not len(rows):
            continue
        start = draw.randrange(len(rows))
        stop, column = draw.randint(start + 1, len(rows)), draw.randrange(table.num_columns)
        assert table.column(column, start, stop).tolist() == rows[start:stop, column].tolist()
        if draw.random() < 0.5:
            assert table.rows(start, stop).tolist() == rows[start:stop].tolist()
        else:
            order = np.array([draw.randrange(len(rows)) for _ in range(3)])
            assert table.take(column, order).tolist() == rows[order, column].tolist()
