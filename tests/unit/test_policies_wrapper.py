"""A wrapper takes over whatever its inner policy defines: every hook, every flag, its promise."""

import pytest

from schedlab.policies import ContinuousBatching, Policy, registry
from schedlab.policies.wrapper import Wrapper
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan import FOREVER
from tests import laws
from tests.laws import arrival
from tests.traced import limits
from tests.unit.test_policies_ordering import served

WRAPPERS = ["aged", "boosted"]
# What is refused in an inner policy, and what says something about a class and not to the engine.
NOT_FORWARDED = {"plan", "candidates"} | {"get_params", "hooks", "knobs", "source", "starves"}
HOOKS = sorted(
    name
    for name in {*vars(Policy), *vars(ContinuousBatching)} - NOT_FORWARDED
    if not name.startswith("_")
)


class Inner(ContinuousBatching):
    """Answers every hook with its name, and notes that it was called."""

    def __init__(self):
        self.called = []


def _spying(name):
    def hook(self, *arguments, **named):
        self.called.append(name)
        return (7, 9) if name in ("promise", "horizon") else name

    return hook


def test_wrapper_forwards_every_hook_there_is():
    assert {"hold", "key", "on_tokens", "rekeyed", "static_keys", "promise"} <= set(HOOKS)
    flags = {name for name in HOOKS if isinstance(getattr(Policy, name, None), bool | tuple)}
    spy = type("Spy", (Inner,), {name: _spying(name) for name in set(HOOKS) - flags})
    wrapper = Wrapper("fcfs")
    wrapper._ordering = spy()
    arguments = {
        "on_tokens": 3, "on_start": 1, "order": 1, "horizon": 1, "promise": 1, "keeps_longer": 3,
    }  # fmt: skip
    for name in HOOKS:
        inner = wrapper._ordering
        if name in flags:
            continue
        answer = getattr(wrapper, name)(*[None] * arguments.get(name, 2))
        if name == "horizon":
            assert answer == (FOREVER, FOREVER)  # that of what is forwarded; see `promise`
        else:
            assert inner.called[-1:] == [name], f"{name} is not forwarded"
            assert answer in (name, (7, 9), None)


@pytest.mark.parametrize("flag", ["static_keys", "rekeyed"])
def test_wrapper_reads_flags_of_the_inner_policy_as_they_are_at_the_time(flag):
    wrapper = Wrapper("fcfs")
    for value in (False, True) if flag == "static_keys" else ((), ("somebody",)):
        setattr(wrapper._ordering, flag, value)
        assert getattr(wrapper, flag) == value


class Upended(ContinuousBatching):
    """By id, until the first finish; then request 5 comes next."""

    def __init__(self):
        self.states = {}
        self.promoted = False

    def on_arrival(self, state, now_ns):
        self.states[state.id] = state

    def key(self, state, now_ns):
        return 0 if self.promoted and state.id == 5 else 1

    def on_finish(self, state, now_ns):
        self.promoted = True


class Rekeys(Upended):
    """Tells the engine whose key has changed."""

    def on_finish(self, state, now_ns):
        super().on_finish(state, now_ns)
        self.rekeyed = [self.states[5]]


class Resorts(Upended):
    """Tells the engine to sort the queue again, only then."""

    def on_finish(self, state, now_ns):
        super().on_finish(state, now_ns)
        self.static_keys = False


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inner", [Rekeys, Resorts])
def test_wrapper_keeps_the_order_of_an_inner_policy_whose_keys_change(wrapper, inner):
    work = [arrival(i, prompt=2) for i in range(7)]
    path = f"{__name__}:{inner.__name__}"
    knobs = {"aged": {"rate_per_s": 0.0}, "boosted": {"threshold_s": 1.0}}[wrapper]
    alone = served(path, work)
    assert alone == [0, 5, 1, 2, 3, 4, 6]
    assert served(wrapper, work, inner=path, **knobs) == alone


class SaysSevenSteps(ContinuousBatching):
    """Overrides a hook and promises seven steps."""

    def hold(self, state, view):
        return False

    def horizon(self, view):
        return 7, 1_000


class Silent(ContinuousBatching):
    """Overrides a hook and says nothing."""

    def on_tokens(self, plan, num_steps, now_ns):
        pass


def test_wrapper_promises_no_more_than_its_inner_policy():
    def promise(wrapper, inner, hooks_matter):
        policy = registry.make(wrapper, inner=f"{__name__}:{inner.__name__}")
        return policy.promise(None, hooks_matter)

    assert promise("aged", SaysSevenSteps, True) == (7, 1_000)
    assert promise("aged", SaysSevenSteps, False) == (FOREVER, FOREVER)
    assert promise("aged", Silent, False) == (1, FOREVER)
    assert promise("boosted", SaysSevenSteps, True) == (1, 1_000)
    assert promise("boosted", Silent, False) == (1, FOREVER)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapper_of_a_silent_policy_changes_no_bit_by_skipping(wrapper):
    work = [arrival(i, 2_300 * i, 9, 40) for i in range(12)]
    config = limits(seats=8)

    def run(limits):
        policy = registry.make(wrapper, inner=f"{__name__}:Silent")
        return laws.signature(laws.run(policy, work, limits))

    assert run(config) == run(laws.slow(config))


def test_wrapper_tells_whether_its_inner_policy_needs_a_prediction():
    assert registry.make("boosted", inner="sjf").needs_prediction
    assert not registry.make("boosted", inner="fcfs").needs_prediction


@pytest.mark.parametrize("inner", ["static", "orca", "vtc", "boosted"])
def test_wrapper_of_more_than_an_ordering_is_refused(inner):
    with pytest.raises(Exception, match=f"must be an ordering.*{inner} does more"):
        registry.make("boosted", inner=inner)


def test_iterations_of_who_comes_between_steps_are_counted_alike_ahead_and_step_by_step():
    # 1 comes while 0 runs: it waits from the end of that step on, not of all that is skipped, so
    # that it is due when 0 leaves its seat, before 2, which is shorter.
    work = [
        arrival(0, 0, 8, 30, predicted_tokens=30.0), arrival(1, 1500, 8, 9, predicted_tokens=9.0),
        arrival(2, 1600, 8, 2, predicted_tokens=2.0),
    ]  # fmt: skip
    config = EngineConfig(
        num_blocks=40, max_model_len=100, block_size=4, max_num_seqs=1, arrivals_between_steps=True
    )
    policy = {"inner": "sjf", "threshold_iterations": 20}
    ahead = laws.run(registry.make("boosted", **policy), work, config)
    by_steps = laws.run(registry.make("boosted", **policy), work, laws.slow(config))
    assert laws.signature(ahead) == laws.signature(by_steps)
    assert ahead.requests()["finish_ns"].argsort().tolist() == [0, 1, 2]


ARGUMENTS = {
    "key": 2, "order": 1, "victim": 2, "hold": 2, "chunk": 2, "seating": 2, "on_start": 1,
    "on_arrival": 2, "on_tokens": 3, "on_finish": 2, "on_reject": 2, "keeps_until": 2,
    "keeps_longer": 3,
}  # fmt: skip


@pytest.mark.parametrize("method", ARGUMENTS)
def test_wrapper_hands_over_what_it_is_called_with_and_gives_back_what_it_gets(method):
    class Plain(Wrapper):
        """Changes nothing."""

    given, answer = [], object()
    policy = Plain("sjf")
    setattr(policy._ordering, method, lambda *arguments: given.append(arguments) or answer)
    arguments = tuple(object() for _ in range(ARGUMENTS[method]))
    found = getattr(policy, method)(*arguments)
    assert given == [arguments]
    is_told = method.startswith("on_")
    assert found is (None if is_told else answer)
    if is_told:  # or the inner policy need not have it
        setattr(policy._ordering, method, None)
        getattr(policy, method)(*arguments)
    assert len(given) == 1


@pytest.mark.parametrize(
    ("own", "inner", "promised"),
    [
        ((9, 90), (5, 50), (5, 50)), ((9, 90), (12, 50), (9, 50)), ((9, 90), (5, 95), (5, 90)),
        ((FOREVER, FOREVER), (3, 4), (3, 4)),
    ],
)  # fmt: skip
def test_wrapper_promises_the_least_of_both(own, inner, promised, monkeypatch):
    asked = []

    def promise(self, view, hooks_matter=True):
        asked.append((self, view, hooks_matter))
        return own if isinstance(self, Wrapper) else inner

    monkeypatch.setattr(ContinuousBatching, "promise", promise)

    class Plain(Wrapper):
        """Changes nothing."""

    policy, view = Plain("sjf"), object()
    assert policy.promise(view, False) == promised
    assert asked == [(policy, view, False), (policy._ordering, view, False)]
