"""Tables in memory, and those that are read when they are asked for: rows, batches, columns."""

import numpy as np
import pytest

from schedlab.sim.record import columns
from schedlab.sim.record.columns import (
    LazyTable,
    batches,
    completed,
    held,
    pairs,
    rows_of,
    whole_numbers,
    with_columns,
)

TABLE = {"id": np.array([5, 6, 7, 8, 9]), "share": np.array([0.5, 0.25, 0.0, 1.0, 0.75])}


def lazy(asked=None):
    def reader(name):
        def read(start, stop):
            if asked is not None:
                asked.append((name, start, stop))
            return TABLE[name][start:stop]

        return read

    return LazyTable(5, {name: reader(name) for name in TABLE})


def as_lists(table):
    return {name: table[name].tolist() for name in table}


WHOLE = as_lists(TABLE)


def test_lazy_table_has_the_columns_it_is_asked_for_and_reads_no_other():
    asked = []
    table = lazy(asked)
    assert (len(table), list(table), table.num_rows) == (2, ["id", "share"], 5)
    assert "id" in table
    assert "ids" not in table
    assert asked == []
    assert table["share"].tolist() == WHOLE["share"]
    assert asked == [("share", 0, 5)]
    assert as_lists(table.rows(1, 3)) == {"id": [6, 7], "share": [0.25, 0.0]}
    assert asked[1:] == [("id", 1, 3), ("share", 1, 3)]
    with pytest.raises(KeyError):
        table["ids"]


@pytest.mark.parametrize("table", [lazy(), TABLE], ids=["lazy", "held"])
def test_rows_of_a_table_are_those_of_a_mask_in_part_as_well(table):
    mask = np.array([True, False, True, True, False])
    some = rows_of(table, mask)
    assert as_lists(some) == {"id": [5, 7, 8], "share": [0.5, 0.0, 1.0]}
    if isinstance(some, LazyTable):
        assert some.num_rows == 3
        assert as_lists(some.rows(1, 3)) == {"id": [7, 8], "share": [0.0, 1.0]}
        assert as_lists(rows_of(some, np.array([False, True, True]))) == {
            "id": [7, 8], "share": [0.0, 1.0],
        }  # fmt: skip


@pytest.mark.parametrize(("size", "lengths"), [(1, [1] * 5), (2, [2, 2, 1]), (4, [4, 1]),
                                              (5, [5]), (6, [5])])  # fmt: skip
def test_batches_of_a_lazy_table_are_its_rows_in_order(size, lengths, monkeypatch):
    monkeypatch.setattr(columns, "BATCH_ROWS", size)
    found = [as_lists(some) for some in batches(lazy())]
    assert [len(some["id"]) for some in found] == lengths
    for name, values in WHOLE.items():
        assert [value for some in found for value in some[name]] == values
    assert [as_lists(some) for some in batches(TABLE)] == [WHOLE]  # at once, whatever its size


def test_batches_of_an_empty_table_are_one(monkeypatch):
    monkeypatch.setattr(columns, "BATCH_ROWS", 2)
    empty = LazyTable(0, {"id": held(np.array([], dtype=int))})
    assert [as_lists(some) for some in batches(empty)] == [{"id": []}]


@pytest.mark.parametrize("table", [lazy(), TABLE], ids=["lazy", "held"])
def test_table_with_more_columns_has_them_behind_its_own(table):
    more = np.array([10, 20, 30, 40, 50])
    found = with_columns(table, {"more": held(more), "share": held(-more)})
    assert as_lists(found) == {"id": WHOLE["id"], "share": (-more).tolist(), "more": more.tolist()}
    assert list(found) == ["id", "share", "more"]
    if isinstance(found, LazyTable):
        assert as_lists(found.rows(3, 5)) == {
            "id": [8, 9], "share": [-40, -50], "more": [40, 50],
        }  # fmt: skip
    assert as_lists(table) == WHOLE, "the table itself is as it was"


def test_who_got_an_answer_has_finished_or_was_cut_off():
    status = np.array([0, 1, 2, 3, 0])
    assert completed({"status": status}).tolist() == [True, False, False, True, True]


def test_pairs_are_the_two_columns_in_order_as_whole_numbers():
    value, number = pairs({"gap_ns": np.array([3, 9], dtype="i4"), "count": np.array([2.0, 1.0])})
    assert (value.tolist(), number.tolist()) == ([3, 9], [2, 1])
    assert value.dtype == number.dtype == np.int64
    assert whole_numbers({"x": np.array([7], dtype="u1")}, "x").dtype == np.int64
