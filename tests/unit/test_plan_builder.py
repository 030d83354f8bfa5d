"""The ledger of a step: what it grants, in which order, and what it refuses to write down."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from schedlab.policies import ContinuousBatching, Policy, registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_log import RecordingExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import InfeasiblePlan
from schedlab.sim.request import RequestState
from tests import laws
from tests.laws import arrival

CONFIG = EngineConfig(
    num_blocks=100, max_model_len=200, block_size=4, max_num_seqs=4, max_num_batched_tokens=16
)


class Once(Policy):
    """Runs what a test gives it as plan()."""

    def __init__(self, plan):
        self._plan = plan

    def plan(self, view, builder):
        return self._plan(view, builder)


def run_plan(plan, workload=None, config=CONFIG):
    return laws.run(Once(plan), workload or [arrival(0, prompt=5, output=3)], config)


def tokens_by_step(policy, workload, config=CONFIG):
    """Return what each step computes: request id to tokens."""
    executor = RecordingExecutor(SimExecutor(Pricing(laws.LinearCost())))
    simulate(Engine(config, policy, executor), workload)
    return [step.tokens for step in executor.steps]


# -- what is refused ---------------------------------------------------------------------------


def refused(action, match):
    """Let a policy do something to its head of the queue, and see it refused by name."""

    def plan(view, builder):
        action(builder, view.waiting.head)
        return builder.build()

    with pytest.raises(InfeasiblePlan, match=rf"policy Once at t = 0\.000000 s: .*{match}"):
        run_plan(plan)


@pytest.mark.parametrize("num_tokens", [-1, -1000])
def test_negative_padding_is_refused(num_tokens):
    refused(lambda b, s: b.pad(num_tokens), f"pad.. needs .* >= 0, got {num_tokens}")


@pytest.mark.parametrize("num_tokens", [0.5, 2.0, "3", None])
def test_padding_that_is_no_whole_number_is_refused(num_tokens):
    refused(lambda b, s: b.pad(num_tokens), "pad.. needs a whole number of tokens")


def test_padding_beyond_the_token_budget_is_refused():
    def overfill(builder, state):
        builder.grant(state)
        builder.pad(11)
        builder.pad(1)

    refused(overfill, "1 padding token.* the budget of the step has 0 left")


def test_padding_up_to_the_token_budget_is_computed():
    def plan(view, builder):
        if view.waiting:
            builder.grant(view.waiting.head)
            builder.pad(11)
        else:
            builder.grant_running()
        return builder.build()

    assert run_plan(plan).steps()["padding_tokens"].tolist() == [11, 0, 0]


def test_first_token_of_a_step_may_be_padded_beyond_the_budget():
    # A prompt of one token beside one of 40, with 16 tokens a step: it is computed all the same.
    work = [arrival(0, prompt=1, output=2), arrival(1, prompt=40, output=2)]
    log = laws.run(registry.make("static"), work, CONFIG)
    assert log.steps()["prefill_tokens"].tolist() == [1, 16, 16, 8, 0]
    assert log.steps()["padding_tokens"].tolist() == [39, 0, 0, 0, 0]


@pytest.mark.parametrize("want", [2.5, "2", np.float64(3.0)])
def test_grant_of_no_whole_number_is_refused(want):
    refused(lambda b, s: b.grant(s, want), "grant.. needs a whole number of tokens")


@pytest.mark.parametrize("want", [0, -2])
def test_grant_of_less_than_a_token_is_refused(want):
    refused(lambda b, s: b.grant(s, want), f"grant.. needs .* >= 1, got {want}")


def test_grant_of_a_numpy_integer_is_a_grant():
    def plan(view, builder):
        for state in (*view.running, *view.waiting):
            builder.grant(state, np.int64(2))
        return builder.build(max_steps=np.int64(1))

    log = run_plan(plan)
    assert log.steps()["prefill_tokens"].tolist() == [2, 2, 1, 0, 0]


@pytest.mark.parametrize(
    ("promise", "match"),
    [
        ({"max_steps": 3.7}, "max_steps needs a whole number"),
        ({"max_steps": 0}, "max_steps needs .* >= 1, got 0"),
        ({"until_ns": 1e9}, "until_ns needs a whole number"),
        ({"finished": "holds"}, "finished must be one of leave, hold, hold_answer, got 'holds'"),
    ],
)
def test_promise_that_is_none_is_refused(promise, match):
    def plan(view, builder):
        builder.grant(view.waiting.head)
        return builder.build(**promise)

    with pytest.raises(InfeasiblePlan, match=match):
        run_plan(plan)


def test_rejecting_twice_is_refused():
    def twice(builder, state):
        builder.reject(state, "no")
        builder.reject(state, "no, really")

    refused(twice, "rejected twice in one step")


@pytest.mark.parametrize("then", ["grant", "admit"])
def test_scheduling_a_rejected_request_is_refused(then):
    def both(builder, state):
        builder.reject(state, "no")
        getattr(builder, then)(state)

    refused(both, "was rejected in this step")


@pytest.mark.parametrize("first", ["grant", "admit"])
def test_rejecting_a_request_just_admitted_is_refused(first):
    def both(builder, state):
        getattr(builder, first)(state)
        builder.reject(state, "no")

    refused(both, "cannot be rejected: it is not waiting")


def test_admitting_twice_is_refused():
    def twice(builder, state):
        builder.admit(state)
        builder.admit(state)

    refused(twice, "cannot be admitted: it is not waiting")


def later_refused(action, match, workload=None):
    """Let two prompts be computed, and a policy then do something to the first; see it refused."""

    def plan(view, builder):
        if view.waiting and not view.running:
            for state in view.waiting:
                builder.grant(state)
            return builder.build()
        action(builder, next(iter(view.running)), view)
        return builder.build()

    work = workload or [arrival(i, prompt=5, output=9) for i in range(2)]
    work.append(arrival(9, 1_060, prompt=5, output=9))  # waits when the second plan is made
    with pytest.raises(InfeasiblePlan, match=rf"policy Once at t = 0\.000\d+ s: .*{match}"):
        run_plan(plan, work)


def preempts(builder, state, view):
    builder.preempt(state)


@pytest.mark.parametrize(
    ("first", "then", "match"),
    [
        (None, lambda b, s, v: b.prefetch(s), "cannot be loaded: it does not wait"),
        (None, lambda b, s, v: b.reject(s, "no"), "cannot be rejected: it is not waiting"),
        (None, lambda b, s, v: b.admit(s), "cannot be admitted: it is not waiting"),
        (None, lambda b, s, v: b.preempt(v.waiting.head), "cannot be preempted: it does not run"),
        (preempts, preempts, "cannot be preempted: it does not run"),
        (preempts, lambda b, s, v: b.grant(s), "cannot be scheduled: it neither runs nor waits"),
        (preempts, lambda b, s, v: b.reject(s, "no"), "cannot be rejected: it is not waiting"),
        (preempts, lambda b, s, v: b.prefetch(s), "cannot be loaded: it does not wait"),
        (lambda b, s, v: b.grant(s), lambda b, s, v: b.grant(s), "granted tokens twice in one"),
        (lambda b, s, v: b.grant_decodes(), lambda b, s, v: b.grant(s), "granted tokens twice in"),
        (lambda b, s, v: b.grant_decodes(), preempts, "preempted after all decodes were granted"),
        (lambda b, s, v: b.reject(v.waiting.head, "no"),
         lambda b, s, v: b.prefetch(v.waiting.head), "was rejected in this step"),
        (lambda b, s, v: b.grant(v.waiting.head), lambda b, s, v: b.prefetch(v.waiting.head),
         "cannot be loaded: it does not wait"),
        (lambda b, s, v: b.grant(v.waiting.head), lambda b, s, v: b.grant(v.waiting.head),
         "granted tokens twice in one step"),
    ],
)  # fmt: skip
def test_plan_that_does_what_cannot_be_to_a_request_is_refused(first, then, match):
    def both(builder, state, view):
        if first is not None:
            first(builder, state, view)
        then(builder, state, view)

    later_refused(both, match)


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (lambda b, s, v: b.prefetch(v.waiting.head), False),  # nothing lies anywhere else
        (lambda b, s, v: b.offload(s), False),  # there is no host memory
        (lambda b, s, v: b.grant(v.waiting.head), 5),
        (lambda b, s, v: b.grant(v.waiting.head, 3), 3),
        (lambda b, s, v: b.grant(s), 1),
    ],
)
def test_plan_is_answered_what_was_granted(action, answer):
    def asks(builder, state, view):
        raise InfeasiblePlan(f"the answer is {action(builder, state, view)}")

    later_refused(asks, f"the answer is {answer}")


def test_preempting_in_an_unknown_way_is_refused():
    def plan(view, builder):
        for state in list(builder.running()):
            builder.preempt(state, "swp")
        for state in view.waiting:
            builder.grant(state)
        return builder.build()

    with pytest.raises(
        InfeasiblePlan, match=r"preempt.. must be one of recompute, swap, got 'swp'"
    ):
        run_plan(plan)


def test_plan_that_grants_after_it_was_built_is_refused():
    def plan(view, builder):
        built = builder.build()
        builder.grant(view.waiting.head)
        return built

    with pytest.raises(InfeasiblePlan, match=r"what builder.build.. gave it last"):
        run_plan(plan)


# -- order -------------------------------------------------------------------------------------


class Pieces(ContinuousBatching):
    """Admits everybody with a first chunk of four tokens."""

    def chunk(self, state, view):
        return 4


@pytest.mark.parametrize(
    ("prompts", "second_step"),
    [
        # In order of admission: the long prompt in front takes the budget, the decodes get none.
        ((40, 2, 2), {0: 16}),
        # Two long prompts: the first one takes it all.
        ((40, 40, 2), {0: 16}),
        # Decodes in front of it come first.
        ((2, 2, 40), {0: 1, 1: 1, 2: 14}),
        ((2, 40, 40), {0: 1, 1: 15}),
        ((2, 12, 40), {0: 1, 1: 8, 2: 7}),
        ((2, 40, 2), {0: 1, 1: 15}),
        # Enough for everybody: everybody.
        ((12, 2, 2), {0: 8, 1: 1, 2: 1}),
    ],
)
def test_running_requests_share_the_budget_in_order_of_admission(prompts, second_step):
    work = [arrival(i, prompt=n, output=20) for i, n in enumerate(prompts)]
    assert tokens_by_step(Pieces(), work)[1] == second_step


def test_running_requests_less_those_preempted_share_in_order_of_admission():
    class EvictsSecond(Pieces):
        def plan(self, view, builder):
            if len(view.running) == 4:
                builder.preempt(list(view.running)[1])
                assert builder.grant_running()
                return builder.build()
            return super().plan(view, builder)

    work = [arrival(i, prompt=n, output=20) for i, n in enumerate((2, 40, 40, 2))]
    # Request 3 decodes behind the prompt of request 2 and finds nothing left.
    assert tokens_by_step(EvictsSecond(), work)[1] == {0: 1, 2: 15}


# -- admission ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("watermark", "waits"), [(0.0, False), (0.88, False), (0.92, True)])
def test_watermark_is_kept_free_while_somebody_runs(watermark, waits):
    # At the end of the first step request 0 takes its second block of 50, and request 1 would
    # take 4 for its 15 tokens: with 44 to be kept they are there, with 46 they are not.
    config = replace(CONFIG, num_blocks=50, watermark=watermark)
    work = [arrival(0, prompt=4, output=30), arrival(1, 500, prompt=80, output=2)]
    requests = laws.run(registry.make("fcfs"), work, config).requests()
    instant = "finish_ns" if waits else "first_token_ns"
    assert requests["first_scheduled_ns"][1] == requests[instant][0]


def test_watermark_does_not_keep_out_a_request_that_finds_the_engine_idle():
    config = replace(CONFIG, num_blocks=50, watermark=0.9, max_num_batched_tokens=200)
    log = laws.run(registry.make("fcfs"), [arrival(0, prompt=198, output=2)], config)
    assert log.requests()["first_scheduled_ns"].tolist() == [0]


@pytest.mark.parametrize(
    ("watermark", "waits"),
    [(0.0, False), (0.1, False), (0.12, True)],
)
def test_reserving_the_whole_prompt_leaves_the_watermark_free(watermark, waits):
    # Request 0 holds 2 blocks of 50; request 1 needs 43 for its prompt and 4 for its first chunk.
    # 48 free blocks less a watermark of 5 are just enough, less 6 are not.
    config = replace(CONFIG, num_blocks=50, watermark=watermark, scheduler_reserve_full_isl=True)
    work = [arrival(0, prompt=4, output=3), arrival(1, 500, prompt=172, output=1)]
    requests = laws.run(registry.make("fcfs"), work, config).requests()
    instant = "finish_ns" if waits else "first_token_ns"
    assert requests["first_scheduled_ns"][1] == requests[instant][0]


# -- decodes granted together ------------------------------------------------------------------


class Together(Policy):
    """Serves decodes latest admission first, all at once or one by one."""

    def __init__(self, at_once, most=9):
        self.at_once = at_once
        self.most = most
        self.answers = []

    def plan(self, view, builder):
        decodes = [state for state in reversed(view.running) if state.is_decoding][: self.most]
        granted = self.at_once and builder.grant_all(decodes)
        self.answers.append(granted)
        if not granted:
            for state in decodes:
                while not builder.grant(state) and builder.tokens_left:
                    builder.preempt(next(builder.running()))
        for state in (*view.prefilling, *view.waiting):
            if state not in builder.preempted:
                builder.grant(state)
        return builder.build()


@pytest.mark.parametrize(("num_blocks", "most"), [(9, 9), (100, 9), (100, 2), (100, 1)])
def test_decodes_granted_at_once_are_those_granted_one_by_one(num_blocks, most):
    config = replace(CONFIG, num_blocks=num_blocks, max_model_len=20, max_num_batched_tokens=5)
    workload = [arrival(i, prompt=3 + i, output=9 + i) for i in range(4)]
    together, apart = Together(at_once=True, most=most), Together(at_once=False, most=most)
    both = [tokens_by_step(p, workload, config) for p in (together, apart)]
    assert both[0] == both[1]
    assert set(together.answers) == {True} if num_blocks == 100 else {True, False}


@pytest.mark.parametrize("wrong", ["twice", "a prompt", "after grant", "after preempt"])
def test_decodes_granted_at_once_that_cannot_be_are_refused(wrong):
    def plan(view, builder):
        for state in view.prefilling or view.waiting:
            if wrong == "a prompt" and view.prefilling:
                builder.grant_all([state])
            builder.grant(state, 2)
            return builder.build()
        (state,) = view.running
        if wrong == "after grant":
            builder.grant(state)
        if wrong == "after preempt":
            builder.preempt(state)
        builder.grant_all([state, state] if wrong == "twice" else [state])
        return builder.build()

    with pytest.raises(InfeasiblePlan, match=r"twice in one step|does not decode"):
        run_plan(plan)


class ByTurns(Policy):
    """Decodes some by chance, granted in one way or another, and checks the plan."""

    pauses = True

    def __init__(self, how):
        self.how = how
        self.told = []
        self.num_swaps = 0  # of the whole batch for a few others
        self.answers = []

    def plan(self, view, builder):
        draw = Random(view.now_ns)
        decodes = [state for state in view.decoding if draw.random() < 0.7] or view.decoding
        draw.shuffle(decodes)
        granted = False
        if self.how == "halves":
            granted = builder.grant_all(decodes[::2]) and builder.grant_all(decodes[1::2])
        elif self.how == "at once":
            granted = builder.grant_all(decodes)
        elif self.how == "few":
            rested = [state for state in view.decoding if state.id in view._requests.paused]
            few = rested[:2] if rested and draw.random() < 0.5 else decodes
            granted = builder.grant_all(few)
        elif self.how == "again":
            others = [state for state in reversed(view.running) if state not in decodes]
            granted = builder.grant_again(others, decodes)
        self.answers.append(granted)
        if not granted:
            for state in decodes:
                builder.serves(state) or builder.grant(state)
        for state in (*view.prefilling, *view.waiting):
            builder.grant(state)
        if self.how == "preempting" and decodes and draw.random() < 0.3:
            builder.preempt(decodes[0])
        plan = builder.build()
        members = view._requests.decodes.members.values()
        if plan.left is not None:
            assert len(plan.left) == len(set(plan.left))
            assert set(plan.left) == {state for state in members if state not in plan.decodes}
            assert plan.joining == [state for state in plan.decodes if state not in members]
            by_seat = [state for state in view.decoding if state in plan.joining]
            assert plan.joining == by_seat or self.how != "again"
            self.num_swaps += len(plan.left) == len(members) > 2 * len(plan.decodes) > 0
        self.told.append(plan.left)
        return plan


@pytest.mark.parametrize("how", ["at once", "few", "again", "halves", "one by one", "preempting"])
def test_plans_tell_who_leaves_the_batch_only_where_that_is_known(how):
    policy = ByTurns(how)
    config = replace(CONFIG, max_num_batched_tokens=64, max_num_seqs=12)
    laws.run(policy, [arrival(i, i, prompt=3, output=4 + i % 7) for i in range(40)], config)
    assert any(policy.told) or how not in ("at once", "few", "again")
    assert how != "few" or policy.num_swaps > 3
    assert None in policy.told or how == "again"


@pytest.mark.parametrize("short", [{}, {"num_blocks": 12}, {"max_num_batched_tokens": 5}])
def test_decodes_granted_again_are_those_granted_by_name(short):
    config = replace(
        CONFIG, max_num_batched_tokens=64, max_num_seqs=6, max_num_resident=12, max_model_len=40
    )
    workload = [arrival(i, i, prompt=3, output=4 + i % 7) for i in range(40)]
    by_name, again = ByTurns("at once"), ByTurns("again")
    both = [tokens_by_step(p, workload, replace(config, **short)) for p in (by_name, again)]
    assert both[0] == both[1]
    assert by_name.answers == again.answers
    assert False in again.answers
    assert True in again.answers


@pytest.mark.parametrize("wrong", ["a prompt", "after a grant"])
def test_decodes_granted_again_that_cannot_be_are_refused(wrong):
    def plan(view, builder):
        for state in view.waiting:
            builder.grant(state, 2)
        for state in view.running:
            if wrong == "after a grant":
                builder.grant(state)
            builder.grant_again([], [state])
        return builder.build()

    with pytest.raises(InfeasiblePlan, match=r"does not decode|already granted"):
        run_plan(plan, [arrival(0, prompt=3 if wrong == "a prompt" else 1, output=3)])


def test_decodes_granted_again_are_served_cannot_be_granted_twice_and_can_be_preempted():
    given_up = []

    def plan(view, builder):
        for state in view.waiting:
            builder.grant(state)
        decodes = list(view.running)
        if len(decodes) == 2 and not given_up:
            assert builder.grant_again([decodes[0]], [])
            left = builder.tokens_left
            assert [builder.serves(state) for state in decodes] == [False, True]
            with pytest.raises(InfeasiblePlan, match="twice"):
                builder.grant(decodes[1])
            with pytest.raises(InfeasiblePlan, match="twice"):
                builder.grant_all(decodes)
            builder.preempt(decodes[1])
            assert builder.tokens_left == left + 1
            given_up.append(decodes[1].id)
            assert builder.grant(decodes[0])
        elif decodes:
            builder.grant_all(decodes)
        return builder.build()

    log = run_plan(plan, [arrival(i, prompt=1, output=4) for i in range(2)])
    assert given_up == [1]
    assert log.requests()["num_preemptions"].tolist() == [0, 1]


def test_decodes_are_not_granted_again_once_somebody_is_preempted():
    answers = []

    def plan(view, builder):
        for state in view.waiting:
            builder.grant(state)
        decodes = list(view.running)
        if len(decodes) == 2 and not answers:
            builder.preempt(decodes[1])
            answers.append(builder.grant_again([decodes[1]], []))
        if not answers or decodes:
            builder.grant_all(decodes[:1])
        return builder.build()

    run_plan(plan, [arrival(i, prompt=1, output=4) for i in range(2)])
    assert answers == [False]


class Remembers(ByTurns):
    """Asks who decoded when the step is done, and others may have come to the batch or left it."""

    def __init__(self, how):
        super().__init__(how)
        self.decoded, self.num_swapped = [], 0

    def on_tokens(self, plan, num_steps, now_ns):
        members = list(self._batch.members.values())
        num_decodes = plan.num_decodes
        self.decoded.append([state.id for state in plan.decodes])
        assert num_decodes == plan.num_decodes == len(plan.decodes)
        self.num_swapped += members != list(plan.decodes)

    def plan(self, view, builder):
        self._batch = view._requests.decodes
        draw = Random(view.now_ns)
        decodes = [state for state in view.decoding if draw.random() < 0.7] or view.decoding
        if self.how == "again":
            builder.grant_again([s for s in view.running if s not in decodes], decodes)
        else:
            members = [s for s in self._batch.members.values() if s in decodes]
            assert builder.grant_all(members + [s for s in decodes if s not in members])
        for state in (*view.prefilling, *view.waiting):
            builder.grant(state)
        return builder.build()


def test_decodes_granted_again_are_told_as_those_granted_by_name_once_the_step_is_done():
    by_name, again = Remembers("by name"), Remembers("again")
    config = replace(CONFIG, num_blocks=1000, max_num_batched_tokens=64, max_num_seqs=20)
    for policy in (by_name, again):
        laws.run(policy, [arrival(i, i, prompt=3, output=4 + i % 7) for i in range(40)], config)
    assert by_name.decoded == again.decoded
    assert again.num_swapped > 10


def test_all_decodes_may_be_granted_after_none_was_granted_again():
    granted = []

    def plan(view, builder):
        for state in view.waiting:
            builder.grant(state)
        if view.decoding:
            assert builder.grant_again(view.decoding, [])
            granted.append(builder.grant_decodes())
        return builder.build()

    log = run_plan(plan, [arrival(i, prompt=1, output=4) for i in range(2)])
    assert granted == [True] * 3
    assert log.steps()["num_decodes"].tolist() == [0, 2, 2, 2]


@pytest.mark.parametrize(("lost", "served"), [(1, {2: 1}), (2, {1: 1}), (0, {1: 1, 2: 1})])
def test_decodes_that_join_those_granted_again_are_known_when_somebody_is_preempted(lost, served):
    """First 0 and 1 decode while 2 is paused; then 1 and 2, and one of the three is preempted."""
    told = []

    def plan(view, builder):
        for state in view.waiting:
            builder.grant(state)
        decodes = {state.id: state for state in view.decoding}
        if len(decodes) == 3 and len(told) < 3:
            told.append(None)
            if len(told) == 1:
                assert builder.grant_all([decodes[0], decodes[1]])
            else:
                assert builder.grant_again([decodes[0]], [decodes[2]])
                builder.preempt(decodes[lost])
                made = builder.build()
                told[1:] = [made.num_scheduled_tokens(), [state.id for state in made.preempted]]
                return made
        else:
            builder.grant_all(view.decoding)
        return builder.build()

    log = run_plan(plan, [arrival(i, prompt=3, output=6) for i in range(3)])
    assert told[1:] == [served, [lost]]
    assert log.requests()["generated_tokens"].tolist() == [6, 6, 6]


GRANTS = {
    "grant": lambda view, builder: builder.grant(view.decoding[0]),
    "grant_all": lambda view, builder: builder.grant_all(view.decoding),
    "grant_decodes": lambda view, builder: builder.grant_decodes(),
    "grant_running": lambda view, builder: builder.grant_running(),
    "grant_again": lambda view, builder: builder.grant_again((), ()),
}


@pytest.mark.parametrize("second", GRANTS)
@pytest.mark.parametrize("first", GRANTS)
def test_decodes_that_were_granted_are_never_granted_again_in_a_step(first, second):
    reached = []

    def plan(view, builder):
        if len(view.decoding) == 2:
            assert GRANTS[first](view, builder)
            reached.append(first)
            GRANTS[second](view, builder)
            return builder.build()
        builder.grant_running()
        for state in view.waiting:
            builder.grant(state)
        return builder.build()

    work = [arrival(i, prompt=5, output=6) for i in range(2)]
    with pytest.raises(InfeasiblePlan, match=r"already granted|twice|granted tokens"):
        run_plan(plan, work)
    assert reached == [first]


def test_decodes_of_a_plan_are_worked_out_once_or_those_it_is_given():
    def plan(**who):
        return BatchPlan(None, (), (), (), (), (), 0, "leave", False, 1, FOREVER, 0, tuple, **who)

    a, b, c, d = (RequestState(arrival(i).request) for i in range(4))
    for left, joining, decodes in (
        (None, None, (a, b, c)), ([b], None, (a, c)), ([a, c], [d], (b, d)), ([], [d], (a, b, c, d))
    ):  # fmt: skip
        one = plan(left=left, joining=joining, members=(a, b, c))
        assert (one.num_decodes, one.decodes, one.num_decodes) == (
            len(decodes), decodes, len(decodes),
        )  # fmt: skip
        given = plan(left=left, joining=joining, members=(a, b, c))
        given.decodes = (d, a)
        assert (given.num_decodes, given.decodes) == (2, (d, a))
        given.decodes = None
        assert (given.num_decodes, given.decodes) == (-1, None)
