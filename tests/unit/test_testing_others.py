"""The checks for cost models, executors and readers: ours pass, and each catches a bad one."""

import json
from dataclasses import fields, replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.core.executor import SimExecutor, Steps
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError, TraceError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from schedlab.sim.request import RequestState
from schedlab.testing import (
    COST_MODEL_LAWS,
    EXECUTOR_LAWS,
    READER_LAWS,
    LawBroken,
    LinearCost,
    check_cost_model,
    check_executor,
    check_reader,
)
from schedlab.testing import cost_model as cost_model_laws
from schedlab.testing import reader as reader_laws
from schedlab.testing.cases import _MAX_TRIES, Case, random_cases, smallest
from schedlab.testing.check import verdicts
from schedlab.testing.executor import _Watch
from schedlab.traces.readers import READERS
from schedlab.traces.trace import Trace
from tests.laws import arrival

# -- cost models -------------------------------------------------------------------------------


@pytest.mark.parametrize("law", COST_MODEL_LAWS)
def test_our_cost_models_keep(law):
    check_cost_model(LinearCost(), only=law)
    check_cost_model(RooflineCostModel(Deployment(model("llama-3-8b"), gpu("a100-80gb"))), only=law)


@pytest.mark.parametrize("cls", [LinearCost, RooflineCostModel])
def test_class_of_cost_models_is_checked_by_one_that_is_made(cls):
    check_cost_model(cls, only="takes_time", num_shapes=2)


def test_class_of_cost_models_is_named_where_one_breaks_a_law_or_cannot_be_made():
    with pytest.raises(LawBroken, match="cost model Floats breaks the law 'takes_time'"):
        check_cost_model(Floats, num_shapes=2)

    class Refusing(LinearCost):
        def __init__(self, deployment):
            raise ValueError(f"not for {deployment.gpu.name}")

    with pytest.raises(SpecError, match="cost model Refusing: not for "):
        check_cost_model(Refusing)


class Floats(LinearCost):
    def step_ns(self, shape, k=1):
        return [float(t) for t in super().step_ns(shape, k)]


class FreeOfCharge(LinearCost):
    def step_ns(self, shape, k=1):
        return [0 if shape.num_decodes == 1 else t for t in super().step_ns(shape, k)]


class FrozenContext(LinearCost):
    """Forgets that contexts grow from step to step."""

    def step_ns(self, shape, k=1):
        return super().step_ns(shape, 1) * k


class Warming(LinearCost):
    """Gets faster the more it is asked."""

    def step_ns(self, shape, k=1):
        self.base_ns += 1
        return super().step_ns(shape, k)


class Cached(LinearCost):
    """Hands out the list it keeps."""

    def __init__(self):
        super().__init__()
        self._kept = {}

    def step_ns(self, shape, k=1):
        return self._kept.setdefault((shape, k), super().step_ns(shape, k))


class Unwritable(LinearCost):
    """Describes itself in what is no plain data."""

    def describe(self):
        return {"name": "unwritable", "by": {1, 2}}


class Anonymous(LinearCost):
    def describe(self):
        return {"object": "without a name"}


class Lonely(LinearCost):
    """Lets the context of one decode grow slower, if several steps of it are asked for."""

    def step_ns(self, shape, k=1):
        times = super().step_ns(shape, k)
        return [ns - j * (shape.num_decodes == 1) for j, ns in enumerate(times)]


class OneMore(LinearCost):
    """Prices a step more than it is asked for."""

    def step_ns(self, shape, k=1):
        return super().step_ns(shape, k + (k > 1))


BAD_MODELS = [
    (Floats, "takes_time", "is float, not int"),
    (FreeOfCharge, "takes_time", "a step takes 0 ns"),
    (OneMore, "takes_time", "step_ns gives 121 times, not 120"),
    (FrozenContext, "prices_many_steps_as_single_ones", "step 1 takes .* alone and"),
    (Lonely, "prices_many_steps_as_single_ones", "step 1 takes .* alone and"),
    (Warming, "answers_alike", "the same step takes"),
    (Cached, "hands_out_fresh_lists", "changes the model"),
    (Anonymous, "describes_itself", "has no name"),
    (Unwritable, "describes_itself", "not JSON serializable"),
]


@pytest.mark.parametrize(("bad", "law", "reason"), BAD_MODELS)
def test_cost_model_that_breaks_a_law_is_caught(bad, law, reason):
    with pytest.raises(LawBroken, match=reason) as caught:
        check_cost_model(bad(), only=law)
    assert "BatchShape(" in str(caught.value)


class MindsOthers(LinearCost):
    """Adds the decodes of the last shape that was another one."""

    def __init__(self):
        super().__init__(100)
        self._asked = [BatchShape(0, 0, 0)]

    def step_ns(self, shape, k=1):
        other = next(one for one in reversed(self._asked) if one != shape)
        self._asked.append(shape)
        return [time_ns + other.num_decodes for time_ns in super().step_ns(shape, k)]


class OneList(LinearCost):
    """Gets slower with each call, and writes that into one list."""

    def __init__(self):
        super().__init__(100)
        self._times = []

    def step_ns(self, shape, k=1):
        self.base_ns += 1
        self._times[:] = super().step_ns(shape, k)
        return self._times


@pytest.mark.parametrize(("bad", "first_ns", "then_ns"), [(MindsOthers, 0, 3), (OneList, 1, 3)])
def test_cost_model_that_answers_otherwise_after_another_question_is_told_both_times(
    bad, first_ns, then_ns
):
    shape = BatchShape(1, 5, 5)
    (plain_ns,) = LinearCost(100).step_ns(shape)
    law = rf"the same step takes {plain_ns + first_ns} ns, then {plain_ns + then_ns} ns"
    with pytest.raises(AssertionError, match=law):
        cost_model_laws.answers_alike(bad(), shape, 1)


def test_every_law_of_cost_models_has_one_that_breaks_it():
    assert {law for _, law, _ in BAD_MODELS} == set(COST_MODEL_LAWS)


# -- executors ---------------------------------------------------------------------------------


def simulated(case):
    return SimExecutor(Pricing(case.cost))


@pytest.mark.slow
def test_simulated_executor_keeps_all_laws():
    check_executor(simulated, num_cases=6)


class Overeager(SimExecutor):
    """Runs a step more than it is asked for, where nobody finishes."""

    def execute(self, work, max_steps, horizon_ns):
        steps = super().execute(work, max_steps, horizon_ns)
        if steps.finished or work.plan.chunks:
            return steps
        return Steps(steps.durations_ns + steps.durations_ns[-1:], 0, [])


class OvereagerInTime(SimExecutor):
    """Runs a step more than it is asked for where that one begins before the horizon."""

    def execute(self, work, max_steps, horizon_ns):
        steps = super().execute(work, max_steps, horizon_ns)
        end_ns = work.now_ns + sum(steps.durations_ns)
        if steps.finished or len(steps.durations_ns) < max_steps or end_ns >= horizon_ns:
            return steps
        return Steps(steps.durations_ns + steps.durations_ns[-1:], steps.overhead_ns, [])


class OvereagerInNumber(SimExecutor):
    """Runs the steps it may, the last of them behind the horizon."""

    def execute(self, work, max_steps, horizon_ns):
        steps = super().execute(work, max_steps, horizon_ns)
        end_ns = work.now_ns + sum(steps.durations_ns)
        if steps.finished or len(steps.durations_ns) >= max_steps or end_ns < horizon_ns:
            return steps
        return Steps(steps.durations_ns + steps.durations_ns[-1:], steps.overhead_ns, [])


class Wrong(SimExecutor):
    """Answers every fifth time what a step cannot be."""

    what = ""
    calls = 0

    def execute(self, work, max_steps, horizon_ns):
        steps = super().execute(work, max_steps, horizon_ns)
        self.calls += 1
        if self.calls % 5:
            return steps
        (first, *others), overhead_ns, finished = (
            steps.durations_ns, steps.overhead_ns, steps.finished
        )  # fmt: skip
        if self.what == "a truth":
            first = True
        elif self.what == "a float":
            first = float(first)
        elif self.what == "no time":
            first = 0
        elif self.what == "none at all":
            return Steps([], 0, finished)
        elif self.what == "overhead":
            overhead_ns = -1
        elif self.what == "twice":
            finished = [*work.decodes.members.values()][:1] * 2
        elif self.what == "a stranger":
            finished = [*finished, RequestState(arrival(99).request)]
        return Steps([first, *others], overhead_ns, finished)


class Borrows(SimExecutor):
    """Takes a token from who decodes, in every step but the last, and gives it back."""

    borrowed = None

    def execute(self, work, max_steps, horizon_ns):
        if self.borrowed is not None:
            self.borrowed._computed += 1
            self.borrowed = None
        steps = super().execute(work, max_steps, horizon_ns)
        for state in work.decodes.members.values():
            if state not in steps.finished:
                self.borrowed = state
                state._computed -= 1
                break
        return steps


def wrong(what):
    return type(f"Wrong{what.title().replace(' ', '')}", (Wrong,), {"what": what})


class CutsShort(SimExecutor):
    """Ends every answer one token early."""

    def add(self, request, output_tokens):
        super().add(request, max(output_tokens - 1, 1))


class RunsOn(SimExecutor):
    """Ends every answer one token late."""

    def add(self, request, output_tokens):
        super().add(request, output_tokens + 1)


class Drifting(SimExecutor):
    """Takes a nanosecond longer with each call."""

    calls = 0

    def execute(self, work, max_steps, horizon_ns):
        self.calls += 1
        steps = super().execute(work, max_steps, horizon_ns)
        steps.durations_ns[0] += self.calls
        return steps


BAD_EXECUTORS = [
    (Overeager, "runs_no_more_than_asked", "steps, asked for|starts at"),
    (OvereagerInTime, "runs_no_more_than_asked", r"(\d+) steps, asked for 1 to (?!\1)"),
    (OvereagerInNumber, "runs_no_more_than_asked", "last step starts at .* ns, not before"),
    (CutsShort, "generates_true_lengths", "gets .* tokens, not"),
    (RunsOn, "generates_true_lengths", "gets .* tokens, not"),
    (Borrows, "generates_true_lengths", "tokens, .* are|is off"),
    (Drifting, "runs_many_steps_as_single_ones", "the runs differ at"),
    (wrong("a float"), "runs_no_more_than_asked", r"a step takes \d+\.0 ns"),
    (wrong("a truth"), "runs_no_more_than_asked", "a step takes True ns"),
    (wrong("no time"), "runs_no_more_than_asked", "a step takes 0 ns"),
    (wrong("none at all"), "runs_no_more_than_asked", "0 steps, asked for 1 to"),
    (wrong("overhead"), "runs_no_more_than_asked", "-1 ns of overhead"),
    (wrong("twice"), "runs_no_more_than_asked", "somebody twice"),
    (wrong("a stranger"), "runs_no_more_than_asked", "finish, but .* ran"),
]


@pytest.mark.parametrize(("bad", "law", "reason"), BAD_EXECUTORS)
def test_executor_that_breaks_a_law_is_caught(bad, law, reason):
    with pytest.raises(LawBroken, match=reason) as caught:
        check_executor(lambda case: bad(Pricing(case.cost)), only=law)
    assert caught.value.case is not None


def test_every_law_of_executors_has_one_that_breaks_it():
    assert {law for _, law, _ in BAD_EXECUTORS} == set(EXECUTOR_LAWS)


# -- readers -----------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
2023-11-16 18:15:51.3910170,91,16
"""


@pytest.fixture
def sample(tmp_path):
    path = tmp_path / "sample.csv"
    path.write_text(AZURE)
    return path


@pytest.mark.parametrize("law", READER_LAWS)
def test_azure_reader_keeps(law, sample):
    check_reader(READERS["azure"], sample, only=law)


def _believes_all(reader):
    return reader._replace(sniff=lambda peek: True)


def _loses_the_last_of_a_chunk(reader):
    def chunks(path, options):
        for trace in reader.chunks(path, options):
            yield (
                trace.head(len(trace) - 1) if options.chunk_rows == 2 and len(trace) > 1 else trace
            )

    return reader._replace(chunks=chunks)


def _miscounts(reader):
    return reader._replace(name="another")


def _writes(reader):
    def chunks(path, options):
        yield from reader.chunks(path, options)
        with path.open("a") as file:
            file.write("\n")

    return reader._replace(chunks=chunks)


def _crashes(reader):
    def chunks(path, options):
        try:
            yield from reader.chunks(path, options)
        except TraceError:
            json.loads("not JSON")

    return reader._replace(chunks=chunks)


def changed(**columns):
    """Let a reader give other columns, worked out of the whole of what it read."""

    def bad(reader):
        def chunks(path, options):
            for trace in reader.chunks(path, options):
                yield replace(trace, **{
                    name: change(getattr(trace, name)) for name, change in columns.items()
                })  # fmt: skip

        return reader._replace(chunks=chunks)

    return bad


def only_where(wrong):
    """Let a reader give longer answers where a law asks for them so."""

    def bad(reader):
        calls = []

        def chunks(path, options):
            calls.append(path)
            for trace in reader.chunks(path, options):
                is_wrong = wrong(len(calls), path, options.chunk_rows)
                yield replace(trace, output_tokens=trace.output_tokens + is_wrong)

        return reader._replace(chunks=chunks)

    return bad


def _drops_the_last(reader):
    def chunks(path, options):
        for trace in reader.chunks(path, options):
            yield trace.head(len(trace) - 1)

    return reader._replace(chunks=chunks)


def _knows_nothing(reader):
    return reader._replace(sniff=lambda peek: False)


def _swallows(reader):
    def chunks(path, options):
        try:
            yield from reader.chunks(path, options)
        except TraceError:
            yield from ()

    return reader._replace(chunks=chunks)


def _hides_the_file(reader):
    def chunks(path, options):
        try:
            yield from reader.chunks(path, options)
        except TraceError:
            raise TraceError("something is wrong") from None

    return reader._replace(chunks=chunks)


def _names_no_ending(reader):
    def chunks(path, options):
        try:
            yield from reader.chunks(path, options)
        except TraceError:
            raise TraceError(f"{path.stem} is wrong") from None

    return reader._replace(chunks=chunks)


BAD_READERS = [
    (_knows_nothing, "knows_its_format", "sample.csv is not recognised"),
    (
        changed(prompt_tokens=lambda tokens: tokens * [1, 1, 1, 0]),
        "gives_valid_requests",
        "a prompt of no token|prompt_tokens must be >= 1",
    ),
    (
        changed(output_tokens=lambda tokens: tokens * [0, 1, 1, 1]),
        "gives_valid_requests",
        "an answer of no token|output_tokens must be >= 1",
    ),
    (
        changed(arrival_ns=lambda times: times[::-1]),
        "gives_valid_requests",
        "arrivals go back in time|is earlier than the row before",
    ),
    (
        changed(arrival_ns=lambda times: times - times[-1]),
        "gives_valid_requests",
        "the first request comes before time 0|arrival_ns must be >= 0",
    ),
    (_drops_the_last, "gives_valid_requests", "the report says 4 requests are left, there are 3"),
    (
        only_where(lambda n, path, rows: rows == 1),
        "reads_in_chunks_what_it_reads_whole",
        "in chunks of 1 gives another output_tokens",
    ),
    (
        only_where(lambda n, path, rows: path.suffix == ".gz"),
        "reads_in_chunks_what_it_reads_whole",
        "sample.csv.gz in chunks of 65536",
    ),
    (only_where(lambda n, path, rows: n == 2), "leaves_the_file_alone", "a second reading gives"),
    (_swallows, "names_file_and_row_of_a_mistake", "is read without an error|ValueError|empty"),
    (_names_no_ending, "names_file_and_row_of_a_mistake", "names no file: damaged is wrong"),
    (_hides_the_file, "names_file_and_row_of_a_mistake", "names no file: something is wrong"),
    (_believes_all, "knows_its_format", "is taken for its own"),
    (_loses_the_last_of_a_chunk, "reads_in_chunks_what_it_reads_whole", "in chunks of 2"),
    (_miscounts, "gives_valid_requests", "the report says format 'azure'"),
    (_writes, "leaves_the_file_alone", "changes the file"),
    (_crashes, "names_file_and_row_of_a_mistake", "JSONDecodeError"),
]


@pytest.mark.parametrize(("bad", "law", "reason"), BAD_READERS)
def test_reader_that_breaks_a_law_is_caught(bad, law, reason, sample):
    with pytest.raises(LawBroken, match=reason):
        check_reader(bad(READERS["azure"]), sample, only=law)


def test_every_law_of_readers_has_one_that_breaks_it():
    assert {law for _, law, _ in BAD_READERS} == set(READER_LAWS)


@pytest.mark.parametrize(("horizon_ns", "holds"), [(11, True), (10, False)])
def test_last_of_many_steps_has_to_start_before_the_horizon_and_may_end_behind_it(
    horizon_ns, holds
):
    executor = SimpleNamespace(
        kv_bytes=None, prices_never_fall=False, execute=lambda *_: Steps([4, 6, 9], 0, [])
    )
    work = SimpleNamespace(
        now_ns=0, decodes=None, shape=SimpleNamespace(num_decodes=0),
        plan=SimpleNamespace(chunks=()),
    )  # fmt: skip
    if holds:
        assert _Watch(executor).execute(work, 3, horizon_ns).durations_ns == [4, 6, 9]
        return
    with pytest.raises(AssertionError, match="the last step starts at 10 ns, not before 10 ns"):
        _Watch(executor).execute(work, 3, horizon_ns)


@pytest.mark.parametrize(
    ("finished", "fault"),
    [(["a", "b"], None), (["a", "a"], "somebody twice"), (["a", "c"], "finish, but")],
)
def test_those_who_finish_took_part_and_each_finishes_once(finished, fault):
    executor = SimpleNamespace(
        kv_bytes=None, prices_never_fall=False, execute=lambda *_: Steps([4], 0, finished)
    )
    work = SimpleNamespace(
        now_ns=0, decodes=SimpleNamespace(members={0: "a"}), shape=SimpleNamespace(num_decodes=1),
        plan=SimpleNamespace(chunks=(("b", 3),)),
    )  # fmt: skip
    if fault is None:
        assert _Watch(executor).execute(work, 1, 9).finished == finished
        return
    with pytest.raises(AssertionError, match=fault):
        _Watch(executor).execute(work, 1, 9)


@pytest.mark.parametrize(
    ("meeting", "alone"), [(ValueError, KeyError), (LookupError, KeyError), (KeyError, LookupError)]
)
def test_smaller_case_that_is_shown_fails_in_the_same_way(meeting, alone):
    def law(subject, case):
        if len(case.workload) > 1:
            raise meeting("two meet")
        raise alone("one is alone")

    case = next(c for c in random_cases(seed=0) if len(c.workload) > 4)
    (verdict,) = verdicts("it", None, {"law": law}, [case])
    assert len(verdict.broken.case.workload) == 2
    assert type(verdict.broken.__cause__) is meeting


def test_smaller_cases_are_tried_as_often_as_the_most_and_no_oftener():
    asked = []
    large = Case(tuple(arrival(i, i, 9, 9) for i in range(60)), next(random_cases()).limits)
    smallest(large, asked.append)
    assert len(asked) == _MAX_TRIES
    for seed in range(5):
        asked.clear()
        draw = Random(seed)
        smallest(large, lambda case: asked.append(case) or draw.random() < 0.05)  # noqa: B023
        assert len(asked) == _MAX_TRIES, "as often in all, however many are found"
    asked.clear()
    smallest(replace(large, workload=large.workload[:2]), asked.append)
    assert len(asked) == 2 + 2 + 2 * 2, "halves, one left out, one with a shorter answer or prompt"


@pytest.mark.parametrize(("rows_read", "holds"), [(8, True), (7, False), (5, False)])
def test_requests_are_the_rows_read_less_all_that_were_dropped(monkeypatch, rows_read, holds):
    report = SimpleNamespace(rows_read=rows_read, rows_dropped={"a": 2, "b": 3}, format="mine")
    ones = np.ones(3, dtype=np.int64)
    trace = SimpleNamespace(prompt_tokens=ones, output_tokens=ones, arrival_ns=None, report=report)
    monkeypatch.setattr(reader_laws, "_read", lambda *_: Rows(trace))
    told = SimpleNamespace(name="mine")
    if holds:
        reader_laws.gives_valid_requests(told, None, None)
    else:
        with pytest.raises(AssertionError, match=f"says {rows_read - 5} requests are left"):
            reader_laws.gives_valid_requests(told, None, None)


class Rows:
    """Three rows of a trace."""

    def __init__(self, trace):
        self.__dict__.update(vars(trace))

    def __len__(self):
        return 3


def test_cost_model_is_asked_about_the_same_batches_for_every_law_and_each_time(monkeypatch):
    asked = {}

    def noting(name):
        def law(model, shape, k):
            """Note. And more of it."""
            asked.setdefault(name, []).append((shape, k))

        return law

    laws = {name: noting(name) for name in ("one", "two", "three")}
    monkeypatch.setattr(cost_model_laws, "COST_MODEL_LAWS", laws)
    check_cost_model(None, num_shapes=7)
    first = dict(asked)
    assert list(first) == ["one", "two", "three"]
    assert first["one"] == first["two"] == first["three"]
    assert len(first["one"]) == 7
    for only, names in (("two", ["two"]), (["three", "one"], ["three", "one"])):
        asked.clear()
        check_cost_model(None, num_shapes=5, only=only)
        assert list(asked) == names
        assert all(some == first["one"][:5] for some in asked.values())
    asked.clear()
    check_cost_model(None, num_shapes=7, seed=1, only="one")
    assert asked["one"] != first["one"]
    asked.clear()
    check_cost_model(None, only="one")
    assert len(asked["one"]) == 200

    def broken(model, shape, k):
        """Hold. And so on."""
        assert k < 17, "no more"

    def odd(model, shape, k):
        raise KeyError(k)

    laws.update(broken=broken, odd=odd)
    shape, k = next(one for one in first["one"] if one[1] >= 17)
    with pytest.raises(LawBroken) as caught:
        check_cost_model(LinearCost(), only="broken")
    assert (caught.value.law, str(caught.value).count("no more\n")) == ("broken", 1)
    assert f"for {shape}, k = {k}" in str(caught.value)
    assert "cost model LinearCost" in str(caught.value)
    assert "Hold" in str(caught.value)
    with pytest.raises(LawBroken, match=r"KeyError\("):
        check_cost_model(LinearCost(), only="odd")


class CutsShortOfLimit(SimExecutor):
    """Ends every answer a token before its limit."""

    def add(self, request, output_tokens):
        super().add(request, request.max_tokens - 1)


def test_answer_that_is_cut_off_is_asked_for_as_far_as_its_limit():
    case = next(iter(random_cases(0, 1)))
    long = [
        replace(one, request=replace(one.request, max_tokens=3), output_tokens=8)
        for one in case.workload[:3]
    ]
    case = replace(case, workload=tuple(long))
    check_executor(simulated, only="generates_true_lengths", cases=[case])
    with pytest.raises(LawBroken, match="gets 2 tokens, not 3"):
        check_executor(
            lambda case: CutsShortOfLimit(Pricing(case.cost)), only="generates_true_lengths",
            cases=[case],
        )  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 2])
def test_reader_that_takes_letters_for_numbers_is_caught_on_a_sample_of_two_rows(
    tmp_path, num_rows
):
    """Of one row there is none before it to tell what a row is like."""
    sample = tmp_path / "sample.csv"
    sample.write_text("a,b\n" + "1,2\n" * num_rows)

    def forgives(reader, path):
        text = path.read_text()
        if not text or "\x00" in text:
            raise TraceError(f"{path.name}: damaged")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_laws, "_read", forgives)
        if num_rows == 1:
            reader_laws.names_file_and_row_of_a_mistake(None, sample, tmp_path)
            return
        with pytest.raises(AssertionError, match="letters for numbers is read without an error"):
            reader_laws.names_file_and_row_of_a_mistake(None, sample, tmp_path)


FIELDS = [field.name for field in fields(Trace)]


@pytest.mark.parametrize("name", FIELDS)
def test_traces_that_differ_in_one_field_are_told_apart_by_it(name):
    def trace(**changes):
        rows = {key: SimpleNamespace(rows=lambda: [1, 2]) for key in ("prefix", "turns")}
        columns = dict.fromkeys(FIELDS, np.array([1.0, np.nan, 3.0]))
        return SimpleNamespace(**{**columns, **rows, **changes})

    reader_laws._require_same(trace(), trace(), "reading it again")
    others = [np.array([1.0, np.nan, 4.0]), np.array([1.0, np.nan]), None]
    if name in ("prefix", "turns"):
        others = [SimpleNamespace(rows=lambda: [1, 3]), None]
    for other in others:
        with pytest.raises(AssertionError, match=f"reading it again gives another {name}$"):
            reader_laws._require_same(trace(), trace(**{name: other}), "reading it again")
