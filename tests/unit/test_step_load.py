"""The largest number that ends in time, however prices rise and whatever was guessed."""

import random

import pytest

from schedlab.policies import ContinuousBatching
from schedlab.policies.step_load import Ceiling, PromptCeilings, StepLoad, _most
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.request import RequestState
from tests.laws import LinearCost, arrival


class Prices:
    """Times of 1, 2, .. of something, which count how often they are asked."""

    def __init__(self, times_ns):
        self.times_ns, self.asked = times_ns, 0

    def __call__(self, n):
        self.asked += 1
        return self.times_ns[n]


def rising(limit, seed):
    draw, now_ns = random.Random(seed), 0
    times_ns = [0]
    for _ in range(limit):
        now_ns += draw.choice((0, 0, 1, 5))  # stairs
        times_ns.append(now_ns)
    return times_ns


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 32, 65])
@pytest.mark.parametrize("never_falls", [False, True])
def test_most_that_ends_in_time_is_found_whatever_is_guessed(limit, never_falls):
    times_ns = rising(limit, limit)
    for budget_ns in sorted({-1, *times_ns, *(t - 1 for t in times_ns), times_ns[-1] + 1}):
        most = max((n for n in range(1, limit + 1) if times_ns[n] <= budget_ns), default=0)
        for guess in {0, 1, most - 1, most, most + 1, limit // 2, limit, limit + 3}:
            found = _most(limit, Prices(times_ns), budget_ns, never_falls, guess)
            assert found == most, (budget_ns, guess)


@pytest.mark.parametrize("most", [1, 3, 4_000, 9_999])
@pytest.mark.parametrize(("guess", "asked"), [(0, 16), (1, 30), (5_000, 30), (9_999, 30)])
def test_most_that_ends_in_time_is_found_in_a_few_questions(most, guess, asked):
    price_ns = Prices(range(10_001))
    assert _most(10_000, price_ns, most, True, guess) == most
    assert price_ns.asked <= asked


@pytest.mark.parametrize("most", [2, 500, 9_998])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_most_that_ends_in_time_is_found_soonest_where_it_was_guessed(most, off):
    price_ns = Prices(range(10_001))
    assert _most(10_000, price_ns, most, True, most + off) == most
    assert price_ns.asked <= 6


def test_most_where_prices_never_fall_and_one_is_too_dear_asks_no_further():
    price_ns = Prices(range(10, 10_011))
    assert _most(10_000, price_ns, 9, True) == 0
    assert price_ns.asked == 2


@pytest.mark.parametrize("seed", range(5))
def test_guess_says_nothing_where_prices_may_fall(seed):
    draw = random.Random(seed)
    for _ in range(40):
        limit = draw.randrange(1, 30)
        times_ns = [0, *(draw.randrange(20) for _ in range(limit))]
        budget_ns = draw.randrange(20)
        without = _most(limit, Prices(times_ns), budget_ns)
        for guess in range(limit + 2):
            assert _most(limit, Prices(times_ns), budget_ns, False, guess) == without


class Counts(LinearCost):
    """1,000 ns a step, 10 for each decode and 1 for each token in its context, said or not."""

    def __init__(self, never_falls=True):
        super().__init__()
        self.never_falls, self.asked = never_falls, 0

    def step_ns(self, shape, k=1):
        self.asked += 1
        return super().step_ns(shape, k)


def at_each_step(ask, contexts, cost, num_steps=20):
    """Serve prompts of so many tokens, and ask at each plan in which all decode."""

    class Asks(ContinuousBatching):
        def plan(self, view, builder):
            if view.num_decodes == len(contexts):
                before = cost.asked
                answer = ask(view)
                answers.append((answer, cost.asked - before))
            return super().plan(view, builder)

    answers = []
    config = EngineConfig(
        num_blocks=2_000, max_model_len=2_000, max_num_seqs=64, max_num_batched_tokens=20_000
    )
    engine = Engine(config, Asks(), SimExecutor(Pricing(cost)))
    simulate(engine, [arrival(i, prompt=n, output=num_steps) for i, n in enumerate(contexts)])
    assert len(answers) == num_steps - 1
    return answers


def decodes(view):
    return StepLoad(view).with_all_decodes()


@pytest.mark.parametrize("seed", range(6))
def test_ceiling_says_only_of_steps_that_end_in_time_that_they_do(seed):
    draw, ceiling, said = random.Random(seed), Ceiling(), []

    def ask(view):
        budget_ns, num_steps = draw.randrange(1_000, 4_000), draw.choice((1, 1, 32))
        is_above = ceiling.is_above(decodes(view), budget_ns, num_steps)
        n, total = view.num_decodes, view.decode_contexts()[0]
        assert not is_above or 1_000 + 10 * n + total + n * (num_steps - 1) <= budget_ns
        said.append(is_above)

    for _ in range(20):
        contexts = [draw.randrange(1, 300) for _ in range(draw.randrange(1, 14))]
        at_each_step(ask, contexts, Counts())
    assert 50 < sum(said) < len(said)


def test_ceiling_prices_one_step_of_many_that_go_on():
    ceiling = Ceiling()
    answers = at_each_step(
        lambda view: ceiling.is_above(decodes(view), 9_000), [100] * 20, Counts()
    )
    assert answers == [(True, 1)] + [(True, 0)] * 18


@pytest.mark.parametrize("more", [[80] * 27, [126] * 20, [*[100] * 19, 126]])
def test_ceiling_prices_a_step_with_more_decodes_or_tokens_anew(more):
    ceiling = Ceiling()
    at_each_step(lambda view: ceiling.is_above(decodes(view), 9_000), [100] * 20, Counts(), 2)
    answers = at_each_step(lambda view: ceiling.is_above(decodes(view), 9_000), more, Counts(), 2)
    assert answers == [(True, 1)]


def test_ceiling_prices_steps_further_ahead_anew():
    ceiling = Ceiling()

    def ask(view):
        return [ceiling.is_above(decodes(view), 9_000, num_steps) for num_steps in (1, 26, 27)]

    assert at_each_step(ask, [100] * 20, Counts(), 2) == [([True] * 3, 2)]


def test_ceiling_prices_a_step_that_has_less_time_anew():
    ceiling = Ceiling()
    most_ns = 1_000 + 10 * 26 + 2_500

    def ask(view):
        return [ceiling.is_above(decodes(view), ns) for ns in (most_ns, most_ns - 1, most_ns)]

    assert at_each_step(ask, [100] * 20, Counts(), 2) == [([True, False, True], 2)]


def test_ceiling_says_nothing_where_prices_may_fall():
    answers = at_each_step(
        lambda view: Ceiling().is_above(decodes(view), 9_000), [9], Counts(False), 2
    )
    assert answers == [(False, 0)]


def prompt(num_tokens, computed_tokens=0):
    state = RequestState(arrival(999, prompt=num_tokens + computed_tokens).request)
    state._computed = computed_tokens
    return state


@pytest.mark.parametrize("seed", range(6))
def test_prompt_ceiling_says_only_of_steps_that_end_in_time_that_they_do(seed):
    draw, ceilings, said = random.Random(seed), PromptCeilings(), []

    def ask(view):
        budget_ns, tokens = draw.randrange(1_000, 60_000), draw.randrange(1, 2_000)
        state, load = prompt(tokens, draw.choice((0, 0, 700))), StepLoad(view).with_all_decodes()
        is_above = ceilings.is_above(load, state, tokens, budget_ns)
        load.add(state, tokens)
        assert not is_above or load.is_within(budget_ns)
        said.append(is_above)

    for _ in range(20):
        contexts = [draw.randrange(1, 300) for _ in range(draw.randrange(1, 14))]
        at_each_step(ask, contexts, Counts())
    assert 50 < sum(said) < len(said)


def test_prompt_ceiling_prices_one_step_of_many_alike_and_longer_prompts_anew():
    ceilings = PromptCeilings()

    def ask(view):
        load = StepLoad(view).with_all_decodes()
        return [ceilings.is_above(load, prompt(n), n, 90_000) for n in (130, 256, 257)]

    answers = at_each_step(ask, [100] * 20, Counts())
    assert answers == [([True] * 3, 2)] + [([True] * 3, 0)] * 18


def test_prompt_ceiling_prices_a_prompt_with_more_in_the_cache_anew():
    ceilings = PromptCeilings()

    def ask(view):
        load = StepLoad(view).with_all_decodes()
        return [ceilings.is_above(load, prompt(9, c), 9, 90_000) for c in (0, 1, 1_024, 1_025)]

    assert at_each_step(ask, [100] * 20, Counts(), 2) == [([True] * 4, 3)]


def test_prompt_ceiling_says_nothing_beside_other_prompts_or_where_prices_may_fall():
    def ask(view):
        load, state = StepLoad(view).with_all_decodes(), prompt(9)
        if view.prices_never_fall:
            load.add(prompt(5), 5)
        return PromptCeilings().is_above(load, state, 9, 90_000)

    for cost in (Counts(), Counts(False)):
        assert at_each_step(ask, [9], cost, 2) == [(False, 0)]


def test_contexts_of_many_are_those_of_each_while_some_are_paused_and_some_have_not_begun():
    told = []

    class HalfOfThem(ContinuousBatching):
        def plan(self, view, builder):
            if not view.num_decodes:
                return super().plan(view, builder)
            states = [*view.running, *view.waiting]
            told.append([view.computed_tokens(states), view.num_paused])
            assert told[-1][0] == [state.num_computed_tokens for state in states]
            contexts = view.computed_tokens(view.running)
            assert view.decode_contexts() == (sum(contexts), max(contexts), min(contexts))
            for state in list(view.running)[len(told) % 2 :: 2] or view.running:
                builder.grant(state)
            return builder.build()

    config = EngineConfig(num_blocks=500, max_model_len=500, max_num_seqs=5)
    engine = Engine(config, HalfOfThem(), SimExecutor(Pricing(LinearCost())))
    simulate(engine, [arrival(i, prompt=3 + 7 * i, output=9) for i in range(6)])
    assert {num_paused > 0 for _, num_paused in told} == {True, False}
