"""Tables are written as they are, and without what only others need."""

import importlib.util
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.errors import SchedlabError
from schedlab.sim.record import saved_log
from schedlab.sim.record.saved_log import read_table, write_table

COLUMNS = {
    "whole": np.arange(-3, 3),
    "small": np.array([0, 1, -1, 2, 3, 4], dtype=np.int8),
    "broken": np.array([0.5, np.nan, -0.0, np.inf, 1e300, 3.0]),
    "strided": np.arange(12)[::2],
    "text": np.array(["", "a", "bc", "d", "e", "f"]),
}


def test_table_has_the_types_and_values_that_arrow_would_choose(tmp_path):
    write_table(tmp_path / "table.parquet", [COLUMNS])
    found = pq.read_table(tmp_path / "table.parquet")
    assert found.schema == pa.table(COLUMNS).schema
    for name, column in read_table(tmp_path / "table.parquet").items():
        np.testing.assert_array_equal(column, COLUMNS[name])


def test_table_of_no_rows_is_a_table(tmp_path):
    write_table(tmp_path / "table.parquet", [{"ids": np.zeros(0, dtype=np.int64)}])
    assert read_table(tmp_path / "table.parquet")["ids"].shape == (0,)


@pytest.mark.slow
def test_writing_numbers_does_not_import_pandas(tmp_path):
    if importlib.util.find_spec("pandas") is None:
        pytest.skip("there is no pandas to import")
    code = (
        "import sys, numpy, pathlib\n"
        "from schedlab.sim.record.saved_log import write_table\n"
        "columns = {'a': numpy.arange(3), 'b': numpy.ones(3)}\n"
        f"write_table(pathlib.Path({str(tmp_path / 'table.parquet')!r}), [columns])\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_of_a_stored_table_are_those_asked_for_wherever_its_groups_begin(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": list(range(5))}), path, row_group_size=2)
    read = saved_log._stored_table(path, pq.read_metadata(path))._readers["x"]
    for start in range(5):
        for stop in range(start + 1, 6):
            assert read(start, stop).tolist() == list(range(start, stop))


def test_saved_fleet_of_more_rows_than_are_held_at_once_has_the_token_times_of_its_run(
    tmp_path, monkeypatch
):
    spec = make_spec({
        "workload": {"trace": "azure-conv", "num_requests": 12, "request_rate": 8},
        "cluster": {"count": 2, "router": "round_robin"},
    })  # fmt: skip
    result = run(spec)
    result.save(tmp_path)
    monkeypatch.setattr(saved_log, "BATCH_ROWS", 5)
    log = saved_log.SavedLog(tmp_path)
    for request_id in result.requests["id"].tolist():
        expected = result.log.token_times(request_id).tolist()
        assert log.token_times(request_id).tolist() == expected


def test_saved_run_of_more_rows_than_are_held_at_once_has_the_tokens_of_its_run(
    tmp_path, monkeypatch
):
    for speculative in ({}, {"speculation": {"method": "ngram", "acceptance": 0.6,
                                                    "num_speculative_tokens": 3}}):  # fmt: skip
        result = run(make_spec({
            "workload": {"trace": "azure-conv", "num_requests": 9, "request_rate": 8},
            "engine": speculative,
        }))  # fmt: skip
        folder = tmp_path / f"run {len(speculative)}"
        result.save(folder)
        monkeypatch.setattr(saved_log, "BATCH_ROWS", 5)
        log = saved_log.SavedLog(folder)
        assert isinstance(log.token_times_of_all(), saved_log.StoredTokenTimes)
        ids = result.requests["id"]
        for request_id in ids.tolist():
            expected = result.log.token_times(request_id).tolist()
            assert log.token_times(request_id).tolist() == expected
        for chosen in (None, ids[2:5]):
            for name in ("token_gaps", "token_counts"):
                wanted = getattr(result.log, name)(chosen)
                found = getattr(log, name)(chosen)
                for column in wanted:
                    assert found[column].tolist() == wanted[column].tolist(), (name, column)
        monkeypatch.undo()


def test_table_of_more_rows_than_are_held_at_once_is_refused_where_numbers_belong(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(saved_log, "BATCH_ROWS", 2)
    path = tmp_path / "preemptions.parquet"
    good = {name: [1, 2, 3] for name in ("id", "evicted_ns", "resumed_ns")}
    for bad, wanted in (
        (["1", "2", "3"], "whole numbers in every row"),
        ([1, None, 3], "whole numbers in every row"),
        ([0.5, 1.0, 2.0], "whole numbers in every row"),
    ):
        pq.write_table(pa.table({**good, "evicted_ns": bad}), path)
        found = read_table(path)
        assert found["id"].tolist() == [1, 2, 3]
        with pytest.raises(SchedlabError, match=f"column 'evicted_ns' must hold {wanted}"):
            found["evicted_ns"]
