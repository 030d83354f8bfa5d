"""The checks for policies: each catches a policy made to break it, and says how to see it again."""

import random
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.policies import ContinuousBatching, Policy, registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.errors import PolicyLied
from schedlab.sim.request import RequestState, Slo
from schedlab.testing import (
    POLICY_LAWS,
    Case,
    LawBroken,
    check_policy,
    fleet_cases,
    random_cases,
)
from schedlab.testing import policy as policy_laws
from schedlab.testing.policy import KeyWatch, _Guard
from tests import laws
from tests.laws import LinearCost, arrival

HERE = __name__
LIMITS = EngineConfig(num_blocks=9, max_model_len=60, block_size=16)


@pytest.mark.parametrize(
    ("sent", "answered", "fault"),
    [
        # One goes out when the next comes; the rejected one is there no time at all.
        ([0, 0, 0, 10, 5], [10, 20, 30, 40, -1], None),
        ([0, 0, 0, 9, 5], [10, 20, 30, 40, -1], "4 requests of 3 clients at 9 ns"),
        ([0, 0, 0, 10, 10], [10, 20, 30, 40, 50], "4 requests of 3 clients at 10 ns"),
        ([0, 0, 0, 10], [10, 20, 30, 40], "not every request was sent"),
    ],
)
def test_closed_loop_law_counts_who_is_there(sent, answered, fault, monkeypatch):
    columns = {"id": sent, "arrival_ns": np.array(sent), "finish_ns": np.array(answered)}
    asked = []

    def run(policy, case, **options):
        asked.append(options)
        # In a case of an odd number of requests each is ready a step after it is sent.
        assert all(one.ready_ns - one.request.arrival_ns == 100 for one in case.workload)
        return SimpleNamespace(requests=lambda: columns)

    monkeypatch.setattr(policy_laws, "_run", run)
    limits = EngineConfig(num_blocks=9, max_model_len=9, block_size=4)
    case = Case(tuple(arrival(i) for i in range(5)), limits, LinearCost(100))
    if fault is None:
        policy_laws.serves_a_closed_loop(object, case)
    else:
        with pytest.raises(AssertionError, match=fault):
            policy_laws.serves_a_closed_loop(object, case)
    assert asked == [{"max_concurrency": 3}]


def test_reproducibility_is_asked_without_a_trace_on_random_numbers_of_others():
    case = next(random_cases(0, 1))
    random.seed(11)
    np.random.seed(12)  # noqa: NPY002 - what others may use
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    policy_laws.is_reproducible(ContinuousBatching, case)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002

    class Broken(ContinuousBatching):
        """Fails in the middle of it."""

        def key(self, state, now_ns):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        policy_laws.is_reproducible(Broken, case)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


def test_reproducibility_is_not_held_by_who_draws_from_random_numbers_of_others():
    """From those of Python and those of NumPy alike, each seeded otherwise in the second run."""
    case = next(case for case in random_cases(0, 5) if len(case.workload) > 5)

    def drawing(draw):
        class Draws(ContinuousBatching):
            static_keys = True

            def key(self, state, now_ns):
                return draw()

        return Draws

    for draw in (random.random, np.random.random):
        with pytest.raises(AssertionError, match=r"in one run, .* in the next"):
            policy_laws.is_reproducible(drawing(draw), case)
    policy_laws.is_reproducible(drawing(lambda: 0.0), case)


class Lying(ContinuousBatching):
    """Lets newcomers wait for 5 us while others run, and promises all."""

    def hold(self, state, view):
        return bool(view.running) and view.now_ns - state.request.arrival_ns < 5_000

    def horizon(self, view):
        return FOREVER, FOREVER


class OnlookerOf(ContinuousBatching):
    """Keeps its promises, but orders by the progress of others when a request comes."""

    def __init__(self):
        self._states = []

    def on_arrival(self, state, now_ns):
        self._states.append(state)

    def key(self, state, now_ns):
        return sum(s.num_output_tokens for s in self._states) % 5


class Leaking(ContinuousBatching):
    """Finds the true lengths where they are hidden, and serves the shortest answer first."""

    def on_start(self, view):
        self._known = view._engine.executor._answers

    def key(self, state, now_ns):
        return self._known[state.id].output_tokens


class Raising(ContinuousBatching):
    """Cannot stand a second request."""

    def victim(self, running, now_ns):
        raise KeyError("nobody to take from")

    def key(self, state, now_ns):
        return 1 // (1 - state.id)


class ReturningNothing(Policy):
    """Forgets to return its plan."""

    def plan(self, view, builder):
        builder.grant_running()
        builder.build()


class Idling(ContinuousBatching):
    """Waits for three requests, or 90 us, before it serves anybody."""

    def plan(self, view, builder):
        if view.running or len(view.waiting) >= 3:
            return super().plan(view, builder)
        if not len(view.waiting):
            return builder.build()
        until_ns = view.waiting.head.request.arrival_ns + 90_000
        if until_ns <= view.now_ns:
            return super().plan(view, builder)
        return builder.build(until_ns=until_ns)


class Dropping(ContinuousBatching):
    """Never serves a request of the lowest class."""

    def candidates(self, view, builder):
        return (s for s in view.waiting if s.request.priority < 2)


class Dicing(ContinuousBatching):
    """Draws its order from the global random numbers."""

    def key(self, state, now_ns):
        return random.random()

    static_keys = True


class Writing(ContinuousBatching):
    """Marks requests as preempted, so that nobody takes them for new."""

    def hold(self, state, view):
        state.num_preemptions = max(state.num_preemptions, 1)
        return False


class Shortening(ContinuousBatching):
    """Makes prompts shorter than they are, when it is asked where they belong."""

    def key(self, state, now_ns):
        state.request.prompt_tokens = 1
        return 0


class KeysOf(ContinuousBatching):
    """Has keys that the class names; a function of the request."""

    def key(self, state, now_ns):
        return type(self).of(state.request, now_ns)


class NoneKeys(KeysOf):
    of = staticmethod(lambda request, now_ns: None)


class NanKeys(KeysOf):
    of = staticmethod(lambda request, now_ns: (float("nan"), request.id))


class MixedKeys(KeysOf):
    of = staticmethod(lambda request, now_ns: "a" if request.id % 2 else 1)


class ArrayKeys(KeysOf):
    of = staticmethod(lambda request, now_ns: np.array([1, 2]))


class DriftingKeys(KeysOf):
    """Response ratios, which drift, said to be static."""

    of = staticmethod(
        lambda request, now_ns: -(now_ns - request.arrival_ns) / request.prompt_tokens
    )


BREAKS = [
    (Lying, "keeps_its_promises", "broke its skip-ahead promise"),
    (Lying, "skips_ahead_exactly", "by single steps, .* ahead"),
    (OnlookerOf, "skips_ahead_exactly", "the runs differ at"),
    (Leaking, "cannot_see_lengths", "with other true lengths"),
    (Raising, "serves_everyone", "ZeroDivisionError|division by zero"),
    (
        ReturningNothing,
        "serves_everyone",
        "must return what builder.build.. gave it .*got NoneType",
    ),
    (Idling, "never_idles", "idle from"),
    (Dropping, "serves_everyone", "Stalled"),
    (Dropping, "serves_a_closed_loop", "Stalled"),
    (Dicing, "is_reproducible", "in one run, .* in the next"),
    (Writing, "changes_nothing_but_itself", "plan changes num_preemptions of request 0 from 0 to"),
    (Shortening, "changes_nothing_but_itself", "key changes request.prompt_tokens of request 0"),
    (NoneKeys, "has_sane_keys", "the key of request 0 is None"),
    (NanKeys, "has_sane_keys", "the key of request 0 is .nan, 0."),
    (MixedKeys, "has_sane_keys", "cannot be compared"),
    (ArrayKeys, "has_sane_keys", r"the key array\(\[1, 2\]\) of request 0 cannot be compared: Val"),
    (DriftingKeys, "has_sane_keys", "set static_keys to False"),
]


@pytest.mark.slow
def test_what_a_policy_writes_under_one_law_does_not_hide_it_from_the_next():
    with pytest.raises(LawBroken, match=r"request\.prompt_tokens of request 0") as caught:
        check_policy(Shortening)
    assert caught.value.law == "changes_nothing_but_itself"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "law", "reason"), BREAKS)
def test_policy_that_breaks_a_law_is_caught_by_it(policy, law, reason):
    with pytest.raises(LawBroken, match=reason) as caught:
        check_policy(policy, only=law)
    assert caught.value.law == law
    assert f"policy {policy.__name__} breaks the law {law!r}" in str(caught.value)


@pytest.mark.parametrize("num_waiting", [2, 3])
def test_queue_of_two_that_is_out_of_order_is_seen_while_plans_are_looked_at(num_waiting):
    class Youngest(ContinuousBatching):
        def key(self, state, now_ns):
            return -state.id

        def plan(self, view, builder):
            return "planned"

    waiting = [RequestState(arrival(i).request) for i in range(num_waiting)]
    view = SimpleNamespace(now_ns=7, waiting=waiting)
    with pytest.raises(PolicyLied, match=r"at 7 ns request 0 waits before request 1, .* 0 and -1"):
        KeyWatch(Youngest(), num_plans=1).plan(view, None)
    assert KeyWatch(Youngest(), num_plans=0).plan(view, None) == "planned"
    watch = KeyWatch(Youngest(), num_plans=1)
    assert watch.plan(SimpleNamespace(now_ns=7, waiting=waiting[::-1]), None) == "planned"
    assert watch.plan(view, None) == "planned", "that was the only plan to look at"


def test_plans_before_which_fewer_than_two_wait_do_not_count_as_looked_at():
    waiting = [RequestState(arrival(i).request) for i in (1, 0)]
    policy = SimpleNamespace(key=lambda state, now_ns: state.id, plan=lambda view, builder: 0)
    watch = KeyWatch(policy, num_plans=2)
    for num_waiting, looked_at in ((0, 0), (1, 0), (1, 0), (0, 0)):
        watch.plan(SimpleNamespace(now_ns=7, waiting=waiting[:num_waiting]), None)
        assert watch.num_looked_at == looked_at
    watch.plan(SimpleNamespace(now_ns=7, waiting=waiting[::-1]), None)
    assert watch.num_looked_at == 1
    with pytest.raises(PolicyLied, match="request 1 waits before request 0"):
        watch.plan(SimpleNamespace(now_ns=7, waiting=waiting), None)
    assert watch.num_looked_at == 2


def test_every_law_of_policies_has_a_policy_that_breaks_it():
    assert {law for _, law, _ in BREAKS} == set(POLICY_LAWS)


@pytest.mark.slow
@pytest.mark.parametrize("law", POLICY_LAWS)
def test_honest_policy_keeps(law):
    check_policy(registry.policy_class("sjf"), only=law, num_cases=4)


def test_policy_that_pads_answers_may_go_by_who_has_ended_as_soon_as_one_has():
    # A batch whose first answer is complete holds it: what it does then depends on a length.
    def sealed():
        return registry.make("multi_bin", bin_edges=[8], max_batch_size=3)

    check_policy(sealed, only="cannot_see_lengths", num_cases=8)


@pytest.mark.slow
def test_policy_that_may_wait_is_not_asked_whether_it_idles():
    check_policy(Idling, may_wait=True, num_cases=2)


@pytest.mark.slow
def test_broken_law_shows_the_smallest_workload_as_code_that_repeats_it():
    with pytest.raises(LawBroken) as caught:
        check_policy(Lying, only="skips_ahead_exactly")
    assert len(caught.value.case.workload) <= 3
    text = str(caught.value)
    code = text[text.index("case = ") :]
    names = {}
    header = "from schedlab.testing import Case, LinearCost, arrival\n"
    header += "from schedlab.sim.config import EngineConfig\nfrom schedlab.sim.request import Slo\n"
    exec(header + code, names)
    with pytest.raises(LawBroken) as again:
        check_policy(Lying, only="skips_ahead_exactly", cases=[names["case"]])
    assert again.value.reason == caught.value.reason


def test_workloads_of_a_seed_are_the_same_and_reach_the_corners():
    cases = list(random_cases(3, 40))
    assert [str(case) for case in cases] == [str(case) for case in random_cases(3, 40)]
    assert str(cases[0]) != str(next(random_cases(4)))
    work = [a.request for case in cases for a in case.workload]
    assert {r.tenant for r in work} == {"a", "b", "c"}
    on_edge = [
        r.prompt_tokens % case.limits.block_size == 0
        for case in cases
        for r in (a.request for a in case.workload)
    ]
    assert any(on_edge)
    assert not all(on_edge)
    together = [a.request.arrival_ns == b.request.arrival_ns for case in cases
                for a, b in zip(case.workload, case.workload[1:], strict=False)]  # fmt: skip
    assert any(together)
    assert not all(together)


def test_unknown_law_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no law 'never_idle'; did you mean never_idles\?"):
        check_policy(ContinuousBatching, only="never_idle")


@pytest.mark.slow
def test_checks_need_no_hypothesis():
    code = (
        "import sys; sys.modules['hypothesis'] = sys.modules['pytest'] = None;"
        "from schedlab.testing import check_policy;"
        "from schedlab.policies import ContinuousBatching;"
        "check_policy(ContinuousBatching, num_cases=1)"
    )
    subprocess.run([sys.executable, "-O", "-c", code], check=True)


@pytest.mark.slow
def test_laws_hold_without_assertions_being_compiled():
    code = (
        f"from {HERE} import *\n"
        "try: check_policy(Idling, only='never_idles')\n"
        "except LawBroken: raise SystemExit(7)"
    )
    assert subprocess.run([sys.executable, "-O", "-c", code], check=False).returncode == 7


# -- the command -------------------------------------------------------------------------------


def check(*arguments):
    return CliRunner().invoke(app, ["policy", "check", *arguments])


@pytest.mark.slow
def test_command_for_an_honest_policy_prints_a_line_a_law_and_exits_with_0():
    done = check("shortest_prompt", "--cases", "2")
    assert done.exit_code == 0, done.output
    for law in POLICY_LAWS:
        assert re.search(rf"^holds +{law} ", done.output, re.M)


@pytest.mark.slow
def test_command_for_a_policy_that_lies_says_which_laws_are_broken_and_exits_with_1():
    done = check(f"{HERE}:Lying", "--cases", "6")
    assert done.exit_code == 1
    assert re.search("^BROKEN +keeps_its_promises ", done.output, re.M)
    assert re.search("^holds +is_reproducible ", done.output, re.M)
    assert "case = Case(" in done.output


@pytest.mark.slow
def test_command_for_a_policy_that_raises_says_once_where_and_what_else_breaks():
    laws = ("--law", "never_idles", "--law", "serves_everyone")
    done = check(f"{HERE}:Raising", *laws, "--cases", "1")
    assert done.exit_code == 1
    assert re.search(
        r"ZeroDivisionError: .* in key\(\) \(test_testing_policy.py:\d+\)", done.output
    )
    assert done.output.count("case = Case(") == 1
    assert "the same breaks serves_everyone" in done.output


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])
def test_policy_that_ends_the_process_breaks_the_law_that_was_checked(error):
    class Quitting(ContinuousBatching):
        def on_finish(self, state, now_ns):
            raise error

    with pytest.raises(LawBroken, match=rf"{type(error).__name__}.* in on_finish\(\) \(test_test"):
        check_policy(Quitting, only="serves_everyone", num_cases=1)


def test_command_that_is_told_to_end_while_it_checks_ends(monkeypatch):
    told = {"__name__": "schedlab.experiments.commands.cli"}
    exec("import sys\ndef end(*_): sys.exit(143)", told)
    monkeypatch.setattr(ContinuousBatching, "plan", told["end"])
    with pytest.raises(SystemExit):
        check_policy(ContinuousBatching, only="serves_everyone", num_cases=1)


def test_policy_that_is_watched_is_told_by_its_own_name():
    with pytest.raises(LawBroken, match="policy DriftingKeys at t = "):
        check_policy(DriftingKeys, only="has_sane_keys")


@pytest.mark.slow
def test_command_takes_knobs_and_may_wait():
    done = check("wait", "max_wait_s=1e-5", "output_edges=[8, 30]", "--may-wait", "--cases", "2")
    assert done.exit_code == 0, done.output
    assert "never_idles" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fcsf",), "did you mean fcfs"),
        (("fcfs", "speed=3"), "no parameter 'speed'"),
        (("fcfs", "speed"), "KNOB=VALUE"),
        (("fcfs", "--law", "never_idle"), "did you mean never_idles"),
        ((f"{HERE}:NoneKey",), "did you mean NoneKeys"),
    ],
)
def test_command_with_a_mistake_says_what_is_right(arguments, message):
    done = check(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert Case.__name__ not in done.output


def test_policy_that_turns_the_queue_round_is_seen_though_no_request_changes():
    states = [RequestState(arrival(i).request) for i in range(3)]
    view = SimpleNamespace(waiting=states[:2], running=states[2:], held=[])
    guard = _Guard(SimpleNamespace())
    guard._watched("hook", view.waiting.reverse)
    guard._view = view
    with pytest.raises(AssertionError, match=r"hook changes the queue from \[1, 0\] to \[0, 1\]"):
        guard._watched("hook", view.waiting.reverse)
    with pytest.raises(AssertionError, match=r"hook changes the running from \[2\] to \[\]"):
        guard._watched("hook", view.running.clear)
    guard._watched("hook", len, view.waiting)


@pytest.mark.parametrize(
    ("does", "fault"),
    [
        (lambda world, state: None, None),
        (lambda world, state: world.held.append(state), r"key adds \['.* of request 1"),
        (lambda world, state: world.held.clear(), r"key removes .* of request 3"),
        (lambda world, state: world.waiting.append(state), r"key changes the queue from \[2\] to"),
        (lambda world, state: world.running.clear(), r"key changes the running from \[4\] to \[\]"),
        (lambda world, state: setattr(state, "swapped", True), "key changes swapped of request 0 "),
        (lambda world, state: setattr(world.held[0], "queued_ns", 7),
         r"key changes queued_ns of request 3 from -1 to 7"),
    ],
)  # fmt: skip
def test_guard_names_what_a_hook_adds_removes_and_changes(does, fault):
    def state(number):
        return RequestState(arrival(number).request)

    asked, other = state(0), state(1)
    world = SimpleNamespace(waiting=[state(2)], held=[state(3)], running=[state(4)])

    def key(given, now_ns):
        does(world, other if fault and "swapped" not in fault else given)
        return now_ns

    guard = _Guard(SimpleNamespace(key=key, on_start=None))
    guard._view = world
    if fault is None:
        assert guard.key(asked, 5) == 5
    else:
        with pytest.raises(AssertionError, match=fault):
            guard.key(asked, 5)


class ChunksByLength(Leaking):
    """Begins a prompt with a longer chunk if its answer is longer than `than`."""

    key = None
    than = 0

    def chunk(self, state, view):
        return 2 + (self._known[state.id].output_tokens > self.than)


@pytest.mark.parametrize(("own_tokens", "than", "chunks"), [(30, 20, (3, 2)), (3, 5, (2, 3))])
def test_policy_that_cuts_prompts_by_true_lengths_is_caught_before_any_token_comes_out(
    own_tokens, than, chunks, monkeypatch
):
    monkeypatch.setattr(ChunksByLength, "than", than)
    assert random.Random(1).randint(1, 39) == 9, "the other length, with which it is compared"
    case = Case((arrival(0, 0, 5, own_tokens),), LIMITS)
    law = rf"by request are \{{0: {chunks[0]}\}}, and \{{0: {chunks[1]}\}} with other"
    with pytest.raises(AssertionError, match=law):
        policy_laws.cannot_see_lengths(ChunksByLength, case)


HORIZON_CHECKED = {"keeps_its_promises": {True}}


@pytest.mark.parametrize("law", POLICY_LAWS)
def test_horizons_are_checked_where_promises_are_the_law_and_nowhere_else(law, monkeypatch):
    checked, run = set(), policy_laws.laws.run

    def noting(policy, work, limits, *given, **options):
        checked.add(limits.check_horizon)
        return run(policy, work, limits, *given, **options)

    monkeypatch.setattr(policy_laws.laws, "run", noting)
    case = Case((arrival(0, 0, 5, 3), arrival(1, 9, 7, 2)), LIMITS)
    check_policy(ContinuousBatching, only=law, cases=[case])
    assert checked == HORIZON_CHECKED.get(law, {False})


def test_every_case_is_written_down_as_code_that_gives_it_again():
    odd = {"max_tokens": 1, "priority": -1, "tenant": "", "application": "", "predicted_tokens": 0}
    cases = [*random_cases(5, 20), Case((arrival(0, 0, 5, 3, **odd),), LIMITS)]
    cases += [Case((arrival(0, 0, 5, 3, **{name: value}),), LIMITS) for name, value in odd.items()]
    names = {"Case": Case, "EngineConfig": EngineConfig, "LinearCost": LinearCost, "Slo": Slo,
             "arrival": arrival}  # fmt: skip
    for case in cases:
        again = eval(str(case), names)
        assert repr(again) == repr(case)


def test_policy_is_tried_on_cases_of_the_seed_that_is_given(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        policy_laws, "random_cases", lambda seed, num_cases: drawn.append((seed, num_cases)) or ()
    )
    check_policy(ContinuousBatching, seed=7, num_cases=3)
    check_policy(ContinuousBatching)
    assert drawn == [(7, 3), (0, 20)]


def test_case_costs_what_the_laws_cost_unless_it_says_otherwise():
    case = next(random_cases(0, 1))
    plain = Case(case.workload, case.limits)
    assert repr(plain.cost) == repr(LinearCost()) == "LinearCost(1000, 10, 1)"


def test_guard_hands_on_to_each_hook_what_it_was_called_with():
    told = []
    calls = {
        "on_start": [SimpleNamespace(waiting=[], running=[], held=[])],
        "key": ["a state", 11], "plan": ["a view", "a builder"], "on_arrival": ["another", 12],
        "on_tokens": ["a plan", 7, 13], "on_finish": ["the first", 14],
    }  # fmt: skip
    hooks = {name: lambda *given, name=name: told.append((name, *given)) or name for name in calls}
    guard = _Guard(SimpleNamespace(**hooks))
    answers = [getattr(guard, name)(*given) for name, given in calls.items()]
    assert told == [(name, *given) for name, given in calls.items()]
    assert answers == [name if name in ("key", "plan") else None for name in calls]


@pytest.mark.parametrize(
    ("keys", "clash"),
    [
        ([(0, "a"), (1, 2), (1, "b")], r"\(1, 'b'\) of request 2 and \(1, 2\) of request 1"),
        ([(0, (1,)), (1, 2), (1, (2,))], r"\(1, \(2,\)\) of request 2 and \(1, 2\) of request 1"),
        ([((0, "a"),), ((1, 2),), ((1, "b"),)], r"\(\(1, 'b'\),\) of request 2 and \(\(1, 2\),\)"),
        ([1, 2.5, True, 3], None),
        ([("a", 1), ("b", 2.0), ("b", 3)], None),
    ],
)
def test_keys_are_compared_with_one_of_each_kind_that_came_before(keys, clash):
    watch = KeyWatch(SimpleNamespace(key=lambda state, now_ns: keys[state.id]), 0)
    states = [RequestState(arrival(i).request) for i in range(len(keys))]
    for state in states[:-1]:
        assert watch.key(state, 0) == keys[state.id]
    if clash is None:
        assert watch.key(states[-1], 0) == keys[-1]
    else:
        with pytest.raises(PolicyLied, match=clash):
            watch.key(states[-1], 0)


def test_skipping_ahead_is_compared_with_single_steps_with_and_without_the_next_arrival(
    monkeypatch,
):
    ran, compared = [], []

    def run(policy, case, fast_forward=True, prove=True, drive=None):
        ran.append((policy, case, fast_forward, drive))
        return len(ran) - 1

    monkeypatch.setattr(policy_laws, "_run", run)
    monkeypatch.setattr(
        policy_laws, "_require_same", lambda one, other, names: compared.append((one, other))
    )
    policy_laws.skips_ahead_exactly(lambda: "a policy", "a case")
    assert ran == [
        ("a policy", "a case", False, None), ("a policy", "a case", True, None),
        ("a policy", "a case", True, laws.cut_at_arrivals),
    ]  # fmt: skip
    assert compared == [(0, 1), (0, 2)]


@pytest.mark.slow
def test_policy_is_not_blamed_for_what_the_prefix_cache_notes_of_a_request():
    cases = list(fleet_cases(num_cases=3))
    assert all(case.limits.enable_prefix_caching for case in cases)
    check_policy(registry.policy_class("fcfs"), only="changes_nothing_but_itself", cases=cases)
