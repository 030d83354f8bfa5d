"""Runs that outgrow memory give what they would give in it."""

import os

import numpy as np
import pytest

from schedlab import core
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.metrics import concurrency
from schedlab.sim.record import columns, log, saved_log, steps, stored_token_times
from schedlab.sim.record.columns import LazyTable
from schedlab.sim.record.segment_row import SegmentRow
from schedlab.sim.result import RunResult
from tests import laws

SPEC = {
    "name": "long",
    "hardware": "a100-80gb",
    "engine": {"num_gpu_blocks_override": 700, "max_num_seqs": 16, "max_num_batched_tokens": 512},
    "workload": {"num_requests": 120, "request_rate": 8.0, "prompt_tokens": 300,
                 "output_tokens": {"distribution": "uniform", "low": 1, "high": 90}},
    "slo": {"ttft_ms": 500, "tpot_ms": 30},
}  # fmt: skip
CASES = {
    "one engine": (),
    "preempting": ("engine.num_gpu_blocks_override=120",),
    "reserving": ("engine.kv_allocator=contiguous_exact", "engine.max_model_len=1000"),
    "measured in part": ("measure={warm_up_s: 2.0, cool_down_s: 1.0}",),
    "predicted": ("policy={name: sjf, predictor: {name: noisy, sigma: 0.5}}",),
    "two engines": ("engine.data_parallel_size=2",),
    "a fleet": ("cluster={count: 3, router: vllm}",),
    "two tenants": ("workload.classes={chat: {share: 0.7}, batch: {share: 0.3}}",),
}


def spilled(monkeypatch, most_numbers, batch_rows):
    monkeypatch.setattr(log, "MOST_NUMBERS_IN_MEMORY", most_numbers)
    monkeypatch.setattr(stored_token_times, "_WINDOW_STEPS", 2 * batch_rows + 1)
    monkeypatch.setattr(steps, "_MARKED", 5)
    for module in (columns, steps, saved_log, stored_token_times, concurrency):
        monkeypatch.setattr(module, "BATCH_ROWS", batch_rows)


@pytest.fixture(params=CASES)
def spec(request, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    return make_spec(SPEC, CASES[request.param])


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_spilled_run_writes_the_same_bytes_as_one_in_memory(spec, monkeypatch, tmp_path):
    run(spec).save(tmp_path / "memory")
    spilled(monkeypatch, 400, columns.BATCH_ROWS)
    result = run(spec)
    if result.num_engines == 1:
        assert isinstance(result.requests, LazyTable)
    result.save(tmp_path / "disk")
    assert files(tmp_path / "disk") == files(tmp_path / "memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["one engine", "preempting", "measured in part", "two engines"], indirect=True
)
def test_batches_of_a_few_rows_change_rounding_only(spec, monkeypatch, tmp_path):
    expected = run(spec)
    wanted, of_class = expected.metrics(), expected.metrics_by("prompt_tokens")[300.0]
    steps_wanted, gaps_wanted = expected.log.steps(), expected.log.token_gaps()
    spilled(monkeypatch, 400, 701)
    result = run(spec)
    result.save(tmp_path)
    assert result.metrics_by("prompt_tokens")[300.0] == pytest.approx(of_class, nan_ok=True)
    for found in (result, RunResult.load(tmp_path)):
        assert found.metrics() == pytest.approx(wanted, rel=1e-12, nan_ok=True)
        for name in ("p99_itl_ms", "median_itl_ms", "p90_ttft_ms", "max_batch_size", "num_steps"):
            np.testing.assert_equal(found.metrics()[name], wanted[name])
        for name in steps_wanted:
            assert np.array_equal(found.log.steps()[name], steps_wanted[name]), name
        for name in gaps_wanted:
            assert np.array_equal(found.log.token_gaps()[name], gaps_wanted[name]), name
        for number in (0, 17, 119):
            times = expected.log.token_times(number)
            assert np.array_equal(found.log.token_times(number), times)
        assert list(found.requests) == list(expected.requests)
        for name in expected.requests:
            np.testing.assert_array_equal(found.requests[name], expected.requests[name])


def test_temporary_files_of_a_run_have_no_names(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    spilled(monkeypatch, 400, 701)
    result = run(make_spec(SPEC, ()))
    assert isinstance(result.requests, LazyTable)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(
    core.running() != "python", reason="compiled callers do not see a method put in"
)
def test_logs_of_a_fleet_share_what_may_lie_in_memory_and_one_file(monkeypatch):
    made = []
    write_to = log.RunLog.write_to

    def shared(self, common):
        made.append(self)
        write_to(self, common)

    monkeypatch.setattr(log.RunLog, "write_to", shared)
    for router in ("vllm", "round_robin"):  # together, and one after the other
        made.clear()
        spec = make_spec(SPEC, (f"cluster={{count: 4, router: {router}}}",))
        wanted = run(spec)
        most = max(len(one.own_rows.requests) // 8 for one in made) + 1
        assert not any(one._spools for one in made)
        monkeypatch.setattr(log, "MOST_NUMBERS_IN_MEMORY", 2 * most)  # too much for none alone
        made.clear()
        found = run(spec)
        assert all(one._spools for one in made)
        assert len({id(one._spool_file) for one in made}) == 1
        monkeypatch.undo()
        monkeypatch.setattr(log.RunLog, "write_to", shared)
        for name in wanted.requests:
            np.testing.assert_equal(found.requests[name], wanted.requests[name])
        np.testing.assert_equal(found.metrics(), wanted.metrics())


def test_steps_that_are_read_while_they_become_more_are_those_of_then(monkeypatch):
    monkeypatch.setattr(log, "MOST_NUMBERS_IN_MEMORY", 1)
    seen = []

    def look(engine):
        found = engine.log.steps()
        seen.append((found.num_rows, engine.log.num_steps))

    config = EngineConfig(num_blocks=100, max_model_len=100, block_size=4, max_num_seqs=2)
    laws.run(registry.make("fcfs"), [laws.arrival(i, 0, 5, 4) for i in range(6)], config,
             observer=look)  # fmt: skip
    assert len({rows for rows, _ in seen}) > 3
    assert all(rows == steps for rows, steps in seen)


def test_long_segments_go_to_disk_as_soon_as_many_do(monkeypatch):
    monkeypatch.setattr(log, "MOST_NUMBERS_IN_MEMORY", 100)
    kept = log.RunLog(block_size=4, grows=True)
    row = SegmentRow(*[0] * 17)
    kept.add_segment(row, [5] * 99, [1] * 99)
    assert not kept._spools
    kept.add_segment(row, [5], [1])
    assert kept._spools
    assert kept.num_steps == 100
