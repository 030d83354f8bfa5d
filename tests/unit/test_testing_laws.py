"""A log that breaks a law of runs is refused with the words of that law."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.record.columns import REJECTED, TRUNCATED
from schedlab.sim.request import RequestState, Turn
from schedlab.testing import laws
from schedlab.testing.cost_model import _after, random_shape

LIMITS = EngineConfig(
    num_blocks=6, max_model_len=24, block_size=4, max_num_seqs=3, max_num_batched_tokens=8
)
WORK = [laws.arrival(i, 500 * i, 5 + i, 4 + i) for i in range(6)] + [laws.arrival(6, 3000, 40, 2)]


class Forged:
    """A log of which some rows are other than they were."""

    def __init__(self, log, table, column, change):
        self._log, self._forged = log, {table: (column, change)}

    def __getattr__(self, name):
        return getattr(self._log, name)

    def _table(self, name):
        columns = {key: np.array(column) for key, column in getattr(self._log, name)().items()}
        if name in self._forged:
            column, change = self._forged[name]
            columns[column] = change(columns[column])
        return columns

    def requests(self):
        return self._table("requests")

    def steps(self):
        return self._table("steps")

    def preemptions(self):
        return self._table("preemptions")


@pytest.fixture(scope="module")
def log():
    found = laws.run(registry.make("fcfs"), WORK, LIMITS)
    assert found.requests()["num_preemptions"].sum() > 0
    assert (found.requests()["status"] == 1).sum() == 1
    return found


def at(row, value):
    """Change one row by something."""

    def change(column):
        column[row] += value
        return column

    return change


FORGERIES = [
    ("requests", "id", at(0, 9), "leaves the engine exactly once"),
    ("requests", "status", at(0, 7), "finished or rejected"),
    ("requests", "status", at(0, 1), "has a reason"),
    ("requests", "queued_ns", at(1, -10_000), "arrival_ns > queued_ns"),
    ("requests", "first_scheduled_ns", at(2, 10**9), "first_scheduled_ns > first_token_ns"),
    ("requests", "finish_ns", at(0, -1), "last_token_ns > finish_ns"),
    ("steps", "end_ns", at(0, -(10**6)), "every step takes time"),
    ("steps", "end_ns", at(1, 10**6), "steps overlap"),
    ("requests", "generated_tokens", at(3, 1), "each answer is as long as it is"),
    ("requests", "status", at(0, TRUNCATED), "who may say no more, and nobody else, is cut off"),
    ("steps", "prefill_tokens", at(0, 1), "tokens computed are those needed"),
    ("requests", "cached_tokens", at(0, 1), "tokens computed are those needed"),
    ("steps", "recomputed_tokens", at(0, 99), "recomputed tokens of requests and of steps"),
    ("steps", "num_preempted", at(0, 1), "preemptions of requests and of steps"),
    ("preemptions", "resumed_ns", at(0, -(10**6)), "nobody resumes before|evictions are as many"),
    ("preemptions", "evicted_ns", at(0, 10**9), "nobody resumes before being evicted"),
    ("preemptions", "id", at(0, 1), "every preemption has a row|evictions are as many"),
    ("steps", "num_prefills", at(0, 3), "more requests than rows"),
    ("steps", "num_decodes", lambda column: column + 9, "tokens computed are those needed"),
    ("steps", "kv_allocated_tokens", at(0, 25), "holds more memory than there is"),
    ("steps", "kv_tokens", lambda column: column - 100, "kv_tokens is never negative"),
    (
        "steps", "kv_reserved_unused_tokens", lambda column: column - 1,
        "kv_reserved_unused_tokens is never",
    ),
    (
        "steps", "kv_fragmentation_tokens", lambda column: column - 100,
        "kv_fragmentation_tokens is never",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("table", "column", "change", "law"), FORGERIES)
def test_log_with_a_forged_row_breaks_the_law_of_it(table, column, change, law, log):
    laws.check(log, WORK, LIMITS)
    with pytest.raises(AssertionError, match=law):
        laws.check(Forged(log, table, column, change), WORK, LIMITS)


def test_rows_of_prompts_and_of_decodes_count_together_and_just_all_of_them_fit(log):
    rows = log.steps()["num_decodes"] + log.steps()["num_prefills"]
    assert rows.max() == LIMITS.max_num_seqs
    full = int(np.argmax(rows))
    with pytest.raises(AssertionError, match="more requests than rows"):
        laws.check(Forged(log, "steps", "num_prefills", at(full, 1)), WORK, LIMITS)


def test_idle_engine_with_somebody_waiting_is_no_idle_engine(log):
    steps = log.steps()
    after = at(slice(3, None), 10**6)
    late = Forged(Forged(log, "steps", "start_ns", after), "steps", "end_ns", after)
    assert steps["num_running"][3] > 0
    with pytest.raises(AssertionError, match="idle from"):
        laws.check_never_idle(late)


def test_time_before_the_first_step_is_idle_like_any_other(log):
    first_ns = int(log.requests()["arrival_ns"].min())
    assert log.steps()["start_ns"][0] == first_ns == 0
    laws.check_never_idle(log)
    late = Forged(
        Forged(log, "steps", "start_ns", lambda c: c + 1), "steps", "end_ns", lambda c: c + 1
    )
    with pytest.raises(AssertionError, match="idle from 0 to 1 with 1 requests"):
        laws.check_never_idle(late)
    later = Forged(late, "requests", "arrival_ns", lambda c: c + 1)
    laws.check_never_idle(later)


@pytest.mark.parametrize("seed", range(40))
def test_engine_idles_in_any_instant_outside_all_steps_in_which_somebody_is_there(seed):
    draw = random.Random(seed)
    edges = sorted(draw.sample(range(40), 6))
    starts, ends = edges[::2], edges[1::2]
    rows = [(draw.randrange(40), draw.randrange(1, 9), draw.choice((0, 1))) for _ in range(3)]
    there = {
        at
        for arrived, length, status in rows
        for at in range(arrived, arrived + length)
        if status != REJECTED
    }
    computed = {at for one in zip(starts, ends, strict=True) for at in range(*one)}
    log = SimpleNamespace(
        steps=lambda: {"start_ns": np.array(starts), "end_ns": np.array(ends)},
        requests=lambda: {
            "arrival_ns": np.array([arrived for arrived, _, _ in rows]),
            "finish_ns": np.array([arrived + length for arrived, length, _ in rows]),
            "status": np.array([status for _, _, status in rows]),
        },
    )
    if there & (set(range(ends[-1])) - computed):
        with pytest.raises(AssertionError, match="idle from"):
            laws.check_never_idle(log)
    else:
        laws.check_never_idle(log)


def test_difference_of_a_run_that_is_not_at_its_end_is_of_the_same_request_in_both(log):
    class Begun(Forged):
        def requests(self):
            return {name: column[1:] for name, column in super().requests().items()}

    finish = int(log.requests()["finish_ns"][4])
    other = Forged(log, "requests", "finish_ns", at(4, 7))
    told = laws.difference(Begun(log, "", "", None), other, ("here", "there"))
    assert told == f"request 4: finish_ns {finish} here, {finish + 7} there"


def test_requests_may_be_sent_in_any_order_of_their_ids(log):
    laws.check(log, WORK[::-1], LIMITS)
    renamed = [replace(one, request=replace(one.request, id=6 - i)) for i, one in enumerate(WORK)]
    laws.check(laws.run(registry.make("fcfs"), renamed, LIMITS), renamed, LIMITS)


def test_difference_names_the_first_row_that_differs_and_in_what(log):
    assert laws.difference(log, log, ("a", "b")) is None
    steps = Forged(log, "steps", "num_waiting", at(2, 5))
    assert laws.difference(log, steps, ("here", "there")).startswith("step 2: num_waiting ")
    requests = Forged(log, "requests", "finish_ns", at(4, 7))
    told = laws.difference(log, requests, ("here", "there"))
    finish = int(log.requests()["finish_ns"][4])
    assert told == f"request 4: finish_ns {finish} here, {finish + 7} there"


def test_linear_cost_by_hand():
    cost = laws.LinearCost(100, 10, 1)
    shape = BatchShape(2, 30, 20, ((5, 7),), padding_tokens=3, padding_context_tokens=4)
    assert cost.step_ns(shape) == [100 + 10 * (2 + 5 + 3) + 34 + 7]
    assert cost.step_ns(BatchShape(2, 30, 20), 3) == [100 + 20 + 30 + 2 * j for j in range(3)]
    assert cost.step_ns(BatchShape(1, 3, 3, swapped_bytes=9)) == [100 + 10 + 3 + 9]
    with pytest.raises(AssertionError, match="only decodes repeat"):
        cost.step_ns(shape, 2)


def test_decodes_some_steps_later_have_a_token_more_each_step():
    shape = BatchShape(3, 60, 30, rows_sampled=3, decode_context_min_tokens=10)
    later = _after(shape, 4)
    assert later.decode_context_sum_tokens == 60 + 3 * 4
    assert (later.decode_context_max_tokens, later.decode_context_min_tokens) == (34, 14)
    assert _after(BatchShape(0, 0, 0, ((4, 0),)), 9) == BatchShape(0, 0, 0, ((4, 0),))


def test_random_shapes_are_consistent_and_of_every_kind():
    draw = random.Random(1)
    shapes = [random_shape(draw) for _ in range(200)]
    for shape in shapes:
        n = shape.num_decodes
        low, high = shape.decode_context_min_tokens, shape.decode_context_max_tokens
        assert n * low <= shape.decode_context_sum_tokens <= n * high
        assert shape.rows_sampled == n + len(shape.chunks) + shape.padding_rows
        assert shape.num_running == n + len(shape.chunks) > 0
        assert all(q >= 1 and c >= 0 for q, c in shape.chunks)
    kinds = {(bool(s.num_decodes), bool(s.chunks)) for s in shapes}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert any(s.padding_rows for s in shapes)
    assert any(s.swapped_bytes for s in shapes)


@pytest.mark.parametrize(
    ("table", "column", "change"),
    [
        ("steps", "kv_allocated_tokens", lambda column: np.full_like(column, 24)),
        ("steps", "kv_tokens", np.zeros_like),
        ("steps", "kv_reserved_unused_tokens", np.zeros_like),
        ("steps", "kv_fragmentation_tokens", np.zeros_like),
    ],
)
def test_log_at_the_very_limit_of_a_law_keeps_it(table, column, change, log):
    laws.check(Forged(log, table, column, change), WORK, LIMITS)


def test_limits_that_a_run_just_reaches_are_kept_and_smaller_ones_are_not(log):
    steps, requests = log.steps(), log.requests()
    reached = {
        "max_num_resident": (int(steps["num_running"].max()), "without a seat"),
        "max_num_batched_tokens": (
            int((steps["num_decodes"] + steps["prefill_tokens"]).max()), "the token budget",
        ),
        "num_blocks": (int(steps["kv_allocated_tokens"].max()) // 4, "more memory than there is"),
    }  # fmt: skip
    assert requests["num_preemptions"].sum() > 0
    for name, (most, law) in reached.items():
        laws.check(log, WORK, replace(LIMITS, **{name: most}))
        with pytest.raises(AssertionError, match=law):
            laws.check(log, WORK, replace(LIMITS, **{name: most - 1, "max_model_len": 20}))


def test_all_with_memory_are_held_against_the_seats_whoever_is_computed(log):
    seats = replace(LIMITS, max_num_resident=4)
    steps = log.steps()
    for row in range(len(steps["num_running"])):
        more = 4 - int(steps["num_running"][row])
        laws.check(Forged(log, "steps", "num_running", at(row, more)), WORK, seats)
        with pytest.raises(AssertionError, match="without a seat"):
            laws.check(Forged(log, "steps", "num_running", at(row, more + 1)), WORK, seats)


def test_no_step_ends_when_it_begins(log):
    steps = log.steps()
    for row, length_ns in enumerate((steps["end_ns"] - steps["start_ns"]).tolist()):
        laws.check(Forged(log, "steps", "start_ns", at(row, length_ns - 1)), WORK, LIMITS, True)
        with pytest.raises(AssertionError, match="every step takes time"):
            laws.check(Forged(log, "steps", "start_ns", at(row, length_ns)), WORK, LIMITS, True)


def test_as_many_steps_may_overlap_as_batches_may_be_in_flight(log):
    overlapping = Forged(log, "steps", "start_ns", at(3, -1))
    with pytest.raises(AssertionError, match="steps overlap"):
        laws.check(overlapping, WORK, LIMITS, may_wait=True)
    two = replace(LIMITS, pipeline_parallel_size=2)
    laws.check(overlapping, WORK, two, may_wait=True)
    ends = log.steps()["end_ns"]
    far = Forged(log, "steps", "start_ns", at(3, int(ends[1] - ends[2])))
    laws.check(far, WORK, two, may_wait=True)
    farther = Forged(log, "steps", "start_ns", at(3, int(ends[1] - ends[2]) - 1))
    with pytest.raises(AssertionError, match="steps overlap"):
        laws.check(farther, WORK, two, may_wait=True)


def test_no_more_tokens_are_accepted_than_were_drafted(log):
    class Drafted(Forged):
        def steps(self):
            nothing = np.zeros_like(self._log.steps()["num_decodes"])
            ((column, change),) = self._forged.values()
            columns = {"draft_tokens": nothing, "accepted_tokens": nothing}
            return {**self._log.steps(), **columns, column: change(nothing.copy())}

    three = replace(LIMITS, num_speculative_tokens=3)
    laws.check(Drafted(log, "steps", "accepted_tokens", at(0, 0)), WORK, three)
    undrafted = Drafted(log, "steps", "accepted_tokens", lambda c: at(1, -1)(at(0, 1)(c)))
    with pytest.raises(AssertionError, match="no more is accepted than drafted"):
        laws.check(undrafted, WORK, three)
    full = int(np.argmax(log.steps()["num_decodes"] + log.steps()["prefill_tokens"]))
    with pytest.raises(AssertionError, match="the token budget"):
        laws.check(Drafted(log, "steps", "draft_tokens", at(full, 1)), WORK, three)


class OtherTokens:
    """A log whose token times, gaps or counts are other than they were."""

    def __init__(self, log, **told):
        self._log, self._told = log, told

    def __getattr__(self, name):
        return self._told.get(name, getattr(self._log, name))


@pytest.mark.parametrize(
    ("name", "change", "law"),
    [
        ("token_gaps", lambda gaps, counts: (gaps, counts + (gaps == gaps[0])), "gaps between"),
        ("token_counts", lambda at_ns, out: (at_ns + 1, out), "tokens by instant"),
        ("token_counts", lambda at_ns, out: (at_ns, out + (at_ns == at_ns[1])), "tokens by inst"),
    ],
)
def test_log_whose_tables_of_tokens_differ_from_token_times_is_refused(name, change, law, log):
    table = getattr(log, name)()
    keys = list(table)
    columns = dict(zip(keys, change(*(np.array(table[key]) for key in keys)), strict=True))
    with pytest.raises(AssertionError, match=law):
        laws.check(OtherTokens(log, **{name: lambda: columns}), WORK, LIMITS)


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (lambda times: times[:-1], "each output token has a time"),
        (lambda times: np.append(times[:-2], times[-1:].repeat(2)), "two tokens of a request"),
        (lambda times: np.append(times[:1] - 1, times[1:]), "the first token comes at"),
        (lambda times: np.append(times[:-1], times[-1] + 1), "the last token comes at"),
    ],
)
def test_log_whose_token_times_are_forged_is_refused(change, law, log):
    def token_times(number):
        times = log.token_times(number)
        return change(times) if number == 2 else times

    with pytest.raises(AssertionError, match=law):
        laws.check(OtherTokens(log, token_times=token_times), WORK, LIMITS)


def test_run_that_idles_beside_requests_is_lawful_only_where_it_may_wait():
    work = [laws.arrival(0, 0, 5, 2), laws.arrival(1, 3_000, 5, 2)]
    found = laws.run(registry.make("dynamic", max_queue_delay_s=1e-6), work, LIMITS)
    laws.check(found, work, LIMITS, may_wait=True)
    with pytest.raises(AssertionError, match="idle from 0 to 1000 with 1 requests"):
        laws.check(found, work, LIMITS)
    busy = laws.run(registry.make("fcfs"), work, LIMITS)
    laws.check(busy, work, LIMITS)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("untold", [RequestState(WORK[0].request)]),
        ("kept_until_ns", {3: 900}),
        ("come", {3}),
        ("turns", {0: Turn()}),
        ("held_tokens", 1),
        ("needs_less", True),
    ],
)
def test_run_after_which_an_engine_remembers_somebody_is_refused(name, left):
    def drive(engine, workload):
        log = simulate(engine, workload)
        setattr(engine.requests, name, left)
        return log

    with pytest.raises(AssertionError, match=f"the run ended with somebody in `{name}`"):
        laws.run(registry.make("fcfs"), WORK, LIMITS, drive=drive)


def test_run_that_ends_with_blocks_held_is_refused_though_they_are_accounted_for():
    def drive(engine, workload):
        log = simulate(engine, workload)
        state = RequestState(laws.arrival(99, 0, 5).request)
        assert engine.kv.allocate(state, 5)
        state._computed = engine.requests.resident_tokens = 5
        engine.requests.kept[99] = state
        return log

    with pytest.raises(AssertionError, match="the run ended with blocks held"):
        laws.run(registry.make("fcfs"), WORK, LIMITS, drive=drive)
