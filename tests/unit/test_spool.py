"""Tables of numbers in temporary files: rows, pieces and orders."""

import numpy as np
import pytest

from schedlab.sim.record import spool
from schedlab.sim.record.spool import Spool


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
