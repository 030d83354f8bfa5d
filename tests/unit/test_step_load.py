"""The largest number that ends in time, however prices rise and whatever was guessed."""

import random

import pytest

from schedlab.policies.step_load import _most


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
