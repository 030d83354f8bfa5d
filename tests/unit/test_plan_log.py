from dataclasses import replace

import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan_log import (
    Difference,
    RecordedStep,
    RecordingExecutor,
    first_difference,
    teacher_forced,
)
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from tests import laws
from tests.laws import arrival

CONFIG = EngineConfig(
    num_blocks=8, max_model_len=32, block_size=4, max_num_seqs=4, max_num_batched_tokens=32
)
WORK = [arrival(i, i * 1_500, 4 + 2 * i, 3 + i) for i in range(8)]


def record(work=WORK, config=CONFIG, cost=None, policy="fcfs"):
    recorder = RecordingExecutor(SimExecutor(Pricing(cost or laws.LinearCost())))
    log = simulate(Engine(config, registry.make(policy), recorder), work)
    return recorder.steps, log


def test_recording_executor_records_each_step_and_changes_no_result():
    steps, log = record()
    plain = laws.run(registry.make("fcfs"), WORK, CONFIG)
    assert laws.signature(log) == laws.signature(plain)
    assert len(steps) == log.num_steps
    assert sum(sum(s.tokens.values()) for s in steps) == int(
        (log.steps()["num_decodes"] + log.steps()["prefill_tokens"]).sum()
    )
    assert sum(len(s.preempted) for s in steps) == int(log.steps()["num_preempted"].sum()) > 0


def test_recorded_step_takes_its_time_with_the_overhead_that_is_told_apart():
    pricing = Pricing(laws.LinearCost(100, 0, 0), SchedulingOverhead(base_s=3e-8))
    recorder = RecordingExecutor(SimExecutor(pricing))
    simulate(Engine(CONFIG, registry.make("fcfs"), recorder), [arrival(0, 0, 4, 2)])
    assert [(s.start_ns, s.duration_ns, s.overhead_ns) for s in recorder.steps] == [
        (0, 130, 30),
        (130, 130, 30),
    ]


def test_first_difference_of_equal_decisions_is_none_even_if_times_differ():
    # All at once, nothing depends on time.
    burst = [replace(a, request=replace(a.request, arrival_ns=0), ready_ns=0) for a in WORK]
    first, _ = record(burst)
    second, _ = record(burst, cost=laws.LinearCost(base_ns=9_999))
    assert [s.duration_ns for s in first] != [s.duration_ns for s in second]
    assert first_difference(first, second) is None


def test_first_difference_names_the_step_and_the_requests():
    first, _ = record()
    second, _ = record(config=replace(CONFIG, max_num_seqs=1))
    found = first_difference(first, second)
    assert found is not None
    assert all(a.tokens == b.tokens for a, b in zip(first[: found.step], second, strict=False))
    assert f"step {found.step}: request" in found.explain()


@pytest.mark.parametrize(
    ("num_changed", "told"),
    [
        (1, "request 0 gets 1 against 0 tokens"),
        (3, "request 0 gets 1 against 0 tokens; request 1 gets 1 against 0 tokens; "
            "request 2 gets 1 against 0 tokens"),
        (4, "request 0 gets 1 against 0 tokens; request 1 gets 1 against 0 tokens; "
            "request 2 gets 1 against 0 tokens; and 1 more"),
        (9, "request 0 gets 1 against 0 tokens; request 1 gets 1 against 0 tokens; "
            "request 2 gets 1 against 0 tokens; and 6 more"),
    ],
)  # fmt: skip
def test_difference_names_three_requests_and_counts_the_others(num_changed, told):
    shape = BatchShape(1, 1, 1)
    one = RecordedStep(0, dict.fromkeys(range(num_changed), 1), (), shape, 10, 0)
    for start_ns in (0, 5):  # nobody knows who came in between
        other = RecordedStep(start_ns, {}, (), shape, 10, 0)
        line = f"step 2: {told} (the step starts at 0.0000 s against 0.0000 s)"
        assert Difference(2, one, other).explain() == line


def test_first_difference_of_a_shorter_run_is_its_end():
    steps, _ = record()
    found = first_difference(steps, steps[:-1])
    assert found is not None
    assert found.step == len(steps) - 1
    assert "has ended" in found.explain()


def test_teacher_forced_prices_the_recorded_steps():
    steps, _ = record(cost=laws.LinearCost(base_ns=2_000))
    predicted, measured = teacher_forced(steps, laws.LinearCost(base_ns=1_500))
    assert (measured - predicted == 500).all()


def test_difference_by_an_arrival_between_the_two_starts_says_so():
    shape = BatchShape(1, 8, 8)
    early = RecordedStep(1_000, {1: 1}, (), shape, 10, 0)
    late = RecordedStep(2_000, {1: 1, 2: 16}, (), shape, 10, 0)
    found = first_difference([early], [late])
    assert found.explain({1: 0, 2: 1_500}).endswith("request 2 came in between)")
    assert "came" not in found.explain({1: 0, 2: 500})
    assert "request 2 gets 0 against 16 tokens" in found.explain()


def test_recording_executor_passes_everything_on_as_it_is():
    class Inner:
        kv_bytes, prices_never_fall = None, True

        def __getattr__(self, name):
            def call(*given):
                asked.append((name, *given))
                return f"answer to {name}"

            return call

    asked = []
    recorder = RecordingExecutor(Inner())
    calls = {
        "add": ("request", 5), "joined": ("states", "decodes"), "look_ahead": ("state",),
        "cut": (3,), "released": ("a",), "swapped_out": ("b",), "swapped_in": ("c",),
        "remove": ("d",), "output_tokens": ("e",), "estimate_step_ns": ("shape", 7),
        "chunk_pricer": ("shape", 11),
    }  # fmt: skip
    answers = {name: getattr(recorder, name)(*given) for name, given in calls.items()}
    assert asked == [(name, *given) for name, given in calls.items()]
    answering = ("output_tokens", "estimate_step_ns", "chunk_pricer")
    assert answers == {name: f"answer to {name}" if name in answering else None for name in calls}
    assert (recorder.kv_bytes, recorder.prices_never_fall) == (None, True)
    own = {name for name in vars(RecordingExecutor) if not name.startswith("_")}
    assert own - calls.keys() == {"execute"}


def test_recorded_step_is_priced_by_its_shape_and_beside_its_overhead():
    shapes = [BatchShape(1, 5, 5), BatchShape(2, 20, 12), BatchShape(0, 0, 0, chunks=((7, 0),))]
    steps = [RecordedStep(0, {}, (), shape, 1_000 + i, 30) for i, shape in enumerate(shapes)]
    model = laws.LinearCost()
    predicted_ns, measured_ns = teacher_forced(steps, model)
    assert predicted_ns.tolist() == [model.step_ns(shape)[0] for shape in shapes]
    assert measured_ns.tolist() == [970, 971, 972]


def test_difference_is_told_in_a_line_with_times_in_seconds_and_who_came_in_between():
    def step(start_s, tokens, preempted=()):
        return RecordedStep(round(start_s * 1e9), tokens, preempted, None, 1, 0)

    one = step(1.5, {1: 4, 2: 1, 3: 1, 4: 1, 5: 1})
    other = step(1.25, {1: 5, 6: 9, 5: 1}, (2,))
    assert Difference(7, one, other).explain({3: 1_250_000_000, 4: 1_500_000_000, 5: 1}) == (
        "step 7: request 1 gets 4 against 5 tokens; request 2 gets 1 against 0 tokens; "
        "request 3 gets 1 against 0 tokens; and 2 more; preempted () against (2,) "
        "(the step starts at 1.5000 s against 1.2500 s; request 4 came in between)"
    )
    assert Difference(7, one, step(2, {**one.tokens, 1: 2})).explain() == (
        "step 7: request 1 gets 4 against 2 tokens (the step starts at 1.5000 s against 2.0000 s)"
    )
    assert Difference(3, None, one).explain() == "step 3: one run has ended"


def step(tokens, preempted=(), start_ns=0, duration_ns=10, overhead_ns=0, decodes=1):
    shape = BatchShape(decodes, 5 * decodes, 5)
    return RecordedStep(start_ns, tokens, preempted, shape, duration_ns, overhead_ns)


ONE, OTHER, EVICTING = step({1: 4}), step({1: 5}), step({1: 4}, (7,))


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([], [], None),
        ([ONE], [step({1: 4}, start_ns=9, duration_ns=3, decodes=2)], None),
        ([ONE, OTHER], [ONE, ONE], (1, OTHER, ONE)),
        ([ONE], [EVICTING], (0, ONE, EVICTING)),
        ([ONE, OTHER], [ONE], (1, OTHER, None)),
        ([ONE], [ONE, OTHER], (1, None, OTHER)),
        ([], [ONE], (0, None, ONE)),
    ],
)
def test_first_difference_is_of_decisions_and_of_how_many_there_are(first, second, found):
    assert first_difference(first, second) == found
    if found is not None and None in found:
        assert first_difference(first, second).explain() == f"step {found[0]}: one run has ended"


def test_difference_is_explained_by_who_gets_what_and_who_came_in_between():
    one = step({1: 4, 2: 5, 3: 6, 4: 1}, (8,), start_ns=2_000_000)
    other = step({1: 9, 3: 7, 4: 2, 5: 3}, (), start_ns=1_000_000)
    assert Difference(6, one, other).explain() == (
        "step 6: request 1 gets 4 against 9 tokens; request 2 gets 5 against 0 tokens; request 3 "
        "gets 6 against 7 tokens; and 2 more; preempted (8,) against () (the step starts at "
        "0.0020 s against 0.0010 s)"
    )
    few = Difference(6, one, step({1: 4, 2: 5, 3: 6, 4: 1, 5: 3}, (8,), start_ns=1_000_000))
    starts = "(the step starts at 0.0020 s against 0.0010 s"
    for came_ns, why in ((1_000_000, ""), (1_000_001, "; request 5 came in between"),
                         (2_000_000, "; request 5 came in between"), (2_000_001, "")):  # fmt: skip
        told = few.explain({5: came_ns, 1: 1_500_000})
        assert told == f"step 6: request 5 gets 0 against 3 tokens {starts}{why})"


def test_recorded_steps_are_priced_one_by_one_beside_what_they_took():
    steps = [step({}, duration_ns=50, overhead_ns=8, decodes=n) for n in (1, 2, 3)]
    predicted, measured = teacher_forced(steps, laws.LinearCost(100, 10, 1))
    assert predicted.tolist() == [100 + 10 * n + 5 * n for n in (1, 2, 3)]
    assert measured.tolist() == [42] * 3
    assert predicted.dtype == measured.dtype == "int64"
