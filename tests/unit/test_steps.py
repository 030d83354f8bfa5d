import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from tests import laws
from tests.laws import arrival

CONFIG = EngineConfig(num_blocks=60, max_model_len=120, block_size=4, max_num_seqs=6)


def steps(config=CONFIG):
    work = [arrival(i, i * 2_000, 5 + 3 * i, 4 + 7 * (i % 5)) for i in range(20)]
    return laws.run(registry.make("fcfs"), work, config).steps()


def test_steps_in_batches_are_the_same_rows():
    whole = steps()
    for num_rows in (1, 7, 50, 10_000):
        starts = range(0, whole.num_rows, num_rows)
        pieces = [whole.rows(start, start + num_rows) for start in starts]
        assert sum(p.num_rows for p in pieces) == whole.num_rows
        for name in whole:
            joined = np.concatenate([p[name] for p in pieces])
            assert np.array_equal(joined, whole[name]), (name, num_rows)


def test_steps_taken_at_once_read_as_if_taken_one_by_one():
    fast, slow = steps(), steps(laws.slow(CONFIG))
    assert fast.num_rows == slow.num_rows
    for name in fast:
        assert np.array_equal(fast[name], slow[name]), name


def test_steps_have_no_column_of_another_name():
    with pytest.raises(KeyError, match="colour"):
        steps()["colour"]
