"""Tables of numbers in temporary files: rows, pieces and orders."""

import errno
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


class Narrow:
    """A file that takes and gives a few bytes at a time, as a disk that is nearly full does."""

    def __init__(self, file, most):
        self._file, self.most = file, most
        self.seek = file.seek

    def write(self, data):
        if not self.most:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data[: self.most])

    def readinto(self, buffer):
        return self._file.readinto(buffer[: self.most])


@pytest.mark.parametrize("ordered", [False, True])
def test_table_of_which_a_disk_takes_a_part_at_a_time_is_there_whole(monkeypatch, ordered):
    monkeypatch.setattr(spool, "_MOST_ORDERED_NUMBERS", 0)

    def narrow():
        file = SpoolFile()
        file._file = Narrow(file.open(), 13)
        return file

    monkeypatch.setattr(spool, "SpoolFile", narrow)
    rows = np.arange(20).reshape(10, 2)
    table = Spool(2)
    table.append(rows[:4])
    table.append(rows[4:])
    if ordered:
        rows = rows[::-1]
        table = table.in_order(np.arange(10)[::-1])
    assert table.rows(0, 10).tolist() == rows.tolist()


def test_table_for_which_there_is_no_room_or_that_was_cut_short_is_an_error():
    file = SpoolFile()
    narrow = file._file = Narrow(file.open(), 8)
    table = Spool(1, file=file)
    table.append(np.array([[1], [2]]))
    narrow._file.truncate(12)
    with pytest.raises(OSError, match="a temporary file of this run was cut short"):
        table.column(0)
    narrow.most = 0
    with pytest.raises(OSError, match="No space left on device"):
        table.append(np.array([[3]]))
