from dataclasses import replace

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.record import log
from schedlab.sim.record import steps as stored
from schedlab.sim.record.steps import StepTable, StoredSteps
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws
from tests.laws import arrival
from tests.staged_cost import StagedCost

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


def test_steps_that_are_none_have_all_columns_wherever_they_would_lie():
    whole = steps()
    for start in range(whole.num_rows + 1):
        for stop in (start, start - 1):
            if stop >= 0:
                none = whole.rows(start, stop)
                assert none.num_rows == 0
                assert {name: none[name].tolist() for name in none} == {name: [] for name in whole}
                assert none.tokens_out().tolist() == []
                assert none.rows(0, 0)["end_ns"].tolist() == []


def test_steps_taken_at_once_read_as_if_taken_one_by_one():
    fast, slow = steps(), steps(laws.slow(CONFIG))
    assert fast.num_rows == slow.num_rows
    for name in fast:
        assert np.array_equal(fast[name], slow[name]), name


def test_steps_have_no_column_of_another_name():
    with pytest.raises(KeyError, match="colour"):
        steps()["colour"]


def some_run(kind):
    work = [arrival(i, i * 2_000, 5 + 3 * i, 4 + 7 * (i % 5)) for i in range(8)]
    if kind == "drafts":
        config = replace(CONFIG, num_speculative_tokens=2)
        return laws.run(
            registry.make("fcfs"), work, config,
            make_executor=lambda pricing: SpeculativeExecutor(
                pricing, config, DrawnAcceptance([0.5, 0.5]), NgramDrafter(0.0)
            ),
        )  # fmt: skip
    if kind == "stages":
        config = replace(CONFIG, pipeline_parallel_size=3)
        return laws.run(registry.make("fcfs"), work, config, StagedCost((10, 10, 5), 7))
    return laws.run(registry.make("fcfs"), work, CONFIG)


@pytest.mark.parametrize("kind", ["plain", "drafts", "stages"])
@pytest.mark.parametrize("batch_rows", [3, 7, 1_000])
def test_steps_on_disk_read_in_batches_are_those_in_memory(kind, batch_rows, monkeypatch):
    whole = some_run(kind).steps()
    monkeypatch.setattr(log, "MOST_NUMBERS_IN_MEMORY", 1)
    monkeypatch.setattr(stored, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(stored, "_MARKED", 3)
    found = some_run(kind).steps()
    assert isinstance(whole, StepTable)
    assert isinstance(found, StoredSteps)
    assert found.num_rows == whole.num_rows
    assert 20 < found.num_rows < 1_000
    assert list(found) == list(whole)
    assert len(found) == len(whole)
    for name in whole:
        assert found[name].tolist() == whole[name].tolist(), name
    size = found.num_rows
    for start, stop in ((0, 0), (0, 1), (5, 5), (6, 15), (20, size), (0, size), (size, size)):
        part = found.rows(start, stop)
        assert part.num_rows == stop - start
        for name in whole:
            assert part[name].tolist() == whole[name][start:stop].tolist(), (name, start, stop)
    out = whole.tokens_out()
    tokens = found.tokens_out()
    assert tokens["time_ns"].tolist() == whole["end_ns"][out > 0].tolist()
    assert tokens["count"].tolist() == out[out > 0].tolist()
    assert found.tokens_out() is tokens
    assert out.sum() == sum(4 + 7 * (i % 5) for i in range(8))
