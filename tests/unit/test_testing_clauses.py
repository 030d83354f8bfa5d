"""Each clause of the laws of cost models, executors and readers, broken alone and by the least."""

import dataclasses
import gzip
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.core.executor import Steps
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import TraceError
from schedlab.testing import LawBroken, LinearCost
from schedlab.testing import cost_model as of_models
from schedlab.testing import executor as of_executors
from schedlab.testing import reader as of_readers
from schedlab.testing.cases import Case, random_cases
from schedlab.testing.executor import _Watch
from schedlab.traces.readers import READERS
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.trace import Trace
from tests.laws import arrival

# -- cost models -------------------------------------------------------------------------------

DECODES = BatchShape(2, 30, 20, rows_sampled=2, decode_context_min_tokens=10)
PROMPT = BatchShape(0, 0, 0, ((5, 7),), rows_sampled=1)
BOTH = replace(DECODES, chunks=((5, 7),), swapped_bytes=0)
SWAPPING = replace(DECODES, swapped_bytes=9)


class Answers:
    """Gives the same times whatever it is asked, and keeps what that was."""

    def __init__(self, *answers):
        self._answers, self.asked = list(answers), []

    def step_ns(self, shape, k=1):
        self.asked.append((shape, k))
        answer = self._answers[min(len(self.asked), len(self._answers)) - 1]
        return list(answer) if isinstance(answer, list) else answer


class Whole(int):
    """A whole number that is no plain one."""


@pytest.mark.parametrize(("shape", "k", "times", "asked", "fault"), [
    (DECODES, 3, [1, 1, 1], 3, None),
    (PROMPT, 3, [1], 1, None),
    (BOTH, 17, [1], 1, None),
    (SWAPPING, 17, [1], 1, None),
    (DECODES, 3, (1, 1, 1), 3, "step_ns gives tuple, not a list"),
    (DECODES, 3, np.array([1, 1, 1]), 3, "step_ns gives ndarray, not a list"),
    (DECODES, 3, [1, 1], 3, "step_ns gives 2 times, not 3"),
    (DECODES, 3, [1, 1, 1, 1], 3, "step_ns gives 4 times, not 3"),
    (PROMPT, 3, [1, 1, 1], 1, "step_ns gives 3 times, not 1"),
    (SWAPPING, 2, [1, 1], 1, "step_ns gives 2 times, not 1"),
    (PROMPT, 1, [], 1, "step_ns gives 0 times, not 1"),
    *(
        (DECODES, 3, [bad if i == j else 5 for j in range(3)], 3, fault)
        for i in range(3)
        for bad, fault in (
            (0, "a step takes 0 ns"), (-1, "a step takes -1 ns"), (5.0, "5.0 is float, not int"),
            (True, "True is bool, not int"), (Whole(5), "5 is Whole, not int"),
            (np.int64(5), r"np\.int64\(5\) is int64, not int"),
        )
    ),
])  # fmt: skip
def test_time_of_each_step_is_a_positive_plain_whole_number(shape, k, times, asked, fault):
    model = Answers(times)
    if fault is None:
        of_models.takes_time(model, shape, k)
    else:
        with pytest.raises(AssertionError, match=f"^{fault}$"):
            of_models.takes_time(model, shape, k)
    assert model.asked == [(shape, asked)]


@pytest.mark.parametrize("shape", [DECODES, BOTH, SWAPPING])
def test_each_of_many_steps_is_asked_for_alone_with_contexts_that_have_grown(shape):
    def alone(j):
        return replace(
            shape, chunks=(), swapped_bytes=0, decode_context_sum_tokens=30 + 2 * j,
            decode_context_max_tokens=20 + j, decode_context_min_tokens=10 + j,
        )  # fmt: skip

    model = Answers([7], [8], [9], [7, 8, 9])
    of_models.prices_many_steps_as_single_ones(model, shape, 3)
    assert model.asked == [(alone(0), 1), (alone(1), 1), (alone(2), 1), (alone(0), 3)]


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("by", [-1, 1])
def test_any_of_many_steps_that_is_a_nanosecond_off_is_named(step, by):
    together = [7, 8, 9]
    together[step] += by
    law = f"^step {step} takes {7 + step} ns alone and {together[step]} ns among 3$"
    with pytest.raises(AssertionError, match=law):
        of_models.prices_many_steps_as_single_ones(Answers([7], [8], [9], together), DECODES, 3)


def test_many_steps_of_prompts_are_not_asked_for_and_fewer_times_are_no_answer():
    model = Answers([7])
    of_models.prices_many_steps_as_single_ones(model, PROMPT, 3)
    assert model.asked == []
    for together in ([7, 7], [7, 7, 7, 7]):
        with pytest.raises(ValueError, match="zip"):
            of_models.prices_many_steps_as_single_ones(Answers([7], [7], [7], together), DECODES, 3)


def test_same_question_is_asked_before_and_after_another():
    other = BatchShape(3, 700, 300, rows_sampled=3, decode_context_min_tokens=100)
    for last, fault in ([7], None), ([8], "7 ns, then 8"), ([6], "7 ns, then 6"):
        model = Answers([7], [99], last)
        if fault is None:
            of_models.answers_alike(model, BOTH, 5)
        else:
            with pytest.raises(AssertionError, match=fault):
                of_models.answers_alike(model, BOTH, 5)
        assert model.asked == [(BOTH, 1), (other, 1), (BOTH, 1)]


def test_list_that_is_handed_out_may_be_written_to():
    kept = [7]
    given = SimpleNamespace(step_ns=lambda shape: kept)
    with pytest.raises(AssertionError, match="a caller that changes the list changes the model"):
        of_models.hands_out_fresh_lists(given, DECODES, 1)
    assert kept == [-1]
    model = Answers([7])
    of_models.hands_out_fresh_lists(model, BOTH, 5)
    assert model.asked == [(BOTH, 1), (BOTH, 1)]
    for second in ([6], [8], [-1]):
        with pytest.raises(AssertionError, match="changes the model"):
            of_models.hands_out_fresh_lists(Answers([7], second), DECODES, 1)


@pytest.mark.parametrize(("told", "fault"), [
    ({"name": "x"}, None), ({"name": "", "by": [1, None, 2.5, {"a": True}]}, None),
    ({}, r"describe\(\) has no name: \{\}"), ({"Name": "x"}, "has no name"),
    ({"name": b"x"}, "not JSON"), ({"name": "x", "by": {"of": {3}}}, "not JSON"),
])  # fmt: skip
def test_description_is_plain_data_with_a_name(told, fault):
    model = SimpleNamespace(describe=lambda: told)
    if fault is None:
        of_models.describes_itself(model, DECODES, 1)
    else:
        with pytest.raises((AssertionError, TypeError), match=fault):
            of_models.describes_itself(model, DECODES, 1)


def test_class_of_cost_models_is_made_for_one_deployment_only_if_it_needs_one():
    made = []

    class Needs(LinearCost):
        def __init__(self, where, knob=3):
            super().__init__()
            made.append((where.model.name, where.gpu.name, where.tensor_parallel_size, knob))

    class NeedsNot(LinearCost):
        def __init__(self, where=None, knob=4):
            super().__init__()
            made.append((where, knob))

    for cls in (Needs, NeedsNot):
        of_models.check_cost_model(cls, num_shapes=1, only="describes_itself")
    assert made == [("llama-3-8b", "a100-80gb", 1, 3), (None, 4)]


def test_cost_model_is_asked_for_few_steps_and_many():
    asked = []

    class Noting(LinearCost):
        def step_ns(self, shape, k=1):
            asked.append(k)
            return super().step_ns(shape, k)

    of_models.check_cost_model(Noting(), num_shapes=60, only="takes_time")
    assert set(asked) == {1, 2, 17, 120}
    assert len(asked) == 60
    of_models.check_cost_model(Noting(), only=())
    assert len(asked) == 60, "no law is none"


# -- executors ---------------------------------------------------------------------------------


def watched(times, max_steps=3, horizon_ns=100, overhead_ns=0, finished=(), decodes=(), chunks=()):
    """Let the watch look at an answer at 50 ns."""
    steps = Steps(list(times), overhead_ns, list(finished))
    asked = []
    executor = SimpleNamespace(
        kv_bytes=None, prices_never_fall=False,
        execute=lambda *given: asked.append(given) or steps,
    )  # fmt: skip
    work = SimpleNamespace(
        now_ns=50, decodes=SimpleNamespace(members=dict(enumerate(["old", *decodes]))),
        shape=SimpleNamespace(num_decodes=len(decodes) + bool(decodes)),
        plan=SimpleNamespace(chunks=tuple((name, 4) for name in chunks)),
    )  # fmt: skip
    assert _Watch(executor).execute(work, max_steps, horizon_ns) is steps
    assert asked == [(work, max_steps, horizon_ns)]


EXECUTED = [
    ({"times": [1]}, None),
    ({"times": [1], "max_steps": 1, "horizon_ns": 0}, None),
    ({"times": [1, 1, 1]}, None),
    ({"times": []}, "^0 steps, asked for 1 to 3$"),
    ({"times": [1] * 4}, "^4 steps, asked for 1 to 3$"),
    ({"times": [1, 1], "max_steps": 1}, "^2 steps, asked for 1 to 1$"),
    ({"times": [1], "overhead_ns": 1}, None),
    ({"times": [1], "overhead_ns": -1}, "^-1 ns of overhead$"),
    ({"times": [20, 29, 900]}, None),
    ({"times": [20, 30, 1]}, "^the last step starts at 100 ns, not before 100 ns$"),
    ({"times": [50, 1]}, "^the last step starts at 100 ns, not before 100 ns$"),
    ({"times": [49, 1]}, None),
    ({"times": [1, 1], "horizon_ns": 51}, "starts at 51 ns, not before 51 ns"),
    ({"times": [1, 1], "horizon_ns": 52}, None),
    *(
        ({"times": [bad if i == j else 5 for j in range(3)]}, fault)
        for i in range(3)
        for bad, fault in (
            (0, "^a step takes 0 ns$"), (-1, "^a step takes -1 ns$"),
            (5.0, r"^a step takes 5\.0 ns$"), (True, "^a step takes True ns$"),
        )
    ),
    ({"times": [1], "decodes": "ab", "chunks": "cd", "finished": ["a", "d", "c", "old"]}, None),
    ({"times": [1], "decodes": "ab", "chunks": "cd", "finished": ["a", "e"]}, "'e'.* finish, but"),
    ({"times": [1], "decodes": "ab", "chunks": "cd", "finished": ["b", "c", "b"]},
     "'b', 'c', 'b'.: somebody twice"),
    ({"times": [1], "chunks": "cd", "finished": ["d"]}, None),
    ({"times": [1], "chunks": "cd", "finished": ["d", "d"]}, "somebody twice"),
    ({"times": [1], "chunks": "c", "finished": ["old"]}, "finish, but"),
]  # fmt: skip
"""Where nobody decodes, the batch of decodes may be that of a step before."""


@pytest.mark.parametrize(("answer", "fault"), EXECUTED)
def test_answer_of_an_executor_is_within_what_was_asked(answer, fault):
    if fault is None:
        watched(**answer)
    else:
        with pytest.raises(AssertionError, match=fault):
            watched(**answer)


ASKED = Case(
    (arrival(0, 0, 5, 3), arrival(1, 0, 5, 9, max_tokens=4), arrival(2, 0, 5, 4, max_tokens=4),
     arrival(3, 0, 5, 4, max_tokens=9)),
    next(random_cases(0, 1)).limits,
)  # fmt: skip


@pytest.mark.parametrize("row", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("by", [-1, 1])
def test_true_length_of_each_request_is_asked_for_by_itself(row, by, monkeypatch):
    tokens, checked = [3, 4, 4, 4], []
    if row is not None:
        tokens[row] += by
    log = SimpleNamespace(
        requests=lambda: {"id": np.arange(4)[::-1], "generated_tokens": np.array(tokens[::-1])}
    )
    monkeypatch.setattr(of_executors, "_run", lambda executor, case: log)
    monkeypatch.setattr(
        of_executors.laws, "check", lambda *given, **options: checked.append((given, options))
    )
    if row is None:
        of_executors.generates_true_lengths(lambda case: None, ASKED)
    else:
        law = f"^request {row} gets {tokens[row]} tokens, not {tokens[row] - by}$"
        with pytest.raises(AssertionError, match=law):
            of_executors.generates_true_lengths(lambda case: None, ASKED)
    assert checked == [((log, ASKED.workload, ASKED.limits), {"may_wait": True})]


def test_run_of_an_executor_is_proved_after_every_step_and_ends_with_nobody(monkeypatch):
    seen, left = [], [0]
    monkeypatch.setattr(of_executors, "check_conservation", lambda engine: seen.append(engine))

    class Spied:
        def __init__(self, limits, policy, executor, observer):
            self.given = limits, type(policy).__name__, executor
            self.observer = observer
            self.requests = SimpleNamespace(num_in_flight=left[0])

    def simulate(engine, workload):
        assert engine.given == (ASKED.limits, "ContinuousBatching", "executor")
        assert workload is ASKED.workload
        engine.observer("committed")
        return "log"

    monkeypatch.setattr(of_executors, "Engine", Spied)
    monkeypatch.setattr(of_executors, "simulate", simulate)
    assert of_executors._run("executor", ASKED) == "log"
    assert seen[0] == "committed"
    assert isinstance(seen[1], Spied)
    assert len(seen) == 2
    left[0] = 1
    with pytest.raises(AssertionError, match="the run ended with requests in flight"):
        of_executors._run("executor", ASKED)


def test_many_steps_of_an_executor_are_compared_with_single_ones(monkeypatch):
    ran, told = [], [None]
    made = count()
    monkeypatch.setattr(
        of_executors, "_run", lambda executor, case: ran.append((executor, case)) or executor
    )
    monkeypatch.setattr(
        of_executors.laws, "difference", lambda *given: ran.append(given) or told[0]
    )
    of_executors.runs_many_steps_as_single_ones(lambda case: next(made), ASKED)
    slow = replace(ASKED, limits=replace(ASKED.limits, fast_forward=False))
    assert ran == [(0, slow), (1, ASKED), (0, 1, ("by single steps", "ahead"))]
    told[0] = "step 3"
    with pytest.raises(AssertionError, match=r"^the runs differ at step 3$"):
        of_executors.runs_many_steps_as_single_ones(lambda case: next(made), ASKED)


def test_executor_is_tried_on_cases_of_the_seed_for_every_law_unless_cases_are_given(monkeypatch):
    tried = []
    monkeypatch.setattr(
        of_executors, "verdicts",
        lambda name, make, laws, cases, only: tried.append((name, laws, [*cases], [*cases], only))
        or (),
    )  # fmt: skip

    def my_executor(case):
        return None

    of_executors.check_executor(my_executor, only="one", seed=4, num_cases=3)
    of_executors.check_executor(my_executor)
    of_executors.check_executor(my_executor, cases=[])
    of_executors.check_executor(SimpleNamespace(name="no function"), cases=[ASKED])
    drawn = [[*random_cases(4, 3)], [*random_cases(0, 10)], [], [ASKED]]
    for (name, laws, cases, again, _), expected in zip(tried, drawn, strict=True):
        assert repr(cases) == repr(again) == repr(expected), "also for the next law"
        assert laws is of_executors.EXECUTOR_LAWS
        assert name.startswith("executor ")
    assert tried[0][0].endswith("my_executor")
    assert "no function" in tried[3][0]
    assert [only for *_, only in tried] == ["one", None, None, None]


# -- readers -----------------------------------------------------------------------------------

SAMPLE = "a,b\n1,2\n3,40\n5,6\n"


def reader(chunks=None, sniff=None, name="mine"):
    return Reader(name, "for a test", sniff or (lambda peek: True), chunks)


class Rows:
    """Some rows of a trace."""

    def __init__(self, **columns):
        self.__dict__.update(columns)

    def __len__(self):
        return len(self.prompt_tokens)


def given(monkeypatch, rows=3, read=None, dropped=None, fmt="mine", **columns):
    dropped = {} if dropped is None else dropped
    report = SimpleNamespace(
        rows_read=rows + sum(dropped.values()) if read is None else read, rows_dropped=dropped,
        format=fmt,
    )  # fmt: skip
    fine = {"prompt_tokens": [1] * rows, "output_tokens": [1] * rows, "arrival_ns": [0] * rows}
    told = {key: None if v is None else np.array(v) for key, v in {**fine, **columns}.items()}
    monkeypatch.setattr(of_readers, "_read", lambda *_: Rows(**told, report=report))


TRACES = [
    ({}, None),
    ({"rows": 1}, None),
    ({"rows": 0}, "^no request$"),
    ({"arrival_ns": None}, None),
    ({"arrival_ns": [0, 0, 5]}, None),
    ({"arrival_ns": [1, 0, 5]}, "^arrivals go back in time$"),
    ({"arrival_ns": [1, 5, 4]}, "^arrivals go back in time$"),
    ({"arrival_ns": [-1, 0, 0]}, "^the first request comes before time 0$"),
    *(
        ({name: [0 if i == j else 1 for j in range(3)]}, f"^{what}$")
        for name, what in (
            ("prompt_tokens", "a prompt of no token"), ("output_tokens", "an answer of no token"),
        )
        for i in range(3)
    ),
    ({"read": 4}, "^the report says 4 requests are left, there are 3$"),
    ({"read": 2}, "^the report says 2 requests are left, there are 3$"),
    ({"dropped": {"a": 1, "b": 4}}, None),
    ({"dropped": {"a": 1, "b": 4}, "read": 7}, "says 2 requests are left, there are 3"),
    ({"dropped": {"a": 1, "b": 4}, "read": 9}, "says 4 requests are left, there are 3"),
    ({"fmt": "other"}, "^the report says format 'other'$"),
]  # fmt: skip


@pytest.mark.parametrize(("told", "fault"), TRACES)
def test_requests_of_a_reader_are_valid_to_the_last(told, fault, monkeypatch):
    given(monkeypatch, **told)
    if fault is None:
        of_readers.gives_valid_requests(reader(), None, None)
    else:
        with pytest.raises(AssertionError, match=fault):
            of_readers.gives_valid_requests(reader(), None, None)


@pytest.fixture
def sample(tmp_path):
    path = tmp_path / "here" / "sample.csv"
    path.parent.mkdir()
    path.write_text(SAMPLE)
    return path


@pytest.mark.parametrize("taken", ["sample", "other.csv", "other.jsonl", "other.json", None])
def test_sample_alone_is_recognised(taken, sample, tmp_path):
    """By a reader that errs in one of the files."""
    seen = []

    def sniff(peek):
        name = {"csv": "other.csv", "jsonl": "other.jsonl", "json": "other.json"}[peek.kind]
        name = "sample" if peek.names == ("a", "b") else name
        seen.append((name, peek.names))
        return (name == "sample") != (name == taken)

    mine = reader(sniff=sniff)
    if taken is None:
        of_readers.knows_its_format(mine, sample, tmp_path)
        assert seen == [
            ("sample", ("a", "b")), ("other.csv", ("surname", "town")),
            ("other.jsonl", ("surname",)), ("other.json", ("surname",)),
        ]  # fmt: skip
        return
    law = "sample.csv is not recognised" if taken == "sample" else "Ada.* is taken for its own"
    with pytest.raises(AssertionError, match=law):
        of_readers.knows_its_format(mine, sample, tmp_path)
    assert seen[-1][0] == taken


READINGS = [("sample.csv", 65536), ("sample.csv", 1), ("sample.csv", 2), ("sample.csv.gz", 65536)]


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("place", range(3))
def test_every_way_of_reading_gives_the_same_to_the_last_row(wrong, place, sample, tmp_path):
    asked = []

    def chunks(path, options):
        content = path.read_bytes()
        assert (gzip.decompress(content) if path.suffix == ".gz" else content).decode() == SAMPLE
        assert options == ReadOptions(options.chunk_rows, "estimate", 1, drop_empty=False)
        asked.append((path.name, options.chunk_rows))
        tokens = np.array([1, 2, 3])
        tokens[place] += len(asked) - 1 == wrong
        for at in range(0, 3, options.chunk_rows):
            part = tokens[at : at + options.chunk_rows]
            yield Trace(prompt_tokens=part, output_tokens=np.ones_like(part))

    name, rows = READINGS[max(wrong, 1)]
    with pytest.raises(AssertionError, match=f"^{name} in chunks of {rows} gives another prompt_"):
        of_readers.reads_in_chunks_what_it_reads_whole(reader(chunks), sample, tmp_path)
    assert asked == READINGS[: max(wrong, 1) + 1]
    wrong = 9
    asked.clear()
    of_readers.reads_in_chunks_what_it_reads_whole(reader(chunks), sample, tmp_path)
    assert asked == READINGS
    assert sample.read_text() == SAMPLE


@pytest.mark.parametrize(("wrong", "law"), [
    (0, "^a second reading gives another output_tokens$"),
    (1, "^a second reading gives another output_tokens$"), (2, None),
    ("write", "^reading changes the file$"), ("write late", "^reading changes the file$"),
])  # fmt: skip
def test_file_is_read_twice_alike_and_left_as_it_was(wrong, law, sample, tmp_path):
    asked = []

    def chunks(path, options):
        asked.append((path, options.chunk_rows))
        ones = np.ones(2, dtype=np.int64)
        yield Trace(prompt_tokens=ones, output_tokens=ones + (len(asked) - 1 == wrong))
        if wrong == "write" or (wrong == "write late" and len(asked) == 2):
            path.write_text(SAMPLE[:-1] + " ")

    if law is None:
        of_readers.leaves_the_file_alone(reader(chunks), sample, tmp_path)
    else:
        with pytest.raises(AssertionError, match=law):
            of_readers.leaves_the_file_alone(reader(chunks), sample, tmp_path)
    assert asked == [(sample, 65536), (sample, 65536)]


DAMAGES = {"empty": "", "garbled": "a,b\n1,2\n3,40\n\x00?\n",
           "letters for numbers": "a,b\n1,2\n3,40\nx,x\n"}  # fmt: skip
OUTCOMES = [
    (None, "is read without an error"),
    (TraceError("damaged is wrong"), "names no file: damaged is wrong"),
    (TraceError("sample.csv is wrong"), "names no file: sample.csv is wrong"),
    (KeyError("damaged.csv"), r"ends in KeyError\('damaged.csv'\), not a TraceError"),
    (SystemExit(3), r"ends in SystemExit\(3\), not a TraceError"),
    (GeneratorExit(), r"ends in GeneratorExit\(\), not a TraceError"),
]


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize(("outcome", "law"), OUTCOMES)
def test_each_damage_to_a_file_has_to_be_told_of_by_a_trace_error(
    what, outcome, law, sample, tmp_path, monkeypatch
):
    read = []

    def reads(mine, path):
        assert path == tmp_path / "damaged.csv"
        read.append(path.read_text())
        if read[-1] != DAMAGES[what]:
            raise TraceError("row 3 of damaged.csv is wrong")
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(of_readers, "_read", reads)
    with pytest.raises(AssertionError, match=f"a file with {what} .*{law}$"):
        of_readers.names_file_and_row_of_a_mistake(reader(), sample, tmp_path)
    assert read == [*DAMAGES.values()][: [*DAMAGES].index(what) + 1]
    assert sample.read_text() == SAMPLE


def test_check_of_a_reader_takes_a_name_of_a_file_and_leaves_nothing_behind(sample, monkeypatch):
    asked = []

    def law(mine, path, folder):
        """Hold. And more.

        Or less.
        """
        assert isinstance(path, Path)
        assert list(folder.iterdir()) == []
        (folder / "left").write_text("x")
        asked.append((mine.name, path, folder))

    def broken(mine, path, folder):
        """Break."""
        raise faults[0]

    monkeypatch.setattr(of_readers, "READER_LAWS", {"one": law, "two": law, "broken": broken})
    of_readers.check_reader(reader(), str(sample), only=("one", "two"))
    of_readers.check_reader(reader(), sample, only="two")
    of_readers.check_reader(reader(), sample, only=())
    assert [(name, path) for name, path, _ in asked] == [("mine", sample)] * 3
    assert len({folder for *_, folder in asked}) == 3
    assert not any(folder.exists() for *_, folder in asked)
    faults = []
    for error, words in (AssertionError("it is so"), "it is so"), (KeyError(1), r"KeyError\(1\)"):
        faults[:] = [error]
        law = rf"^reader 'mine' breaks the law 'broken' \(Break\):\n  {words}$"
        with pytest.raises(LawBroken, match=law):
            of_readers.check_reader(reader(), sample)
    assert len(asked) == 7
    assert [path.name for path in sample.parent.iterdir()] == ["sample.csv"]


FIELDS = [field.name for field in dataclasses.fields(Trace)]


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "report"])
@pytest.mark.parametrize("place", range(3))
def test_column_that_is_there_in_one_reading_only_or_differs_in_a_row_is_another(name, place):
    class Named:
        def __init__(self, *values):
            self.values = list(values)

        def rows(self):
            return self.values

    make = Named if name in ("prefix", "turns") else lambda *values: np.array(values)
    mine, other = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]
    other[place] += 1e-9
    plain = dict.fromkeys(FIELDS)
    same = of_readers._require_same
    same(Rows(**plain), Rows(**plain), "it")
    same(Rows(**{**plain, name: make(*mine)}), Rows(**{**plain, name: make(*mine)}), "it")
    pairs = [(make(*mine), make(*other)), (make(*mine), None), (make(*mine), make(*mine[:-1]))]
    if make is not Named:
        holed = [*mine]
        holed[place] = float("nan")
        pairs += [(make(*mine), make(*holed)), (make(*holed), make(*mine)), (None, make(*mine))]
        same(Rows(**{**plain, name: make(*holed)}), Rows(**{**plain, name: make(*holed)}), "it")
    for one, another in pairs:
        with pytest.raises(AssertionError, match=f"^it gives another {name}$"):
            same(Rows(**{**plain, name: one}), Rows(**{**plain, name: another}), "it")


def test_reader_that_is_ours_is_read_in_one_piece_of_many_rows(tmp_path):
    path = tmp_path / "sample.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,374,44\n")
    assert of_readers._read(READERS["azure"], path).prompt_tokens.tolist() == [374]
