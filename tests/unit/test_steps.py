from dataclasses import replace
from random import Random

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.record import log, stored_token_times
from schedlab.sim.record import steps as stored
from schedlab.sim.record.cluster_log import ClusterSteps
from schedlab.sim.record.spool import Spool
from schedlab.sim.record.steps import StepTable, StoredSteps
from schedlab.sim.record.stored_token_times import StoredTokenTimes
from schedlab.sim.record.token_times import MICRO_BATCH, TokenTimes
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


def test_steps_of_a_part_of_a_part_are_those_of_the_whole():
    whole = steps()
    expected = {name: whole[name] for name in whole}
    draw = Random(7)
    for _ in range(60):
        first, last = sorted(draw.sample(range(whole.num_rows + 1), 2))
        start, stop = sorted(draw.sample(range(last - first + 1), 2))
        part = whole.rows(first, last).rows(start, stop)
        assert part.num_rows == stop - start
        for name, column in expected.items():
            assert np.array_equal(part[name], column[first + start : first + stop]), name


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
@pytest.mark.parametrize("batch_rows", [3, 1_000])
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


def evicting_run(kind):
    """Run requests that evict each other, so that most have several stints."""
    config = EngineConfig(num_blocks=11, max_model_len=44, block_size=4, max_num_seqs=6)
    work = [arrival(i, i * 1_500, 5 + 3 * (i % 4), 4 + 7 * (i % 4)) for i in range(12)]
    if kind == "stages":
        return laws.run(
            registry.make("fcfs"), work, replace(config, pipeline_parallel_size=2), StagedCost()
        )
    return laws.run(registry.make("srtf" if kind == "by length" else "fcfs"), work, config)


def as_pairs(table):
    """Return how often each value occurs, in order."""
    first, count = table.values()
    found = {}
    for value, times in zip(first.tolist(), count.tolist(), strict=True):
        found[value] = found.get(value, 0) + times
    return sorted(found.items())


def drawn_stints(draw, num_steps, has_bursts):
    """Return stints of five requests as they end, their bursts, and the tokens of each request.

    Decode step i ends at 10 i + 10; prompts end in between, the first perhaps at time 0.
    """
    rows, tokens = [], {number: [] for number in range(5)}
    for number in range(5):
        step = 0
        while step < num_steps and draw.random() < 0.8:
            first = draw.randrange(step, num_steps + 1)
            last = draw.randrange(first, num_steps + 1)
            has_entry = first == last or draw.random() < 0.5
            entry = 10 * first + draw.randrange(first > 0, 10) if has_entry else -1
            bursts = [draw.randrange(1, 4) if has_bursts else 1 for _ in range(first, last)]
            rows.append((last, number, entry, first, bursts))
            tokens[number] += [entry] if has_entry else []
            for i, count in enumerate(bursts, first):
                tokens[number] += [10 * i + 10] * count
            step = last + 1
    rows.sort(key=lambda row: row[0])
    stints = [(number, entry, first, last) for last, number, entry, first, _ in rows]
    return stints, [count for *_, bursts in rows for count in bursts], tokens


def on_disk(table):
    spool = Spool(table.shape[1])
    spool.append(table)
    return spool


@pytest.mark.parametrize("has_bursts", [False, True])
@pytest.mark.parametrize("batch_rows", [1, 3, 1_000])
def test_token_times_of_any_stints_are_those_told_one_by_one(batch_rows, has_bursts, monkeypatch):
    monkeypatch.setattr(stored_token_times, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(stored_token_times, "_WINDOW_STEPS", 2 * batch_rows + 1)
    ends_ns = np.arange(10, 90, 10)
    table = {"num_decodes": np.full(8, 2), "end_ns": ends_ns}
    for seed in range(12):
        rows, counts, tokens = drawn_stints(Random(seed), 8, has_bursts)
        if not rows:
            continue
        stints = np.array(rows, dtype=np.int64)
        bursts = np.array(counts, dtype=np.int64) if has_bursts else None
        stored = on_disk(bursts[:, np.newaxis]) if has_bursts and len(bursts) else None
        ways = [TokenTimes(stints, ends_ns, bursts)]
        if stored is not None or not has_bursts:
            ways.append(StoredTokenTimes(on_disk(stints), table, stored))
        for ids in (None, np.array([0, 3]), np.array([4])):
            some = [times for i, times in tokens.items() if ids is None or i in ids]
            gaps = np.concatenate([np.diff(np.unique(times)) for times in some])
            at_ns = np.concatenate([np.array(times, dtype=np.int64) for times in some])
            for one in ways:
                assert as_pairs(one.gaps(ids)) == as_pairs(
                    dict(enumerate(np.unique(gaps, return_counts=True)))
                )
                assert as_pairs(one.counts(ids)) == as_pairs(
                    dict(enumerate(np.unique(at_ns, return_counts=True)))
                )
        for one in ways:
            assert {i: one.of(i).tolist() for i in tokens} == tokens


@pytest.mark.parametrize("has_bursts", [False, True])
def test_stints_in_any_order_are_put_in_order_of_time_with_the_tokens_of_each(has_bursts):
    ends_ns = np.arange(10, 90, 10)
    for seed in range(12):
        draw = Random(seed)
        rows, counts, tokens = drawn_stints(draw, 8, has_bursts)
        ends = np.cumsum([last - first for _, _, first, last in rows]).tolist()
        of_each = [counts[end - last + first : end]
                   for end, (_, _, first, last) in zip(ends, rows, strict=True)]  # fmt: skip
        order = draw.sample(range(len(rows)), len(rows))
        stints = np.array([rows[i] for i in order], dtype=np.int64).reshape(-1, 4)
        bursts = np.array([count for i in order for count in of_each[i]], dtype=np.int64)
        found = TokenTimes(stints, ends_ns, bursts if has_bursts else None).in_order_of_time()
        assert {i: found.of(i).tolist() for i in tokens} == tokens
        assert as_pairs(found.counts()) == as_pairs(
            TokenTimes(stints, ends_ns, bursts if has_bursts else None).counts()
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["by arrival", "stages"])
@pytest.mark.parametrize("batch_rows", [1, 3, 1_000])
def test_token_times_on_disk_read_in_batches_are_those_of_each_request(
    kind, batch_rows, monkeypatch
):
    plain = evicting_run(kind)
    whole = plain.token_times_of_all()
    assert isinstance(whole, TokenTimes)
    assert plain.requests()["num_preemptions"].max() > 1
    monkeypatch.setattr(log, "MOST_NUMBERS_IN_MEMORY", 1)
    monkeypatch.setattr(stored_token_times, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(stored_token_times, "_WINDOW_STEPS", 2 * batch_rows + 1)
    found = evicting_run(kind).token_times_of_all()
    assert isinstance(found, StoredTokenTimes)
    times = {i: found.of(i) for i in range(12)}
    assert {i: len(ns) for i, ns in times.items()} == {i: 4 + 7 * (i % 4) for i in range(12)}
    for number, ns in times.items():
        assert ns.tolist() == whole.of(number).tolist() == sorted(set(ns.tolist()))
    assert found.of(99).tolist() == []
    for ids in (None, np.array([3]), np.array([2, 3, 7, 11])):
        some = [ns for i, ns in times.items() if ids is None or i in ids]
        gaps = np.concatenate([np.diff(ns) for ns in some])
        for one in (found, whole):
            assert as_pairs(one.gaps(ids)) == as_pairs(
                dict(enumerate(np.unique(gaps, return_counts=True)))
            )
            assert as_pairs(one.counts(ids)) == as_pairs(
                dict(enumerate(np.unique(np.concatenate(some), return_counts=True)))
            )
    assert {name: column.tolist() for name, column in found.stints().items()} == {
        name: column.tolist() for name, column in whole.stints().items()
    }
    assert found.bursts is None


def test_micro_batches_of_an_engine_that_was_replaced_are_counted_on():
    # Engine 0 was replaced once; engine 1 has no pipeline.
    piped, plain = some_run("stages").steps(), some_run("plain").steps()
    table = ClusterSteps([piped, plain, piped], [0, 1, 0])
    assert table.num_rows == 2 * piped.num_rows + plain.num_rows
    order = np.lexsort((
        np.repeat([0, 1, 2], [piped.num_rows, plain.num_rows, piped.num_rows]),
        np.concatenate([piped["start_ns"], plain["start_ns"], piped["start_ns"]]),
    ))  # fmt: skip
    own = piped[MICRO_BATCH]
    num = int(own.max()) + 1
    later = np.where(own < 0, own, own + num)
    expected = np.concatenate([own, np.zeros(plain.num_rows, dtype=np.int64), later])[order]
    assert num > 1
    assert table[MICRO_BATCH].tolist() == expected.tolist()
    engine = np.repeat([0, 1, 0], [piped.num_rows, plain.num_rows, piped.num_rows])[order]
    assert table["engine"].tolist() == engine.tolist()
    for start, stop in ((0, 5), (7, 31), (40, table.num_rows)):
        part = table.rows(start, stop)
        for name in table:
            assert part[name].tolist() == table[name][start:stop].tolist(), name
