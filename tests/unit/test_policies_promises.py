"""Promises are opt-in: who overrides a hook is stepped one by one until the class says more."""

from dataclasses import replace

import pytest

from schedlab.policies import ContinuousBatching, registry
from schedlab.policies.ranked import Ranked
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan import FOREVER
from tests import laws
from tests.laws import arrival

CONFIG = EngineConfig(
    num_blocks=400, max_model_len=300, block_size=4, max_num_seqs=12, max_num_batched_tokens=64
)
FIFTY_US = 50_000


class HoldsByTheClock(ContinuousBatching):
    """Let newcomers wait for 50 us while others run."""

    def hold(self, state, view):
        return bool(view.running) and view.now_ns - state.request.arrival_ns < FIFTY_US


class SkipsByTheClock(ContinuousBatching):
    """The same in `candidates`."""

    def candidates(self, view, builder):
        for state in view.waiting:
            if not view.running or view.now_ns - state.request.arrival_ns >= FIFTY_US:
                yield state


class OrdersByTheClock(ContinuousBatching):
    """The longest prompt first until 50 us, the shortest from then on."""

    def order(self, view):
        by_prompt = sorted(view.waiting, key=lambda s: (s.request.prompt_tokens, s.id))
        return reversed(by_prompt) if view.now_ns < FIFTY_US else by_prompt


class ChunksByTheClock(ContinuousBatching):
    """Too large a first chunk for the memory there is, and from 50 us on a small one."""

    def chunk(self, state, view):
        return 40 if view.now_ns < FIFTY_US else 1


class PlansByTheClock(ContinuousBatching):
    """The plan of the base class, but one at a time from 50 us on."""

    def plan(self, view, builder):
        if view.now_ns < FIFTY_US or not view.running:
            return super().plan(view, builder)
        oldest = next(iter(view.running))
        if not builder.grant(oldest):
            builder.preempt(next(s for s in builder.running() if s is not oldest))
        return builder.build()


class CountsSteps(ContinuousBatching):
    """Orders by the steps done when a request came: `on_tokens` must be called after each."""

    def __init__(self):
        self._steps = 0
        self._places = {}

    def on_tokens(self, plan, num_steps, now_ns):
        self._steps += num_steps

    def on_arrival(self, state, now_ns):
        self._places[state.id] = self._steps % 7

    def key(self, state, now_ns):
        return self._places[state.id]


class LooksAtProgress(ContinuousBatching):
    """Orders by what the running requests have generated when a request comes."""

    def on_start(self, view):
        self._view = view
        self._places = {}

    def on_arrival(self, state, now_ns):
        self._places[state.id] = sum(s.num_output_tokens for s in self._view.running) % 7

    def key(self, state, now_ns):
        return self._places[state.id]


class OrcaByTheClock(registry.policy_class("orca")):
    """A promise of the base class does not cover a hook that it did not know."""

    candidates = SkipsByTheClock.candidates


class RankedByTheClock(Ranked):
    """The latest first until 50 us."""

    def key(self, state, now_ns):
        return -state.id if now_ns < FIFTY_US else state.id


def holds_by_an_attribute():
    policy = ContinuousBatching()
    policy.hold = HoldsByTheClock().hold
    return policy


def wrapped(name):
    return lambda: registry.make(name, inner=f"{__name__}:HoldsByTheClock")


NEWCOMERS = [
    HoldsByTheClock, SkipsByTheClock, OrdersByTheClock, ChunksByTheClock, PlansByTheClock,
    CountsSteps, LooksAtProgress, OrcaByTheClock, RankedByTheClock, holds_by_an_attribute,
    wrapped("boosted"), wrapped("aged"),
]  # fmt: skip


def work(gap_ns=2_300):
    """Long answers, so that there is something to skip, and arrivals in the midst of them."""
    return [
        arrival(i, gap_ns * i, (9, 40, 3)[i % 3], 40 + 7 * (i % 3), predicted_tokens=5.0)
        for i in range(24)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "seats", "gap_ns"), [(28, 2, 900), (28, 8, 900), (400, 12, 2_300)]
)
@pytest.mark.parametrize("make", NEWCOMERS)
def test_newcomer_whose_hook_sees_time_pass_gets_the_numbers_of_single_steps(
    make, blocks, seats, gap_ns
):
    config = replace(CONFIG, num_blocks=blocks, max_model_len=100, max_num_seqs=seats)
    requests = work(gap_ns)[:8]

    def run(config):
        return laws.signature(laws.run(make(), requests, config, prove=False))

    fast = run(config)
    assert fast == run(laws.slow(config))
    assert fast == run(replace(config, check_horizon=True))


def test_order_by_the_clock_admits_at_the_step_after_it_changes():
    # Request 1 never fits beside request 0 and comes first until 50 us; request 2 would fit.
    three = [arrival(0, 0, 40, 60), arrival(1, 100, 90, 2), arrival(2, 100, 3, 2)]
    config = replace(CONFIG, num_blocks=28, max_model_len=100)
    log = laws.run(OrdersByTheClock(), three, config)
    assert FIFTY_US <= log.requests()["first_scheduled_ns"][2] < FIFTY_US + 1_100


def test_hold_by_the_clock_schedules_when_the_clock_says():
    # Request 1 comes at 100,000 ns while request 0 decodes; 50 us later it may join.
    pair = [arrival(0, 0, 4, 200), arrival(1, 100_000, 4, 2)]
    log = laws.run(HoldsByTheClock(), pair, CONFIG)
    first = int(log.requests()["first_scheduled_ns"][1])
    assert 150_000 <= first < 151_500  # the next step start: steps take 1.0 to 1.3 us


def num_plans(policy, config=CONFIG):
    count = 0

    def watch(engine):
        nonlocal count
        count = engine.num_plans

    laws.run(policy, work(), config, observer=watch)
    return count


class HoldsAndSaysUntilWhen(HoldsByTheClock):
    """The honest promise: the decision falls when the oldest has waited."""

    def horizon(self, view):
        return FOREVER, view.waiting.head.request.arrival_ns + FIFTY_US


class HoldsOnlyWhileSomeoneRuns(ContinuousBatching):
    """A hook that time does not change, and says so."""

    def hold(self, state, view):
        return bool(view.running)

    def horizon(self, view):
        return FOREVER, FOREVER


def test_newcomer_that_says_its_horizon_skips_ahead_again():
    by_one, ahead = num_plans(HoldsByTheClock()), num_plans(HoldsAndSaysUntilWhen())
    assert ahead < by_one / 2
    fast = laws.signature(laws.run(HoldsAndSaysUntilWhen(), work(), CONFIG))
    assert fast == laws.signature(laws.run(HoldsByTheClock(), work(), laws.slow(CONFIG)))
    laws.run(HoldsAndSaysUntilWhen(), work(), replace(CONFIG, check_horizon=True))
    assert num_plans(HoldsOnlyWhileSomeoneRuns()) < by_one / 2


class HoldsForLonger(HoldsAndSaysUntilWhen):
    """Overrides the hook again, so that the promise of its base no longer covers it."""

    def hold(self, state, view):
        return bool(view.running) and view.now_ns - state.request.arrival_ns < 2 * FIFTY_US


def test_promise_of_a_base_class_does_not_cover_a_hook_overridden_later():
    assert num_plans(HoldsForLonger()) > num_plans(HoldsByTheClock()) / 2
    fast = laws.signature(laws.run(HoldsForLonger(), work(), CONFIG))
    assert fast == laws.signature(laws.run(HoldsForLonger(), work(), laws.slow(CONFIG)))


class ByPrompt(ContinuousBatching):
    """Overrides no hook that sees time pass: skips ahead as the base class does."""

    def key(self, state, now_ns):
        return state.request.prompt_tokens

    def victim(self, running, now_ns):
        return max(running, key=lambda s: s.id)

    def on_finish(self, state, now_ns):
        self.last = state.id


def test_ordering_skips_ahead_without_saying_anything():
    assert num_plans(ByPrompt()) < num_plans(ContinuousBatching()) + 5


QUANTA = [
    ("plas", {"first_quantum_s": 2e-6}),
    ("atlas", {"first_quantum_s": 2e-6}),
    ("fastserve", {"first_quantum_s": 2e-6}),
]
LOOKS = ("fastserve", {"first_quantum_s": 5e-7, "starvation_s": 5e-6, "starvation_period": 9})


@pytest.mark.parametrize(("name", "knobs"), QUANTA)
def test_quantum_that_ends_while_everybody_is_served_asks_for_no_plan(name, knobs):
    roomy = replace(CONFIG, max_num_seqs=24, max_num_batched_tokens=400)
    fcfs = num_plans(registry.make("fcfs"), roomy)
    assert num_plans(registry.make(name, **knobs), roomy) == fcfs


@pytest.mark.parametrize("seats", [5, 12])
@pytest.mark.parametrize(("name", "knobs"), [*QUANTA, LOOKS])
def test_quantum_that_ended_while_everybody_was_served_counts_when_somebody_is_not(
    name, knobs, seats
):
    config = replace(CONFIG, max_num_seqs=seats, max_num_resident=24)
    signatures = [
        laws.signature(laws.run(registry.make(name, **knobs), work(), config))
        for config in (config, laws.slow(config))
    ]
    assert signatures[0] == signatures[1]
