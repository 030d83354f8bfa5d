"""Each clause of the laws of policies, and of the runs they are made of, broken alone."""

import random
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.policies import ContinuousBatching
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import PolicyLied
from schedlab.sim.kv.prompt import Prompt
from schedlab.sim.request import Refinement, Request, RequestState, Session, Slo, Status
from schedlab.testing import POLICY_LAWS, LinearCost, check_policy, policy_verdicts, random_cases
from schedlab.testing import laws as of_runs
from schedlab.testing import policy as laws
from schedlab.testing.cases import Case
from schedlab.testing.policy import KeyWatch, _Around, _Guard
from tests.laws import arrival

LIMITS = EngineConfig(num_blocks=9, max_model_len=60, block_size=16)
CASE = Case(tuple(arrival(i, 2_000 * i, 5 + i, 3 + i) for i in range(3)), LIMITS)


def state(number, **columns):
    return RequestState(arrival(number, **columns).request)


# -- what is compared --------------------------------------------------------------------------


def decisions(monkeypatch, *told):
    """Let each policy that is watched decide what is told; return what was asked."""
    asked, left = [], list(told)

    def decide(policy, case):
        asked.append((policy, case))
        return iter(left.pop(0))

    monkeypatch.setattr(laws, "_decisions", decide)
    return asked


SEEN = [(10, {0: 3}), (20, {0: 5, 1: 2}), (30, {0: 6, 1: 4})]


@pytest.mark.parametrize("step", [None, 0, 1, 2])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_decisions_are_compared_from_the_first_to_the_last_that_both_made(step, ahead, monkeypatch):
    other = [(at_ns + 1, dict(computed)) for at_ns, computed in SEEN]
    if step is not None:
        other[step][1][0] += 1
    one, another = SEEN, other
    if ahead:
        one, another = (SEEN, [*other, (50, {})]) if ahead == 1 else ([*SEEN, (50, {})], other)
    asked = decisions(monkeypatch, one, another)
    made = []
    make = lambda: made.append(len(made)) or made[-1]  # noqa: E731
    if step is None:
        laws.cannot_see_lengths(make, CASE)
    else:
        at_ns, computed = SEEN[step]
        with pytest.raises(AssertionError) as caught:
            laws.cannot_see_lengths(make, CASE)
        assert str(caught.value) == (
            f"at {at_ns} ns, before any answer ends, tokens computed by request are {computed}, "
            f"and {other[step][1]} with other true lengths"
        )
    assert [policy for policy, _ in asked] == [0, 1]
    assert asked[0][1] is CASE
    draw = random.Random(3)
    others = tuple(replace(a, output_tokens=draw.randint(1, 39)) for a in CASE.workload)
    assert asked[1][1] == replace(CASE, workload=others)
    assert made == [0, 1]


@pytest.mark.parametrize("name", ["num_finished", "num_rejected", "held"])
def test_decisions_are_those_until_anybody_has_ended_in_single_steps_of_paged_memory(
    name, monkeypatch
):
    reserving = replace(CASE, limits=replace(LIMITS, kv_allocator="contiguous_oracle"))

    def run(policy, case, observer, **options):
        assert policy == "a policy"
        assert case == CASE, "paged, and the same in all else"
        assert options == {"fast_forward": False, "prove": False}
        one, two = (SimpleNamespace(id=i, num_computed_tokens=7 * i, num_tokens=99) for i in (1, 2))
        known = SimpleNamespace(num_finished=0, num_rejected=0, held={}, running={1: one})
        observer(SimpleNamespace(requests=known, now_ns=10))
        known.running = {1: one, 2: two}
        one.num_computed_tokens += 1
        observer(SimpleNamespace(requests=known, now_ns=20))
        setattr(known, name, {3: one} if name == "held" else 1)
        observer(SimpleNamespace(requests=known, now_ns=30))

    monkeypatch.setattr(laws, "_run", run)
    assert list(laws._decisions("a policy", reserving)) == [(10, {1: 7}), (20, {1: 8, 2: 14})]


@pytest.mark.parametrize(("change", "signed", "fault"), [
    (None, ("x", "x"), None),
    ("step 3", ("x", "x"), "^the runs differ at step 3$"),
    (None, ("x", "y"), "^token times differ here and there$"),
    ("step 3", ("x", "y"), "^the runs differ at step 3$"),
])  # fmt: skip
def test_two_runs_are_the_same_in_tables_and_in_token_times(change, signed, fault, monkeypatch):
    asked = []
    monkeypatch.setattr(of_runs, "difference", lambda *given: asked.append(given) or change)
    monkeypatch.setattr(of_runs, "signature", lambda log: signed[log])
    if fault is None:
        laws._require_same(0, 1, ("here", "there"))
    else:
        with pytest.raises(AssertionError, match=fault):
            laws._require_same(0, 1, ("here", "there"))
    assert asked == [(0, 1, ("here", "there"))]


def test_laws_of_policies_run_the_case_in_their_own_way(monkeypatch):
    """What each law runs, and what it then asks of the log."""
    told = []

    def run(policy, case, **options):
        told.append(("run", type(policy).__name__, case, options))
        return f"log {len(told)}"

    monkeypatch.setattr(laws, "_run", run)
    monkeypatch.setattr(of_runs, "check", lambda *a, **k: told.append(("check", a, k)))
    monkeypatch.setattr(of_runs, "check_never_idle", lambda *a, **k: told.append(("idle", a, k)))
    monkeypatch.setattr(laws, "_require_same", lambda *given: told.append(("same", given)))

    def asked(law):
        told.clear()
        POLICY_LAWS[law](ContinuousBatching, CASE)
        return told

    plain = ("run", "ContinuousBatching", CASE, {})
    bare = ("run", "ContinuousBatching", CASE, {"prove": False})
    checked = ("check", ("log 1", CASE.workload, LIMITS), {"may_wait": True})
    assert asked("serves_everyone") == [plain, checked]
    assert asked("never_idles") == [bare, ("idle", ("log 1",), {})]
    promises = {"check_horizon": True, "prove": False}
    assert asked("keeps_its_promises") == [("run", "ContinuousBatching", CASE, promises)]
    same = ("same", ("log 1", "log 2", ("in one run", "in the next")))
    assert asked("is_reproducible") == [plain, plain, same]
    for law, kind in (("changes_nothing_but_itself", _Guard), ("has_sane_keys", KeyWatch)):
        kinds = []
        monkeypatch.setattr(laws, "_run", lambda policy, case, kinds=kinds: kinds.append(policy))
        asked(law)
        assert isinstance(kinds[0], kind)
        assert type(kinds[0]).__name__ == "ContinuousBatching"
        assert isinstance(kinds[0].policy, ContinuousBatching)


def test_policies_are_made_anew_for_every_run_of_a_law():
    made = []

    def make():
        made.append(ContinuousBatching())
        return made[-1]

    runs = {}
    for law in POLICY_LAWS:
        made.clear()
        check_policy(make, only=law, cases=[CASE])
        runs[law] = len(made)
        assert len({id(policy) for policy in made}) == len(made)
    assert runs == dict.fromkeys(POLICY_LAWS, 1) | {
        "skips_ahead_exactly": 3, "cannot_see_lengths": 2, "is_reproducible": 2,
    }  # fmt: skip


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
def test_predictor_takes_a_step_in_every_second_case_of_a_closed_loop(num_requests, monkeypatch):
    work = tuple(arrival(i, 10 * i) for i in range(num_requests))
    sent = []

    def run(policy, case, max_concurrency):
        sent.append([a.ready_ns - a.request.arrival_ns for a in case.workload])
        assert [a.request for a in case.workload] == [a.request for a in work]
        times = np.arange(num_requests)
        return SimpleNamespace(
            requests=lambda: {"id": times, "arrival_ns": times, "finish_ns": times + 1}
        )

    monkeypatch.setattr(laws, "_run", run)
    laws.serves_a_closed_loop(object, Case(work, LIMITS, LinearCost(77)))
    assert sent == [[77 * (num_requests % 2)] * num_requests]


@pytest.mark.parametrize("may_wait", [False, True])
def test_policy_that_may_wait_is_asked_for_every_law_but_one(may_wait, monkeypatch):
    asked = []
    monkeypatch.setattr(laws, "verdicts", lambda *given: asked.append(given) or [])
    cases = [CASE]
    check_policy(ContinuousBatching, may_wait=may_wait, only="one", cases=cases)
    policy_verdicts(ContinuousBatching, may_wait=may_wait, cases=cases)
    check_policy(SimpleNamespace(name="made of nothing"), may_wait=may_wait, cases=[])
    left = {key: law for key, law in POLICY_LAWS.items() if not may_wait or key != "never_idles"}
    assert asked[0] == ("policy ContinuousBatching", ContinuousBatching, left, cases, "one")
    assert asked[1] == ("policy ContinuousBatching", ContinuousBatching, left, cases, None)
    assert asked[2][0] == "policy namespace(name='made of nothing')"
    assert asked[2][3] == []
    assert len(left) == 9 - may_wait
    assert list(POLICY_LAWS) == [
        "serves_everyone", "has_sane_keys", "changes_nothing_but_itself", "never_idles",
        "keeps_its_promises", "skips_ahead_exactly", "serves_a_closed_loop", "cannot_see_lengths",
        "is_reproducible",
    ]  # fmt: skip


def test_cases_of_a_policy_are_drawn_for_all_its_laws(monkeypatch):
    asked = []
    monkeypatch.setattr(laws, "verdicts", lambda *given: asked.append(given[3]) or [])
    check_policy(ContinuousBatching, seed=3, num_cases=2)
    policy_verdicts(ContinuousBatching)
    for cases, drawn in zip(asked, ((3, 2), (0, 20)), strict=True):
        assert repr(list(cases)) == repr(list(cases)) == repr([*random_cases(*drawn)])


def test_run_of_a_case_is_of_requests_of_its_own_under_limits_as_asked(monkeypatch):
    given = []
    monkeypatch.setattr(of_runs, "run", lambda *a, **k: given.append((a, k)) or "log")
    assert laws._run("policy", CASE) == "log"
    laws._run("policy", CASE, "observer", False, True, prove=False)
    for i, (ahead, observer, options) in enumerate(
        [(True, None, {}), (False, "observer", {"prove": False})]
    ):
        (policy, sent, limits, cost), told = given[i]
        assert (policy, cost) == ("policy", CASE.cost)
        assert limits == replace(LIMITS, fast_forward=ahead, check_horizon=not ahead)
        assert told == {"observer": observer, **options}
        assert sent == [*CASE.workload] or repr(sent) == repr([*CASE.workload])
        assert not any(a.request is b.request for a, b in zip(sent, CASE.workload, strict=True))


# -- what is guarded ---------------------------------------------------------------------------

HOOKS = {
    "on_start": lambda one, view: (view,),
    "key": lambda one, view: (one, 5),
    "plan": lambda one, view: (view, "builder"),
    "on_arrival": lambda one, view: (one, 5),
    "on_tokens": lambda one, view: ("plan", 2, 5),
    "on_finish": lambda one, view: (one, 5),
}
SEES_GIVEN = ("key", "on_arrival", "on_finish")
SLOTS = getattr(RequestState, "__mypyc_attrs__", None) or RequestState.__slots__
OTHERS = {  # compiled fields take values of their type alone
    "swapped": True, "status": Status.RUNNING, "prompt": Prompt((1, 2)), "session": Session("a", 5),
    "tool": "a", "awaited_call": ("a", 5), "_batch": DecodeBatch(16),
}  # fmt: skip
OTHER_FIELDS = {
    "slo": Slo(1.0), "application": "x", "session": "x", "tenant": "x", "prompt": "x",
    "prefix_hash_ids": (1, 2), "refinement": Refinement(3, (1.0,)),
}  # fmt: skip
REQUEST_FIELDS = [field.name for field in fields(Request)]


def guarded(hook, does, before=lambda view: None):
    """Call one hook of a guarded policy, which does something to those who are there."""
    one = state(0)
    view = SimpleNamespace(
        waiting=[state(1), state(2)], running=[state(4), state(3)], held=[state(5)]
    )
    before(view)
    told = {name: None for name in HOOKS}
    guard = _Guard(SimpleNamespace(**{**told, hook: lambda *given: does(one, view)}))
    guard._view = view
    getattr(guard, hook)(*HOOKS[hook](one, view))


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_may_have_the_prefix_cache_note_a_prompt_and_not_put_another_there(hook):
    noted, other = Prompt((1, 2)), OTHERS["prompt"]
    guarded(hook, lambda one, view: setattr(view.waiting[0], "prompt", noted))

    def forges(one, view):
        view.waiting[0].prompt = other

    with pytest.raises(AssertionError, match=f"{hook} changes prompt of request 1 from "):
        guarded(hook, forges, lambda view: setattr(view.waiting[0], "prompt", noted))


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", [n for n in SLOTS if n not in ("request", "id", "prompt")])
def test_hook_that_writes_to_any_field_of_anybody_is_told_which(hook, name):
    known = {
        0: lambda one, view: one, 2: lambda one, view: view.waiting[1],
        3: lambda one, view: view.running[1], 5: lambda one, view: view.held[0],
    }  # fmt: skip
    new = OTHERS.get(name, 77)
    for number, whom in known.items():
        if number == 0 and hook not in SEES_GIVEN:
            guarded(hook, lambda one, view: setattr(one, name, new))
            continue
        old = getattr(state(number), name)
        with pytest.raises(AssertionError) as caught:
            guarded(hook, lambda one, view: setattr(whom(one, view), name, new))  # noqa: B023
        law = f"{hook} changes {name} of request {number} from {old} to {new}"
        assert str(caught.value) == law


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", REQUEST_FIELDS)
def test_hook_that_writes_to_any_field_of_a_request_is_told_which(hook, name):
    new = OTHER_FIELDS.get(name, 77)
    for row, number in ((0, 1), (1, 2)):
        with pytest.raises(AssertionError) as caught:
            guarded(
                hook, lambda one, view: setattr(view.waiting[row].request, name, new)  # noqa: B023
            )  # fmt: skip
        assert str(caught.value).startswith(f"{hook} changes ")
        assert f"{name} of request {number} from " in str(caught.value)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("does", "law"), [
    (lambda one, view: None, None),
    (lambda one, view: view.held.reverse(), None),
    (lambda one, view: view.waiting.reverse(), r"changes the queue from \[1, 2\] to \[2, 1\]"),
    (lambda one, view: view.running.sort(key=lambda s: s.id),
     r"changes the running from \[4, 3\] to \[3, 4\]"),
    (lambda one, view: view.waiting.pop(), r"changes the queue from \[1, 2\] to \[1\]"),
    (lambda one, view: view.held.pop(), "removes .* of request 5"),
    (lambda one, view: view.held.append(state(6)), r"adds \[.* of request 6"),
])  # fmt: skip
def test_hook_may_change_neither_the_queue_nor_the_running_nor_who_is_there(hook, does, law):
    if law is None:
        guarded(hook, does)
    else:
        with pytest.raises(AssertionError, match=f"^{hook} {law}"):
            guarded(hook, does)


def test_guard_looks_at_the_view_from_the_start_on():
    view = SimpleNamespace(waiting=[state(1)], running=[], held=[])
    guard = _Guard(SimpleNamespace(on_start=None, on_tokens=lambda *_: view.waiting.clear()))
    guard.on_tokens("plan", 1, 5)
    view.waiting.append(state(1))
    guard.on_start(view)
    with pytest.raises(AssertionError, match="on_tokens changes the queue"):
        guard.on_tokens("plan", 1, 5)


def test_guard_is_silent_about_hooks_that_a_policy_has_not():
    guard = _Guard(SimpleNamespace(on_start=None, on_arrival=None, on_tokens=None, on_finish=None))
    view = SimpleNamespace(waiting=[], running=[], held=[])
    assert guard.on_start(view) is None
    assert guard.on_arrival(state(0), 5) is None
    assert guard.on_tokens("plan", 1, 5) is None
    assert guard.on_finish(state(0), 5) is None


def test_who_stands_around_a_policy_has_its_name_module_and_all_else():
    class Mine(ContinuousBatching):
        static_keys = "as it is"

    policy = Mine()
    for kind in (_Around, _Guard, KeyWatch):
        around = kind(policy)
        assert (type(around).__name__, type(around).__module__) == ("Mine", __name__)
        assert isinstance(around, kind)
        assert around.policy is policy
        assert around.static_keys == "as it is"
        with pytest.raises(AttributeError, match="nothing"):
            around.nothing()


# -- keys --------------------------------------------------------------------------------------

NAN = float("nan")
HINT = "; if it goes by predicted_tokens, give the policy a predictor"


@pytest.mark.parametrize(("key", "predicted", "law"), [
    *((key, None, None) for key in (0, 0.0, "", (), (0, (1, "")), False, float("inf"), -5)),
    *((key, 3.0, None) for key in (0, (1, 2))),
    (None, None, f"the key of request 4 is None, which sorts anywhere{HINT}"),
    (None, 3.0, "the key of request 4 is None, which sorts anywhere"),
    (None, 0, "the key of request 4 is None, which sorts anywhere"),
    (NAN, None, "the key of request 4 is nan, which sorts anywhere"),
    (NAN, 3.0, "the key of request 4 is nan, which sorts anywhere"),
    ((1, None), None, "the key of request 4 is (1, None), which sorts anywhere"),
    ((NAN, 1), None, "the key of request 4 is (nan, 1), which sorts anywhere"),
    ((1, (2, NAN)), None, "the key of request 4 is (1, (2, nan)), which sorts anywhere"),
    ((1, (None, 2)), 3.0, "the key of request 4 is (1, (None, 2)), which sorts anywhere"),
    ((1, (2, (3, None))), 3.0, "the key of request 4 is (1, (2, (3, None))), which sorts anywhere"),
])  # fmt: skip
def test_key_has_no_hole_however_deep(key, predicted, law):
    asked = []
    policy = SimpleNamespace(key=lambda *given: asked.append(given) or key)
    one = state(4, predicted_tokens=predicted)
    if law is None:
        assert KeyWatch(policy).key(one, 9) is key
    else:
        with pytest.raises(PolicyLied) as caught:
            KeyWatch(policy).key(one, 9)
        assert str(caught.value) == law
    assert asked == [(one, 9)]


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
@pytest.mark.parametrize("how", ["alone", "beside"])
def test_key_that_cannot_be_compared_is_told_whatever_it_raises(error, how):
    class Odd:
        def __ne__(self, other):
            if how == "alone":
                raise error("not so")
            return False

        def __lt__(self, other):
            raise error("not so")

        def __repr__(self):
            return "odd"

        __hash__ = None

    keys = {1: 5, 2: Odd()}
    watch = KeyWatch(SimpleNamespace(key=lambda one, now_ns: keys[one.id]))
    watch.key(state(1), 0)
    with pytest.raises(PolicyLied) as caught:
        watch.key(state(2), 0)
    beside = " of request 2 and 5 of request 1" if how == "beside" else " of request 2"
    keys_are = "keys" if how == "beside" else "key"
    assert str(caught.value) == (
        f"the {keys_are} odd{beside} cannot be compared: {error.__name__}: not so"
    )


QUEUES = [  # keys by request, where each arrives, the order of the queue, who is out of place
    ([1, 2, 3], [0, 0, 0], [0, 1, 2], None),
    ([2, 2, 2], [0, 0, 0], [0, 1, 2], None),
    ([2, 2, 2], [5, 4, 4], [1, 2, 0], None),
    ([2, 2, 2], [5, 4, 4], [2, 1, 0], (2, 1)),
    ([2, 2, 2], [5, 4, 4], [1, 0, 2], (0, 2)),
    ([1, 3, 2], [0, 0, 0], [0, 2, 1], None),
    ([1, 3, 2], [0, 0, 0], [0, 1, 2], (1, 2)),
    ([2, 1, 3], [0, 0, 0], [0, 1, 2], (0, 1)),
    ([(1, 2), (1, 3), (0, 9)], [0, 0, 0], [2, 0, 1], None),
    ([(1, 2), (1, 3), (0, 9)], [0, 0, 0], [0, 1, 2], (1, 2)),
    ([1, 2, 3], [9, 8, 7], [0, 1, 2], None),
]


@pytest.mark.parametrize(("keys", "arrive", "order", "wrong"), QUEUES)
def test_queue_is_in_order_of_keys_then_arrivals_then_numbers(keys, arrive, order, wrong):
    states = [state(i, at_ns=at_ns) for i, at_ns in enumerate(arrive)]
    asked = []

    def key(one, now_ns):
        asked.append(now_ns)
        return keys[one.id]

    watch = KeyWatch(SimpleNamespace(key=key, plan=lambda view, builder: (view, builder)))
    view = SimpleNamespace(now_ns=9, waiting=[states[i] for i in order])
    if wrong is None:
        assert watch.plan(view, "builder") == (view, "builder")
    else:
        one, other = wrong
        with pytest.raises(PolicyLied) as caught:
            watch.plan(view, "builder")
        assert str(caught.value) == (
            f"at 9 ns request {one} waits before request {other}, but their keys are now "
            f"{keys[one]!r} and {keys[other]!r}: set static_keys to False, or name in rekeyed "
            "whose key has changed"
        )
    assert set(asked) == {9}


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("number", [0, 1])
def test_key_that_is_another_the_second_time_it_is_asked_for_is_told_of(by, number):
    asked = []

    def key(one, now_ns):
        asked.append(one.id)
        return 10 * one.id + by * (one.id == number and asked.count(number) > 1)

    watch = KeyWatch(SimpleNamespace(key=key, plan=lambda view, builder: "plan"))
    view = SimpleNamespace(now_ns=9, waiting=[state(0), state(1), state(2)])
    with pytest.raises(PolicyLied) as caught:
        watch.plan(view, None)
    assert str(caught.value) == (
        f"two calls of key() for request {number} at 9 ns give {10 * number} and "
        f"{10 * number + by}: draw random numbers in on_arrival, from a generator that the "
        "constructor seeds"
    )


def test_watch_of_keys_looks_at_all_plans_unless_it_is_told_how_many():
    watch = KeyWatch(SimpleNamespace(key=lambda one, _: one.id, plan=lambda *_: "plan"))
    view = SimpleNamespace(now_ns=9, waiting=[state(0), state(1)])
    for _ in range(50):
        watch.plan(view, None)
    assert watch.num_looked_at == 50


# -- how a run is made and proved --------------------------------------------------------------


def test_run_is_proved_after_every_step_before_anybody_looks_and_at_its_end(monkeypatch):
    seen = []
    monkeypatch.setattr(of_runs, "check_conservation", lambda engine: seen.append("proved"))
    observer = lambda engine: seen.append(engine.now_ns)  # noqa: E731
    log = of_runs.run(ContinuousBatching(), CASE.workload, LIMITS, observer=observer)
    looks = [seen[i : i + 2] for i in range(0, len(seen) - 1, 2)]
    assert all(proved == "proved" and isinstance(now_ns, int) for proved, now_ns in looks)
    assert len(looks) > 1
    assert seen[-1] == "proved"
    assert looks[-1][1] == log.steps()["end_ns"][-1]
    seen.clear()
    of_runs.run(ContinuousBatching(), CASE.workload, LIMITS, observer=observer, prove=False)
    assert [one for one in seen if one != "proved"] == [now_ns for _, now_ns in looks]
    assert seen.count("proved") == 1
    assert seen[-1] == "proved"
    seen.clear()
    of_runs.run(ContinuousBatching(), CASE.workload, LIMITS)
    assert seen == ["proved"] * (len(looks) + 1)


def test_run_is_of_the_engine_executor_and_options_that_are_asked_for():
    seen, priced = [], []

    def drive(engine, workload, **options):
        seen.append((type(engine).__name__, type(engine.executor).__name__, workload, options))
        return simulate(engine, workload)

    def executor(pricing):
        priced.append(pricing)
        return SimExecutor(pricing)

    two = replace(LIMITS, pipeline_parallel_size=2)
    policy = ContinuousBatching
    of_runs.run(policy(), CASE.workload, LIMITS, drive=drive, one=1, two=2)
    of_runs.run(policy(), CASE.workload, two, drive=drive)
    of_runs.run(policy(), CASE.workload, LIMITS, drive=drive, make_executor=executor)
    assert seen == [
        ("Engine", "SimExecutor", CASE.workload, {"one": 1, "two": 2}),
        ("PipelinedEngine", "PipelineExecutor", CASE.workload, {}),
        ("Engine", "SimExecutor", CASE.workload, {}),
    ]
    cost, overhead = LinearCost(5_000), SchedulingOverhead(base_s=3e-6)
    for given in ((), (cost,), (cost, overhead)):
        log = of_runs.run(policy(), CASE.workload, LIMITS, *given)
        base_ns = 1_000 if not given else 5_000
        # The first prompt of five tokens alone.
        took_ns = log.steps()["end_ns"][0] - log.steps()["start_ns"][0]
        assert took_ns == base_ns + 50 + 3_000 * (len(given) > 1)


def test_run_that_ends_with_somebody_in_flight_or_a_wrong_count_is_refused():
    def one_more(engine, workload):
        log = simulate(engine, workload)
        engine.submit(arrival(9, engine.now_ns, 5, 2), engine.now_ns)
        return log

    with pytest.raises(AssertionError, match="the run ended with requests in flight"):
        of_runs.run(ContinuousBatching(), CASE.workload, LIMITS, drive=one_more)

    def miscounts(engine, workload):
        log = simulate(engine, workload)
        engine.requests.resident_tokens += 1
        return log

    with pytest.raises(AssertionError, match="1 tokens, 0 are"):
        of_runs.run(ContinuousBatching(), CASE.workload, LIMITS, drive=miscounts, prove=False)


class Scripted:
    """An engine of three segments, which says what it was asked; it begins when somebody is there.

    Parameters
    ----------
    ends : list of int
        Nanoseconds that each segment takes.
    """

    def __init__(self, ends, wait_until_ns=of_runs.FOREVER):
        self._ends, self.told, self.log = list(ends), [], "log"
        self.now_ns, self.wait_until_ns, self._there = 0, wait_until_ns, 0

    def submit(self, one, now_ns):
        self.told.append(("submit", one.request.id, now_ns))
        self._there += 1

    def begin(self, now_ns):
        self.now_ns = now_ns
        assert len(self.told) < 99, "it comes to no end"
        if not self._ends or not self._there:
            self.told.append(("idle", now_ns))
            if now_ns >= self.wait_until_ns:
                self.wait_until_ns = of_runs.FOREVER
            return None
        self.segment = SimpleNamespace(end_ns=now_ns + self._ends.pop(0))
        self.told.append(("begin", now_ns))
        return self.segment

    def cut(self, at_ns):
        self.told.append(("cut", at_ns))
        self.segment.end_ns = at_ns + 2  # the step under way ends a little later

    def commit(self):
        self.now_ns = self.segment.end_ns
        self.told.append(("commit", self.now_ns))


@pytest.mark.parametrize(("ends", "come", "told"), [
    ([10], [0], "submit 0 0, begin 0, commit 10, idle 10"),
    ([10], [4], "idle 0, submit 0 4, begin 4, commit 14, idle 14"),
    ([10, 5], [0, 0], "submit 0 0, submit 1 0, begin 0, commit 10, begin 10, commit 15, idle 15"),
    # Somebody comes within a segment, at its end, and just behind it.
    ([10, 5], [0, 3, 20], "submit 0 0, begin 0, cut 3, submit 1 3, commit 5, begin 5, commit 10, "
                          "idle 10, submit 2 20, idle 20"),
    ([10, 5], [0, 9], "submit 0 0, begin 0, cut 9, submit 1 9, commit 11, begin 11, commit 16, "
                      "idle 16"),
    ([10, 5], [0, 10], "submit 0 0, begin 0, submit 1 10, commit 10, begin 10, commit 15, idle 15"),
    ([10, 5], [0, 11], "submit 0 0, begin 0, commit 10, begin 10, cut 11, submit 1 11, commit 13, "
                       "idle 13"),
    # Two and three come before the segment that was cut has ended.
    ([10], [0, 3, 4, 5, 6], "submit 0 0, begin 0, cut 3, submit 1 3, submit 2 4, submit 3 5, "
                            "commit 5, idle 5, submit 4 6, idle 6"),
])  # fmt: skip
def test_engine_that_does_not_know_who_comes_next_is_cut_when_somebody_does(ends, come, told):
    engine = Scripted(ends)
    # Each was sent a little before the scheduler sees it.
    work = [replace(arrival(i, max(at - 1, 0)), ready_ns=at) for i, at in enumerate(come)]
    assert of_runs.cut_at_arrivals(engine, work) == "log"
    assert ", ".join(" ".join(map(str, one)) for one in engine.told) == told


def test_engine_that_waits_is_asked_again_when_it_said_or_when_somebody_comes():
    engine = Scripted([], wait_until_ns=7)
    of_runs.cut_at_arrivals(engine, [arrival(0, 5), arrival(1, 9)])
    assert engine.told == [
        ("idle", 0), ("submit", 0, 5), ("idle", 5), ("idle", 7), ("submit", 1, 9), ("idle", 9),
    ]  # fmt: skip


def test_request_written_in_one_line_may_say_as_much_as_it_likes_unless_told():
    one = of_runs.arrival(3, 7, 5, 2, tenant="a", slo=Slo(1.0))
    assert (one.request.id, one.request.arrival_ns, one.ready_ns) == (3, 7, 7)
    assert (one.request.prompt_tokens, one.output_tokens) == (5, 2)
    assert (one.request.max_tokens, one.request.tenant) == (1 << 20, "a")
    assert of_runs.arrival(3, max_tokens=4).request.max_tokens == 4
    alone = of_runs.arrival(3)
    assert (alone.request.arrival_ns, alone.request.prompt_tokens, alone.output_tokens) == (0, 1, 1)


@pytest.mark.parametrize("no", [False, 0, None, (), np.bool_(False)])
def test_law_that_does_not_hold_is_raised_with_its_words(no):
    with pytest.raises(AssertionError, match=r"^the words$"):
        of_runs.require(no, "the words")
    for yes in (True, 1, "x", np.bool_(True)):
        of_runs.require(yes, "the words")
